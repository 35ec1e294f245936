# SPDX-License-Identifier: Apache-2.0
"""The elementwise passes of a step over many runs in one launch each, in Triton.

At ZeRO stage 3 a rank holds a part of every matrix, so with a launch per run a small model's step is bound by its
launches. Each program of :mod:`deepspeed.muon.kernels.triton_elementwise`'s kernels takes one tile of one run, from a
table that is made once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Tiles
from deepspeed.muon.kernels.triton_elementwise import BLOCK, OPTIONS, advance_kernel, apply_kernel

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


def advance(buffer: Tensor, grad: Tensor, out: Tensor, tiles: Tiles, momentum: float, nesterov: bool) -> None:
    """:func:`deepspeed.muon.kernels.reference.advance_runs`: ``buffer`` fp32, all contiguous on one device."""
    grid, rate = (tiles.table.size(0),), 1.0 - momentum
    with torch.cuda.device_of(buffer):
        advance_kernel[grid](
            buffer, grad, out, tiles.table, 0, momentum, rate, 0, 0, nesterov, tiles.are_aligned, BLOCK, **OPTIONS
        )


def apply_(
    param: Tensor, update: Tensor, tiles: Tiles, lr: float, scale: float, weight_decay: float, cautious: bool
) -> None:
    """:func:`deepspeed.muon.kernels.reference.apply_runs_`: all contiguous on one device."""
    grid, keep = (tiles.table.size(0),), 1.0 - lr * weight_decay
    with torch.cuda.device_of(param):
        apply_kernel[grid](
            param, update, tiles.table, 0, keep, -lr * scale, cautious, tiles.are_aligned, BLOCK, **OPTIONS
        )
