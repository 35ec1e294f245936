# SPDX-License-Identifier: Apache-2.0
"""The least time that an optimizer step can take: its least work over the measured rates of the machine.

Counted per rank, and nothing else:
    Newton-Schulz   operations of every product of the method that is chosen for each shape; a rank does at least an
                    equal share, and at least the most expensive matrix. A product whose result is symmetric counts
                    half where a kernel computes one triangle.
    elementwise     bytes of the shard: gradient read 4, momentum read and written 8, parameter read and written 8,
                    input of Newton-Schulz written 2, its result read 2 (the wire is bf16 whatever the products are).
    exchange        bytes a rank must send if the one that holds most of a matrix gathers it: the mean of the ranks.
The three add up: on a CPU the same cores do all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rates import DTYPES, Rates
from deepspeed.muon.cli.forecast import GroupSpec, lay_out, step_cost
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet
from deepspeed.muon.layout import Block, MatrixSpec
from deepspeed.muon.math.newton_schulz import flops, method_of, schedule
from deepspeed.muon.zero.read_config import Layout

Matrices = Sequence[tuple[int, int]]
SIMPLE = schedule("simple")


class Demand(NamedTuple):
    """The least that one rank must do in a step: operations, bytes read and written, bytes sent."""

    flops: float
    bytes: float
    sent: float = 0.0


class Floor(NamedTuple):
    """Least seconds of each part of a step; their sum is that of the whole."""

    newton_schulz: float
    elementwise: float
    exchange: float


def least_flops(rows: int, cols: int, method: str = "auto", dtype: str = "bf16", symmetric: bool = False) -> float:
    """Least operations to orthogonalize one matrix; `symmetric` counts symmetric products half."""
    method = method_of(rows, cols, method, SIMPLE, dtype)
    return flops(rows, cols, SIMPLE, method, dtype, 0.5 if symmetric else 1.0)


def has_symmetric(kernels: KernelSet) -> bool:
    """Whether a table computes symmetric products by a kernel of its own."""
    return kernels.square is not kernel_set.square


def muon_group(matrices: Matrices) -> GroupSpec:
    """A parameter group of these matrices."""
    named = ((f"p{i}", shape, (Block(0, *shape, shape[1]),)) for i, shape in enumerate(matrices))
    return GroupSpec(
        use_muon=True, specs=tuple(MatrixSpec(name, shape, True, "", blocks) for name, shape, blocks in named)
    )


def demands(
    matrices: Matrices, stage: int, world: int, dtype: str = "bf16", symmetric: bool = False, wire: str = "bf16"
) -> list[Demand]:
    """What one rank must do at least. At stage 0 there are two ways: to repeat the work, or to share it."""
    each = [least_flops(rows, cols, dtype=dtype, symmetric=symmetric) for rows, cols in matrices]
    numel, itemsize = sum(rows * cols for rows, cols in matrices), DTYPES[wire].itemsize
    share, moved = max(sum(each) / world, max(each)), numel * (20 + 2 * itemsize)
    if stage == 0:
        return [Demand(sum(each), moved), Demand(share, moved, numel * itemsize * (world - 1) / world)]
    group = muon_group(matrices)
    cost = group.cost_model(SIMPLE, dtype, itemsize, "cpu")
    parts = lay_out([group], Layout(stage, world))
    return [Demand(share, moved / world, sum(step_cost(part, cost).least_bytes for part in parts))]


def floor(
    matrices: Matrices, stage: int, world: int, rates: Rates, dtype: str = "", symmetric: bool = False
) -> tuple[Floor, Demand]:
    """The least seconds of the optimizer's step on this machine, in its best dtype or this one; what they come from."""
    found = []
    for name in [dtype] if dtype else DTYPES:
        speed = getattr(rates, name), rates.copy, rates.network
        for way in demands(matrices, stage, world, name, symmetric):
            found.append((Floor(*(amount / rate for amount, rate in zip(way, speed, strict=True))), way))
    return min(found, key=lambda pair: sum(pair[0]))
