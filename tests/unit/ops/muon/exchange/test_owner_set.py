# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on slices of matrices, one on each rank, against the whole matrix on one rank."""

import itertools
from statistics import fmean
from typing import Any

import pytest
import torch

from deepspeed.muon.exchange.owner_set import OwnerSet, set_of
from deepspeed.muon.kernels.selection import product_tables, unavailable_kernels
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, orthogonalize
from helpers.distributed import run
from helpers.kernels import relative
from helpers.oracles import newton_schulz_fp64

#: Wide, tall, square: several in a batch, of whose entries one rank has far larger ones than the others.
SHAPES = [(8, 24, 96), (8, 96, 24), (8, 48, 48)]
STEPS = schedule("simple")


def mean_error(results: torch.Tensor, exact: torch.Tensor) -> float:
    """Over the matrices of a batch."""
    return fmean(map(relative, results, exact))


def errors(table: Operations, dtype: str, method: str, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Of all ranks together and of one alone, relative to the exact polynomial."""
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 1, shape[2])
    axis = 1 + int(shape[1] <= shape[2])
    how: dict[str, Any] = {"method": method, "dtype": DTYPES[dtype], "gram_axis": 2 - axis}
    owners = OwnerSet(set_of(dist.group.WORLD, world), world, lambda kind, tensor, launch: launch().wait())
    mine = x.chunk(world, dim=axis)[rank].clone(memory_format=torch.contiguous_format)
    orthogonalize(mine, STEPS, work=Workspace(), kernels=owners.operations(table), **how)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    exact = torch.stack([newton_schulz_fp64(matrix, STEPS) for matrix in x])
    alone = orthogonalize(x.clone(), STEPS, kernels=table, **how)
    return mean_error(torch.cat(parts, dim=axis), exact), mean_error(alone, exact)


def all_errors(dtype: str) -> dict[str, tuple[float, float]]:
    tables = product_tables(unavailable_kernels("auto", ["cpu"]), "cpu")
    return {
        f"{name} {method} {shape}": errors(tables[name], dtype, method, shape)
        for name, method, shape in itertools.product(tables, METHODS, SHAPES)
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_are_as_exact_as_the_whole(dtype: str, world: int) -> None:
    """Two owners compute the products of small matrices whole, four share them. A sum is rounded once more."""
    for case, (of_slices, of_whole) in run(all_errors, world, dtype=dtype)[0].items():
        most = {"fp32": 1e-5, "bf16": 1.5 * of_whole, "fp16": 1.6 * of_whole}[dtype]
        assert of_slices <= most, (case, of_whole)


def with_unlike_threads() -> list[tuple[int, ...]]:
    """The shapes of the sums that a rank sends, whose number of threads is its own."""
    import torch.distributed as dist

    torch.set_num_threads(4 * dist.get_rank() + 1)
    sent: list[tuple[int, ...]] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return original(torch.zeros(1), *args, **options)  # unlike sizes would end the process

    dist.all_reduce = all_reduce
    try:
        owners = OwnerSet(dist.group.WORLD, 2, lambda kind, tensor, launch: launch().wait())
        kernels = owners.operations(product_tables(unavailable_kernels("torch", ["cpu"]), "cpu")["torch"])
        orthogonalize(torch.randn(3, 512, 1024), STEPS[:1], kernels=kernels, gram_axis=0)
    finally:
        dist.all_reduce = original
        torch.set_num_threads(1)
    return sent


def test_unlike_numbers_of_threads_send_alike() -> None:
    """They decide how many matrices a rank orthogonalizes at a time, unless others have slices of them."""
    first, second = run(with_unlike_threads, 2, fresh=True)
    assert len(first) == 3 and first == second
