# SPDX-License-Identifier: Apache-2.0
"""What a learning-rate scheduler sees: the parameter groups as the user gave them.

The optimizer has split each of them into a Muon group and an AdamW group (its halves). A schedule written for AdamW
sets one learning rate per user group; each half's rate becomes that rate times the half's ``lr_ratio``.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

#: Keys whose value in a half is the user group's value times ``lr_ratio``. Without the ratio, schedules with absolute
#: rates, such as OneCycleLR and WarmupLR, would set the same rate in both halves.
RATES = ("lr", "initial_lr")
#: Key that belongs to one half only -> whether that is the Muon half. A cycle of ``betas`` does not change Muon's
#: momentum, because the usual cycles (0.85 to 0.95) are chosen for Adam's first moment.
HALF_OF = {"betas": False, "momentum": True}


class UserGroup(UserDict):
    """A parameter group that the user passed, as a view of the Muon and AdamW halves into which the optimizer split it.

    Reading ``lr`` or ``initial_lr`` returns a half's value divided by the half's ``lr_ratio``; writing sets each half's
    to the value times its ``lr_ratio``. ``betas`` are the AdamW half's, ``momentum`` is the Muon half's. Other keys
    that a scheduler writes stay in this object.

    ``indices``: the halves' indices in ``optimizer.param_groups``. ``lr``, ``betas``: returned if no half has this key.
    """

    def __init__(self, optimizer: Optimizer, indices: Sequence[int], lr: float, betas: tuple[float, float]) -> None:
        # A function, because a load replaces the groups, and because a deep copy of a scheduler copies a function by
        # reference and so does not copy the optimizer.
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
    """The optimizer as a learning-rate scheduler sees it: with the user's parameter groups; ``step`` does nothing.

    ``origins`` and ``lrs``: for each of the user's groups, the indices of its halves and its learning rate.
    """

    def __init__(self, optimizer: Optimizer, origins: Sequence[Sequence[int]], lrs: Sequence[float]) -> None:
        self.optimizer, betas = optimizer, optimizer.defaults["betas"]
        self.defaults = {"lr": optimizer.defaults["lr"], "betas": betas}
        groups = [UserGroup(optimizer, indices, lr, betas) for indices, lr in zip(origins, lrs, strict=True)]
        self.param_groups = groups  # type: ignore[assignment]
        # Schedulers warn if they step before their optimizer, and this object is their optimizer.
        optimizer.register_step_post_hook(lambda *_: self.step())

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of the real optimizer."""
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; the real optimizer updates the parameters."""

    # torch.optim.Optimizer wraps ``step`` to call hooks, except where this mark says that it has been wrapped.
    step.hooked = True  # type: ignore[attr-defined]
