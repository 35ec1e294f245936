# SPDX-License-Identifier: Apache-2.0
"""Momentum and weight decay as functions of the number of updates done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
