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


class _CurrentStep:
    """This process's current or latest step. Steps are numbered from 1, equally on all ranks.

    ``began``: time of :func:`time.monotonic` at the start. ``is_left``: whether the process has ended the step.
    ``has_failed``: whether an exception ended it.
    """

    number = 0
    began = 0.0
    is_left = True
    has_failed = False


@contextmanager
def failures_reported() -> Iterator[None]:
    """Return a context to enter once for each training step, on all ranks. It reports an exception to the other ranks.

    The exception is then raised again.
    """
    if _CurrentStep.has_failed:  # the script has handled an exception and continues; all ranks may have had it
        with suppress(Exception):
            torch.distributed.distributed_c10d._get_default_store().delete_key(_key(_CurrentStep.number))
    _CurrentStep.number, _CurrentStep.began = _CurrentStep.number + 1, time.monotonic()
    _CurrentStep.is_left = _CurrentStep.has_failed = False
    try:
        yield
    except BaseException as error:
        _CurrentStep.has_failed = True
        with suppress(Exception):  # the store may be gone with its rank; the original error must be raised
            _report(f"rank {torch.distributed.get_rank()}: {type(error).__name__}: {error}")
        raise
    finally:
        _CurrentStep.is_left = True


def reports_failures(step: Callable) -> Callable:
    """Decorate an optimizer's ``step``, so that it runs inside :func:`failures_reported`.

    Where DeepSpeed calls ``step`` several times in one training step, the caller enters :func:`failures_reported`
    around all calls instead.
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
    first = store.compare_set(_key(_CurrentStep.number), "", text).decode()
    if first != text:
        logger.error("deepspeed-muon: another rank failed first in this step; fix the cause of its error: %s", first)
    elif torch.distributed.get_rank() == 0:
        time.sleep(LAST_WORDS)


def first_failure() -> str:
    """Return the first error that a rank reported in this step or the one before, such as "rank 3: ValueError: ...".

    Return an empty string if no rank has reported an error.
    """
    with suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        for number in (_CurrentStep.number, _CurrentStep.number - 1):
            if store.check([_key(number)]):
                return store.get(_key(number)).decode()
    return ""


def end_if_left_alone(is_waiting: Callable[[], bool]) -> None:
    """End this process if a rank reported an exception in a step in which this process still waits for other ranks.

    The watchdog thread calls this every few seconds. ``is_waiting``: function that returns whether a collective of this
    process is still running :data:`GRACE` seconds after its launch.
    """
    number = _CurrentStep.number
    if number == 0 or _CurrentStep.has_failed or time.monotonic() - _CurrentStep.began < GRACE:
        return
    text = first_failure()
    if (
        not text
        or (_CurrentStep.is_left and not is_waiting())
        or _CurrentStep.has_failed
        or _CurrentStep.number != number
    ):
        return
    logger.error(
        "deepspeed-muon: this process ends, because it waits in a step in which another rank failed; "
        "fix the cause of that rank's error: %s",
        text,
    )
    for handler in logger.handlers:
        handler.flush()
    # Not sys.exit: this is the watchdog's thread, and the main thread waits in a collective that never returns.
    os._exit(1)
