# SPDX-License-Identifier: Apache-2.0
"""What a learning-rate scheduler sees: the parameter groups as the user gave them.

The optimizer has split each of them into a Muon and an AdamW half. A schedule written for AdamW sets one learning rate
per group, and each half gets it times the half's ``lr_ratio``.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

#: Keys that scale with ``lr_ratio``.
RATES = ("lr", "initial_lr")
#: Keys that act in one half, and whether it is Muon's: a cycle of ``betas`` is meant for Adam.
HALF_OF = {"betas": False, "momentum": True}


class UserGroup(UserDict):
    """One group as the user gave it. ``lr``, ``momentum`` and ``betas`` are read from its halves.

    Writing ``lr`` or ``initial_lr`` sets each half's to the value times its ``lr_ratio``. Writing ``betas`` sets those
    of AdamW, writing ``momentum`` that of Muon. All other keys are the scheduler's, or the user's in the group.
    """

    def __init__(self, optimizer: Optimizer, indices: Sequence[int], lr: float, betas: tuple[float, float]) -> None:
        # A load replaces the groups. A function, because a deep copy of a scheduler must not copy the optimizer.
        self._current_halves = lambda: [optimizer.param_groups[index] for index in indices]
        self.data = {"params": [], "lr": lr, "betas": betas}

    @property
    def _halves(self) -> list[dict[str, Any]]:
        return self._current_halves()

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return [param for half in self._halves for param in half["params"]]
        if key in RATES:
            found = [half[key] / half["lr_ratio"] for half in self._halves if half["lr_ratio"] and key in half]
        elif key in HALF_OF:
            found = [half[key] for half in self._halves if half["use_muon"] is HALF_OF[key]]
        else:
            found = [half[key] for half in self._halves if key in half and key not in self.data]
        return found[0] if found else self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data or any(key in half for half in self._halves)

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value
        for half in self._halves:
            if key in RATES:
                half[key] = float(value) * half["lr_ratio"]
            elif key in HALF_OF and half["use_muon"] is HALF_OF[key]:
                half[key] = value


class UserGroups(Optimizer):
    """An optimizer for schedulers only: it has the groups as the user gave them, and its step does nothing.

    ``origins`` and ``lrs``: for each of the user's groups, the indices of its halves in ``optimizer`` and its learning
    rate. Groups without an AdamW half have the betas of the optimizer's defaults.
    """

    def __init__(self, optimizer: Optimizer, origins: Sequence[Sequence[int]], lrs: Sequence[float]) -> None:
        self.optimizer, betas = optimizer, optimizer.defaults["betas"]
        self.defaults = {"lr": optimizer.defaults["lr"], "betas": betas}
        groups = [UserGroup(optimizer, indices, lr, betas) for indices, lr in zip(origins, lrs, strict=True)]
        self.param_groups = groups  # type: ignore[assignment]
        # Schedulers warn unless the optimizer steps before they do.
        optimizer.register_step_post_hook(lambda *_: self.step())

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the optimizer's state, which a load replaces."""
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the optimizer has stepped."""
