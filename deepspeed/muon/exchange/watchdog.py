# SPDX-License-Identifier: Apache-2.0
"""Report which bucket a hung collective belongs to: in the error if the backend raises one, otherwise in the log.

gloo raises in ``wait()``. NCCL returns from ``wait()`` at once, and its watchdog ends the process later without running
any Python, so a thread checks the latest collectives from time to time. It reads only host memory, into which the
device writes when a collective has ended. To query an event instead would be a call of the device's runtime, which
invalidates a CUDA graph that another thread is capturing. A step pays for two small launches per collective.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import ExchangeError
from deepspeed.muon.exchange.failures import GRACE, end_if_left_alone, first_failure
from deepspeed.muon.exchange.host_staging import pinned
from deepspeed.muon.kernels.workspace import is_accelerator
from deepspeed.muon.log import logger

CPU = torch.device("cpu")
#: Seconds after which an unfinished collective is named in the log.
SLOW = 60.0
#: Seconds between two checks of the collectives. During a long step or forward each check also asks the rendezvous
#: store, which one rank serves for all.
TICK = 5.0
#: How many matrices of a bucket a message names, and how many of a group's latest collectives the thread checks.
MAX_NAMED, MAX_LATEST = 4, 4


class PendingCollective:
    """One launched collective, which knows whether it has ended.

    ``handle`` keeps the collective's tensors in memory. :meth:`wait` sets it to ``None``, though on an accelerator the
    collective may then still be running.

    Args:
        title: the bucket and the parameter group, for messages.
        names: the matrices in the bucket, for messages.
        start: function that launches the collective and returns its handle, which has a method ``wait``.
        mark: host tensor with one uint8. It is 0 while the collective is waited for and has not ended, otherwise 1.
        device: device of the collective's tensors.

    Raises:
        ExchangeError: the backend failed to launch the collective. Other errors are raised unchanged.
    """

    def __init__(
        self, title: str, names: tuple[str, ...], start: Callable[[], Any], mark: Tensor, device: torch.device = CPU
    ) -> None:
        self.title, self.names, self.since = title, names, time.monotonic()
        self.mark, self._device, self.is_reported = mark, device, False
        with self._named_errors():
            self.handle = start()

    def wait(self) -> None:
        """Wait for the end of the collective; on an accelerator the current stream waits instead of the host.

        Raises:
            ExchangeError: another rank died, or did not call the collective within the process group's timeout.
        """
        # Not at the launch: until this call no stream waits for the collective, so it cannot be what hangs.
        self.mark.zero_()
        # gloo raises plain RuntimeErrors; errors of memory and of the device are subclasses of RuntimeError.
        try:
            with self._named_errors(RuntimeError):
                self.handle.wait()
        except Exception:
            self.mark.fill_(1)
            raise
        self.handle = None
        # On an accelerator the stream executes this copy only when the collective has ended.
        self.mark.copy_(torch.ones(1, dtype=self.mark.dtype, device=self._device), non_blocking=True)

    def is_slow(self, limit: float | None = None) -> bool:
        """Return whether :meth:`wait` was called, and the collective has not ended ``limit`` seconds after its launch.

        ``limit``: :data:`SLOW` if ``None``.
        """
        return time.monotonic() - self.since > (SLOW if limit is None else limit) and not self.mark.item()

    def location(self) -> str:
        """Return a text for messages: the collective's bucket, its first matrices, and the seconds since the launch."""
        more = f" and {len(self.names) - MAX_NAMED} more" if len(self.names) > MAX_NAMED else ""
        seconds = time.monotonic() - self.since
        return f"{self.title} ({', '.join(self.names[:MAX_NAMED])}{more}), {seconds:.1f} s after the exchange began"

    @contextmanager
    def _named_errors(self, plain: type[Exception] | None = None) -> Iterator[None]:
        """Return a context that turns a backend's error into an ExchangeError that names the bucket.

        ``plain``: exact class of errors that the backend raises besides ``DistError``. Other errors, also of its
        subclasses, are logged and raised again.
        """
        try:
            yield
        except Exception as error:
            if type(error) is not plain and not isinstance(error, torch.distributed.DistError):
                logger.error(
                    "deepspeed-muon: Muon's step raised %s while this rank communicated in %s; see the traceback "
                    "of this error",
                    type(error).__name__,
                    self.location(),
                )
                raise
            cause = f". The first error in this step was on {first}" if (first := first_failure()) else ""
            raise ExchangeError(
                f"communication between ranks failed in Muon's step, in {self.location()}: another rank died, or "
                "did not join within the timeout of the process group; look first at the log of a rank without this "
                "error. If ranks are only slow, raise the timeout with DEEPSPEED_TIMEOUT (minutes). The backend's "
                f"error: {error}{cause}"
            ) from error


class PendingCollectives:
    """The latest collectives of one parameter group, which the watchdog thread checks for one that hangs.

    ``group``: name of the parameter group. ``device``: device of the collectives' tensors.
    """

    def __init__(self, group: str, device: torch.device = CPU) -> None:
        self._group, self._device = group, device
        self._latest: deque[PendingCollective] = deque()
        #: Marks of earlier collectives, oldest first. A mark is reused once it is 1, because pinning memory is slow.
        self._marks: deque[Tensor] = deque()
        _all.add(self)

    def start(self, bucket: str, names: tuple[str, ...], launch: Callable[[], Any]) -> PendingCollective:
        """Launch a collective. Return the :class:`PendingCollective` to wait for it.

        ``bucket``: the bucket's number, such as "2 of 5"; empty for the check for missing gradients. ``names``: the
        matrices in the bucket. ``launch``: function that launches the collective and returns its handle.
        """
        what = f"bucket {bucket}" if bucket else "the check for missing gradients"
        if len(self._latest) == MAX_LATEST and (earlier := self._latest.popleft()).handle is None:
            self._marks.append(earlier.mark)
        if self._marks and self._marks[0].item():
            mark = self._marks.popleft()
        else:
            mark = torch.ones(1, dtype=torch.uint8, device="cpu")
            mark = pinned(mark) if is_accelerator(self._device) else mark
        collective = PendingCollective(f"{what} of group {self._group}", names, launch, mark, self._device)
        self._latest.append(collective)
        return collective

    def is_waiting(self) -> bool:
        """Return whether this rank waits for a collective of the group launched over :data:`GRACE` seconds ago."""
        return any(collective.is_slow(GRACE) for collective in list(self._latest))

    def report_slow(self) -> None:
        """Log the group's oldest slow collective, once. Later ones are slow for the same reason, and are not logged."""
        latest = list(self._latest)
        slow = next((collective for collective in latest if collective.is_slow()), None)
        if slow is not None and not slow.is_reported:
            logger.error(
                "deepspeed-muon: Muon's step is waiting for other ranks in %s; another rank is slow or has died, look "
                "at the logs of all ranks",
                slow.location(),
            )
            for collective in latest:
                collective.is_reported = True


_all: weakref.WeakSet[PendingCollectives] = weakref.WeakSet()


@functools.cache
def start_watchdog() -> None:
    """Start this process's watchdog thread. Do nothing if it is running.

    The thread logs slow collectives, and ends the process if it waits for a rank that failed.
    """
    threading.Thread(target=_watch, name="deepspeed-muon watchdog", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(TICK)
        with suppress(RuntimeError):  # the backend's, or because `_all` changed meanwhile: the next check sees it
            _look()


def _look() -> None:
    # A function of its own, so that its list is gone between two checks: the thread must not be the one that frees
    # pinned marks.
    everyone = list(_all)
    end_if_left_alone(lambda: any(collectives.is_waiting() for collectives in everyone))
    for collectives in everyone:
        collectives.report_slow()
