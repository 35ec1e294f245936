# SPDX-License-Identifier: Apache-2.0
"""Names the collective that never ends: in an error if the backend raises one, else in the log.

gloo raises in ``wait()``. NCCL returns from ``wait()`` at once, and its watchdog ends the process later without running
any Python, so a thread checks the latest collectives from time to time. A step pays for one small object per
collective.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed.muon.errors import ExchangeError
from deepspeed.muon.exchange.failures import GRACE, end_if_left_alone, words
from deepspeed.muon.log import logger

CPU = torch.device("cpu")
#: Seconds after which an unfinished collective is named in the log.
SLOW = 60.0
#: Seconds between two looks at the collectives. While a step or a forward takes long, each look asks the rendezvous
#: store, which one rank serves for all.
TICK = 5.0
#: At most this many matrices of a bucket are named.
NAMED = 4


class PendingCollective:
    """One collective under way: ``title`` says its bucket and group, ``names`` the parameters in the bucket.

    Its handle, which keeps the collective's tensors in memory, is dropped once it has been waited for.

    Raises:
        ExchangeError: the backend failed when ``start``, which returns a handle, launched it. Other errors pass as they
            are.
    """

    def __init__(
        self, title: str, names: tuple[str, ...], start: Callable[[], Any], device: torch.device = CPU
    ) -> None:
        self.title, self.names, self.since, self._device = title, names, time.monotonic(), device
        with self._named_errors():
            self._handle = start()

    def wait(self) -> None:
        """Wait for it.

        Raises:
            ExchangeError: another rank died, or did not join within the process group's timeout.
        """
        # gloo's errors have no class of their own; errors of memory and of the device are subclasses of RuntimeError.
        with self._named_errors(RuntimeError):
            self._handle.wait()
        self._handle = _mark_after_wait(self._device)

    def is_slow(self) -> bool:
        """Whether it has been under way for longer than ``SLOW``."""
        return self.is_older_than(SLOW)

    def is_older_than(self, seconds: float) -> bool:
        """Return whether it has been under way for so long; ask the backend only then, until it has ended."""
        handle = self._handle
        if handle is None or time.monotonic() - self.since <= seconds:
            return False
        if is_over := handle.is_completed():
            self._handle = None  # never ask again: an event that is asked may spoil the capture of a CUDA graph
        return not is_over

    def location(self) -> str:
        """Its bucket and its age, for a message."""
        more = f" and {len(self.names) - NAMED} more" if len(self.names) > NAMED else ""
        seconds = time.monotonic() - self.since
        return f"{self.title} ({', '.join(self.names[:NAMED])}{more}), {seconds:.1f} s after it began"

    @contextmanager
    def _named_errors(self, plain: type[Exception] | None = None) -> Iterator[None]:
        """Turn the backend's errors into ExchangeError, and log the bucket of any other.

        Beside torch's own, the backend's are those of class ``plain``; subclasses do not count.
        """
        try:
            yield
        except Exception as error:
            if type(error) is not plain and not isinstance(error, torch.distributed.DistError):
                logger.error("deepspeed-muon: %s in %s", type(error).__name__, self.location())
                raise
            told = f". First to fail in this step was {first}" if (first := words()) else ""
            raise ExchangeError(
                f"the exchange failed in {self.location()}: another rank died, or did not come within the timeout of "
                "the process group; look first at the log of a rank without this error. If ranks are only slow, "
                f"set DEEPSPEED_TIMEOUT (minutes). The backend says: {error}{told}"
            ) from error


def _mark_after_wait(device: torch.device) -> Any:
    """Says whether the collective has ended. On a CPU it has; elsewhere the current stream waits, and an event says."""
    if device.type == "cpu":
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return SimpleNamespace(is_completed=event.query)


class PendingCollectives:
    """The last collectives of the exchange of one parameter group, by its name, between tensors on one device."""

    def __init__(self, group: str, device: torch.device = CPU) -> None:
        self._group, self._device = group, device
        self._recent: deque[PendingCollective] = deque(maxlen=4)
        _all.add(self)

    def start(self, bucket: str, names: tuple[str, ...], launch: Callable[[], Any]) -> PendingCollective:
        """Launch a collective, as :class:`PendingCollective`; ``bucket``: which of how many, empty before the first."""
        what = f"bucket {bucket}" if bucket else "the look for gradients"
        collective = PendingCollective(f"{what} of group {self._group}", names, launch, self._device)
        self._recent.append(collective)
        return collective

    def is_waiting(self) -> bool:
        """Return whether a collective has not ended for ``GRACE`` seconds."""
        return any(collective.is_older_than(GRACE) for collective in list(self._recent))

    def report_slow(self) -> None:
        """Log the first slow collective, once."""
        slow = next((collective for collective in list(self._recent) if collective.is_slow()), None)
        if slow is not None:
            self._recent.clear()
            message = "deepspeed-muon: the exchange does not end in %s; another rank is slow or gone"
            logger.error(message, slow.location())


_all: weakref.WeakSet[PendingCollectives] = weakref.WeakSet()


@functools.cache
def start_watchdog() -> None:
    """Start the thread that reports slow collectives; once per process."""
    threading.Thread(target=_watch, name="deepspeed-muon watchdog", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(TICK)
        with suppress(RuntimeError):  # of the backend, or because the set changes meanwhile: the next round sees it
            everyone = list(_all)
            end_if_left_alone(lambda everyone=everyone: any(one.is_waiting() for one in everyone))  # type: ignore[misc]
            for collectives in everyone:
                collectives.report_slow()
