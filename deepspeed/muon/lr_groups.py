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
        found = []
        if key in RATES:
            found = [half[key] / half["lr_ratio"] for half in halves if half["lr_ratio"] and key in half]
        elif key in ("momentum", "betas"):
            found = [half[key] for half in halves if half["use_muon"] is (key == "momentum")]
        return found[0] if found else self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data or (key in RATES and any(key in half for half in self._halves()))

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value
        if key in RATES:
            for half in self._halves():
                half[key] = float(value) * half["lr_ratio"]
        elif key in ("momentum", "betas"):
            momentum, beta2 = value if key == "betas" else (value, self["betas"][1])
            self.data |= {"momentum": momentum, "betas": (momentum, beta2)}
            for half in self._halves():
                half.update({"momentum": momentum} if half["use_muon"] else {"betas": (momentum, beta2)})


class GivenGroups(Optimizer):
    """An optimizer for schedulers only: it has the groups as the user gave them, and its step does nothing.

    ``origins`` and ``lrs``: for each of the user's groups, the indices of its halves in ``optimizer`` and its learning
    rate. ``betas``: AdamW's, for groups without an AdamW half.
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
