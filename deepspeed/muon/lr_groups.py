# SPDX-License-Identifier: Apache-2.0
"""What a learning-rate scheduler sees: the parameter groups as the user gave them.

The optimizer has split each of them into a Muon and an AdamW half. A schedule written for AdamW sets one learning rate
per group, and each half gets it times its own ``lr_ratio``.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

#: Keys that scale with ``lr_ratio``.
RATES = ("lr", "initial_lr")


class GivenGroup(UserDict):
    """One group as the user gave it. ``lr``, ``momentum`` and ``betas`` are read from its halves.

    Writing ``lr`` or ``initial_lr`` sets each half's to the value times its ``lr_ratio``. Writing ``betas`` or
    ``momentum`` sets AdamW's first rate and Muon's momentum to the same value. All other keys are the scheduler's own.
    """

    def __init__(self, halves: Callable[[], list[dict[str, Any]]], lr: float, betas: tuple[float, float]) -> None:
        self._halves = halves
        self.data = {"params": [], "lr": lr, "betas": betas, "momentum": betas[0]}

    def __getitem__(self, key: str) -> Any:
        halves = self._halves()
        if key == "params":
            return [param for half in halves for param in half["params"]]
        if key in RATES:
            rates = (half[key] / half["lr_ratio"] for half in halves if half["lr_ratio"] and key in half)
            rate = next(rates, None)
            return self.data[key] if rate is None else rate
        if key == "momentum":
            return next((half["momentum"] for half in halves if half["use_muon"]), self.data["momentum"])
        if key == "betas":
            return next((half["betas"] for half in halves if not half["use_muon"]), self.data["betas"])
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data or (key in RATES and any(key in half for half in self._halves()))

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value
        if key in RATES:
            for half in self._halves():
                half[key] = float(value) * half["lr_ratio"]
        elif key == "betas":
            self._set_momentum(*value)
        elif key == "momentum":
            self._set_momentum(value, self["betas"][1])

    def _set_momentum(self, momentum: float, beta2: float) -> None:
        self.data |= {"momentum": momentum, "betas": (momentum, beta2)}
        for half in self._halves():
            if half["use_muon"]:
                half["momentum"] = momentum
            else:
                half["betas"] = (momentum, beta2)


class GivenGroups(Optimizer):
    """An optimizer for schedulers only: it has the groups as the user gave them, and its step does nothing.

    Args:
        optimizer: its groups are the halves.
        origins: for each of the user's groups, the indices of its halves.
        lrs: for each of the user's groups, its learning rate.
        betas: AdamW's, for groups without an AdamW half.
    """

    def __init__(
        self, optimizer: Optimizer, origins: Sequence[Sequence[int]], lrs: Sequence[float], betas: tuple[float, float]
    ) -> None:
        self.optimizer = optimizer
        self.defaults = {"lr": optimizer.defaults["lr"], "betas": betas, "momentum": betas[0]}
        groups = [GivenGroup(self._halves(indices), lr, betas) for indices, lr in zip(origins, lrs, strict=True)]
        self.param_groups = groups  # type: ignore[assignment]
        # Schedulers warn unless the optimizer steps before they do.
        optimizer.register_step_post_hook(lambda *_: self.step())

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's; a load replaces it."""
        return self.optimizer.state

    def _halves(self, indices: Sequence[int]) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [self.optimizer.param_groups[index] for index in indices]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: the optimizer has stepped."""
