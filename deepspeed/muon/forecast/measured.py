# SPDX-License-Identifier: Apache-2.0
"""Measure the rates of a :class:`Machine` in this process, in bounded time."""

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
from deepspeed.muon.forecast.layout import GroupSpec
from deepspeed.muon.kernels.codes import block_count
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import adamw
from deepspeed.muon.math.choice import Choice, counted_method
from deepspeed.muon.math.momentum_storage import storage_dtype
from deepspeed.muon.math.newton_schulz import DTYPES, flops, orthogonalize
from deepspeed.muon.numerics import fixed_numerics
from deepspeed.muon.plan.plan import BUCKET_BYTES, CPU_BUCKET_BYTES
from deepspeed.muon.tuning import Candidates, may_time, method_of, with_products

#: Seconds for all shapes together, not counting the first call of each, which may compile kernels.
SECONDS = 8.0
#: How often a shape is timed; the median counts.
CALLS = 5
#: The time of a shape is first predicted from a copy whose smaller dimension is about this.
SMALL = 128
#: Numbers of elements of two shards on which the elementwise passes are timed. On the small one, launching is all.
LARGE_RUN, SMALL_RUN = 2**22, 64
#: Passes over a shard per timing, so that an accelerator is kept busy.
REPEATS = 10
#: (tokens of the linear layer that is timed, maximum of tokens x outputs x inputs): on a CPU, and on an accelerator.
CPU_LAYER, LAYER = (512, 2**29), (8192, 2**40)
#: (rows, columns, method of Newton-Schulz).
Shape = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class ShapeRate:
    """The measured speed of Newton-Schulz on matrices of one shape.

    ``count``: number of matrices of this shape in the model. ``method``, ``dtype``: what training on this machine would
    choose for them. ``run_as``: (batch, rows, columns) of the timed call. If the shape would take too long, a smaller
    one is timed: rows and columns divided by the same power of two.
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
    groups: Sequence[GroupSpec],
    candidates: Candidates,
    wire: torch.dtype,
    shard_device: torch.device,
    kernels: Operations,
    world_size: int,
    seconds: float = SECONDS,
) -> tuple[Machine, list[ShapeRate]]:
    """Time Muon's computation for a model on this machine. Return (speed of this process, speed for each shape).

    ``Machine.tflops`` is an average over all matrices of the model. Operations are counted as in
    :func:`deepspeed.muon.forecast.estimate.estimate`.

    Args:
        groups: the optimizer's parameter groups, with at least one Muon group.
        candidates: dtypes, methods and kernels among which training would choose, and the device of Newton-Schulz.
        wire: dtype in which ranks send matrices to each other.
        shard_device: device of momentum and parameters; the CPU with ZeRO-Offload.
        kernels: the kernels for everything except the matrix products of Newton-Schulz.
        world_size: number of ranks that share the matrices; the more ranks, the fewer matrices in a batch.
        seconds: time limit for all shapes together.
    """
    muon = [group for group in groups if group.use_muon]
    blocks = Counter((b.rows, b.cols, group.ns_method) for group in muon for spec in group.specs for b in spec.blocks)
    counts = Counter((rows, cols) for rows, cols, _ in blocks.elements())
    choice = candidates.choose(counts, world_size, may_time=may_time()).choice
    shapes = Counter((rows, cols, method_of(choice, method, rows, cols)) for rows, cols, method in blocks.elements())
    timer = _ShapeTimer(candidates, choice, wire, kernels)
    rates = timer.rates(shapes, world_size, seconds)
    spent = sum(rate.count * timer.flops(rate.rows, rate.cols, rate.method) / rate.tflops for rate in rates)
    large, small = (_muon_pass(numel, muon[0], wire, shard_device, kernels) for numel in (LARGE_RUN, SMALL_RUN))
    # Count the operations of the methods that a forecast assumes, which divides them by this rate.
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


def training_tflops(groups: Sequence[GroupSpec], dtype: str, device: torch.device) -> dict[str, Any]:
    """Time the products of forward and backward in one linear layer, of the shape that has most of Muon's parameters.

    If the shape would take too long, a smaller copy is timed. Training is slower, because it has other operations too.

    Returns:
        {"dtype": ``dtype``, "run_as": [tokens, outputs, inputs] of the timed layer, "tflops": 10^12 floating-point
        operations per second}
    """
    numel = Counter[tuple[int, int]]()
    for block in (block for group in groups for spec in group.specs for block in spec.blocks):
        numel[block.rows, block.cols] += block.numel
    ((rows, cols), _), *_ = numel.most_common()
    tokens, limit = CPU_LAYER if device.type == "cpu" else LAYER
    while tokens * rows * cols > limit and min(rows, cols) > SMALL:
        rows, cols = rows // 2, cols // 2
    x, weight, out = (
        torch.randn(*size, dtype=torch.float32, device=device).to(DTYPES[dtype])
        for size in ((tokens, cols), (rows, cols), (tokens, rows))
    )

    def products() -> None:
        for a, b in ((x, weight.mT), (out, weight), (out.mT, x)):
            torch.mm(a, b)

    tflop = 3 * 2 * tokens * rows * cols / 1e12
    return {"dtype": dtype, "run_as": [tokens, rows, cols], "tflops": tflop / _median(products, device, CALLS)}


@dataclass(frozen=True)
class _ShapeTimer:
    """A timer of Newton-Schulz on matrices of each shape, for one choice of dtype and kernels."""

    candidates: Candidates
    choice: Choice
    wire: torch.dtype
    kernels: Operations
    work: Workspace = field(default_factory=Workspace)

    def rates(self, shapes: Mapping[Shape, int], world_size: int, seconds: float) -> list[ShapeRate]:
        """Time each shape, within ``seconds`` for all together. Return the results, fewest operations first.

        ``shapes``: {(rows, columns, method): number of such matrices in the model}.
        """
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
        """Return ((rows, columns), batch size) to time for ``shape``, predicted to take at most ``seconds``.

        If ``shape`` would take too long, rows and columns are divided by the same power of two. The batch size may be
        less than 1 if even that takes too long.
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
        """Return the seconds per floating-point operation of Newton-Schulz on a batch, the median of ``calls`` calls.

        ``run_as``: (batch, rows, columns). Method and kernels are those that ``shape`` gets.
        """
        (rows, cols, method), (batch, run_rows, run_cols) = shape, run_as
        x = torch.randn(run_as, dtype=torch.float32, device=self.candidates.device).to(self.wire)
        kernels = with_products(self.kernels, self.candidates.tables, self.choice, rows, cols)
        dtype = DTYPES[self.choice.dtype]
        run = partial(orthogonalize, x, self.candidates.schedule, method, dtype, self.work, kernels)
        return _median(run, x.device, calls) / (batch * self.flops(run_rows, run_cols, method))

    def flops(self, rows: int, cols: int, method: str) -> int:
        return flops(rows, cols, self.candidates.schedule, method, self.choice.dtype)


def _muon_pass(numel: int, group: GroupSpec, dtype: torch.dtype, device: torch.device, kernels: Operations) -> float:
    """Return the seconds of Muon's two elementwise passes (momentum; weights) over ``numel`` contiguous elements."""
    grad, param = (torch.randn(numel, dtype=torch.float32, device=device) for _ in range(2))
    kind, factor, nesterov = group.momentum_dtype, 0.95, group.nesterov
    momentum = torch.zeros(numel, device=device, dtype=storage_dtype(grad, kind))
    absmax = torch.zeros(block_count(numel), dtype=torch.float32, device=device)
    out, work, decay = torch.empty(numel, device=device, dtype=dtype), Workspace(), 0.1 if group.decays else 0.0
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
    """Return the seconds of an AdamW step on one flat fp32 tensor of ``numel`` elements."""
    param = torch.randn(numel, dtype=torch.float32, device=device)
    param.grad = torch.randn(numel, dtype=torch.float32, device=device)
    state: dict[str, Any] = adamw.state_of({}, param)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return _median(lambda: adamw.step([param], [state], group, True), device, CALLS)


@torch.no_grad()
def _median(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the median duration in seconds of ``calls`` calls of ``call``, after one call that is not counted."""
    times = []
    wait = torch.zeros((), dtype=torch.float32, device=device).item  # returns when the device has finished its work
    for _ in range(calls + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
