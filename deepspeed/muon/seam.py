# SPDX-License-Identifier: Apache-2.0
"""Replace methods of DeepSpeed's objects, and restore the originals."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Seam(NamedTuple):
    """A DeepSpeed attribute that deepspeed-muon replaces: ``path`` in ``module``, such as ``DeepSpeedEngine.step``."""

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def find(self) -> tuple[Any, str]:
        """Return (class or module, name of its attribute). Raise ImportError or AttributeError if it does not exist."""
        *parts, name = self.path.split(".")
        owner = functools.reduce(getattr, parts, importlib.import_module(self.module))
        getattr(owner, name)
        return owner, name

    def exists(self) -> bool:
        """Return whether the installed DeepSpeed has the attribute."""
        try:
            return bool(self.find())
        except (ImportError, AttributeError):
            return False


def replace(owner: Any, name: str, function: Callable) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``function(original, ...)``, and return a function that undoes the replacement.

    ``owner`` is a class, an instance or a module. If it inherited the attribute, it inherits it again after the undo.
    """
    before = vars(owner).get(name)  # None if the attribute is inherited
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    return (
        functools.partial(delattr, owner, name) if before is None else functools.partial(setattr, owner, name, before)
    )


@contextmanager
def replaced(owner: Any, **functions: Callable) -> Iterator[None]:
    """Replace functions of ``owner`` in the ``with`` block: ``replaced(owner, name=function)``. See :func:`replace`."""
    with ExitStack() as undo:
        for name, function in functions.items():
            undo.callback(replace(owner, name, function))
        yield
