# SPDX-License-Identifier: Apache-2.0
"""The products of Newton-Schulz in PyTorch, in C++ and in Triton, interpreted: against float64, and each other.

In Triton: symmetric ones, of which one triangle is computed, and the pass that completes a library's product.
"""

import math
import platform
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import native, reference
from deepspeed.muon.kernels.table import Operations, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import newton_schulz
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from helpers.kernels import (
    BY,
    Interpret,
    check_multiply,
    check_product,
    check_square,
    empty,
    interpreted_table,
    native_bf16,
    near_identity,
    needs_triton,
    oriented,
    randn,
    relative,
    threads,
)
from helpers.oracles import newton_schulz_fp64

Shape = tuple[int, int, int]
#: Wide, tall and square; smaller than a tile, ragged ones, and a sum longer than one call of the kernel makes.
SHAPES = [(1, 2, 6), (2, 32, 64), (3, 34, 70), (2, 66, 34), (2, 130, 130), (1, 48, 2050), (1, 1100, 64), (2, 770, 600)]
#: Relative: one rounding of the result, or two in the twin; sums are in fp32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}

# ---- PyTorch and C++ ------------------------------------------------------------------------------------------


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, kernels: Operations) -> torch.dtype:
    if request.param == torch.bfloat16 and kernels is not reference.OPERATIONS and not native_bf16():
        pytest.skip("this CPU has no instructions for products of bf16")
    return request.param


def tolerance(kernels: Operations, dtype: torch.dtype, depth: int) -> float:
    """Return the relative error that sums of ``depth`` products may have."""
    if kernels is not reference.OPERATIONS or dtype != torch.bfloat16 or platform.machine() != "aarch64":
        return ROUNDING[dtype]
    # On Arm oneDNN rounds a sum to bf16 after each block of 128 or more products. After i of n blocks it is sqrt(i / n)
    # as large as in the end, so the squares of n errors add up to (n + 1) / 2 times the square of the last one.
    return ROUNDING[dtype] * math.sqrt((math.ceil(depth / 128) + 1) / 2)


def room(batch: int, size: int, dtype: torch.dtype) -> Symmetric:
    """As the iteration has it."""
    return empty(batch, size, dtype, is_whole=dtype == torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_square_and_multiply(kernels: Operations, dtype: torch.dtype, shape: Shape) -> None:
    given = randn(*shape, dtype=dtype)
    for x in (given, given.mT):
        out = room(shape[0], x.size(1), dtype)
        check_square(kernels, x, out, tolerance(kernels, dtype, x.size(2)))
        assert out.rest.equal(out.rest.mT)
        check_multiply(kernels, x, out, tolerance(kernels, dtype, x.size(1)))


@pytest.mark.parametrize("same", [True, False], ids=["square", "product"])
@pytest.mark.parametrize("size", [2, 32, 34, 98, 130])
def test_product(kernels: Operations, dtype: torch.dtype, size: int, same: bool) -> None:
    """Rounded, different factors commute nearly."""
    out = check_product(kernels, room(2, size, dtype), same, ROUNDING[dtype] * (1 if same else 2))
    assert kernels is reference.OPERATIONS or out.rest.equal(out.rest.mT)


def test_a_matrix_has_equal_bits_in_any_batch_on_any_number_of_threads(kernels: Operations, dtype: torch.dtype) -> None:
    """Ranks own other batches, and may have other numbers of threads."""
    x = randn(3, 66, 130, dtype=dtype)

    def results(x: Tensor) -> list[Tensor]:
        r, q, y = room(len(x), 66, dtype), room(len(x), 66, dtype), torch.empty_like(x)
        kernels.square(x, r, Workspace())
        kernels.product(r, r, q, Workspace(), BY[1])
        kernels.multiply(q, x, y, Workspace())
        return [*r, *q, y]

    with threads(1):
        expected, single = results(x), [results(one.clone()) for one in x.split(1)]
    with threads(2):
        assert all(map(torch.equal, results(x), expected))
    if kernels is not reference.OPERATIONS:  # a library's kernels may differ by batch
        assert all(map(torch.equal, map(torch.cat, zip(*single, strict=True)), expected))


def test_a_row_that_is_not_finite_leaves_other_rows_unchanged(kernels: Operations, dtype: torch.dtype) -> None:
    """A kernel may read beyond the end of a row, but not count what it reads."""
    x, others = randn(2, 34, 70, dtype=dtype), torch.arange(34) != 20
    good, bad = room(2, 34, dtype), room(2, 34, dtype)
    kernels.square(x, good, Workspace())
    x[1, 20] = math.inf
    kernels.square(x, bad, Workspace())
    assert bad.rest[:, others][:, :, others].equal(good.rest[:, others][:, :, others])
    assert not bad.rest[1, 20, others].isfinite().any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 7, 12), torch.bfloat16), ((1, 8, 13), torch.bfloat16), ((1, 8, 12), torch.float32)],
    ids=["odd rows of bf16", "odd columns of bf16", "fp32 with diagonals apart"],
)
def test_what_cpp_is_not_made_for_goes_to_the_twin(shape: Shape, dtype: torch.dtype) -> None:
    if reason := native.unavailable():
        pytest.skip(reason)
    x, results = randn(*shape, dtype=dtype), []
    for kernels in (native.operations(), reference.OPERATIONS):
        square, product = empty(1, x.size(1), dtype), empty(1, x.size(1), dtype)
        kernels.square(x, square, Workspace())
        results.append([*square])
        if dtype == torch.float32:
            kernels.product(square, square, product, Workspace(), BY[1])
            results[-1] += [*product, kernels.multiply(product, x, torch.empty_like(x), Workspace())]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_script_may_switch_onednn_off(dtype: torch.dtype) -> None:
    """Its kernels raise then; products of 16 bits go to the twin."""
    x = randn(2, 32, 64, dtype=dtype)
    with torch.backends.mkldnn.flags(enabled=False):
        gram, expected = room(2, 32, dtype), room(2, 32, dtype)
        native.operations().square(x, gram, Workspace())
        reference.OPERATIONS.square(x, expected, Workspace())
    torch.testing.assert_close(gram.rest, expected.rest, rtol=ROUNDING.get(dtype, 1e-3), atol=1e-2)
    torch.testing.assert_close(gram.diagonal, expected.diagonal)


# ---- Triton, interpreted --------------------------------------------------------------------------------------

NEVER = 10**9
"""A size from which on symmetric products begin that nothing reaches."""
INTERPRETED = {torch.float32: 1e-6, torch.float16: 2**-11}
#: Shapes, tiles, and how many tiles a group has: 1 to 10 squares on a side, in every order.
SQUARES = [
    ((2, 40, 70), (16, 16, 16), 2),
    ((1, 70, 40), (16, 32, 16), 2),
    ((2, 48, 48), (32, 32, 16), 2),
    ((1, 5, 7), (16, 32, 16), 2),
    *(((1, size, size), (16, 16, 256), group) for group in (3, 8, 1) for size in (160, 48, 16)),
]


def square(shape: Shape, tiles: Shape, group: int) -> None:
    """What is mirrored is equal, but in squares on the diagonal: they are computed whole, with the sums of a BLAS."""
    from deepspeed.muon.kernels import triton_products as products

    kernels = interpreted_table(tiles=tiles)
    products.GROUP = group
    for dtype, tolerance in INTERPRETED.items():
        x = oriented(randn(*shape, dtype=dtype))
        out = empty(shape[0], x.size(1), dtype)
        check_square(kernels, x, out, tolerance, 1e-6)
        of = torch.arange(x.size(1)) // tiles[1]
        outside = of[:, None] != of
        assert out.rest[:, outside].equal(out.rest.mT[:, outside])


@needs_triton
@pytest.mark.sample(5)
@pytest.mark.parametrize(("shape", "tiles", "group"), SQUARES, ids=str)
def test_triton_square(interpret: Interpret, shape: Shape, tiles: Shape, group: int) -> None:
    interpret(square, shape=shape, tiles=tiles, group=group)


def square_of_distant_rows() -> None:
    """The last row begins beyond 2^31 elements, of which hardly any are touched."""
    from deepspeed.muon.kernels import triton_products as products

    kernels, rows, apart = interpreted_table(tiles=(16, 16, 16)), 16, 2**31 // 15 + 16
    kernels = replace(kernels, square=lambda *args: products.square(*args, products.tuned_kernel))
    storage = torch.empty(rows * apart, dtype=torch.float16)
    x = storage.as_strided((1, rows, rows), (rows * apart, apart, 1))
    x.copy_(randn(1, rows, rows, dtype=torch.float16))
    check_square(kernels, x, empty(1, rows, torch.float16), INTERPRETED[torch.float16])


@needs_triton
def test_a_matrix_may_have_more_elements_than_32_bits_count(interpret: Interpret) -> None:
    interpret(square_of_distant_rows)


def product(size: int, symmetric_from: int, same: bool) -> None:
    """Twice the rounding: in the triangle the rounded factors commute no more, elsewhere the pass rounds again."""
    for dtype, tolerance in INTERPRETED.items():
        check_product(interpreted_table(symmetric_from), empty(2, size, dtype), same, 2 * tolerance, 1e-6)


@needs_triton
@pytest.mark.sample(3)
@pytest.mark.parametrize("same", [True, False], ids=["square", "product"])
@pytest.mark.parametrize(("size", "symmetric_from"), [(50, 1), (33, NEVER)])
def test_triton_product(interpret: Interpret, size: int, symmetric_from: int, same: bool) -> None:
    interpret(product, size=size, symmetric_from=symmetric_from, same=same)


def multiply(shape: Shape) -> None:
    for dtype, tolerance in INTERPRETED.items():
        x = oriented(randn(*shape, dtype=dtype))
        check_multiply(interpreted_table(), x, empty(shape[0], x.size(1), dtype), 2 * tolerance)


@needs_triton
@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(2, 20, 50), (2, 50, 20), (3, 17, 17), (1, 1, 7), (1, 7, 1)], ids=str)
def test_triton_multiply(interpret: Interpret, shape: Shape) -> None:
    interpret(multiply, shape=shape)


def several_blocks() -> None:
    from deepspeed.muon.kernels import triton_products as products

    products.PASS_BLOCK, kept = 16, products.PASS_BLOCK
    try:
        product(20, NEVER, same=False)
        multiply((2, 10, 20))
        multiply((2, 20, 10))
    finally:
        products.PASS_BLOCK = kept


@needs_triton
def test_rows_are_longer_than_a_pass_takes_and_no_multiple_of_it(interpret: Interpret) -> None:
    interpret(several_blocks)


def non_finite(symmetric_from: int) -> None:
    kernels, work = interpreted_table(symmetric_from), Workspace()
    for wrong in (math.nan, math.inf):
        a, x = near_identity(empty(2, 20, torch.float32), 3.0, 1), randn(2, 20, 30)
        good, bad = empty(2, 20, torch.float32), empty(2, 20, torch.float32)
        kernels.product(a, a, good, work, BY[1])
        a.rest[1, 3, 5] = a.rest[1, 5, 3] = x[1, 3, 5] = wrong
        kernels.product(a, a, bad, work, BY[1])
        assert all(part[0].equal(other[0]) for part, other in zip(good, bad, strict=True))
        assert not bad.rest[1].isfinite().all() and not bad.diagonal[1].isfinite().all()
        kernels.square(x, bad, work)
        assert bad.rest[0].isfinite().all() and not bad.diagonal[1].isfinite().all()


@needs_triton
@pytest.mark.parametrize("symmetric_from", [1, NEVER], ids=["triangle", "library and pass"])
def test_what_is_not_finite_stays_so_and_leaves_others_unchanged(interpret: Interpret, symmetric_from: int) -> None:
    interpret(non_finite, symmetric_from=symmetric_from)


def iterate(method: str, shape: Shape, symmetric_from: int) -> None:
    """In fp32 with diagonals apart, though the iteration would leave them whole, and Triton's kernels out."""
    x = randn(*shape)
    exact = torch.stack([newton_schulz_fp64(matrix) for matrix in x])
    kernels = interpreted_table(symmetric_from, tiles=(16, 32, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newton_schulz, "symmetric_of", lambda name, x, work: empty(x.size(0), x.size(1), x.dtype))
        found = orthogonalize(x.clone(), schedule("simple"), method, kernels=kernels)
    assert relative(found, exact) <= 1e-4


@needs_triton
@pytest.mark.sample(2)
@pytest.mark.parametrize("symmetric_from", [1, NEVER], ids=["triangle", "library and pass"])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(2, 20, 50), (1, 50, 20)], ids=str)
def test_triton_iteration(interpret: Interpret, method: str, shape: Shape, symmetric_from: int) -> None:
    interpret(iterate, method=method, shape=shape, symmetric_from=symmetric_from)
