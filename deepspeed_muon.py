# SPDX-License-Identifier: Apache-2.0
"""The entry point in group ``torch.backends``, called by ``import torch``.

It imports neither torch nor deepspeed, but hooks the import of DeepSpeed's config. The package is imported, and
replaces what it has to replace in DeepSpeed, when a config first names Muon. ``DS_MUON_AUTOLOAD=0`` leaves DeepSpeed
untouched.
"""

import contextlib
import functools
import importlib.abc
import logging
import os
import runpy
import sys
from pathlib import Path

#: In a run of ``ds_muon try`` AdamW's variant needs the package too, once DeepSpeed's engine can be imported.
_IS_TRIED = bool(os.environ.get("PYTHON_DS_MUON_TRY"))
_MODULE = "deepspeed.runtime.engine" if _IS_TRIED else "deepspeed.runtime.config"
_COMMAND = "deepspeed.muon.cli"


def command() -> int:
    """Run the command ``ds_muon`` and return its exit status.

    Print help and errors in arguments before anything heavy is imported. What DeepSpeed prints when it is imported goes
    to stderr, so that ``--json`` prints JSON only, and its warnings about this machine do not appear.
    """
    runpy.run_path(str(Path(__file__).with_name("deepspeed") / "muon" / "cli" / "parser.py"))["parser"]().parse_args()
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.muon.cli.main import main
    logging.disable(logging.NOTSET)
    return main()


def autoload() -> None:
    """Let each DeepSpeed config that names Muon activate deepspeed-muon. ``import torch`` calls this: never raise."""
    if _runs_command():
        sys.stdout = sys.stderr  # until the command's __main__ runs: DeepSpeed prints warnings when it is imported
    if os.environ.get("DS_MUON_AUTOLOAD", "1") == "0":
        return
    if _MODULE in sys.modules:
        _begin(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _runs_command() -> bool:
    """Return whether this is ``python -m deepspeed.muon.cli``, which imports its packages before ``__main__``."""
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
        return False
    return sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == [_COMMAND]


def _begin(module) -> None:
    """Act on the module for which :class:`_Finder` has waited."""
    if _IS_TRIED:
        importlib.import_module("deepspeed.muon")
    else:
        _watch(module)


def _watch(config_module) -> None:
    """Replace ``DeepSpeedConfig.__init__``: call it, then activate deepspeed-muon if the config may name Muon."""
    kind = config_module.DeepSpeedConfig
    original = kind.__init__
    if getattr(original, "is_watched", False):
        return

    @functools.wraps(original)
    def read(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if "deepspeed.muon" in sys.modules or not self.optimizer_name:  # the package looks at configs itself
            return
        name = self.optimizer_name
        is_other = name.lower() in config_module.DEEPSPEED_OPTIMIZERS or hasattr(sys.modules["torch"].optim, name)
        if name.lower() == "muon" or not is_other:  # an unknown name may be a misspelt one
            importlib.import_module("deepspeed.muon")
            importlib.import_module("deepspeed.muon.zero.patches").take_config(self)

    read.is_watched = True
    kind.__init__ = read


class _Finder(importlib.abc.MetaPathFinder):
    """Find DeepSpeed's module with the other finders, and call :func:`_begin` once it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):  # for code that looks at the loader of the spec
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        _begin(module)
