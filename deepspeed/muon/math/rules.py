# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon, the factor that scales an update, and schedules of momentum and weight decay.

The rules are pure functions of one matrix ``[rows, cols]``, applied before and after Newton-Schulz. ``axis`` is the
axis along which the outputs lie: 0 for the weight ``[out, in]`` of ``nn.Linear``, 1 for the weight ``[in, out]`` of
``Conv1D``. The papers call the weights of one output a row, and so do the options, even if these weights are a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace, has_fp64, near_one_
from deepspeed.muon.math.wide_arithmetic import scale, sums_of_squares, widened

#: Value of ``muon_eq`` -> whose norms become equal: 0 for each output's weights, 1 for each input's weights.
SIDES = {"rows": 0, "columns": 1}
#: NorMuon's epsilon, as in its authors' code.
EPS = 1e-10


@dataclass(frozen=True)
class Rule:
    """An update rule: what a matrix's owner, the rank that orthogonalizes it, does before and after Newton-Schulz.

    A subclass is one entry of :data:`RULES`. Its fields are keys of ``optimizer.params``, such as ``normuon_beta2``.

    Attributes:
        KEY: the key of ``optimizer.params`` that turns the rule on. ``false`` and ``none`` turn it off.
        STATE: the state that the owner keeps for each matrix: {name: function of the matrix's (rows, columns) and axis
            that returns the shape of the state}. State is fp32 and zeros at first. Checkpoints store it under its name.
        NEEDS_AXIS: whether the rule treats outputs and inputs differently.
    """

    KEY: ClassVar[str]
    STATE: ClassVar[Mapping[str, Callable[[tuple[int, ...], int], tuple[int, ...]]]] = {}
    NEEDS_AXIS: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Any) -> Rule | None:
        """Return the rule with its settings from ``config`` (:class:`MuonConfig`); ``None`` if that turns it off."""
        settings = {field.name: getattr(config, field.name) for field in fields(cls)}
        return cls(**settings) if is_on(config, cls.KEY) else None

    def before(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        """Change a matrix in place before Newton-Schulz; the base class does nothing.

        Args:
            x: the matrix ``[rows, cols]``, bf16 or fp32; zeros if it had no gradient.
            axis: 0 if ``x`` is ``[out, in]``, 1 if it is ``[in, out]``.
            state: the matrix's tensors, by the names in ``STATE``, to be updated in place.
            work: scratch memory.
        """

    def after(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        """Change a matrix in place after Newton-Schulz; arguments as for :meth:`before`."""


@dataclass(frozen=True)
class MuonEq(Rule):
    """MuonEq: before Newton-Schulz, give all outputs or all inputs of a matrix equal norms (:func:`equalize`).

    ``muon_eq``: ``rows`` for the weights of each output, ``columns`` for those of each input.
    """

    KEY = "muon_eq"
    muon_eq: str = "rows"

    def before(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        """Scale ``x`` so that the weights of each output, or those of each input, have norm 1."""
        side = axis ^ SIDES[self.muon_eq]
        # Squares of gradients may leave fp32's range: use fp64 or, without it, first bring entries near one.
        if has_fp64(x.device):
            equalize(x, side, work, torch.float64)
        else:
            near_one_(x, dim=1 - side)
            equalize(x, side, work)

    def __str__(self) -> str:
        return f"MuonEq ({self.muon_eq})"


@dataclass(frozen=True)
class MuonPlus(Rule):
    """Muon+: after Newton-Schulz, scale a matrix to the Frobenius norm of an orthogonal one (:func:`snap_norm`)."""

    KEY = "muon_plus"
    NEEDS_AXIS = False

    def after(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        """Scale ``x`` to the norm of an orthogonal matrix."""
        snap_norm(x, work)

    def __str__(self) -> str:
        return "Muon+"


@dataclass(frozen=True)
class NorMuon(Rule):
    """NorMuon: after Newton-Schulz, divide each output of a matrix by its running RMS (:func:`normuon`).

    ``normuon_beta2``: factor by which the second moments, running means of squares, decay per step.
    """

    KEY = "normuon"
    STATE = {"second_moments": lambda shape, axis: (shape[axis],)}
    normuon_beta2: float = 0.95

    def after(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        """Divide the elements of each output of ``x`` by the root of its second moment; keep the norm of ``x``."""
        normuon(x, axis, state["second_moments"], self.normuon_beta2, work)

    def __str__(self) -> str:
        return f"NorMuon (beta2 {self.normuon_beta2:g})"


#: All rules, in the order in which they act. A new rule is an entry here, and a field of :class:`MuonConfig` per key.
RULES: list[type[Rule]] = [MuonEq, MuonPlus, NorMuon]
#: Key that turns a rule or schedule on -> the keys that have an effect only with it.
OPTIONS = {kind.KEY: tuple(f.name for f in fields(kind) if f.name != kind.KEY) for kind in RULES}
OPTIONS["momentum_start"] = ("momentum_warmup_steps",)


def is_on(config: Any, key: str) -> bool:
    """Return whether ``config`` (:class:`MuonConfig`) turns on the update rule or schedule that ``key`` controls."""
    value = getattr(config, key)
    return value is not None and value is not False and value != "none"


def rules_of(config: Any) -> tuple[Rule, ...]:
    """Return the update rules that ``config`` (:class:`MuonConfig`) turns on; an empty tuple for plain Muon."""
    return tuple(rule for kind in RULES if (rule := kind.of(config)) is not None)


def state_shapes(rules: Iterable[Rule], shape: tuple[int, ...], axis: int) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the state that ``rules`` keep for a matrix, such as ``{"second_moments": (4096,)}``.

    ``shape``: (rows, columns) of the matrix. ``axis``: the axis along which its outputs lie.
    """
    return {name: shape_of(shape, axis) for rule in rules for name, shape_of in rule.STATE.items()}


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


def _factors(norms: Tensor, target_norm: float) -> Tensor:
    """Return the factors that scale vectors of these norms to ``target_norm``; 1 for a norm of 0."""
    return torch.where(norms == 0, 1.0, target_norm / norms)


def normuon(x: Tensor, axis: int, second_moment: Tensor, beta2: float, work: Workspace) -> None:
    """Apply NorMuon (arXiv 2510.05491): divide the elements of each output by the root of the output's second moment.

    The second moment is a running mean, over steps, of the mean square of these elements. The result is scaled back to
    the Frobenius norm of ``x``. A zero matrix, which had no gradient, does not change, nor does its second moment.

    Args:
        x: the orthogonalized matrix, ``[rows, cols]``; changed in place.
        axis: 0 if ``x`` is ``[out, in]``, 1 if it is ``[in, out]``.
        second_moment: fp32 ``[outputs]``, zeros at first; updated in place.
        beta2: factor by which the second moment decays per step.
    """
    squares = sums_of_squares(x, axis, work)
    total, mean = squares.sum(), second_moment.view(squares.shape)
    mean.copy_(torch.where(total > 0, mean.lerp(squares / x.size(1 - axis), 1 - beta2), mean))
    factor = 1 / (mean.sqrt() + EPS)
    scaled = (squares * factor.square()).sum()
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
