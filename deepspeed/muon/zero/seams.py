# SPDX-License-Identifier: Apache-2.0
"""Replaces methods of DeepSpeed, and puts them back as they were."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Seam(NamedTuple):
    """An attribute of DeepSpeed that deepspeed-muon replaces or extends, such as ``DeepSpeedEngine.save_checkpoint``.

    ``scope`` says when: at activation (``import``), for an engine with this Muon (``engine``), or only during a save or
    a load (``call``).
    """

    module: str
    path: str
    scope: str = "import"

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def exists(self) -> bool:
        """Whether the installed DeepSpeed has it."""
        try:
            functools.reduce(getattr, self.path.split("."), importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return False
        return True


def replace(owner: Any, name: str, function: Callable) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``function(original, ...)``.

    Args:
        owner: a class, an instance or a module.

    Returns:
        What undoes it: afterwards ``owner`` has the attribute of its own that it had before, or none.
    """
    own = vars(owner).get(name)  # not what it inherits
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    return functools.partial(_put_back, owner, name, own)


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


@contextmanager
def replaced(owner: Any, **functions: Callable) -> Iterator[None]:
    """:func:`replace` each of ``functions`` by name, for as long as the context lasts."""
    with ExitStack() as undo:
        for name, function in functions.items():
            undo.callback(replace(owner, name, function))
        yield
