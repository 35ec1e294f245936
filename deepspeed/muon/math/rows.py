# SPDX-License-Identifier: Apache-2.0
"""Sums over the rows or columns of a matrix, and factors for them: a chunk at a time, in a wider dtype, rounded once.

fp32 is enough for matrices of ordinary entries; squares of tiny or huge ones leave its range and need fp64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import CHUNK
from deepspeed.muon.kernels.workspace import Workspace, is_accelerator

#: Elements at once on a CPU: few enough for its caches, so many that waking its threads costs little.
CPU_CHUNK = 2**18


def widened(x: Tensor, work: Workspace, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of ``x``, ``[rows, cols]``, at a time: a view, and a copy in ``dtype``, valid until the next one."""
    rows = max(1, (CHUNK if is_accelerator(x.device) else CPU_CHUNK) // x.size(1))
    for part in x.split(rows):
        yield part, work.get("widened", tuple(part.shape), dtype, x.device).copy_(part)


def squares(x: Tensor, axis: int, work: Workspace, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums of squares in ``dtype``: of each row (axis 0), ``[rows, 1]``, or column (axis 1), ``[1, cols]``."""
    sums = [wide.square_().sum(dim=1 - axis, keepdim=True) for _, wide in widened(x, work, dtype)]
    return torch.cat(sums) if axis == 0 else torch.stack(sums).sum(dim=0)


def scale(x: Tensor, factors: Tensor, work: Workspace) -> None:
    """Multiply ``x``, ``[rows, cols]``, in place by factors of rows, ``[rows, 1]``, or of columns, ``[1, cols]``.

    They have the dtype to compute in.
    """
    start = 0
    for part, wide in widened(x, work, factors.dtype):
        part.copy_(wide.mul_(factors[start : start + len(part)] if factors.size(0) > 1 else factors))
        start += len(part)
