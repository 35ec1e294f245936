# SPDX-License-Identifier: Apache-2.0
"""Facts about one step for the monitor: the size of its updates and the seconds of each phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: The halves of the optimizer, in the order of :meth:`StepStats.sums`.
HALVES = ("muon", "adamw")


class StepStats:
    """Records one step on one rank; ``synchronize`` waits for the accelerator, so that a phase has its own time."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._squares: dict[str, list[Tensor]] = {half: [] for half in HALVES}
        self._counts = dict.fromkeys(HALVES, 0)
        self._synchronize = synchronize

    def add(self, half: str, squares: Tensor, count: int) -> None:
        """Add the sum of squares, 0-D, of ``count`` elements of an update."""
        self._squares[half].append(squares)
        self._counts[half] += count

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to this phase."""
        self._synchronize()
        started = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name] += time.perf_counter() - started

    def sums(self) -> Tensor:
        """(sum of squares, number of elements) of each half, fp64, [2, 2], on the CPU; add them over the ranks."""
        values = [(sum(float(s) for s in self._squares[half]), float(self._counts[half])) for half in HALVES]
        return torch.tensor(values, dtype=torch.float64)
