# SPDX-License-Identifier: Apache-2.0
"""Normalization of a batch of matrices, in every kernel set: norm one whatever the magnitude."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from helpers.kernels import is_interpreted, randn, threads

SHAPES = [(1, 6, 10), (3, 33, 7), (2, 130, 300)]
MAGNITUDES = [(torch.float32, 10.0**e) for e in (-44, -42, -38, -30, -19, -3, 0, 8, 19, 25, 38)]
MAGNITUDES += [(torch.bfloat16, 10.0**e) for e in (-38, -30, -19, -3, 0, 8, 19, 25, 38)]


def matrices(shape: tuple[int, ...], magnitude: float, dtype: torch.dtype) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (magnitude * (6 * uniform - 3)).to(dtype)


def exact(x: Tensor, norm: float = 1.0) -> Tensor:
    return norm * x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
def test_norm_is_one_whatever_the_magnitude(kernels: Operations, dtype: torch.dtype, magnitude: float) -> None:
    for shape in SHAPES:
        x = matrices(shape, magnitude, dtype)
        expected, twin = exact(x), reference.normalize(x.clone(), x.clone())
        assert kernels.normalize(x, x) is x
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(x.double(), expected, rtol=4 * tolerance, atol=1e-30)
        torch.testing.assert_close(x, twin, rtol=4 * tolerance, atol=1e-30)
        if math.prod(shape) < 1000:  # sums of a few squares
            torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=0)
            torch.testing.assert_close(exact(x), x.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [-126, -100, -3, 1, 60, 125])
def test_a_power_of_two_changes_no_bit(kernels: Operations, exponent: int, dtype: torch.dtype) -> None:
    x = (1 + torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0))).to(dtype)
    scaled = (x.double() * 2.0**exponent).to(dtype)
    assert kernels.normalize(scaled, scaled).equal(kernels.normalize(x.clone(), x.clone()))


def normalize_extremes(kernels: Operations, dtype: torch.dtype) -> None:
    """Magnitudes whose squares leave fp32, parts of a matrix of very different magnitude, and zero.

    Subnormal numbers in fp32 alone: Triton's interpreter misreads those of bf16.
    """
    x, tiny = randn(5, 130, 200).double(), 1e-39 if dtype == torch.float32 else 1e-35
    x *= torch.tensor([1.0, 1e-25, 1e18, tiny, 0.0], dtype=torch.float64)[:, None, None]
    x[0, 70:] *= 1e-20
    given = x.to(dtype)
    result = kernels.normalize(given.clone(), torch.empty_like(given))
    error = (result.double() - exact(given)).norm(dim=(1, 2))
    bf16 = 2**-7 if is_interpreted(kernels) else 2**-8
    assert float(error.max()) <= (1e-6 if dtype == torch.float32 else bf16)
    assert not result[4].any()
    single = kernels.normalize(given[2:3].clone(), torch.empty_like(given[2:3]))
    assert single[0].equal(result[2]), "no matrix knows the others of its batch"
    for wrong in (math.inf, math.nan):
        given[1, 100, 100] = wrong
        assert not kernels.normalize(given.clone(), torch.empty_like(given))[1].isfinite().all()
        assert kernels.normalize(given.clone(), torch.empty_like(given))[0].equal(result[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_matrices(on: Any, dtype: torch.dtype) -> None:
    on(normalize_extremes, dtype=dtype)


def test_one_entry_and_its_extreme_neighbours(kernels: Operations) -> None:
    x = torch.zeros(3, 4, 6)
    x[0, 2, 3], x[1, 1, 1], x[1, 0, 0], x[2, 3, 5] = -1e-44, 3e38, 1e-44, 1.2345
    kernels.normalize(x, x)
    assert x[0, 2, 3] == -1.0 and x[1, 1, 1] == 1.0 and x[1, 0, 0] == 0.0 and x[2, 3, 5] == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_batches_nor_threads_change_a_bit(kernels: Operations, dtype: torch.dtype) -> None:
    x = matrices((5, 301, 257), 1e-3, dtype)
    many, single = x.clone(), x.clone()
    with threads(2):
        kernels.normalize(many, many)
    with threads(1):
        one_by_one = [kernels.normalize(matrix.clone()[None], torch.empty_like(matrix[None])) for matrix in x]
        assert kernels.normalize(single, single).equal(torch.cat(one_by_one)), "whatever the batch"
    if kernels.name != "torch":
        assert many.equal(single), "PyTorch's own sums depend on the threads"


@pytest.mark.parametrize("norm", [1.0, 16.0])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalized_into_another_dtype(
    kernels: Operations, dtype: torch.dtype, out_dtype: torch.dtype, norm: float
) -> None:
    """Rounded once, and only by the dtype of the result; a norm that is a power of two rounds nothing."""
    x, out = matrices((3, 33, 47), 1e-9, dtype), torch.full((3, 33, 47), torch.nan, dtype=out_dtype)
    assert kernels.normalize(x.clone(), out, norm) is out
    rounding = 0.51 * torch.finfo(out_dtype).eps + 2e-6
    torch.testing.assert_close(out.double(), exact(x, norm), rtol=rounding, atol=1e-6)
    if out_dtype != torch.float16:
        assert torch.equal(kernels.normalize(x.clone(), torch.empty_like(out), 1.0) * norm, out)
