# SPDX-License-Identifier: Apache-2.0
"""Import the planner with one line changed, beside the planner that other tests use."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

#: Modules that are imported anew, so that all of them use the changed one.
FRESH = ("deepspeed.muon.plan", "helpers.plans", "helpers.jobs", "helpers.simulation")


@contextmanager
def mutant(module: str, old: str, new: str) -> Iterator[ModuleType]:
    """Yield ``helpers.jobs``, which plans with a module of ``deepspeed.muon.plan`` in which ``old`` reads ``new``."""
    name = f"deepspeed.muon.plan.{module}"
    spec = importlib.util.find_spec(name)
    assert spec and spec.origin
    with open(spec.origin) as file:
        source = file.read()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}"
    finder = _Finder(name, source.replace(old, new))
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith(FRESH)}
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("helpers.jobs")
    finally:
        sys.meta_path.remove(finder)
        for key in [key for key in sys.modules if key.startswith(FRESH)]:
            del sys.modules[key]
        sys.modules.update(kept)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from another source text."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, self._name, "exec"), module.__dict__)
