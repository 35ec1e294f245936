# SPDX-License-Identifier: Apache-2.0
"""Seconds of pieces of work: one call, repeated calls, and what is said of them."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Of one call; an accelerator is waited for."""
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def repeat(work: Callable[[], object], budget: float = 0.3, device: str = "cpu") -> list[float]:
    """Seconds of each of the calls that fit into a budget of seconds, at least three, after one that is not counted."""
    seconds(work, device)
    times: list[float] = []
    while sum(times) < budget or len(times) < 3:
        times.append(seconds(work, device))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median, fastest and slowest in milliseconds, and how many."""
    spread = {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
    return {f"{name} ms": round(1e3 * value, 3) for name, value in spread.items()} | {"calls": len(times)}
