# SPDX-License-Identifier: Apache-2.0
"""Define the entry point that ``import torch`` calls, in group ``torch.backends``, and the command ``ds_muon``.

The entry point imports neither torch nor deepspeed. It waits until DeepSpeed's config module is imported. When a
DeepSpeed config first names Muon, the package ``deepspeed.muon`` is imported and patches DeepSpeed. With
``DS_MUON_AUTOLOAD=0`` DeepSpeed stays untouched.
"""

import contextlib
import functools
import importlib.abc
import json
import logging
import os
import runpy
import sys
from pathlib import Path

#: A run that ``ds_muon try`` has started needs the package with AdamW too, as soon as DeepSpeed's engine is imported.
_TRIED = os.environ.get("PYTHON_DS_MUON_TRY")
_MODULE = "deepspeed.runtime.engine" if _TRIED else "deepspeed.runtime.config"
_COMMAND = "deepspeed.muon.cli"


def command() -> int:
    """Run the command ``ds_muon`` and return its exit status.

    Help and errors in arguments are printed before anything heavy is imported. What DeepSpeed prints when it is
    imported goes to stderr, so that stdout has only the result. What it logs then, such as warnings about this machine,
    is dropped.
    """
    runpy.run_path(str(Path(__file__).with_name("deepspeed") / "muon" / "cli" / "parser.py"))["parser"]().parse_args()
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.muon.cli.main import main
    logging.disable(logging.NOTSET)
    return main()


def autoload() -> None:
    """Let a DeepSpeed config that names Muon activate deepspeed-muon. Must not raise: ``import torch`` calls it."""
    if _runs_command():
        sys.stdout = sys.stderr  # until the command's __main__ runs: DeepSpeed prints warnings when it is imported
    if os.environ.get("DS_MUON_AUTOLOAD", "1") == "0":
        return
    if _TRIED:
        _move_seeds(_TRIED)
    if _MODULE in sys.modules:
        _begin(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _runs_command() -> bool:
    """Return whether Python was started as ``python -m deepspeed.muon.cli``, and has not yet run that module."""
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
        return False
    return sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == [_COMMAND]


def _move_seeds(file) -> None:
    """Make ``torch.manual_seed(n)`` seed with n + m, so that ``ds_muon try`` can repeat a run with another seed.

    ``file``: JSON file that ``ds_muon try`` has written for this run; m is its value ``"seed"``.
    """
    # Here, because scripts seed before they import DeepSpeed.
    with contextlib.suppress(OSError):  # the package reports it
        more, torch = json.loads(Path(file).read_text())["seed"], sys.modules["torch"]
        original = torch.manual_seed
        torch.manual_seed = functools.wraps(original)(lambda seed: original(int(seed) + more)) if more else original


def _begin(module) -> None:
    """Import ``deepspeed.muon``: now if ``ds_muon try`` started this process, otherwise when a ds_config names Muon.

    ``module``: DeepSpeed's module :data:`_MODULE`, which has just been imported.
    """
    if _TRIED:
        importlib.import_module("deepspeed.muon")
    else:
        _watch(module)


def _watch(config_module) -> None:
    """Wrap ``DeepSpeedConfig.__init__`` to activate deepspeed-muon if the config names Muon or an unknown optimizer.

    An unknown optimizer may be a misspelt Muon, which deepspeed-muon reports.
    """
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
    """An import hook that calls :func:`_begin` once the DeepSpeed module :data:`_MODULE` has been imported.

    :func:`autoload` puts it at the front of ``sys.meta_path``. The other entries find the module.
    """

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
