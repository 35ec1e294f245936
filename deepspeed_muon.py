# SPDX-License-Identifier: Apache-2.0
"""What the entry point in group ``torch.backends`` calls at ``import torch``.

Imports neither torch nor deepspeed: it only asks to be told when DeepSpeed's engine is imported.
``DS_MUON_AUTOLOAD=0`` leaves DeepSpeed untouched.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import sys

_ENGINE = "deepspeed.runtime.engine"


def command() -> int:
    """Run ``ds_muon``. What DeepSpeed says when it is imported goes to stderr, so that ``--json`` is JSON alone."""
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.muon.cli.main import main
    return main()


def autoload() -> None:
    """Activate deepspeed-muon as soon as ``deepspeed.runtime.engine`` is imported.

    Raises nothing: an exception here would break ``import torch`` for everybody.
    """
    if os.environ.get("DS_MUON_AUTOLOAD", "1") == "0":
        return
    if _ENGINE in sys.modules:
        _activate()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _activate() -> None:
    try:
        import deepspeed.muon  # noqa: F401  importing it activates it
    except Exception as error:
        print(f"deepspeed-muon is not active: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the engine's module with the ordinary finders and adds a step after its execution."""

    def find_spec(self, name, path=None, target=None):
        if name != _ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _activate()
