# SPDX-License-Identifier: Apache-2.0
"""Products whose result is symmetric, in Triton: one triangle of tiles is computed, each tile stored twice.

Batches ``[batch, k, k]`` in bf16 or fp16, sums in fp32. Same contracts as ``square`` and ``product`` of
:mod:`deepspeed.muon.kernels.reference`. The triangle is cut into squares of ``COLS x COLS``, each of them into tiles
of ``ROWS x COLS``: squares on the diagonal are computed whole, those above it also stored transposed below it. So
every element is written once, and read by no program but the one that writes it.

A tile sums over its depth in one order whatever its size, so that a configuration changes the time and not the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deepspeed.muon.kernels.triton_elementwise import OPTIONS

#: Columns of squares that are visited together, row by row: what they share stays in the L2 cache.
GROUP = 8


def _config(rows: int, cols: int, depth: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"ROWS": rows, "COLS": cols, "DEPTH": depth}, num_warps=warps, num_stages=stages)


#: Tiles that fill Hopper's matrix units, whose fp32 sums fit its registers; two to four of them in flight.
CONFIGS = [
    _config(128, 128, 64, 4, 3),
    _config(128, 128, 64, 8, 4),
    _config(128, 256, 64, 8, 3),
    _config(128, 256, 64, 8, 4),
    _config(64, 128, 64, 4, 4),
]


@triton.jit
def _triangle(index: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(row, column) of a place in the upper triangle, counted column by column; exact up to 2^22 places."""
    column = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def _square_of(index: tl.tensor, squares: tl.tensor, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(row, column) of the index-th square of the upper triangle, ``GROUP`` columns at a time."""
    _, column = _triangle(index)
    first = column // GROUP * GROUP
    rest = index - first * (first + 1) // 2
    width = tl.minimum(GROUP, squares - first)
    above = first * width
    row, column = _triangle(tl.maximum(rest - above, 0))
    is_above = rest < above
    return tl.where(is_above, rest // width, first + row), first + tl.where(is_above, rest % width, column)


@triton.jit
def _sum_of_products(
    a_ptrs: tl.tensor,
    b_ptrs: tl.tensor,
    depth: tl.tensor,
    along: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """One tile of A B^T in fp32, from pointers to the first ``DEPTH`` columns of both."""
    deep = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, depth, DEPTH):
        a = tl.load(a_ptrs, deep[None, :] < depth - start, other=0.0)
        b = tl.load(b_ptrs, deep[:, None] < depth - start, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += DEPTH * along
        b_ptrs += DEPTH * along
    return total


@triton.jit
def symmetric_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    add_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    across: tl.tensor,
    along: tl.tensor,
    beta: tl.tensor,
    alpha: tl.tensor,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """``out = beta add + alpha A B^T`` with A and B ``[size, depth]``, of strides ``across`` and ``along``."""
    per_square: tl.constexpr = COLS // ROWS
    row, column = _square_of(tl.program_id(0) // per_square, tl.cdiv(size, COLS), GROUP)
    rows = row * COLS + tl.program_id(0) % per_square * ROWS + tl.arange(0, ROWS)
    cols = column * COLS + tl.arange(0, COLS)
    matrix = tl.program_id(1).to(tl.int64)
    # Rows beyond the last are read from the start again: they are not stored, and loads need no mask.
    deep = tl.arange(0, DEPTH)
    a_ptrs = a_ptr + matrix * size * depth + (rows % size)[:, None] * across + deep[None, :] * along
    b_ptrs = b_ptr + matrix * size * depth + deep[:, None] * along + (cols % size)[None, :] * across
    total = _sum_of_products(a_ptrs, b_ptrs, depth, along, ROWS, COLS, DEPTH)
    total *= alpha
    exists = (rows < size)[:, None] & (cols < size)[None, :]
    base = matrix * size * size
    if ADDS:  # The program's own tile alone, before both stores: `add` may be `out`.
        add = tl.load(add_ptr + base + rows[:, None] * size + cols[None, :], exists, other=0.0)
        total = tl.fma(add.to(tl.float32), beta, total)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + rows[:, None] * size + cols[None, :], result, exists)
    if row != column:
        mirrored = (cols < size)[:, None] & (rows < size)[None, :]
        tl.store(out_ptr + base + cols[:, None] * size + rows[None, :], tl.trans(result), mirrored)


def _bench(call: Callable[[], None], quantiles: Any) -> Any:
    """Milliseconds of one configuration; short trials, as every shape of a model pays for them in its first step."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


# `add` may be `out`: what a trial run writes must be taken back before the next one.
tuned_kernel = triton.autotune(
    CONFIGS, key=["size", "depth", "along", "ADDS"], restore_value=["out_ptr"], do_bench=_bench
)(symmetric_kernel)


def tiles(size: int, rows: int, cols: int) -> int:
    """Programs for one matrix."""
    squares = triton.cdiv(size, cols)
    return squares * (squares + 1) // 2 * (cols // rows)


def _run(a: Tensor, b: Tensor, add: Tensor, out: Tensor, strides: tuple[int, int], **scalars: Any) -> Tensor:
    batch, size = out.size(0), out.size(-1)
    depth = a[0].numel() // size

    def grid(chosen: dict[str, Any]) -> tuple[int, int]:
        return tiles(size, chosen["ROWS"], chosen["COLS"]), batch

    tuned_kernel[grid](a, b, add, out, size, depth, *strides, **scalars, GROUP=GROUP, **OPTIONS)
    return out


def square(x: Tensor, out: Tensor) -> Tensor:
    """The smaller of X X^T and X^T X; ``x`` is ``[batch, rows, cols]``, ``out`` ``[batch, k, k]``, both contiguous."""
    rows, cols = x.shape[-2:]
    strides = (cols, 1) if rows <= cols else (1, cols)
    return _run(x, x, out, out, strides, beta=0.0, alpha=1.0, ADDS=False)


def product(a: Tensor, b: Tensor, add: Tensor, out: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """``beta add + alpha A B`` of symmetric matrices that commute; ``add`` may be any of the others."""
    return _run(a, b, add, out, (out.size(-1), 1), beta=float(beta), alpha=float(alpha), ADDS=True)
