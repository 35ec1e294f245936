# SPDX-License-Identifier: Apache-2.0
"""Measures the constants of a :class:`Machine` in this process, in bounded time."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed.muon.forecast.estimate import Machine
from deepspeed.muon.forecast.layout import Half
from deepspeed.muon.kernels.codes import blocks_of
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import adamw
from deepspeed.muon.math.choice import Choice, counted_method
from deepspeed.muon.math.momentum import kept_dtype
from deepspeed.muon.math.newton_schulz import DTYPES, flops, orthogonalize
from deepspeed.muon.numerics import fixed_numerics
from deepspeed.muon.plan.plan import BUCKET_BYTES, CPU_BUCKET_BYTES
from deepspeed.muon.tuning import Candidates, may_race, method_of, with_products

#: Seconds that all shapes together may take, beside the first call of each, which may compile kernels.
SECONDS = 8.0
#: Timed calls of one shape; the median counts.
CALLS = 5
#: Smaller dimension of the first, smaller copy of a shape by which its time is judged.
SMALL = 128
#: Elements of the shard on which the elementwise passes are timed, and of one so small that only the launch counts.
LARGE_RUN, SMALL_RUN = 2**22, 64
#: Passes over a shard between two looks at the clock, so that an accelerator is kept busy.
REPEATS = 10
#: Rows, columns, and the method or what the user wrote for it.
Shape = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class ShapeRate:
    """Newton-Schulz of one shape: what was run for it, and how fast that was.

    ``count``: matrices of this shape in the model. ``method``, ``dtype``: the choice of a run on this machine.
    ``run_as``: batch, rows and columns of the timed call, smaller by a power of two where the shape itself would have
    taken too long.
    """

    rows: int
    cols: int
    count: int
    method: str
    dtype: str
    run_as: tuple[int, int, int]
    tflops: float


@fixed_numerics()
def measure(
    halves: Sequence[Half],
    candidates: Candidates,
    wire: torch.dtype,
    shard_device: torch.device,
    kernels: Operations,
    world_size: int,
    seconds: float = SECONDS,
) -> tuple[Machine, list[ShapeRate]]:
    """Return the constants of this process's device, for a model and what a run of it chooses.

    ``Machine.tflops`` is the rate of all matrices of the model one after the other: the operations that
    :func:`deepspeed.muon.forecast.estimate.estimate` counts over the measured seconds.

    Args:
        halves: the optimizer's parameter groups, at least one of Muon.
        candidates: for Newton-Schulz, on its device. ``wire``: dtype of the exchange.
        shard_device: where momentum and parameters are: the CPU with ZeRO-Offload.
        kernels: for all but products.
        world_size: ranks that share the matrices, which bounds how many of one shape an owner has in a batch.
    """
    muon = [half for half in halves if half.use_muon]
    blocks = Counter((b.rows, b.cols, half.ns_method) for half in muon for spec in half.specs for b in spec.blocks)
    counts = Counter((rows, cols) for rows, cols, _ in blocks.elements())
    choice = candidates.choose(counts, world_size, races=may_race()).choice
    shapes = Counter((rows, cols, method_of(choice, method, rows, cols)) for rows, cols, method in blocks.elements())
    timer = _ShapeTimer(candidates, choice, wire, kernels)
    rates = timer.rates(shapes, world_size, seconds)
    spent = sum(rate.count * timer.flops(rate.rows, rate.cols, rate.method) / rate.tflops for rate in rates)
    large, small = (_muon_pass(numel, muon[0], wire, shard_device, kernels) for numel in (LARGE_RUN, SMALL_RUN))
    # Counted as a forecast does, which does not know the choice.
    schedule, dtype = candidates.schedule, candidates.default_dtype
    operations = sum(
        count * flops(rows, cols, schedule, counted_method(rows, cols, ns_method, schedule, dtype), dtype)
        for (rows, cols, ns_method), count in blocks.items()
    )
    machine = Machine(
        tflops=operations / spent,
        muon_ns=max(0.0, large - small) / LARGE_RUN * 1e9,
        adamw_ns=_adamw_pass(LARGE_RUN, shard_device) / LARGE_RUN * 1e9,
        run_us=small * 1e6,
    )
    return machine, rates


@dataclass(frozen=True)
class _ShapeTimer:
    """Times Newton-Schulz shape by shape."""

    candidates: Candidates
    choice: Choice
    wire: torch.dtype
    kernels: Operations
    work: Workspace = field(default_factory=Workspace)

    def rates(self, shapes: Mapping[Shape, int], world_size: int, seconds: float) -> list[ShapeRate]:
        """Return the rate of each shape, the cheap ones first; each has an equal share of the time that is left."""
        end, rates = time.perf_counter() + seconds, []
        nbytes = CPU_BUCKET_BYTES if self.candidates.device.type == "cpu" else BUCKET_BYTES
        for index, shape in enumerate(sorted(shapes, key=lambda shape: (self.flops(*shape), shape))):
            rows, cols, method = shape
            share = (end - time.perf_counter()) / (len(shapes) - index)
            size, fitting = self._affordable(shape, share / 2)
            batch = min(-(-shapes[shape] // world_size), nbytes // self.wire.itemsize // (rows * cols), fitting)
            run_as = max(1, batch), *size
            rates.append(
                ShapeRate(
                    rows=rows,
                    cols=cols,
                    count=shapes[shape],
                    method=method,
                    dtype=self.choice.dtype,
                    run_as=run_as,
                    tflops=1e-12 / self._pace(shape, run_as, CALLS - 1),
                )
            )
        return rates

    def _affordable(self, shape: Shape, seconds: float) -> tuple[tuple[int, int], int]:
        """Return rows and columns to time in place of a shape, and how many such matrices fit into the time.

        Small matrices are slower per operation, so from copies divided by a power of two the size doubles while the
        next one fits by the pace of the last.
        """
        rows, cols, method = shape
        halvings = max(0, math.ceil(math.log2(min(rows, cols) / SMALL)))
        size, *larger = [(max(1, rows >> k), max(1, cols >> k)) for k in range(halvings, -1, -1)]
        pace = self._pace(shape, (1, *size), calls=1)
        for following in larger:
            if CALLS * pace * self.flops(*following, method) >= seconds:
                break
            size, pace = following, self._pace(shape, (1, *following), calls=1)
        return size, int(seconds / CALLS / (pace * self.flops(*size, method)))

    def _pace(self, shape: Shape, run_as: tuple[int, int, int], calls: int) -> float:
        """Return the median seconds per operation of a batch of matrices that stand for a shape."""
        (rows, cols, method), (batch, run_rows, run_cols) = shape, run_as
        x = torch.randn(run_as, dtype=torch.float32, device=self.candidates.device).to(self.wire)
        kernels = with_products(self.kernels, self.candidates.tables, self.choice, rows, cols)
        dtype = DTYPES[self.choice.dtype]
        run = partial(orthogonalize, x, self.candidates.schedule, method, dtype, self.work, kernels)
        return _median(run, x.device, calls) / (batch * self.flops(run_rows, run_cols, method))

    def flops(self, rows: int, cols: int, method: str) -> int:
        """Return the operations of one matrix."""
        return flops(rows, cols, self.candidates.schedule, method, self.choice.dtype)


def _muon_pass(numel: int, half: Half, dtype: torch.dtype, device: torch.device, kernels: Operations) -> float:
    """Return the seconds of both of Muon's elementwise passes over one run of a shard."""
    grad, param = (torch.randn(numel, dtype=torch.float32, device=device) for _ in range(2))
    kind, factor, nesterov = half.momentum_dtype, 0.95, half.nesterov
    momentum = torch.zeros(numel, device=device, dtype=kept_dtype(grad, kind))
    absmax = torch.zeros(blocks_of(numel), dtype=torch.float32, device=device)
    out, work, decay = torch.empty(numel, device=device, dtype=dtype), Workspace(), 0.1 if half.decays else 0.0
    key = key_of("measured", 1)

    def both() -> None:
        for _ in range(REPEATS):
            if kind == "int8":
                kernels.advance_codes(momentum, absmax, grad, out, factor, nesterov, key, 0, work)
            elif kind == "bf16":
                kernels.advance_rounded(momentum, grad, out, factor, nesterov, key, 0, work)
            else:
                kernels.advance(momentum, grad, out, factor, nesterov, work)
            kernels.apply_(param, out, 1e-3, 1.0, decay, False, work)

    return _median(both, device, CALLS) / REPEATS


def _adamw_pass(numel: int, device: torch.device) -> float:
    """Return the seconds of AdamW's step over one flat tensor."""
    param = torch.randn(numel, dtype=torch.float32, device=device)
    param.grad = torch.randn(numel, dtype=torch.float32, device=device)
    state: dict[str, Any] = adamw.state_of({}, param)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return _median(lambda: adamw.step([param], [state], group, True), device, CALLS)


@torch.no_grad()
def _median(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the median seconds of a call, after one that is not counted."""
    times = []
    wait = torch.zeros((), dtype=torch.float32, device=device).item  # until the device has done what was launched
    for _ in range(calls + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
