# SPDX-License-Identifier: Apache-2.0
"""Times both methods of Newton-Schulz on the shapes of a model, on one device, in bounded time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize

#: Seconds that all shapes together may take, beside the first run of each, in which kernels may be compiled.
SECONDS = 10.0
#: Matrices of so many bytes make a batch, as in a step.
BATCH_BYTES = 8 * 2**20
#: Timed runs of each method at most; a method is told from the other by its median.
ROUNDS = 9
#: A method takes the place of the rule's only where it is so many times faster.
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
    """Seconds of each method's runs on one batch, in turn, after one run of each that is not counted.

    Args:
        shape: rows and columns.
        count: matrices in the model; the batch has no more than these.
        seconds: after which no further round begins; one is timed at least.
    """
    generator = torch.Generator(device).manual_seed(0)  # torch's own generators stay as they are
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

    Args:
        shapes: how many matrices of each shape the model has. The cheap ones come first; one that would take too long
            at the pace of the one before ends the measurement, as do all after it.
    """
    found: dict[Shape, dict[str, float]] = {}
    work = {shape: min(shape) * shape[0] * shape[1] * _batch(shape, shapes[shape], dtype) for shape in shapes}
    order = sorted(shapes, key=lambda shape: (work[shape], shape))
    end, pace = clock() + seconds, 0.0
    for index, shape in enumerate(order):
        left = end - clock()
        if 2 * pace * work[shape] > left:  # both methods, twice
            break
        times = race(shape, shapes[shape], schedule, dtype, device, kernels, left / (len(order) - index), clock)
        found[shape] = {method: statistics.median(values) for method, values in times.items()}
        pace = sum(found[shape].values()) / work[shape]
    return found


def better(times: Mapping[str, float], usual: str) -> str:
    """The faster method, if it is faster than the usual one by more than :data:`MARGIN`, which is noise."""
    fastest = min(METHODS, key=lambda method: times[method])
    return fastest if times[usual] > MARGIN * times[fastest] else usual
