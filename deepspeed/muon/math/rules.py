# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon, the factor of an update by its matrix's shape, and schedules of momentum and decay.

The rules are pure functions of one matrix ``[rows, cols]``, applied before and after Newton-Schulz. ``axis`` is the
axis along which the outputs lie: 0 for the weight ``[out, in]`` of ``nn.Linear``, 1 for the weight ``[in, out]`` of
``Conv1D``. The papers call the weights of one output a row, and so do the options, even if these weights are a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace, has_fp64, near_one_
from deepspeed.muon.math.wide_arithmetic import scale, sums_of_squares, widened

#: Value of ``muon_eq`` -> whose norms become equal: 0 for each output's weights, 1 for each input's weights.
SIDES = {"rows": 0, "columns": 1}
#: NorMuon's epsilon, as in its authors' code.
EPS = 1e-10


@dataclass(frozen=True)
class Rules:
    """The options that change Muon's update around Newton-Schulz: MuonEq, Muon+ and NorMuon.

    ``bool(rules)`` is False if all of them are off: plain Muon. ``muon_eq``: which norms :func:`equalize` makes equal
    before Newton-Schulz; ``none`` or a key of :data:`SIDES`. ``muon_plus``: whether :func:`snap_norm` runs after
    Newton-Schulz. ``normuon``: whether :func:`normuon` runs last, with a second moment, fp32 ``[outputs]``, for each
    matrix. ``normuon_beta2``: decay of the second moment per step.
    """

    muon_eq: str = "none"
    muon_plus: bool = False
    normuon: bool = False
    normuon_beta2: float = 0.95

    @property
    def keys(self) -> list[str]:
        """Return the config keys of the options that are on, such as ``["normuon", "muon_eq"]``."""
        is_on = {"normuon": self.normuon, "muon_eq": self.muon_eq != "none", "muon_plus": self.muon_plus}
        return [key for key in is_on if is_on[key]]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __str__(self) -> str:
        names = {
            "muon_eq": f"MuonEq ({self.muon_eq})",
            "muon_plus": "Muon+",
            "normuon": f"NorMuon (beta2 {self.normuon_beta2:g})",
        }
        return ", ".join(names[key] for key in names if key in self.keys)

    def apply_before(self, matrices: Tensor, axis: int, work: Workspace) -> None:
        """Apply MuonEq, if it is on, to matrices before Newton-Schulz; change them in place.

        ``matrices``: ``[batch, rows, cols]``, bf16 or fp32. ``axis``: 0 for ``[out, in]``, 1 for ``[in, out]``.
        """
        if self.muon_eq != "none":
            side = axis ^ SIDES[self.muon_eq]
            for matrix in matrices:
                # Squares of gradients may leave fp32's range: use fp64 or, without it, first bring entries near one.
                if has_fp64(matrix.device):
                    equalize(matrix, side, work, torch.float64)
                else:
                    near_one_(matrix, dim=1 - side)
                    equalize(matrix, side, work)

    def apply_after(self, matrices: Tensor, axis: int, second_moments: Sequence[Tensor], work: Workspace) -> None:
        """Apply Muon+ and then NorMuon, if they are on, to matrices after Newton-Schulz; change them in place.

        ``matrices``, ``axis``: as for :meth:`apply_before`. ``second_moments``: NorMuon's second moment of each matrix,
        fp32 ``[outputs]``, updated in place; empty without NorMuon.
        """
        if self.muon_plus:
            for matrix in matrices:
                snap_norm(matrix, work)
        if self.normuon:
            for matrix, second_moment in zip(matrices, second_moments, strict=True):
                normuon(matrix, axis, second_moment, self.normuon_beta2, work)


def equalize(x: Tensor, axis: int, work: Workspace, dtype: torch.dtype = torch.float32) -> None:
    """Apply MuonEq (arXiv 2603.28254): scale each row (axis 0) or column (axis 1) of ``x`` in place to norm 1.

    ``dtype``: dtype of the arithmetic. Zero rows and columns stay zero.
    """
    if axis == 1:
        scale(x, _factors(sums_of_squares(x, 1, work, dtype).sqrt_(), 1.0), work)
        return
    for part, wide in widened(x, work, dtype):  # a part has whole rows, so that one pass is enough
        part.copy_(wide.mul_(_factors(torch.linalg.vector_norm(wide, dim=1, keepdim=True), 1.0)))


def snap_norm(x: Tensor, work: Workspace) -> None:
    """Apply nanochat's Muon+ (after arXiv 2602.21545): scale ``x`` in place to the norm of an orthogonal matrix.

    Newton-Schulz leaves singular values near one, so the Frobenius norm differs a little from sqrt(min(rows, cols)). A
    zero matrix stays zero.
    """
    norm = sums_of_squares(x, 0, work).sum().sqrt_().view(1, 1)
    scale(x, _factors(norm, math.sqrt(min(x.shape))), work)


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


#: Value of ``adjust_lr_fn``, as ``torch.optim.Muon`` names it -> (formula, function of rows, columns and rms_scale) of
#: the factor. ``original``: Keller Jordan (2024). ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM Training"
#: (arXiv 2502.16982), section 2.2: the update's RMS is rms_scale, by default 0.2, like AdamW's.
#: ``spectral_unclamped``: Bernstein (2025), the spectral condition sqrt(out / in).
SCALES: dict[str, tuple[str, Callable[[int, int, float], float]]] = {
    "original": ("sqrt(max(1, rows / cols))", lambda rows, cols, rms: math.sqrt(max(1.0, rows / cols))),
    "match_rms_adamw": ("rms_scale * sqrt(max(rows, cols))", lambda rows, cols, rms: rms * math.sqrt(max(rows, cols))),
    "spectral_unclamped": ("sqrt(rows / cols)", lambda rows, cols, rms: math.sqrt(rows / cols)),
    "none": ("1", lambda rows, cols, rms: 1.0),
}
RMS_SCALE = 0.2


def scale_factor(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """Return the factor by which a rows x cols matrix's update is multiplied, in addition to the learning rate.

    ``adjust_lr_fn``: a key of :data:`SCALES`. ``rms_scale``: RMS of the update; only ``match_rms_adamw`` uses it.
    """
    return SCALES[adjust_lr_fn][1](rows, cols, rms_scale)


def update_rms(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """Return the RMS of a rows x cols matrix's update at learning rate 1, for an exactly orthogonal result.

    The arguments are those of :func:`scale_factor`.
    """
    return scale_factor(adjust_lr_fn, rows, cols, rms_scale) / math.sqrt(max(rows, cols))


@dataclass(frozen=True)
class Schedules:
    """The schedules of Muon's momentum and weight decay over a training run; both are constant by default.

    ``momentum_start``: momentum of the first update. During ``momentum_warmup_steps`` updates it changes linearly to
    the parameter group's ``momentum``. ``muon_weight_decay_steps``: number of updates over which weight decay falls
    linearly from the group's value to zero. ``momentum_start=None`` and ``muon_weight_decay_steps=None`` keep momentum
    and weight decay constant. modded-nanogpt and nanochat (2025) use such schedules.
    """

    momentum_start: float | None = None
    momentum_warmup_steps: int = 300
    muon_weight_decay_steps: int | None = None

    def settings_at(self, group: dict[str, Any], done: int) -> dict[str, Any]:
        """Return a copy of a Muon parameter group with its momentum and weight decay after ``done`` updates."""
        momentum, decay = group["momentum"], group["weight_decay"]
        if self.momentum_start is not None and done < self.momentum_warmup_steps:
            share = done / self.momentum_warmup_steps
            momentum = (1 - share) * self.momentum_start + share * momentum
        if self.muon_weight_decay_steps is not None:
            decay *= max(0.0, 1 - done / self.muon_weight_decay_steps)
        return {**group, "momentum": momentum, "weight_decay": decay}

    def __str__(self) -> str:
        texts = []
        if self.momentum_start is not None:
            texts.append(f"momentum from {self.momentum_start:g} over {self.momentum_warmup_steps} steps")
        if self.muon_weight_decay_steps is not None:
            texts.append(f"weight decay of the Muon groups to zero over {self.muon_weight_decay_steps} steps")
        return ", ".join(texts)
