# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs
"""Triton kernels of a step: elementwise ones, which read and write every element once, and the normalization.

The functions do the same as those of the same names in :mod:`deepspeed.muon.kernels.kernel_set`, for contiguous tensors
on one device. Sums of products are explicit fused multiply-adds, so that bits do not depend on what a compiler fuses.

At ZeRO stage 3 a rank holds a piece (run) of every matrix. One launch per run would take most of a small model's step,
so :func:`advance_runs` and :func:`apply_runs_` launch once for many runs; each program takes one tile of one run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.muon.kernels import rounding
from deepspeed.muon.kernels.kernel_set import Tiles, Workspace
from deepspeed.muon.kernels.rounding import LARGEST, MULTIPLIERS, SHIFTS, Key, signed

#: Compiler options. The compiler must not fuse operations by itself, because bits must not depend on its version.
OPTIONS = {"enable_fp_fusion": False}
#: Elements per program: 16 for each of its 128 threads.
BLOCK = 2048
#: If the starts and lengths of runs are multiples of this many elements, a thread moves 16 bytes at a time.
ALIGNMENT = 16
#: Elements that one program of the normalization sums.
SUM_BLOCK = 8192
#: Maximum number of programs along the second dimension of a launch grid.
GRID = 65_535

_FIRST_SHIFT, _SECOND_SHIFT = (tl.constexpr(shift) for shift in SHIFTS)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = (tl.constexpr(multiplier % 2**32) for multiplier in MULTIPLIERS)
_LARGEST = tl.constexpr(LARGEST)
_CODE_BLOCK, _LEVELS, _SMALLEST = (
    tl.constexpr(rounding.BLOCK),
    tl.constexpr(rounding.LEVELS),
    tl.constexpr(rounding.SMALLEST),
)
_UNIT = tl.constexpr(2.0**-16)


@triton.jit
def _place(numel, BLOCK: tl.constexpr):
    """Return (int64 indices of this Triton program's elements, mask of the indices below ``numel``)."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < numel


@triton.jit
def _places(tiles_ptr, numel, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Return (indices in the shard, indices in ``out`` or ``update``, mask) of this program's tile; see :class:`Tiles`.

    ``tiles_ptr``: the tiles' ``table``. If it is ``None``, both tensors have ``numel`` elements, in the same order.
    Otherwise ``numel`` is not used. ``ALIGNED``: the tiles' ``are_aligned``.
    """
    if tiles_ptr is None:
        shard, mask = _place(numel, BLOCK)
        other = shard
    else:
        tile = tiles_ptr + tl.program_id(0).to(tl.int64) * 3
        shard, other, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if ALIGNED:
            shard, other, length = tl.multiple_of(shard, 16), tl.multiple_of(other, 16), tl.multiple_of(length, 16)
        at = tl.arange(0, BLOCK)
        shard, other, mask = shard + at, other + at, at < length
    return shard, other, mask


@triton.jit
def _lerp(start, end, weight):
    """Return ``torch.lerp(start, end, weight)``, with the same bits."""
    away = end - start
    return tl.where(weight < 0.5, tl.fma(away, weight, start), tl.fma(-away, 1.0 - weight, end))


@triton.jit
def _average(buffer, grad, beta, rate, NESTEROV: tl.constexpr):
    """Return (new momentum, input of Newton-Schulz) as ``kernel_set.advance`` computes them. ``rate``: 1 - beta."""
    buffer = _lerp(buffer, grad, rate)
    ahead = buffer
    if NESTEROV:
        ahead = _lerp(grad, buffer, beta)
    return buffer, ahead


@triton.jit
def _round(value, noise):
    """Return ``value``, fp32, rounded stochastically to bf16. ``noise``: uniform integers from 0 to 2^16 - 1."""
    bits = value.to(tl.uint32, bitcast=True)
    noise = tl.where((bits & 0x7FFFFFFF) < _LARGEST, noise, 0)
    return ((bits + noise) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _noise(index, key):
    """Return the same random numbers as :func:`deepspeed.muon.kernels.rounding.noise` with the ``random_key`` (a, b).

    ``index``: a + ``first`` + i for each element i. ``key``: b. Both are uint32.
    """
    x = (index ^ (index >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    x += key
    x = (x ^ (x >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return x >> 16


@triton.jit(do_not_specialize=["first_key", "second_key"])
def advance_kernel(
    buffer_ptr,
    grad_ptr,
    out_ptr,
    tiles_ptr,
    numel,
    beta,
    rate,
    first_key,
    second_key,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the momentum of this program's elements, and write the input of Newton-Schulz.

    A bf16 momentum is rounded stochastically. For the ``random_key`` (a, b) and ``first`` of
    :func:`deepspeed.muon.kernels.rounding.noise`, ``first_key`` is a + ``first``, and ``second_key`` is b.

    ``rate``: 1 - beta, computed in fp64. ``tiles_ptr``, ``numel``, ``ALIGNED``: see :func:`_places`.
    """
    shard, other, mask = _places(tiles_ptr, numel, ALIGNED, BLOCK)
    grad = tl.load(grad_ptr + shard, mask).to(tl.float32)
    buffer = tl.load(buffer_ptr + shard, mask).to(tl.float32)
    buffer, ahead = _average(buffer, grad, beta, rate, NESTEROV)
    if buffer_ptr.dtype.element_ty == tl.bfloat16:
        noise = _noise(shard.to(tl.uint32) + first_key.to(tl.uint32), second_key.to(tl.uint32))
        tl.store(buffer_ptr + shard, _round(buffer, noise), mask)
    else:
        tl.store(buffer_ptr + shard, buffer, mask)
    tl.store(out_ptr + other, ahead.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _value(code, absmax):
    """Return the value of an int8 code, as in :func:`deepspeed.muon.kernels.rounding.decode`."""
    return code.to(tl.float32) * (1.0 / _LEVELS) * absmax


@triton.jit(do_not_specialize=["first_key", "second_key"])
def advance_codes_kernel(
    codes_ptr,
    absmax_ptr,
    grad_ptr,
    out_ptr,
    numel,
    beta,
    rate,
    first_key,
    second_key,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Update ``ROWS`` quantization blocks of the int8 momentum, and write the input of Newton-Schulz.

    ``rate``, ``first_key``, ``second_key``: see :func:`advance_kernel`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * _CODE_BLOCK + tl.arange(0, _CODE_BLOCK)[None, :]
    mask, is_block = at < numel, row * _CODE_BLOCK < numel
    grad = tl.load(grad_ptr + at, mask, other=0.0).to(tl.float32)
    absmax = tl.load(absmax_ptr + row, is_block, other=0.0)
    value = _value(tl.load(codes_ptr + at, mask, other=0), absmax[:, None])
    value, ahead = _average(value, grad, beta, rate, NESTEROV)
    tl.store(out_ptr + at, ahead.to(out_ptr.dtype.element_ty), mask)
    absmax = tl.max(tl.abs(value), axis=1)
    absmax = tl.where(absmax < _SMALLEST, 0.0, absmax)
    factor = tl.where(absmax == 0, 0.0, tl.div_rn(tl.full((ROWS,), _LEVELS, tl.float32), absmax))
    noise = _noise(at.to(tl.uint32) + first_key.to(tl.uint32), second_key.to(tl.uint32))
    uniform = (noise | 1).to(tl.int32).to(tl.float32) * _UNIT
    tl.store(codes_ptr + at, tl.floor(value * factor[:, None] + uniform).to(tl.int8), mask)
    tl.store(absmax_ptr + row, absmax, is_block)


@triton.jit
def _decayed(param, update, keep, CAUTIOUS: tl.constexpr):
    """Apply weight decay: return ``keep * param``, where ``keep`` is 1 - lr weight_decay.

    With ``CAUTIOUS``, elements of ``param`` and ``update`` with opposite signs are not decayed.
    """
    if CAUTIOUS:
        opposed = ((update < 0) & (param > 0)) | ((update > 0) & (param < 0))
        return tl.where(opposed, param, param * keep)
    return param * keep


@triton.jit
def apply_kernel(
    param_ptr,
    update_ptr,
    tiles_ptr,
    numel,
    keep,
    step,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set ``param <- keep param + step update`` for this program's elements. ``CAUTIOUS``: see :func:`_decayed`.

    ``keep``: 1 - lr weight_decay. ``step``: -lr scale. ``tiles_ptr``, ``numel``: see :func:`_places`.
    """
    shard, other, mask = _places(tiles_ptr, numel, ALIGNED, BLOCK)
    update = tl.load(update_ptr + other, mask).to(tl.float32)
    param = _decayed(tl.load(param_ptr + shard, mask).to(tl.float32), update, keep, CAUTIOUS)
    tl.store(param_ptr + shard, tl.fma(update, step, param).to(param_ptr.dtype.element_ty), mask)


@triton.jit
def _exponent(largest):
    """Return the integer e with ``largest`` / 2^e in [1/2, 1), but at least -126 and at most 126."""
    # Within these bounds 2^e and 2^-e are normal numbers.
    biased = ((largest.to(tl.uint32, bitcast=True) >> 23) & 0xFF).to(tl.int32)
    return tl.minimum(tl.maximum(biased - 126, -126), 126)


@triton.jit
def _power(exponent):
    """Return 2^exponent exactly, for exponents from -126 to 127; zero for smaller ones."""
    return tl.where(exponent < -126, 0, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sum_kernel(x_ptr, exponent_ptr, sum_ptr, numel, parts, BLOCK: tl.constexpr):
    """Store two numbers for one part of a matrix: e, and the sum of the squares of its entries divided by 4^e.

    e: the :func:`_exponent` of the part's largest entry. ``numel``: number of elements of a matrix. ``parts``: number
    of parts of a matrix; a part is ``BLOCK`` elements, which one program sums.
    """
    at, mask = _place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    x = tl.load(x_ptr + matrix * numel + at, mask, other=0.0).to(tl.float32)
    exponent = _exponent(tl.max(tl.abs(x), axis=0))
    x *= _power(-exponent)
    place = matrix * parts + tl.program_id(0)
    tl.store(exponent_ptr + place, exponent)
    tl.store(sum_ptr + place, tl.sum(x * x, axis=0))


@triton.jit
def norm_kernel(exponent_ptr, sum_ptr, norm_ptr, parts, scale, BLOCK: tl.constexpr):
    """Store the two numbers with which :func:`divide_kernel` normalizes a matrix: 2^-e and ``scale`` norm / 2^e.

    e: the largest exponent that :func:`sum_kernel` stored for the matrix. norm: the matrix's Frobenius norm.
    ``scale``: 1 / the norm that the result shall have. The second number is 1 for a zero matrix.
    """
    matrix = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), -126, tl.int32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(exponent_ptr + matrix * parts + at, at < parts, other=-126))
    exponent = tl.max(top, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        below = tl.load(exponent_ptr + matrix * parts + at, at < parts, other=-126) - exponent
        power = _power(tl.maximum(below, -127))
        total += tl.load(sum_ptr + matrix * parts + at, at < parts, other=0.0) * power * power
    norm = tl.sqrt(tl.sum(total, axis=0))
    tl.store(norm_ptr + 2 * matrix, _power(-exponent))
    tl.store(norm_ptr + 2 * matrix + 1, tl.where(norm == 0, 1.0, norm * scale))


@triton.jit
def divide_kernel(x_ptr, out_ptr, norm_ptr, numel, BLOCK: tl.constexpr):
    """Normalize this program's entries of a matrix with the two numbers that :func:`norm_kernel` has stored."""
    at, mask = _place(numel, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    power, norm = tl.load(norm_ptr + 2 * matrix), tl.load(norm_ptr + 2 * matrix + 1)
    x = tl.load(x_ptr + matrix * numel + at, mask).to(tl.float32) * power / norm
    tl.store(out_ptr + matrix * numel + at, x.to(out_ptr.dtype.element_ty), mask)


def _grid(numel: int) -> tuple[int]:
    return (triton.cdiv(numel, BLOCK),)


def advance(buffer: Tensor, grad: Tensor, out: Tensor, beta: float, nesterov: bool, work: Workspace) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.advance`."""
    numel, rate = buffer.numel(), 1.0 - beta
    advance_kernel[_grid(numel)](
        buffer, grad, out, None, numel, beta, rate, 0, 0, nesterov, ALIGNED=False, BLOCK=BLOCK, **OPTIONS
    )


def advance_rounded(
    buffer: Tensor,
    grad: Tensor,
    out: Tensor,
    beta: float,
    nesterov: bool,
    random_key: Key,
    first: int,
    work: Workspace,
) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.advance_rounded`, with the same random bits."""
    numel, rate, first_key = buffer.numel(), 1.0 - beta, signed(random_key[0] + first)
    advance_kernel[_grid(numel)](
        buffer, grad, out, None, numel, beta, rate, first_key, random_key[1], nesterov, False, BLOCK, **OPTIONS
    )


def advance_codes(
    codes_: Tensor,
    absmax: Tensor,
    grad: Tensor,
    out: Tensor,
    beta: float,
    nesterov: bool,
    random_key: Key,
    first: int,
    work: Workspace,
) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.advance_codes`, with the same random bits."""
    numel, rate, rows = codes_.numel(), 1.0 - beta, BLOCK // rounding.BLOCK
    first_key = signed(random_key[0] + first)
    advance_codes_kernel[_grid(numel)](
        codes_, absmax, grad, out, numel, beta, rate, first_key, random_key[1], nesterov, rows, **OPTIONS
    )


def apply_(
    weights: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float, cautious: bool, work: Workspace
) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.apply_`."""
    numel, keep = weights.numel(), 1.0 - lr * weight_decay
    apply_kernel[_grid(numel)](weights, update, None, numel, keep, -lr * scale, cautious, False, BLOCK, **OPTIONS)


def normalize(x: Tensor, out: Tensor, norm: float = 1.0) -> Tensor:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.normalize`."""
    numel = x.size(1) * x.size(2)
    parts = triton.cdiv(numel, SUM_BLOCK)
    for matrices, results in zip(x.split(GRID), out.split(GRID), strict=True):
        batch = matrices.size(0)
        exponents = torch.empty(batch, parts, dtype=torch.int32, device=x.device)
        sums = torch.empty(batch, parts, dtype=torch.float32, device=x.device)
        norms = torch.empty(batch, 2, dtype=torch.float32, device=x.device)
        sum_kernel[(parts, batch)](matrices, exponents, sums, numel, parts, SUM_BLOCK, num_warps=8, **OPTIONS)
        norm_kernel[(batch,)](exponents, sums, norms, parts, 1.0 / norm, 1024, **OPTIONS)
        divide_kernel[(triton.cdiv(numel, BLOCK), batch)](matrices, results, norms, numel, BLOCK, **OPTIONS)
    return out


def tiles(spans: Sequence[tuple[int, int, int]], device: torch.device) -> Tiles:
    """Split ``spans``, contiguous pieces of a flat shard, into :class:`Tiles` of at most ``BLOCK`` elements.

    The table takes 24 bytes per tile. ``spans``: as in :func:`deepspeed.muon.kernels.kernel_set.tiles`.
    """
    starts = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 3)
    counts = -(-starts[:, 2] // BLOCK)
    span = torch.arange(len(spans), dtype=torch.int64, device="cpu").repeat_interleave(counts)
    done = (torch.arange(span.numel(), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[span]) * BLOCK
    shard, other, length = starts[span].unbind(1)
    table = torch.stack([shard + done, other + done, (length - done).clamp(max=BLOCK)], dim=1)
    return Tiles(table.to(device), are_aligned=not (starts % ALIGNMENT).any())


def advance_runs(buffer: Tensor, grad: Tensor, out: Tensor, tiles: Tiles, beta: float, nesterov: bool) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.advance_runs`, in one launch."""
    grid, rate = (tiles.table.size(0),), 1.0 - beta
    with torch.cuda.device_of(buffer):
        advance_kernel[grid](
            buffer, grad, out, tiles.table, 0, beta, rate, 0, 0, nesterov, tiles.are_aligned, BLOCK, **OPTIONS
        )


def apply_runs_(
    weights: Tensor, update: Tensor, tiles: Tiles, lr: float, scale: float, weight_decay: float, cautious: bool
) -> None:
    """Do the same as :func:`deepspeed.muon.kernels.kernel_set.apply_runs_`, in one launch."""
    grid, keep = (tiles.table.size(0),), 1.0 - lr * weight_decay
    with torch.cuda.device_of(weights):
        apply_kernel[grid](
            weights, update, tiles.table, 0, keep, -lr * scale, cautious, tiles.are_aligned, BLOCK, **OPTIONS
        )
