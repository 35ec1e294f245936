# SPDX-License-Identifier: Apache-2.0
"""Momentum and weight decay that change with the step, as functions of the number of updates done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedules:
    """The schedules of the Muon half, as in modded-nanogpt and nanochat (2025); by default all values stay.

    Args:
        momentum_start: momentum of the first update, from which it goes linearly to that of the group; ``None``: the
            group's from the first update on.
        momentum_warmup_steps: updates after which it is the group's.
        muon_weight_decay_steps: updates over which weight decay goes linearly from that of the group to zero; ``None``:
            it stays.
    """

    momentum_start: float | None = None
    momentum_warmup_steps: int = 300
    muon_weight_decay_steps: int | None = None

    def at(self, group: dict[str, Any], done: int) -> dict[str, Any]:
        """Return a Muon group with the values of the next update, after ``done`` others."""
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
            texts.append(f"weight decay of the Muon half to zero over {self.muon_weight_decay_steps} steps")
        return ", ".join(texts)
