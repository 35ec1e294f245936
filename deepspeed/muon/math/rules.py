# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon: what is done to a whole matrix before and after Newton-Schulz.

Pure functions of one matrix ``[rows, cols]``, bf16 or fp32, changed in place. ``axis`` is the one along which its
outputs lie: 0 for the weight ``[out, in]`` of ``nn.Linear``, 1 for that of ``Conv1D``. The papers call the weights of
one output a row, and so do the options, wherever they lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def __bool__(self) -> bool:
        return self.muon_eq != "none" or self.muon_plus != "none" or self.normuon

    def __str__(self) -> str:
        names = {"MuonEq": self.muon_eq, "Muon+": self.muon_plus}
        texts = [f"{name} ({sides.replace('_', ', then ')})" for name, sides in names.items() if sides != "none"]
        return ", ".join([*texts, *([f"NorMuon (beta2 {self.normuon_beta2:g})"] if self.normuon else ())])

    def before(self, matrix: Tensor, axis: int) -> None:
        """What precedes Newton-Schulz."""
        for side in SIDES[self.muon_eq]:
            equalize(matrix, axis ^ side)

    def after(self, matrix: Tensor, axis: int, second_moment: Tensor | None) -> None:
        """What follows it. ``second_moment``: of the matrix, updated."""
        for side in SIDES[self.muon_plus]:
            equalize(matrix, axis ^ side, math.sqrt(min(matrix.shape) / matrix.size(axis ^ side)))
        if second_moment is not None:
            normuon(matrix, axis, second_moment, self.normuon_beta2)


def equalize(matrix: Tensor, axis: int, norm: float = 1.0) -> None:
    """Give each row (axis 0) or column (axis 1) this norm; zeros stay.

    Before Newton-Schulz this is MuonEq (arXiv 2603.28254), whose variants R and C these are. After it, with
    ``norm = sqrt(min(rows, cols) / count)``, it is Muon+ (arXiv 2602.21545): the matrix keeps the Frobenius norm of an
    orthogonal one, so that the scale of updates is that of ``adjust_lr_fn``.
    """
    low, high = torch.aminmax(matrix, dim=1 - axis, keepdim=True)
    _, exponent = torch.frexp(torch.maximum(high, -low).float())
    matrix.mul_(torch.exp2(-exponent.clamp(-126, 126).float()))  # squares of tiny or huge entries leave fp32's range
    length = _norms(matrix, axis)
    matrix.mul_(torch.where(length == 0, 1.0, norm / length))


def normuon(matrix: Tensor, axis: int, second_moment: Tensor, beta2: float) -> None:
    """NorMuon (arXiv 2510.05491): divide each output's weights by the root of a running mean of their squares.

    The Frobenius norm of the matrix stays what it was. A zero matrix, which is one without a gradient, leaves the
    second moment as it is.

    Args:
        second_moment: fp32, one number per output, zeros at first; updated.
    """
    squares = _norms(matrix, axis).square()
    total = squares.sum(dtype=torch.float64).float()
    held = second_moment.view(squares.shape)
    mean = squares / matrix.size(1 - axis)
    held.copy_(torch.where(total > 0, held.lerp(mean, 1 - beta2), held))
    factor = 1 / (held.sqrt() + EPS)
    scaled = (squares * factor.square()).sum(dtype=torch.float64).float()
    matrix.mul_(torch.where(total > 0, factor * (total / scaled).sqrt(), 1.0))


def _norms(matrix: Tensor, axis: int) -> Tensor:
    """The norm of each row or column, fp32, ``[rows, 1]`` or ``[1, cols]``."""
    return torch.linalg.vector_norm(matrix, dim=1 - axis, keepdim=True, dtype=torch.float32)
