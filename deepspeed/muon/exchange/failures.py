# SPDX-License-Identifier: Apache-2.0
"""An exception inside a step on one rank ends the ranks that wait for it, with its words.

The rank writes what it raised to the rendezvous store. The watchdog of a rank that does not get on in the same step
finds it, logs it and ends the process: a thread cannot end the wait of a collective in any other way on all backends.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from deepspeed.muon.log import logger

#: Seconds that a rank may still take for a step that another rank has left by an exception.
GRACE = 5.0
#: Seconds for which the rank that serves the store lives on, so that the others can read its words.
LAST_WORDS = 2.0


class _Steps:
    """The step that this process takes or has taken last: its number, equal on all ranks, and when it began.

    ``is_left``: whether this process has left it, and ``has_failed``: by an exception.
    """

    number = 0
    began = 0.0
    is_left = True
    has_failed = False


@contextmanager
def told_to_all() -> Iterator[None]:
    """Tell the other ranks what this one raises inside a step that all of them take."""
    if _Steps.has_failed:  # the script goes on after an exception that all ranks may have had
        with suppress(Exception):
            torch.distributed.distributed_c10d._get_default_store().delete_key(_key(_Steps.number))
    _Steps.number, _Steps.began = _Steps.number + 1, time.monotonic()
    _Steps.is_left = _Steps.has_failed = False
    try:
        yield
    except BaseException as error:
        _Steps.has_failed = True
        with suppress(Exception):  # the store is gone with its rank: the error itself must pass
            _tell(f"rank {torch.distributed.get_rank()}: {type(error).__name__}: {error}")
        raise
    finally:
        _Steps.is_left = True


def step_of_all(step: Callable) -> Callable:
    """Decorate an optimizer's ``step``, unless an engine takes it in parts."""

    @functools.wraps(step)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.context.is_stepped_in_parts or not torch.distributed.is_initialized():
            return step(self, *args, **kwargs)
        with told_to_all():
            return step(self, *args, **kwargs)

    return told


def _key(number: int) -> str:
    return f"deepspeed_muon/failed/{number}"


def _tell(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    first = store.compare_set(_key(_Steps.number), "", text).decode()
    if first != text:
        logger.error("deepspeed-muon: %s raised in this step first", first)
    elif torch.distributed.get_rank() == 0:
        time.sleep(LAST_WORDS)


def words() -> str:
    """Return what the first rank raised that left this step, or the one before, by an exception; empty if none has."""
    with suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        for number in (_Steps.number, _Steps.number - 1):
            if store.check([_key(number)]):
                return store.get(_key(number)).decode()
    return ""


def end_if_left_alone(is_waiting: Callable[[], bool]) -> None:
    """End the process if another rank has left the step in which this one waits; called by the watchdog.

    Args:
        is_waiting: whether a collective has not ended for :data:`GRACE` seconds; asked only where a rank has failed.
    """
    number = _Steps.number
    if number == 0 or _Steps.has_failed or time.monotonic() - _Steps.began < GRACE:
        return
    text = words()
    if not text or (_Steps.is_left and not is_waiting()) or _Steps.has_failed or _Steps.number != number:
        return
    logger.error("deepspeed-muon: this rank waits in a step that another has left, and ends: %s", text)
    for handler in logger.handlers:
        handler.flush()
    os._exit(1)
