# SPDX-License-Identifier: Apache-2.0
"""Triton's products without a GPU, interpreted: against float64 and their twins in PyTorch.

Symmetric ones, of which one triangle is computed, and the pass that completes a library's product.
"""

import math

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import newton_schulz
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from helpers.kernels import Interpret, interpreted_table, needs_triton, oriented, randn, relative
from helpers.oracles import newton_schulz_fp64

TILES = [(16, 16, 16), (16, 32, 16), (32, 32, 16)]
NEVER = 10**9
"""A size from which on symmetric products begin that nothing reaches."""
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-11}


def empty(batch: int, size: int, dtype: torch.dtype) -> Symmetric:
    """What is not reached stays NaN."""
    rest = torch.full((batch, size, size), torch.nan, dtype=dtype)
    return Symmetric(rest, torch.full((batch, size), torch.nan))


def dense(matrix: Symmetric) -> Tensor:
    """In fp64; what is on the diagonal of ``rest`` counts, too."""
    return matrix.rest.double() + torch.diag_embed(matrix.diagonal.double())


def assert_is(actual: Symmetric, expected: Tensor, tolerance: float) -> None:
    """Of its parts each by itself: the diagonal is large and fp32, the rest symmetric and zero on it."""
    diagonal = expected.diagonal(dim1=-2, dim2=-1)
    assert not actual.rest.diagonal(dim1=-2, dim2=-1).any()
    assert relative(actual.diagonal, diagonal) <= 1e-6
    if expected.size(-1) > 1:
        assert relative(actual.rest, expected - torch.diag_embed(diagonal)) <= tolerance


def assert_mirrored(rest: Tensor, side: int) -> None:
    """Outside the squares on the diagonal, which are computed whole: the interpreter's sums there are a BLAS's."""
    of = torch.arange(rest.size(-1)) // side
    outside = of[:, None] != of
    assert rest[:, outside].equal(rest.mT[:, outside])


def square(shape: tuple[int, int, int], tiles: tuple[int, int, int], group: int) -> None:
    from deepspeed.muon.kernels import triton_products as products

    kernels = interpreted_table(tiles=tiles)
    products.GROUP = group
    for dtype, tolerance in ROUNDING.items():
        x = oriented(randn(*shape, dtype=dtype))
        out = empty(shape[0], x.size(1), dtype)
        kernels.square(x, out, Workspace())
        assert_is(out, x.double() @ x.double().mT, tolerance)
        assert_mirrored(out.rest, tiles[1])


@needs_triton
@pytest.mark.sample(3)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("shape", [(2, 40, 70), (1, 70, 40), (2, 48, 48), (1, 5, 7)], ids=str)
def test_square(interpret: Interpret, shape: tuple[int, int, int], tiles: tuple[int, int, int]) -> None:
    interpret(square, shape=shape, tiles=tiles, group=2)


def square_of_distant_rows() -> None:
    """The last row begins beyond 2^31 elements, of which hardly any are touched."""
    from deepspeed.muon.kernels import triton_products as products

    kernels, rows, apart = interpreted_table(tiles=(16, 16, 16)), 16, 2**31 // 15 + 16
    storage = torch.empty(rows * apart, dtype=torch.float16)
    x = storage.as_strided((1, rows, rows), (rows * apart, apart, 1))
    x.copy_(randn(1, rows, rows, dtype=torch.float16))
    out = empty(1, rows, torch.float16)
    assert kernels
    products.square(x, out, Workspace(), products.tuned_kernel)
    assert_is(out, x.double() @ x.double().mT, ROUNDING[torch.float16])


@needs_triton
def test_a_matrix_may_have_more_elements_than_32_bits_count(interpret: Interpret) -> None:
    interpret(square_of_distant_rows)


@needs_triton
@pytest.mark.sample(1)
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.full), 3, 8])
def test_every_order_reaches_every_tile(interpret: Interpret, group: int) -> None:
    """1 to 10 squares on a side."""
    for size in (16, 48, 160):
        interpret(square, shape=(1, size, size), tiles=(16, 16, 256), group=group)


def near_identity(batch: int, size: int, factor: float, power: int) -> Symmetric:
    """One of several symmetric matrices that commute."""
    root = randn(batch, size, size).double()
    matrix = torch.linalg.matrix_power(root @ root.mT / size, power) / 8 + factor * torch.eye(size).double()
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return Symmetric((matrix - torch.diag_embed(diagonal)).float(), diagonal.float())


def product(size: int, symmetric_from: int, same: bool) -> None:
    kernels = interpreted_table(symmetric_from)
    for dtype, tolerance in ROUNDING.items():
        a, b = (
            Symmetric(m.rest.to(dtype), m.diagonal)
            for m in (near_identity(2, size, 3.0, 1), near_identity(2, size, -1, 2))
        )
        b = a if same else b
        kept = [part.clone() for part in (*a, *b)]
        for alpha, beta, shift in ((1.0, 0.0, 0.0), (0.6, -1.7, 2.5)):
            out = empty(2, size, dtype)
            kernels.product(a, b, out, Workspace(), Scalars(alpha, beta, shift))
            expected = alpha * dense(a) @ dense(b) + beta * dense(a) + shift * torch.eye(size).double()
            # Twice: in the triangle the rounded factors commute no more, elsewhere the pass rounds again.
            assert_is(out, expected, 2 * tolerance)
        assert all(now.equal(before) for now, before in zip((*a, *b), kept, strict=True))


@needs_triton
@pytest.mark.sample(3)
@pytest.mark.parametrize("same", [True, False], ids=["square", "product"])
@pytest.mark.parametrize(("size", "symmetric_from"), [(50, 1), (33, NEVER)])
def test_product(interpret: Interpret, size: int, symmetric_from: int, same: bool) -> None:
    interpret(product, size=size, symmetric_from=symmetric_from, same=same)


def several_blocks() -> None:
    """Rows longer than the pass takes at a time, and not a multiple of it."""
    from deepspeed.muon.kernels import triton_products as products

    products.PASS_BLOCK, kept = 16, products.PASS_BLOCK
    try:
        product(20, NEVER, same=False)
        multiply((2, 10, 20))
        multiply((2, 20, 10))
    finally:
        products.PASS_BLOCK = kept


@needs_triton
def test_rows_of_several_blocks(interpret: Interpret) -> None:
    interpret(several_blocks)


def multiply(shape: tuple[int, int, int]) -> None:
    kernels = interpreted_table()
    for dtype, tolerance in ROUNDING.items():
        x = oriented(randn(*shape, dtype=dtype))
        p = near_identity(shape[0], x.size(1), 3.0, 1)
        p = Symmetric(p.rest.to(dtype), p.diagonal)
        kept, out = x.clone(), torch.full_like(x, torch.nan)
        assert kernels.multiply(p, x, out, Workspace()) is out
        assert relative(out, dense(p) @ x.double()) <= 2 * tolerance
        assert x.equal(kept)


@needs_triton
@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(2, 20, 50), (2, 50, 20), (3, 17, 17), (1, 1, 7), (1, 7, 1)], ids=str)
def test_multiply(interpret: Interpret, shape: tuple[int, int, int]) -> None:
    interpret(multiply, shape=shape)


def non_finite(symmetric_from: int) -> None:
    """A matrix that is not finite stays so, and leaves the others of its batch alone."""
    kernels, work = interpreted_table(symmetric_from), Workspace()
    for wrong in (math.nan, math.inf):
        a, x = near_identity(2, 20, 3.0, 1), randn(2, 20, 30)
        good, bad = empty(2, 20, torch.float32), empty(2, 20, torch.float32)
        kernels.product(a, a, good, work, Scalars(0.6, -1.7, 2.5))
        a.rest[1, 3, 5] = a.rest[1, 5, 3] = x[1, 3, 5] = wrong
        kernels.product(a, a, bad, work, Scalars(0.6, -1.7, 2.5))
        assert all(part[0].equal(other[0]) for part, other in zip(good, bad, strict=True))
        assert not bad.rest[1].isfinite().all() and not bad.diagonal[1].isfinite().all()
        kernels.square(x, bad, work)
        assert bad.rest[0].isfinite().all() and not bad.diagonal[1].isfinite().all()


@needs_triton
@pytest.mark.parametrize("symmetric_from", [1, NEVER], ids=["triangle", "library and pass"])
def test_what_is_not_finite(interpret: Interpret, symmetric_from: int) -> None:
    interpret(non_finite, symmetric_from=symmetric_from)


# ---- the iteration ------------------------------------------------------------------------------------------


def apart(name: str, x: Tensor, work: Workspace) -> Symmetric:
    """In fp32 too, for which the iteration would leave them whole, and Triton's kernels out."""
    return empty(x.size(0), min(x.shape[1:]), x.dtype)


def iterate(method: str, shape: tuple[int, int, int], symmetric_from: int) -> None:
    x = randn(*shape)
    exact = torch.stack([newton_schulz_fp64(matrix) for matrix in x])
    kernels = interpreted_table(symmetric_from, tiles=(16, 32, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newton_schulz, "symmetric_of", apart)
        found = orthogonalize(x.clone(), schedule("simple"), method, kernels=kernels)
    assert relative(found, exact) <= 1e-4


@needs_triton
@pytest.mark.sample(2)
@pytest.mark.parametrize("symmetric_from", [1, NEVER], ids=["triangle", "library and pass"])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(2, 20, 50), (1, 50, 20)], ids=str)
def test_the_iteration(interpret: Interpret, method: str, shape: tuple[int, int, int], symmetric_from: int) -> None:
    interpret(iterate, method=method, shape=shape, symmetric_from=symmetric_from)
