# SPDX-License-Identifier: Apache-2.0
"""Sums over the rows or columns of a matrix, and factors for them: a chunk at a time, in fp64, rounded once.

fp64 because squares of tiny or huge entries leave fp32's range. ``axis`` is 0 for rows, 1 for columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import CHUNK, CPU_CHUNK
from deepspeed.muon.kernels.workspace import Workspace, is_accelerator


def widened(x: Tensor, work: Workspace) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of ``x``, ``[rows, cols]``, at a time: a view, and a copy in fp64 that is valid until the next one."""
    rows = max(1, (CHUNK if is_accelerator(x.device) else CPU_CHUNK) // x.size(1))
    for part in x.split(rows):
        yield part, work.get("widened", tuple(part.shape), torch.float64, x.device).copy_(part)


def squares(x: Tensor, axis: int, work: Workspace) -> Tensor:
    """The sum of the squares of each row or column, fp64: ``[rows, 1]`` or ``[1, cols]``."""
    sums = [wide.square_().sum(dim=1 - axis, keepdim=True) for _, wide in widened(x, work)]
    return torch.cat(sums) if axis == 0 else torch.stack(sums).sum(dim=0)


def scale(x: Tensor, factors: Sequence[Tensor], work: Workspace) -> None:
    """Multiply ``x``, ``[rows, cols]``, in place by factors of rows, ``[rows, 1]``, and of columns, ``[1, cols]``."""
    start = 0
    for part, wide in widened(x, work):
        for factor in factors:
            wide.mul_(factor[start : start + len(part)] if factor.size(0) > 1 else factor)
        part.copy_(wide)
        start += len(part)
