# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs
"""Adds the contribution of the separate diagonals to a library's product, in one fused Triton pass.

Same contracts as ``product`` and ``multiply`` of :mod:`deepspeed.muon.kernels.reference`, without their temporaries in
fp32. The library rounds a product before the pass reads it, so an element is rounded twice. Matrices are counted along
the first dimension of a grid, as CUDA allows only 65,535 programs along the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import PLAIN, Scalars, Symmetric, base_of
from deepspeed.muon.kernels.triton_elementwise import OPTIONS
from deepspeed.muon.kernels.workspace import Workspace

#: The most columns that one program handles at a time.
BLOCK = 1024


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
    """Overwrite one row of ``A.rest B.rest`` with that of ``alpha A B + beta A + shift I``."""
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
    """``out <- out + D X``, or ``out + X D`` if ``TALL``; a part of one row."""
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
    return min(BLOCK, triton.next_power_of_2(cols))


def complete(a: Symmetric, b: Symmetric, out: Symmetric, by: Scalars) -> None:
    """In one pass, turn ``out``, whose ``rest`` is ``a.rest b.rest``, into ``alpha A B + beta A + shift I``."""
    batch, size = out.diagonal.shape
    alpha, beta, shift = map(float, by)
    cols = _block(size)
    complete_kernel[(size * batch,)](
        a.rest, b.rest, out.rest, a.diagonal, b.diagonal, out.diagonal, size, alpha, beta, shift, cols, **OPTIONS
    )


def product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, by: Scalars = PLAIN) -> None:
    """``alpha A B + beta A + shift I``: a library's full product and one pass."""
    torch.bmm(a.rest, b.rest, out=out.rest)
    complete(a, b, out, by)


def multiply(p: Symmetric, x: Tensor, out: Tensor, work: Workspace) -> Tensor:
    """``P X``: a library's product and one pass. ``x`` and ``out`` are contiguous or transposes of what is."""
    reference.multiply(Symmetric(p.rest, diagonal=p.diagonal[:, :0]), x, out, work)
    (base, is_transposed), (result, _) = base_of(x), base_of(out)
    batch, rows, cols = base.shape
    grid = rows * batch, triton.cdiv(cols, _block(cols))
    scale_kernel[grid](base, p.diagonal, result, rows, cols, is_transposed, _block(cols), **OPTIONS)
    return out
