# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on slices of matrices, one on each rank, against the whole matrix on one rank."""

import itertools
from statistics import fmean
from typing import Any

import pytest
import torch

from deepspeed.muon.exchange.owner_set import OwnerSet, set_of
from deepspeed.muon.kernels.selection import missing, product_tables
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, orthogonalize
from helpers.distributed import run
from helpers.kernels import relative
from helpers.oracles import newton_schulz_fp64

#: Wide, tall, square and several in a batch, of entries of which one rank has far larger ones than the others.
SHAPES = [(1, 24, 96), (1, 96, 24), (1, 48, 48), (3, 16, 64)]
STEPS = schedule("simple")


def matrices(shape: tuple[int, int, int], seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(0, 1, shape[2])


def sliced_error(table: str, dtype: str, method: str, shape: tuple[int, int, int], seed: int) -> tuple[float, float]:
    """Errors of all ranks together and of one alone, relative to the exact polynomial."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    kernels = product_tables(missing("auto", ["cpu"]), "cpu")[table]
    x, axis = matrices(shape, seed), int(shape[1] <= shape[2])
    how: dict[str, Any] = {"method": method, "dtype": DTYPES[dtype], "gram_axis": 1 - axis}
    owners = OwnerSet(set_of(dist.group.WORLD, world), world, lambda launch: launch().wait())
    mine = x.chunk(world, dim=1 + axis)[rank].clone(memory_format=torch.contiguous_format)
    orthogonalize(mine, STEPS, work=Workspace(), kernels=owners.operations(kernels), **how)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    exact = torch.stack([newton_schulz_fp64(matrix, STEPS) for matrix in x])
    alone = orthogonalize(x.clone(), STEPS, kernels=kernels, **how)
    return relative(torch.cat(parts, dim=1 + axis), exact), relative(alone, exact)


def mean_errors(dtype: str) -> dict[str, list[float]]:
    """By table, method and shape, both means over some matrices."""
    tables = product_tables(missing("auto", ["cpu"]), "cpu")
    return {
        f"{table} {method} {shape}": [
            fmean(of_one)
            for of_one in zip(*(sliced_error(table, dtype, method, shape, seed) for seed in range(8)), strict=True)
        ]
        for table, method, shape in itertools.product(tables, METHODS, SHAPES)
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_are_as_exact_as_the_whole(dtype: str, world: int) -> None:
    """Two owners compute the products of small matrices whole, four share them. A sum is rounded once more."""
    for case, (of_slices, of_whole) in run(mean_errors, world, dtype=dtype)[0].items():
        assert of_slices <= (1e-5 if dtype == "fp32" else 1.5 * of_whole), (case, of_whole)
