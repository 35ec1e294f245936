# SPDX-License-Identifier: Apache-2.0
"""If one rank raises an exception inside a step, end the ranks that wait for it, and log its error on them.

The rank writes its error to the rendezvous store. On a rank that is stuck in the same step, the watchdog's thread finds
it there, logs it and ends the process. Nothing else ends a waiting collective on all backends, and nothing is lost: a
rank that has left a step cannot join it again.
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

#: Seconds that a step must last before its rank looks for errors of other ranks.
GRACE = 5.0
#: Seconds for which a failed rank 0, whose process serves the store, lives on, so that the others can read its error.
LAST_WORDS = 2.0


class _Steps:
    """The current or latest step of this process.

    ``number``: of the step, equal on all ranks. ``began``: its start, by :func:`time.monotonic`. ``is_left``: whether
    this process has left it. ``has_failed``: whether an exception has ended it.
    """

    number = 0
    began = 0.0
    is_left = True
    has_failed = False


@contextmanager
def failures_reported() -> Iterator[None]:
    """Report an exception raised inside, during a step that all ranks take, to the other ranks; then raise it."""
    if _Steps.has_failed:  # the script has handled an exception and continues; all ranks may have had it
        with suppress(Exception):
            torch.distributed.distributed_c10d._get_default_store().delete_key(_key(_Steps.number))
    _Steps.number, _Steps.began = _Steps.number + 1, time.monotonic()
    _Steps.is_left = _Steps.has_failed = False
    try:
        yield
    except BaseException as error:
        _Steps.has_failed = True
        with suppress(Exception):  # the store may be gone with its rank; the original error must be raised
            _report(f"rank {torch.distributed.get_rank()}: {type(error).__name__}: {error}")
        raise
    finally:
        _Steps.is_left = True


def step_of_all(step: Callable) -> Callable:
    """Decorate an optimizer's ``step`` with :func:`failures_reported`.

    If an engine calls ``step`` several times in one step, the caller enters :func:`failures_reported` around all calls.
    """

    @functools.wraps(step)
    def reporting_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.context.is_stepped_in_parts or not torch.distributed.is_initialized():
            return step(self, *args, **kwargs)
        with failures_reported():
            return step(self, *args, **kwargs)

    return reporting_step


def _key(number: int) -> str:
    return f"deepspeed_muon/failed/{number}"


def _report(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    first = store.compare_set(_key(_Steps.number), "", text).decode()
    if first != text:
        logger.error("deepspeed-muon: the first error in this step was on %s", first)
    elif torch.distributed.get_rank() == 0:
        time.sleep(LAST_WORDS)


def first_failure() -> str:
    """Return the first error, with its rank, that a rank raised in this step or the one before; empty without one."""
    with suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        for number in (_Steps.number, _Steps.number - 1):
            if store.check([_key(number)]):
                return store.get(_key(number)).decode()
    return ""


def end_if_left_alone(is_waiting: Callable[[], bool]) -> None:
    """End the process if it waits in a step that another rank has left by an exception. The watchdog calls this.
    ``is_waiting``: returns whether a collective has not ended :data:`GRACE` seconds after its launch.
    """
    number = _Steps.number
    if number == 0 or _Steps.has_failed or time.monotonic() - _Steps.began < GRACE:
        return
    text = first_failure()
    if not text or (_Steps.is_left and not is_waiting()) or _Steps.has_failed or _Steps.number != number:
        return
    logger.error("deepspeed-muon: this rank ends, because it waits in a step in which another rank failed: %s", text)
    for handler in logger.handlers:
        handler.flush()
    # Not sys.exit: this is the watchdog's thread, and the main thread waits in a collective that never returns.
    os._exit(1)
