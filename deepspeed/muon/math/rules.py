# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon: what is done to a whole matrix before and after Newton-Schulz.

Pure functions of one matrix ``[rows, cols]``. ``axis`` is the one along which its
outputs lie: 0 for the weight ``[out, in]`` of ``nn.Linear``, 1 for that of ``Conv1D``. The papers call the weights of
one output a row, and so do the options, wherever they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import near_one_
from deepspeed.muon.kernels.workspace import Workspace, has_fp64
from deepspeed.muon.math.wide import scale, squares, widened

#: Which norms an option makes equal, in order: 0 stands for the weights of one output, 1 for those of one input.
SIDES = {"none": (), "rows": (0,), "columns": (1,), "rows_columns": (0, 1), "columns_rows": (1, 0)}
#: NorMuon's epsilon, as in its authors' code.
EPS = 1e-10


@dataclass(frozen=True)
class Rules:
    """The rules of one run; false if it is plain Muon.

    Args:
        muon_eq, muon_plus: keys of :data:`SIDES`.
        normuon: whether :func:`normuon` acts; then each matrix has a second moment, fp32, of one number per output.
        normuon_beta2: its decay per step.
    """

    muon_eq: str = "none"
    muon_plus: str = "none"
    normuon: bool = False
    normuon_beta2: float = 0.95

    @property
    def keys(self) -> list[str]:
        """Return the options that are on."""
        is_on = {"normuon": self.normuon, "muon_eq": self.muon_eq != "none", "muon_plus": self.muon_plus != "none"}
        return [key for key in is_on if is_on[key]]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __str__(self) -> str:
        names = {"MuonEq": self.muon_eq, "Muon+": self.muon_plus}
        texts = [f"{name} ({sides.replace('_', ', then ')})" for name, sides in names.items() if sides != "none"]
        return ", ".join([*texts, *([f"NorMuon (beta2 {self.normuon_beta2:g})"] if self.normuon else ())])

    def before(self, matrices: Tensor, axis: int, work: Workspace) -> None:
        """Apply what precedes Newton-Schulz, in place. ``matrices``: ``[batch, rows, cols]``, bf16 or fp32."""
        if self.muon_eq != "none":
            axes = [axis ^ side for side in SIDES[self.muon_eq]]
            for matrix in matrices:  # a gradient of any magnitude
                if has_fp64(matrix.device):
                    equalize(matrix, axes, work, dtype=torch.float64)
                else:
                    near_one_(matrix, dim=1 - axes[0])
                    equalize(matrix, axes, work)

    def after(self, matrices: Tensor, axis: int, second_moments: Sequence[Tensor], work: Workspace) -> None:
        """Apply what follows it, in place. ``second_moments``: with NorMuon one of each matrix, updated."""
        if self.muon_plus != "none":
            axes = [axis ^ side for side in SIDES[self.muon_plus]]
            for matrix in matrices:
                equalize(matrix, axes, work, math.sqrt(min(matrix.shape)))
        if self.normuon:
            for matrix, second_moment in zip(matrices, second_moments, strict=True):
                normuon(matrix, axis, second_moment, self.normuon_beta2, work)


def equalize(
    x: Tensor, axes: Sequence[int], work: Workspace, norm: float | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Give the rows (axis 0) or columns (axis 1) of ``x``, ``[rows, cols]``, equal norms, in place; zeros stay.

    Before Newton-Schulz this is MuonEq (arXiv 2603.28254), whose variants R and C these are. After it, with
    ``norm = sqrt(min(rows, cols))``, it is Muon+ (arXiv 2602.21545): the matrix keeps the Frobenius norm of an
    orthogonal one, so that the scale of updates is that of ``adjust_lr_fn``.

    Args:
        axes: in which order.
        norm: of the whole matrix, if none of its rows or columns is zero; ``None``: each row or column gets the norm 1.
        dtype: to compute in.
    """
    columns: Tensor | None = None  # factors that the next pass over the matrix applies
    for axis in axes:
        each = 1.0 if norm is None else norm / math.sqrt(x.size(axis))
        if axis == 1:
            columns = _factors(squares(x, 1, work, dtype).sqrt_(), each)
            continue
        for part, wide in widened(x, work, dtype):  # of whole rows, so that their norms need no pass of their own
            if columns is not None:
                wide.mul_(columns)
            part.copy_(wide.mul_(_factors(torch.linalg.vector_norm(wide, dim=1, keepdim=True), each)))
        columns = None
    if columns is not None:
        scale(x, columns, work)


def _factors(norms: Tensor, wanted: float) -> Tensor:
    return torch.where(norms == 0, 1.0, wanted / norms)


def normuon(x: Tensor, axis: int, second_moment: Tensor, beta2: float, work: Workspace) -> None:
    """NorMuon (arXiv 2510.05491): divide each output's weights by the root of a running mean of their squares.

    The Frobenius norm of the matrix stays what it was. A zero matrix, which is one without a gradient, leaves the
    second moment as it is.

    Args:
        x: ``[rows, cols]``; changed in place.
        second_moment: fp32, one number per output, zeros at first; updated.
    """
    found = squares(x, axis, work)
    total, mean = found.sum(), second_moment.view(found.shape)
    mean.copy_(torch.where(total > 0, mean.lerp(found / x.size(1 - axis), 1 - beta2), mean))
    factor = 1 / (mean.sqrt() + EPS)
    scaled = (found * factor.square()).sum()
    scale(x, torch.where(total > 0, factor * (total / scaled).sqrt(), 1.0), work)
