# SPDX-License-Identifier: Apache-2.0
"""Whether this step's gradient is finite, as ZeRO itself has found out on all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch


class NormWatch:
    """Listens to the gradient norms that stages 1 to 3 reduce over all ranks, before the first group's update.

    Each group's norm is -1 where a gradient is not finite. Several DeepSpeed versions square that into a
    harmless 1 when they combine the groups, so the combined norm does not tell.
    """

    METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")

    def __init__(self, wrapper: Any) -> None:
        self._norms: list[Any] = []
        self._are_valid: bool | None = None
        wrapper.step = self._start(wrapper.step)
        for name in self.METHODS:
            setattr(wrapper, name, self._listen(getattr(wrapper, name)))

    def _start(self, step: Any) -> Any:
        @functools.wraps(step)
        def starting(*args: Any, **kwargs: Any) -> Any:
            self._norms.clear()
            self._are_valid = None
            return step(*args, **kwargs)

        return starting

    def _listen(self, method: Any) -> Any:
        @functools.wraps(method)
        def listening(*args: Any, **kwargs: Any) -> Any:
            norm = method(*args, **kwargs)
            self._norms.append(norm)
            self._are_valid = None
            return norm

        return listening

    def __call__(self) -> bool:
        """False where any group's gradient is not finite; the same on all ranks.

        Reading a norm waits for the accelerator: each is read once per step, whatever the number of calls.
        """
        if self._are_valid is None:
            self._are_valid = all(is_valid(norm) for norm in self._norms)
        return self._are_valid


def is_valid(norm: Any) -> bool:
    """Whether a gradient norm, a number or a 0-D tensor, is that of a finite gradient."""
    return 0 <= float(norm) < math.inf  # false of NaN, too


def on_all_ranks(check: Callable[[], bool], group: Any = None) -> Callable[[], bool]:
    """The check, passed where all ranks of the group pass it: ranks with own parameters have own gradients."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed import comm  # type: ignore[attr-defined]

    def agreed() -> bool:
        passed = torch.tensor(float(check()), device=get_accelerator().current_device_name())
        comm.all_reduce(passed, op=comm.ReduceOp.MIN, group=group)
        return bool(passed)

    return agreed


def once_per_step(engine: Any, report: Callable[[], None]) -> Callable[[], None]:
    """A report on rank 0, and there once per step of the engine, however many groups are skipped in it."""
    reported = -1, -1

    def on_rank_0() -> None:
        nonlocal reported
        step = engine.micro_steps, engine.global_steps  # a pipeline does not count micro-steps
        if engine.global_rank == 0 and step != reported:
            reported = step
            report()

    return on_rank_0


def skips_in_silence(wrapper: Any) -> bool:
    """Whether the wrapper skips a step without a word: with no loss scaler, or, before 0.19.8, with a static one."""
    scaler = getattr(wrapper, "loss_scaler", None)
    return scaler is None or not {"log_dist", "logger"} & set(type(scaler).update_scale.__code__.co_names)
