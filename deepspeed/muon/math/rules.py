# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon, applied to a whole matrix before and after Newton-Schulz.

They are pure functions of one matrix ``[rows, cols]``. ``axis`` is the axis along which the outputs lie: 0 for the
weight ``[out, in]`` of ``nn.Linear``, 1 for the weight ``[in, out]`` of ``Conv1D``. The papers call the weights of one
output a row, and so do the options, even if these weights are a column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import near_one_
from deepspeed.muon.kernels.workspace import Workspace, has_fp64
from deepspeed.muon.math.wide_arithmetic import scale, sums_of_squares, widened

#: Value of ``muon_eq`` and ``muon_plus`` -> the norms to make equal, one after the other: 0 for the norms of each
#: output's weights, 1 for the norms of each input's weights.
SIDES = {"none": (), "rows": (0,), "columns": (1,), "rows_columns": (0, 1), "columns_rows": (1, 0)}
#: NorMuon's epsilon, as in its authors' code.
EPS = 1e-10


@dataclass(frozen=True)
class Rules:
    """The options that change Muon's update around Newton-Schulz: MuonEq, Muon+ and NorMuon.

    ``bool(rules)`` is False if all of them are off, which is plain Muon. ``muon_eq``, ``muon_plus``: which norms
    :func:`equalize` makes equal before and after Newton-Schulz; keys of :data:`SIDES`, such as ``rows``. ``normuon``:
    whether :func:`normuon` runs after Newton-Schulz, with a second moment, fp32 ``[outputs]``, for each matrix.
    ``normuon_beta2``: decay of the second moment per step.
    """

    muon_eq: str = "none"
    muon_plus: str = "none"
    normuon: bool = False
    normuon_beta2: float = 0.95

    @property
    def keys(self) -> list[str]:
        """Return the config keys of the options that are on, such as ``["normuon", "muon_eq"]``."""
        is_on = {"normuon": self.normuon, "muon_eq": self.muon_eq != "none", "muon_plus": self.muon_plus != "none"}
        return [key for key in is_on if is_on[key]]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __str__(self) -> str:
        names = {"MuonEq": self.muon_eq, "Muon+": self.muon_plus}
        texts = [f"{name} ({sides.replace('_', ', then ')})" for name, sides in names.items() if sides != "none"]
        return ", ".join([*texts, *([f"NorMuon (beta2 {self.normuon_beta2:g})"] if self.normuon else ())])

    def apply_before(self, matrices: Tensor, axis: int, work: Workspace) -> None:
        """Apply MuonEq, if it is on, to matrices before Newton-Schulz; change them in place.

        ``matrices``: ``[batch, rows, cols]``, bf16 or fp32. ``axis``: 0 for ``[out, in]``, 1 for ``[in, out]``.
        """
        if self.muon_eq != "none":
            axes = [axis ^ side for side in SIDES[self.muon_eq]]
            for matrix in matrices:
                # Squares of gradients may leave fp32's range: use fp64 or, without it, first bring entries near one.
                if has_fp64(matrix.device):
                    equalize(matrix, axes, work, dtype=torch.float64)
                else:
                    near_one_(matrix, dim=1 - axes[0])
                    equalize(matrix, axes, work)

    def apply_after(self, matrices: Tensor, axis: int, second_moments: Sequence[Tensor], work: Workspace) -> None:
        """Apply Muon+ and then NorMuon, if they are on, to matrices after Newton-Schulz; change them in place.

        ``matrices``, ``axis``: as for :meth:`apply_before`. ``second_moments``: NorMuon's second moment of each matrix,
        fp32 ``[outputs]``, updated in place; empty without NorMuon.
        """
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
    """Scale the rows or columns of a matrix in place to equal norms; zero rows and columns stay zero.

    Before Newton-Schulz this is MuonEq (arXiv 2603.28254) in its variants R (rows) and C (columns). After
    Newton-Schulz, with ``norm = sqrt(min(rows, cols))``, it is Muon+ (arXiv 2602.21545). The matrix then has the
    Frobenius norm of an orthogonal matrix, so that ``adjust_lr_fn`` still sets the scale of updates.

    Args:
        x: the matrix, ``[rows, cols]``.
        axes: ``[0]`` for rows, ``[1]`` for columns, ``[0, 1]`` for rows and then columns.
        norm: Frobenius norm of the result, if no row or column is zero; ``None``: each row or column gets norm 1.
        dtype: dtype of the arithmetic.
    """
    columns: Tensor | None = None  # factors of columns, applied in the next pass over the matrix
    for axis in axes:
        each = 1.0 if norm is None else norm / math.sqrt(x.size(axis))
        if axis == 1:
            columns = _factors(sums_of_squares(x, 1, work, dtype).sqrt_(), each)
            continue
        for part, wide in widened(x, work, dtype):  # a part has whole rows, so that one pass is enough
            if columns is not None:
                wide.mul_(columns)
            part.copy_(wide.mul_(_factors(torch.linalg.vector_norm(wide, dim=1, keepdim=True), each)))
        columns = None
    if columns is not None:
        scale(x, columns, work)


def _factors(norms: Tensor, wanted: float) -> Tensor:
    return torch.where(norms == 0, 1.0, wanted / norms)


def normuon(x: Tensor, axis: int, second_moment: Tensor, beta2: float, work: Workspace) -> None:
    """Apply NorMuon (arXiv 2510.05491): divide the elements of each output by the root of the output's second moment.

    The second moment is a running mean, over steps, of the mean square of these elements. The result is scaled back to
    the Frobenius norm of ``x``. A zero matrix, which had no gradient, does not change, nor does its second moment.

    Args:
        x: the orthogonalized matrix, ``[rows, cols]``; changed in place.
        axis: 0 if ``x`` is ``[out, in]``, 1 if it is ``[in, out]``.
        second_moment: fp32 ``[outputs]``, zeros at first; updated in place.
        beta2: decay of the second moment per step.
    """
    found = sums_of_squares(x, axis, work)
    total, mean = found.sum(), second_moment.view(found.shape)
    mean.copy_(torch.where(total > 0, mean.lerp(found / x.size(1 - axis), 1 - beta2), mean))
    factor = 1 / (mean.sqrt() + EPS)
    scaled = (found * factor.square()).sum()
    scale(x, torch.where(total > 0, factor * (total / scaled).sqrt(), 1.0), work)
