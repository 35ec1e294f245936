# SPDX-License-Identifier: Apache-2.0
"""Times both methods of Newton-Schulz on a model's shapes, on one device, in bounded time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize

#: Seconds for all shapes together, without the first run of each, in which kernels may be compiled.
SECONDS = 10.0
#: Bytes of the matrices in one batch, as in a step.
BATCH_BYTES = 8 * 2**20
#: At most this many timed runs of each method; their medians are compared.
ROUNDS = 9
#: A method replaces the rule's only if it is faster by this factor.
MARGIN = 1.03

Shape = tuple[int, int]
Clock = Callable[[], float]


def race(
    shape: Shape,
    count: int,
    schedule: Schedule,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Operations,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each method's runs on one batch, alternating, after one untimed run of each.

    Args:
        shape: rows and columns.
        count: matrices of this shape in the model, the most that a batch holds.
        seconds: no new round begins after this time; one is always timed.
    """
    generator = torch.Generator(device).manual_seed(0)  # leaves torch's own generators alone
    source = torch.randn(_batch(shape, count, dtype), *shape, generator=generator, device=device).to(dtype)
    x, work = torch.empty_like(source), Workspace()

    def run(method: str) -> float:
        x.copy_(source)
        x[0, 0, 0].item()  # waits for the device
        began = clock()
        orthogonalize(x, schedule, method, work=work, kernels=kernels)
        x[0, 0, 0].item()
        return clock() - began

    for method in METHODS:
        run(method)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    end = clock() + seconds
    while len(times[METHODS[0]]) < ROUNDS:
        for method in METHODS:
            times[method].append(run(method))
        if clock() >= end:
            break
    return times


def _batch(shape: Shape, count: int, dtype: torch.dtype) -> int:
    return max(1, min(count, BATCH_BYTES // (shape[0] * shape[1] * dtype.itemsize)))


def measure(
    shapes: Mapping[Shape, int],
    schedule: Schedule,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Operations,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> dict[Shape, dict[str, float]]:
    """Median seconds of each method, by shape; shapes for which no time is left are missing.

    Cheap shapes come first. The measurement ends before the first that would take too long at the pace of the last.

    Args:
        shapes: how many matrices of each shape the model has.
    """
    found: dict[Shape, dict[str, float]] = {}
    costs = {shape: min(shape) * shape[0] * shape[1] * _batch(shape, shapes[shape], dtype) for shape in shapes}
    order = sorted(shapes, key=lambda shape: (costs[shape], shape))
    end, pace = clock() + seconds, 0.0
    for index, shape in enumerate(order):
        left = end - clock()
        if 2 * pace * costs[shape] > left:  # both methods, twice
            break
        times = race(shape, shapes[shape], schedule, dtype, device, kernels, left / (len(order) - index), clock)
        found[shape] = {method: statistics.median(values) for method, values in times.items()}
        pace = sum(found[shape].values()) / costs[shape]
    return found


def better(times: Mapping[str, float], usual: str) -> str:
    """The faster method; the usual one unless the other is faster by more than :data:`MARGIN`, the noise."""
    fastest = min(METHODS, key=lambda method: times[method])
    return fastest if times[usual] > MARGIN * times[fastest] else usual
