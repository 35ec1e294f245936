# SPDX-License-Identifier: Apache-2.0
"""The products of Newton-Schulz in PyTorch and in C++: against float64, and each other."""

import math
import platform

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import cpp_kernels, kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from helpers.kernels import (
    BY,
    check_multiply,
    check_product,
    check_square,
    native_bf16,
    parts,
    randn,
    room,
    threads,
)

Shape = tuple[int, int, int]
#: Wide, tall and square; smaller than a tile, ragged ones, and a sum longer than one call of the kernel makes.
SHAPES = [(1, 2, 6), (2, 32, 64), (3, 34, 70), (2, 66, 34), (2, 130, 130), (1, 48, 2050), (1, 1100, 64), (2, 770, 600)]
#: Relative: one rounding of the result, or two in the twin; sums are in fp32.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, kernels: KernelSet) -> torch.dtype:
    if kernels is not kernel_set.TORCH and request.param == torch.float16:
        pytest.skip("the C++ kernels have no products of fp16")
    if kernels is not kernel_set.TORCH and request.param == torch.bfloat16 and not native_bf16():
        pytest.skip("this CPU has no instructions for products of bf16")
    return request.param


def tolerance(kernels: KernelSet, dtype: torch.dtype, depth: int) -> float:
    """Return the relative error that sums of ``depth`` products may have."""
    if kernels is not kernel_set.TORCH or dtype != torch.bfloat16 or platform.machine() != "aarch64":
        return ROUNDING[dtype]
    # On Arm oneDNN rounds a sum to bf16 after each block of 128 or more products. After i of n blocks it is sqrt(i / n)
    # as large as in the end, so the squares of n errors add up to (n + 1) / 2 times the square of the last one.
    return ROUNDING[dtype] * math.sqrt((math.ceil(depth / 128) + 1) / 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_square_and_multiply(kernels: KernelSet, dtype: torch.dtype, shape: Shape) -> None:
    given = randn(*shape, dtype=dtype)
    for x in (given, given.mT):
        out = check_square(kernels, x, tolerance(kernels, dtype, x.size(2)))
        assert parts(out)[0].equal(parts(out)[0].mT)
        check_multiply(kernels, x, out, tolerance(kernels, dtype, x.size(1)))


@pytest.mark.parametrize("same", [True, False], ids=["square", "product"])
@pytest.mark.parametrize("size", [2, 32, 34, 98, 130])
def test_product(kernels: KernelSet, dtype: torch.dtype, size: int, same: bool) -> None:
    """Rounded, different factors commute nearly."""
    like = room(kernels, torch.empty(2, size, size, dtype=dtype))
    out = check_product(kernels, like, same, ROUNDING[dtype] * (1 if same else 2))
    assert kernels is kernel_set.TORCH or parts(out)[0].equal(parts(out)[0].mT)


def test_a_matrix_has_equal_bits_in_any_batch_on_any_number_of_threads(kernels: KernelSet, dtype: torch.dtype) -> None:
    """Ranks own other batches, and may have other numbers of threads."""
    x = randn(3, 66, 130, dtype=dtype)

    def results(x: Tensor) -> list[Tensor]:
        r, q, y = room(kernels, x), room(kernels, x), torch.empty_like(x)
        kernels.square(x, r, Workspace())
        kernels.product(r, r, q, Workspace(), *BY[1])
        kernels.multiply(q, x, y, Workspace(), 0.5)
        return [*parts(r), *parts(q), y]

    with threads(1):
        expected, single = results(x), [results(one.clone()) for one in x.split(1)]
    with threads(2):
        assert all(map(torch.equal, results(x), expected))
    if kernels is not kernel_set.TORCH:  # a library's kernels may differ by batch
        assert all(map(torch.equal, map(torch.cat, zip(*single, strict=True)), expected))


def test_a_row_that_is_not_finite_leaves_other_rows_unchanged(kernels: KernelSet, dtype: torch.dtype) -> None:
    """A kernel may read beyond the end of a row, but not count what it reads."""
    x, others = randn(2, 34, 70, dtype=dtype), torch.arange(34) != 20
    good, bad = room(kernels, x), room(kernels, x)
    kernels.square(x, good, Workspace())
    x[1, 20] = math.inf
    kernels.square(x, bad, Workspace())
    rest, expected = parts(bad)[0], parts(good)[0]
    assert rest[:, others][:, :, others].equal(expected[:, others][:, :, others])
    assert not rest[1, 20, others].isfinite().any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 7, 12), torch.bfloat16), ((1, 8, 13), torch.bfloat16), ((1, 8, 12), torch.float16)],
    ids=["odd rows of bf16", "odd columns of bf16", "fp16"],
)
def test_what_cpp_is_not_made_for_goes_to_the_twin(shape: Shape, dtype: torch.dtype) -> None:
    if reason := cpp_kernels.unavailable():
        pytest.skip(reason)
    x, results = randn(*shape, dtype=dtype), []
    for kernels in (cpp_kernels.operations(), kernel_set.TORCH):
        square, product = room(kernels, x), room(kernels, x)
        kernels.square(x, square, Workspace())
        kernels.product(square, square, product, Workspace(), *BY[1])
        results.append([square, product, kernels.multiply(product, x, torch.empty_like(x), Workspace())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_script_may_switch_onednn_off(dtype: torch.dtype) -> None:
    """Its kernels raise then; products of 16 bits go to the twin."""
    x = randn(2, 32, 64, dtype=dtype)
    with torch.backends.mkldnn.flags(enabled=False):
        gram, expected = room(cpp_kernels.operations(), x), room(kernel_set.TORCH, x)
        cpp_kernels.operations().square(x, gram, Workspace())
        kernel_set.TORCH.square(x, expected, Workspace())
    torch.testing.assert_close(gram, expected, rtol=ROUNDING[dtype], atol=1e-2)
