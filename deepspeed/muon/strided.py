# SPDX-License-Identifier: Apache-2.0
"""A run's elements of a tensor as contiguous memory, which the operations take, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.muon.plan import Run
from deepspeed.muon.workspace import Workspace


def take(tensor: Tensor, run: Run, work: Workspace, name: str) -> Tensor:
    """The run's elements, 1-D: a view of ``tensor`` where they lie one after the other, else a copy.

    Args:
        tensor: contiguous.
        name: of the copy in ``work``.
    """
    if run.piece.rows == 1:
        return tensor.view(-1)[run.start : run.start + run.piece.numel]
    grid = _grid(tensor, run)
    return work.get(name, tuple(grid.shape), tensor.dtype, tensor.device).copy_(grid).view(-1)


def put(values: Tensor, tensor: Tensor, run: Run) -> None:
    """Write back what :func:`take` gave; nothing to do for a view."""
    if run.piece.rows > 1:
        grid = _grid(tensor, run)
        grid.copy_(values.view(grid.shape))


def _grid(tensor: Tensor, run: Run) -> Tensor:
    piece = run.piece
    return torch.as_strided(tensor.view(-1)[run.start :], (piece.rows, piece.cols), (piece.stride, 1))
