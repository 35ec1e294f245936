# SPDX-License-Identifier: Apache-2.0
"""Replace methods of DeepSpeed, and put them back as they were."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Seam(NamedTuple):
    """An attribute of DeepSpeed that deepspeed-muon replaces or extends, like ``DeepSpeedEngine.save_checkpoint``."""

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def find(self) -> tuple[Any, str]:
        """Return the object whose attribute this is, and the attribute's name.

        Raises:
            ImportError, AttributeError: the installed DeepSpeed lacks it.
        """
        *parts, name = self.path.split(".")
        owner = functools.reduce(getattr, parts, importlib.import_module(self.module))
        getattr(owner, name)
        return owner, name

    def exists(self) -> bool:
        """Return whether the installed DeepSpeed has it."""
        try:
            return bool(self.find())
        except (ImportError, AttributeError):
            return False


def replace(owner: Any, name: str, function: Callable) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``function(original, ...)``; the owner is a class, an instance or a module.

    Returns what undoes it, so that an inherited attribute is inherited again.
    """
    before = vars(owner).get(name)  # not what it inherits
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
    """:func:`replace` each of ``functions`` by name, for as long as the context lasts."""
    with ExitStack() as undo:
        for name, function in functions.items():
            undo.callback(replace(owner, name, function))
        yield
