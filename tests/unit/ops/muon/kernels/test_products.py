# SPDX-License-Identifier: Apache-2.0
"""The products of Newton-Schulz, in PyTorch and in C++: against float64, and each other."""

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import native, reference
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from helpers.kernels import native_bf16

#: Wide, tall and square; smaller than a tile, ragged ones, and a sum longer than one call of the kernel makes.
SHAPES = [(1, 2, 6), (2, 32, 64), (3, 34, 70), (2, 66, 34), (2, 130, 130), (1, 48, 2050), (1, 1100, 64), (2, 770, 600)]
BY = [PLAIN, Scalars(2.0315, -4.775, 3.4445), Scalars(0.5, 0.0, -1.0)]
#: Relative: one rounding of the result, or two in the twin; sums are in fp32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest, kernels: Operations) -> torch.dtype:
    if request.param == torch.bfloat16 and kernels is not reference.OPERATIONS and not native_bf16():
        pytest.skip("this CPU has no dot products of bf16")
    return request.param


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty(batch: int, size: int, dtype: torch.dtype) -> Symmetric:
    """What is not written stays NaN."""
    rest = torch.full((batch, size, size), torch.nan, dtype=dtype)
    return Symmetric(rest, torch.full((batch, 0 if dtype == torch.float32 else size), torch.nan))


def dense(matrix: Symmetric) -> Tensor:
    rest = matrix.rest.double()
    return rest if matrix.is_whole else rest + torch.diag_embed(matrix.diagonal.double())


def commuting(batch: int, size: int, dtype: torch.dtype) -> tuple[Symmetric, Symmetric]:
    """Two polynomials of one symmetric matrix."""
    wide = randn(batch, size, 2 * size).double()
    first = wide @ wide.mT / size
    return split(first, dtype), split(first @ first - 3 * first, dtype)


def split(matrix: Tensor, dtype: torch.dtype) -> Symmetric:
    if dtype == torch.float32:
        return Symmetric(matrix.float(), torch.empty(len(matrix), 0))
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return Symmetric((matrix - torch.diag_embed(diagonal)).to(dtype), diagonal.float())


def assert_is(actual: Symmetric, expected: Tensor) -> None:
    """The rest to its dtype; in 16 bits zero on the diagonal, which is apart and right to fp32."""
    scale, rest, tolerance = expected.abs().amax().item(), expected, ROUNDING[actual.rest.dtype]
    if not actual.is_whole:
        diagonal = expected.diagonal(dim1=-2, dim2=-1)
        assert not actual.rest.diagonal(dim1=-2, dim2=-1).any()
        torch.testing.assert_close(actual.diagonal.double(), diagonal, rtol=1e-5, atol=1e-5 * scale)
        rest = expected - torch.diag_embed(diagonal)
    torch.testing.assert_close(actual.rest.double(), rest, rtol=2 * tolerance, atol=2 * tolerance * scale)
    error = (actual.rest.double() - rest).norm() / rest.norm()
    assert error <= tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_square(kernels: Operations, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    given = randn(*shape).to(dtype)
    for x in (given, given.mT):
        kept, out = x.clone(), empty(shape[0], x.size(1), dtype)
        kernels.square(x, out, Workspace())
        assert_is(out, x.double() @ x.double().mT)
        assert out.rest.equal(out.rest.mT) and x.equal(kept)


@pytest.mark.parametrize("by", BY, ids=str)
@pytest.mark.parametrize("size", [2, 32, 34, 98, 130])
def test_product(kernels: Operations, dtype: torch.dtype, size: int, by: Scalars) -> None:
    first, second = commuting(2, size, dtype)
    given = [part.clone() for part in (*first, *second)]
    for a, b in ((first, first), (first, second)):
        out = empty(2, size, dtype)
        kernels.product(a, b, out, Workspace(), by)
        expected = by.alpha * dense(a) @ dense(b) + by.beta * dense(a) + by.shift * torch.eye(size, dtype=torch.double)
        if a is b:
            assert_is(out, expected)
        else:  # rounded, they commute nearly
            torch.testing.assert_close(dense(out), expected, rtol=0, atol=2.0**-6 * expected.abs().amax().item())
    assert all(part.equal(before) for part, before in zip((*first, *second), given, strict=True))
    assert kernels is reference.OPERATIONS or out.rest.equal(out.rest.mT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multiply(kernels: Operations, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    given = randn(*shape).to(dtype)
    for x in (given, given.mT):
        p, out = commuting(shape[0], x.size(1), dtype)[0], torch.full_like(x, torch.nan)
        kept = x.clone(), p.rest.clone()
        assert kernels.multiply(p, x, out, Workspace()) is out
        assert x.equal(kept[0]) and p.rest.equal(kept[1])
        expected = dense(p) @ x.double()
        assert (out.double() - expected).norm() / expected.norm() <= ROUNDING[dtype]
        scale = expected.abs().amax().item()
        torch.testing.assert_close(out.double(), expected, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype] * scale)


def test_a_matrix_has_equal_bits_in_any_batch_on_any_number_of_threads(kernels: Operations, dtype: torch.dtype) -> None:
    """Ranks own other batches, and may have other numbers of threads."""
    x, threads = randn(3, 66, 130).to(dtype), torch.get_num_threads()

    def results(x: Tensor) -> list[Tensor]:
        r, q, y = empty(len(x), 66, dtype), empty(len(x), 66, dtype), torch.empty_like(x)
        kernels.square(x, r, Workspace())
        kernels.product(r, r, q, Workspace(), BY[1])
        kernels.multiply(q, x, y, Workspace())
        return [*r, *q, y]

    try:
        torch.set_num_threads(1)
        expected = results(x)
        alone = [results(x[i : i + 1].clone()) for i in range(3)]
        torch.set_num_threads(2)
        assert all(a.equal(b) for a, b in zip(results(x), expected, strict=True))
    finally:
        torch.set_num_threads(threads)
    if kernels is not reference.OPERATIONS:  # a library's kernels may differ by batch
        assert all(
            torch.cat(parts).equal(whole) for parts, whole in zip(zip(*alone, strict=True), expected, strict=True)
        )


def test_odd_sizes_of_bf16_go_to_the_twin() -> None:
    if native.unavailable():
        pytest.skip(str(native.unavailable()))
    for x in (randn(1, 7, 12).bfloat16(), randn(1, 8, 13).bfloat16()):
        found, expected = empty(1, x.size(1), x.dtype), empty(1, x.size(1), x.dtype)
        native.operations().square(x, found, Workspace())
        reference.square(x, expected, Workspace())
        assert found.rest.equal(expected.rest) and found.diagonal.equal(expected.diagonal)


def test_fp32_with_diagonals_apart_goes_to_the_twin() -> None:
    if native.unavailable():
        pytest.skip(str(native.unavailable()))
    x, work = randn(1, 8, 12), Workspace()
    found, a, expected, b = (apart(8) for _ in range(4))
    for kernels, square, product in ((native.operations(), found, a), (reference.OPERATIONS, expected, b)):
        kernels.square(x, square, work)
        kernels.product(square, square, product, work, BY[1])
    assert all(part.equal(other) for part, other in zip((*found, *a), (*expected, *b), strict=True))
    results = [k.multiply(a, x, torch.empty_like(x), work) for k in (native.operations(), reference.OPERATIONS)]
    assert results[0].equal(results[1]) and a.diagonal.any()


def apart(size: int) -> Symmetric:
    return Symmetric(torch.full((1, size, size), torch.nan), torch.full((1, size), torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_script_may_switch_onednn_off(dtype: torch.dtype) -> None:
    """Its kernels raise then; products of 16 bits go to the twin."""
    x = randn(2, 32, 64).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False):
        gram, expected = empty(2, 32, dtype), empty(2, 32, dtype)
        native.operations().square(x, gram, Workspace())
        reference.OPERATIONS.square(x, expected, Workspace())
    torch.testing.assert_close(gram.rest, expected.rest, rtol=ROUNDING.get(dtype, 1e-3), atol=1e-2)
    torch.testing.assert_close(gram.diagonal, expected.diagonal)
