# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs
"""The elementwise passes of a step over many runs in one launch each, in Triton.

At ZeRO stage 3 a rank holds a part of every matrix, so with a launch per run a small model's step is bound by its
launches. Each program takes one tile of one run, from a table that is made once. The arithmetic and so the bits are
those of :mod:`deepspeed.muon.kernels.triton_elementwise`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.muon.kernels.table import Tiles
from deepspeed.muon.kernels.triton_elementwise import BLOCK, OPTIONS, _average, _decayed

#: Numbers of a tile: its place in the shard, its place in the other tensor, and its length, at most ``BLOCK``.
FIELDS = 3
#: Places and lengths that are multiples of this many elements let a thread move sixteen bytes at a time.
ALIGNMENT = 16


def tiles(runs: Sequence[tuple[int, int, int]], device: torch.device) -> Tiles:
    """Tiles of at most ``BLOCK`` elements, ``[tiles, 3]``: 12 bytes of table per 1,000 elements."""
    starts = torch.tensor(runs, dtype=torch.int64, device="cpu").view(-1, FIELDS)
    counts = -(-starts[:, 2] // BLOCK)
    run = torch.arange(len(runs), dtype=torch.int64, device="cpu").repeat_interleave(counts)
    done = (torch.arange(run.numel(), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[run]) * BLOCK
    here, there, length = starts[run].unbind(1)
    table = torch.stack([here + done, there + done, (length - done).clamp(max=BLOCK)], dim=1)
    return Tiles(table.to(device), are_aligned=not (starts % ALIGNMENT).any())


@triton.jit
def _tile(tiles_ptr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's elements in the shard and in the other tensor, and a mask of those that exist."""
    tile = tiles_ptr + tl.program_id(0).to(tl.int64) * 3
    here, there, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if ALIGNED:
        here, there, length = tl.multiple_of(here, 16), tl.multiple_of(there, 16), tl.multiple_of(length, 16)
    at = tl.arange(0, BLOCK)
    return here + at, there + at, at < length


@triton.jit
def advance_runs_kernel(
    buffer_ptr,
    grad_ptr,
    out_ptr,
    tiles_ptr,
    momentum,
    rate,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``rate``: 1 - momentum, rounded from fp64."""
    here, there, mask = _tile(tiles_ptr, ALIGNED, BLOCK)
    grad = tl.load(grad_ptr + here, mask).to(tl.float32)
    buffer, ahead = _average(tl.load(buffer_ptr + here, mask), grad, momentum, rate, NESTEROV)
    tl.store(buffer_ptr + here, buffer, mask)
    tl.store(out_ptr + there, ahead.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def apply_runs_kernel(
    param_ptr,
    update_ptr,
    tiles_ptr,
    keep,
    step,
    CAUTIOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``param <- keep param + step update``."""
    here, there, mask = _tile(tiles_ptr, ALIGNED, BLOCK)
    update = tl.load(update_ptr + there, mask).to(tl.float32)
    param = _decayed(tl.load(param_ptr + here, mask).to(tl.float32), update, keep, CAUTIOUS)
    tl.store(param_ptr + here, tl.fma(update, step, param).to(param_ptr.dtype.element_ty), mask)


def advance(buffer: Tensor, grad: Tensor, out: Tensor, tiles: Tiles, momentum: float, nesterov: bool) -> None:
    """:func:`deepspeed.muon.kernels.reference.advance_runs`: ``buffer`` fp32, all contiguous on one device."""
    grid = (tiles.table.size(0),)
    with torch.cuda.device_of(buffer):
        advance_runs_kernel[grid](
            buffer, grad, out, tiles.table, momentum, 1.0 - momentum, nesterov, tiles.are_aligned, BLOCK, **OPTIONS
        )


def apply_(
    param: Tensor, update: Tensor, tiles: Tiles, lr: float, scale: float, weight_decay: float, cautious: bool
) -> None:
    """:func:`deepspeed.muon.kernels.reference.apply_runs_`: all contiguous on one device."""
    grid, keep = (tiles.table.size(0),), 1.0 - lr * weight_decay
    with torch.cuda.device_of(param):
        apply_runs_kernel[grid](
            param, update, tiles.table, keep, -lr * scale, cautious, tiles.are_aligned, BLOCK, **OPTIONS
        )
