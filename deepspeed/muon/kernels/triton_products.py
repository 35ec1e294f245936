# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs
"""The products of Newton-Schulz in Triton, for batches ``[batch, k, k]`` in bf16 or fp16.

The functions do the same as those of the same names in :mod:`deepspeed.muon.kernels.reference`.

:func:`square` and :func:`product` have a symmetric result, so they compute one triangle of tiles and store each tile
twice. Sums are fp32, and each element is rounded once. The triangle consists of squares of ``COLS x COLS``, and each
square of tiles of ``ROWS x COLS``. Squares on the diagonal are computed whole; those above it are also stored
transposed below it. So every element is written once. Tiles of all sizes sum in the same order, so the tuner's choice
changes the time but not the bits.

:func:`unfused_product` and :func:`multiply` add the contribution of the separate diagonals to a library's product, in
one kernel without the reference's fp32 temporaries. An element is rounded twice, first by the library. The first
dimension of a launch counts matrices and tiles, because CUDA allows only 65,535 programs along the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import PLAIN, Scalars, Symmetric, base_of
from deepspeed.muon.kernels.triton_elementwise import OPTIONS
from deepspeed.muon.kernels.workspace import Workspace

#: The squares of the triangle are computed in groups of this many columns, row by row, so that inputs that squares
#: share stay in the L2 cache.
GROUP = 8
#: How often the tuner times each configuration.
TRIALS = 7
#: Maximum number of columns that one program handles at a time in a kernel that completes a library's product.
PASS_BLOCK = 1024

#: (rows, columns, warps, stages) of tiles that fill Hopper's matrix units and whose fp32 sums fit its registers, with
#: three or four of them in flight.
SHAPES = ((128, 128, 4, 3), (128, 128, 8, 4), (128, 256, 8, 3), (128, 256, 8, 4), (64, 128, 4, 4))
CONFIGS = [
    triton.Config({"ROWS": rows, "COLS": cols, "DEPTH": 64}, num_warps=warps, num_stages=stages)
    for rows, cols, warps, stages in SHAPES
]


@triton.jit
def _triangle(index):
    """Return (row, column) of element number ``index`` of an upper triangle, column by column; exact up to 2^22."""
    column = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def _square_of(index, squares, GROUP: tl.constexpr):
    """Return (row, column) of square number ``index`` in the upper triangle of a matrix that is cut into squares.

    All squares of ``GROUP`` columns come before those of the next ``GROUP``. ``squares``: how many squares a side has.
    """
    _, column = _triangle(index)
    first = column // GROUP * GROUP
    rest = index - first * (first + 1) // 2
    width = tl.minimum(GROUP, squares - first)
    above = first * width
    row, column = _triangle(tl.maximum(rest - above, 0))
    is_above = rest < above
    return tl.where(is_above, rest // width, first + row), first + tl.where(is_above, rest % width, column)


@triton.jit
def _sum_of_products(a_ptr, b_ptr, rows, cols, depth, across, along, DEPTH: tl.constexpr):
    """Return the tile of A B^T with the indices ``rows`` and ``cols``, in fp32.

    ``depth``: the number of elements of a row of A or B. ``across``, ``along``: strides between rows and within a row.
    """
    deep = tl.arange(0, DEPTH)
    # A matrix may have more than 2^31 elements.
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * across + deep.to(tl.int64)[None, :] * along
    b_ptrs = b_ptr + deep.to(tl.int64)[:, None] * along + cols.to(tl.int64)[None, :] * across
    total = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32)
    for start in range(0, depth, DEPTH):
        a = tl.load(a_ptrs, deep[None, :] < depth - start, other=0.0)
        b = tl.load(b_ptrs, deep[:, None] < depth - start, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += DEPTH * along
        b_ptrs += DEPTH * along
    return total


@triton.jit
def _tile(ptr, rows, cols, size):
    """Return the elements ``rows`` x ``cols`` of a ``size x size`` matrix in fp32, with zeros beyond its edges."""
    exists = (rows < size)[:, None] & (cols < size)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * size + cols[None, :], exists, other=0.0).to(tl.float32)


@triton.jit
def _with_diagonals(total, a_ptr, b_ptr, a_diagonal_ptr, b_diagonal_ptr, rows, cols, size, alpha, beta):
    """Return the tile ``rows`` x ``cols`` of ``alpha A B + beta A``, where A and B are :class:`Symmetric`.

    ``total``: the same tile of the product of A and B without their diagonals. Elements on the diagonal lack what
    :func:`_on_diagonal` returns.
    """
    of_rows = tl.load(a_diagonal_ptr + rows, rows < size, other=0.0)
    of_columns = tl.fma(tl.load(b_diagonal_ptr + cols, cols < size, other=0.0), alpha, beta)
    total = tl.fma(_tile(a_ptr, rows, cols, size), of_columns[None, :], total * alpha)
    return tl.fma(_tile(b_ptr, rows, cols, size), (of_rows * alpha)[:, None], total)


@triton.jit
def _on_diagonal(a_diagonal_ptr, b_diagonal_ptr, rows, size, alpha, beta, shift):
    """Return what both diagonals and ``shift`` add to the diagonal of ``alpha A B + beta A + shift I`` in ``rows``."""
    of_a = tl.load(a_diagonal_ptr + rows, rows < size, other=0.0)
    of_b = tl.load(b_diagonal_ptr + rows, rows < size, other=0.0)
    return tl.fma(of_a, tl.fma(of_b, alpha, beta), shift)


@triton.jit
def _store(total, on_diagonal, out_ptr, diagonal_ptr, row, col, size, is_above):
    """Store the tile ``total``, whose first element is (``row``, ``col``), with zeros on the matrix's diagonal.

    If the tile is above the diagonal (``is_above``), store its transpose, too. Otherwise it contains a part of the
    diagonal: store that part plus ``on_diagonal`` in ``diagonal_ptr``.
    """
    down, right = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    rows, cols = row + down, col + right
    on_it = rows[:, None] == cols[None, :]
    result = tl.where(on_it, 0.0, total).to(out_ptr.dtype.element_ty)
    exists = (rows < size)[:, None] & (cols < size)[None, :]
    # A matrix may have more than 2^31 elements; within a tile 32 bits are enough, and take fewer registers.
    first = out_ptr + row.to(tl.int64) * size + col
    tl.store(first + (down[:, None] * size + right[None, :]), result, exists)
    if is_above:
        mirrored = (cols < size)[:, None] & (rows < size)[None, :]
        first = out_ptr + col.to(tl.int64) * size + row
        tl.store(first + (right[:, None] * size + down[None, :]), tl.trans(result), mirrored)
    else:
        tl.store(diagonal_ptr + rows, tl.sum(tl.where(on_it, total, 0.0), axis=1) + on_diagonal, rows < size)


@triton.jit(do_not_specialize=["matrices"])
def symmetric_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    a_diagonal_ptr,
    b_diagonal_ptr,
    out_diagonal_ptr,
    size,
    depth,
    across,
    along,
    matrices,
    alpha,
    beta,
    shift,
    DIAGONALS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile of ``A B^T``; with ``DIAGONALS``, of ``alpha A B + beta A + shift I``.

    The result stores its diagonal separately; with ``DIAGONALS`` A and B do, too. ``matrices``: the batch size rounded
    up to a power of two, which only the autotuner uses.
    """
    per_square: tl.constexpr = COLS // ROWS
    squares = tl.cdiv(size, COLS)
    tiles = squares * (squares + 1) // 2 * per_square
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row, column = _square_of(tile // per_square, squares, GROUP)
    first_row, first_col = row * COLS + tile % per_square * ROWS, column * COLS
    rows, cols = first_row + tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    a, b = a_ptr + matrix * size * depth, b_ptr + matrix * size * depth
    # Rows beyond the last wrap around to the first, so that loads need no mask; they are not stored.
    total = _sum_of_products(a, b, rows % size, cols % size, depth, across, along, DEPTH)
    on_it = tl.zeros((ROWS,), tl.float32)
    if DIAGONALS:
        of_a, of_b = a_diagonal_ptr + matrix * size, b_diagonal_ptr + matrix * size
        total = _with_diagonals(total, a, b, of_a, of_b, rows, cols, size, alpha, beta)
        on_it = _on_diagonal(of_a, of_b, rows, size, alpha, beta, shift)
    out, diagonal = out_ptr + matrix * size * size, out_diagonal_ptr + matrix * size
    _store(total, on_it, out, diagonal, first_row, first_col, size, row != column)


def _bench(call: Callable[[], None], quantiles: Any) -> list[float]:
    """Time ``call`` for Triton's autotuner: return its median milliseconds, repeated for each of ``quantiles``."""
    # Triton's own benchmark empties the L2 cache before each call. In a step the cache is full: Newton-Schulz has just
    # written what a product reads.
    call()  # compiles
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(TRIALS + 1)]
    ends[0].record()
    for end in ends[1:]:
        call()
        end.record()
    torch.cuda.synchronize()
    spent = sorted(start.elapsed_time(end) for start, end in pairwise(ends))
    return [spent[TRIALS // 2]] * len(quantiles)


#: Newer versions of Triton can store the tuner's results on disk, for the next process.
_KEPT = {"cache_results": True} if "cache_results" in inspect.signature(triton.autotune).parameters else {}
tuned_kernel = triton.autotune(
    CONFIGS, key=["size", "depth", "along", "matrices", "DIAGONALS"], do_bench=_bench, **_KEPT
)(symmetric_kernel)
#: One configuration, so that nothing is measured.
untuned_kernel = triton.autotune(CONFIGS[:1], key=[])(symmetric_kernel)


def tiles(size: int, rows: int, cols: int) -> int:
    """Return how many tiles of ``rows x cols`` are computed for one symmetric ``size x size`` matrix."""
    squares = triton.cdiv(size, cols)
    return squares * (squares + 1) // 2 * (cols // rows)


def square(x: Tensor, out: Symmetric, work: Workspace, kernel: Any = None) -> None:
    """Set ``out = X X^T`` for each matrix X in ``x``, contiguous or a transposed view of a contiguous tensor.

    ``kernel``: a variant of :func:`symmetric_kernel`; ``None`` for :data:`tuned_kernel`.
    """
    factor = Symmetric(x, out.diagonal)  # which is not read
    _run(kernel, factor, factor, out, PLAIN, diagonals=False)


def product(
    a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN, kernel: Any = None
) -> None:
    """Set ``out = alpha A B + beta A + shift I`` for contiguous symmetric matrices that commute.

    ``kernel``: a variant of :func:`symmetric_kernel`; ``None`` for :data:`tuned_kernel`.
    """
    _run(kernel, a, b, out, coeffs, diagonals=True)


def _run(kernel: Any, a: Symmetric, b: Symmetric, out: Symmetric, coeffs: Scalars, diagonals: bool) -> None:
    batch, size, depth = a.rest.shape
    alpha, beta, shift = map(float, coeffs)

    def grid(chosen: dict[str, Any]) -> tuple[int]:
        return (tiles(size, chosen["ROWS"], chosen["COLS"]) * batch,)

    (kernel or tuned_kernel)[grid](
        a.rest,
        b.rest,
        out.rest,
        a.diagonal,
        b.diagonal,
        out.diagonal,
        size,
        depth,
        a.rest.stride(-2),
        a.rest.stride(-1),
        triton.next_power_of_2(batch),
        alpha,
        beta,
        shift,
        DIAGONALS=diagonals,
        GROUP=GROUP,
        **OPTIONS,
    )


@triton.jit
def complete_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    a_diagonal_ptr,
    b_diagonal_ptr,
    out_diagonal_ptr,
    size,
    alpha,
    beta,
    shift,
    BLOCK: tl.constexpr,
):
    """Turn one row of ``out``, the product of ``a.rest`` and ``b.rest``, into ``alpha A B + beta A + shift I``."""
    row = tl.program_id(0) % size
    first = (tl.program_id(0) // size).to(tl.int64) * size
    at_row = (first + row) * size
    a_diagonal = tl.load(a_diagonal_ptr + first + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        exists = cols < size
        a = tl.load(a_ptr + at_row + cols, exists, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at_row + cols, exists, other=0.0).to(tl.float32)
        product = tl.load(out_ptr + at_row + cols, exists, other=0.0).to(tl.float32)
        total = tl.fma(a, b, total)
        b_diagonal = tl.load(b_diagonal_ptr + first + cols, exists, other=0.0)
        product = tl.fma(a, tl.fma(b_diagonal, alpha, beta), product * alpha)
        product = tl.fma(b, a_diagonal * alpha, product)
        result = tl.where(cols == row, 0.0, product).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_row + cols, result, exists)
    # B is symmetric, so the product's diagonal element is the sum over the row, which stays in fp32.
    factor = tl.fma(tl.load(b_diagonal_ptr + first + row), alpha, beta)
    diagonal = tl.fma(a_diagonal, factor, tl.sum(total, axis=0) * alpha) + shift
    tl.store(out_diagonal_ptr + first + row, diagonal)


@triton.jit
def scale_kernel(x_ptr, diagonal_ptr, out_ptr, rows, cols, TALL: tl.constexpr, BLOCK: tl.constexpr):
    """Add D X, or X D if ``TALL``, to a part of a row of ``out``; D is diagonal, with entries at ``diagonal_ptr``."""
    matrix, row = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = at < cols
    place = (matrix * rows + row) * cols + at
    if TALL:
        diagonal = tl.load(diagonal_ptr + matrix * cols + at, exists, other=0.0)
    else:
        diagonal = tl.load(diagonal_ptr + matrix * rows + row)
    x = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
    result = tl.fma(x, diagonal, tl.load(out_ptr + place, exists, other=0.0).to(tl.float32))
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), exists)


def _block(cols: int) -> int:
    return min(PASS_BLOCK, triton.next_power_of_2(cols))


def complete(a: Symmetric, b: Symmetric, out: Symmetric, coeffs: Scalars) -> None:
    """Turn ``out``, whose ``rest`` must be ``a.rest b.rest``, into ``alpha A B + beta A + shift I``."""
    batch, size = out.diagonal.shape
    alpha, beta, shift = map(float, coeffs)
    cols = _block(size)
    complete_kernel[(size * batch,)](
        a.rest, b.rest, out.rest, a.diagonal, b.diagonal, out.diagonal, size, alpha, beta, shift, cols, **OPTIONS
    )


def unfused_product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN) -> None:
    """Set ``out = alpha A B + beta A + shift I`` by cuBLAS's product and :func:`complete`."""
    torch.bmm(a.rest, b.rest, out=out.rest)
    complete(a, b, out, coeffs)


def multiply(p: Symmetric, x: Tensor, out: Tensor, work: Workspace) -> Tensor:
    """Set ``out = P X`` by cuBLAS's product and one kernel for P's diagonal, and return ``out``.

    ``x`` and ``out`` are contiguous, or both are transposed views of contiguous tensors.
    """
    reference.multiply(Symmetric(p.rest, diagonal=p.diagonal[:, :0]), x, out, work)
    (base, is_transposed), (result, _) = base_of(x), base_of(out)
    batch, rows, cols = base.shape
    grid = rows * batch, triton.cdiv(cols, _block(cols))
    scale_kernel[grid](base, p.diagonal, result, rows, cols, is_transposed, _block(cols), **OPTIONS)
    return out
