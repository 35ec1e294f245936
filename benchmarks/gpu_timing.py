# SPDX-License-Identifier: Apache-2.0
"""Seconds on a GPU by its own events, on a CPU by the clock; candidates alternate, so that all meet the same drift."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def nothing() -> None:
    """No preparation."""


def once(work: Work, device: str, prepare: Work = nothing) -> float:
    """Seconds of one call, without those of ``prepare`` before it."""
    prepare()
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def alternate(works: Mapping[str, Work], device: str, calls: int, prepare: Work = nothing) -> dict[str, list[float]]:
    """Seconds of each call of each candidate, A B A B, after two calls of each that are not counted."""
    for work in works.values():
        for _ in range(2):
            once(work, device, prepare)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(calls):
        for name, work in works.items():
            times[name].append(once(work, device, prepare))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Milliseconds: median, and the spread as slowest less fastest over the median."""
    median = statistics.median(times)
    return {"ms": 1e3 * median, "spread": (max(times) - min(times)) / median}
