# SPDX-License-Identifier: Apache-2.0
"""The least time that an optimizer step can take: its least work over the measured rates of the machine.

Counted per rank, and nothing else:
    Newton-Schulz   operations of every product of the method that is chosen for each shape, as the code calls them;
                    a rank does at least an equal share, and at least the most expensive matrix. A product whose
                    result is symmetric counts half where a kernel computes one triangle.
    elementwise     bytes of the shard: gradient read 4, momentum read and written 8, parameter read and written 8,
                    input of Newton-Schulz written 2, its result read 2 (bf16; 4 and 4 in fp32).
    exchange        bytes that a rank must send if each matrix is gathered by the rank that holds most of it: the mean
                    of the ranks.
The three add up: on a CPU the same cores do all of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import report
from benchmarks.rates import Rates, measure
from deepspeed.muon.forecast.layout import Half, Layout, lay_out, step_cost
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.choice import choose_method
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.plan.cost import cost_model

ITEMSIZE = {"bf16": 2, "fp32": 4}
Matrices = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How ZeRO spreads the optimizer."""

    stage: int
    ranks: int = 1


@dataclasses.dataclass(frozen=True)
class Demand:
    """The least that one rank must do in a step: operations, bytes read and written in memory, bytes sent."""

    flops: float
    bytes: float
    sent: float = 0.0


@dataclasses.dataclass(frozen=True)
class Floor:
    """Least seconds of each part of a step."""

    newton_schulz: float
    elementwise: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Of the whole step of the optimizer."""
        return self.newton_schulz + self.elementwise + self.exchange


@functools.cache
def products(rows: int, cols: int, method: str, steps: int = 5) -> tuple[float, float]:
    """Operations for one matrix, in products with a symmetric result and in others.

    Counted by running the method on tensors without data; a multiply-add is two operations.
    """
    symmetric = 0

    def counted(operation: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal symmetric
            before = counter.get_total_flops()
            operation(*args, **kwargs)
            symmetric += counter.get_total_flops() - before

        return run

    table = dataclasses.replace(
        reference.OPERATIONS,
        normalize_=lambda x: x,
        square=counted(reference.square),
        product=counted(reference.product),
    )
    x = torch.empty(1, rows, cols, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as counter:
        orthogonalize(x, schedule("simple", steps), method, kernels=table)
    return float(symmetric), float(counter.get_total_flops() - symmetric)


def least_flops(rows: int, cols: int, method: str = "auto", symmetric: bool = False) -> float:
    """Least operations to orthogonalize one matrix; `symmetric` counts symmetric products half."""
    mirrored, other = products(rows, cols, choose_method(rows, cols, method, "cpu bf16"))
    return mirrored * (0.5 if symmetric else 1.0) + other


def has_symmetric(kernels: Operations) -> bool:
    """Whether a table computes symmetric products by a kernel of its own."""
    return kernels.square is not reference.square


def muon_half(matrices: Matrices) -> Half:
    """A parameter group of these matrices."""
    specs = (
        MatrixSpec(f"p{i}", shape, True, "given", (Block(0, *shape, shape[1]),)) for i, shape in enumerate(matrices)
    )
    return Half(use_muon=True, specs=tuple(specs))


def demands(matrices: Matrices, sharding: Sharding, dtype: str = "bf16", symmetric: bool = False) -> list[Demand]:
    """What one rank must do at least. At stage 0 there are two ways: to repeat the work, or to share it."""
    flops = [least_flops(rows, cols, symmetric=symmetric) for rows, cols in matrices]
    numel, ranks = sum(rows * cols for rows, cols in matrices), sharding.ranks
    held, itemsize = numel if sharding.stage == 0 else numel / ranks, ITEMSIZE[dtype]
    moved, share = held * (20 + 2 * itemsize), max(sum(flops) / ranks, max(flops))
    if sharding.stage == 0:
        return [Demand(sum(flops), moved), Demand(share, moved, numel * itemsize * (ranks - 1) / ranks)]
    cost = cost_model("auto", schedule("simple"), itemsize, "cpu")
    parts = lay_out([muon_half(matrices)], Layout(sharding.stage, ranks))
    return [Demand(share, moved, sum(step_cost(part, cost).least_bytes for part in parts))]


def floor_of(demand: Demand, rates: Rates, dtype: str = "bf16") -> Floor:
    """A demand over the rates."""
    return Floor(demand.flops / getattr(rates, dtype), demand.bytes / rates.copy, demand.sent / rates.network)


def floor(matrices: Matrices, sharding: Sharding, rates: Rates, dtype: str = "bf16", symmetric: bool = False) -> Floor:
    """The least seconds of the optimizer's step on this machine."""
    ways = demands(matrices, sharding, dtype, symmetric)
    return min((floor_of(demand, rates, dtype) for demand in ways), key=lambda found: found.total)


def roofline(
    matrices: tuple[str, ...] = ("8x512x512", "8x2048x512", "8x512x2048"),
    world: int = 2,
    threads: int = 1,
    dtype: str = "bf16",
    symmetric: bool = False,
    device: str = "cpu",
) -> str:
    """Measure this machine's rates; the least time of a step by ZeRO stage.

    Args:
        matrices: COUNTxROWSxCOLS
        world: ranks
        threads: of each rank
        dtype: of Newton-Schulz and its exchange, bf16 or fp32
        symmetric: count products with a symmetric result half
        device: cpu or cuda
    """
    shapes = [(int(r), int(c)) for n, r, c in (text.split("x") for text in matrices) for _ in range(int(n))]
    rates = measure(world, threads, device).best(measure(world, threads, device))
    rows = []
    for stage in range(4):
        ways = demands(shapes, Sharding(stage, world), dtype, symmetric)
        demand = min(ways, key=lambda way: floor_of(way, rates, dtype).total)
        least = floor_of(demand, rates, dtype)
        row = {"stage": stage, "GFLOP": demand.flops / 1e9, "MB in memory": demand.bytes / 1e6}
        row |= {"MB sent": demand.sent / 1e6, "Newton-Schulz ms": 1e3 * least.newton_schulz}
        row |= {"elementwise ms": 1e3 * least.elementwise, "exchange ms": 1e3 * least.exchange}
        rows.append(row | {"floor ms": 1e3 * least.total})
    title = f"The floor of a step: {len(shapes)} matrices, {sum(r * c for r, c in shapes) / 1e6:.1f} M parameters"
    counted = "symmetric products counted half" if symmetric else "every product counted in full"
    name = report.name_of("roofline", f"{world}-ranks", "symmetric" * symmetric, "fp32" * (dtype == "fp32"))
    parts = "Newton-Schulz ms", "elementwise ms", "exchange ms"
    chart = report.bars(rows, lambda row: f"stage {row['stage']}", *parts, unit="least milliseconds of a step")
    setting = f"{world} ranks, {threads} threads per rank, {dtype}, {counted}. {rates}"
    facts = [row | dataclasses.asdict(rates) for row in rows]
    return report.write(name, title, facts, setting, report.table(rows), draw=chart)
