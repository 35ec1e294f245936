# SPDX-License-Identifier: Apache-2.0
"""Whether this step's gradient is finite, as ZeRO itself has found out on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from deepspeed.muon.exchange.groups import Agreed, agreed

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class NormWatch:
    """Listens to the gradient norms that stages 1 to 3 reduce over all ranks before they update the first group.

    A group's norm is -1 where a gradient is not finite. Several versions of DeepSpeed square that into a harmless 1
    when they combine the groups, so the combined norm does not tell. ``replace`` is :meth:`Adapter.replace`.
    """

    def __init__(self, replace: Callable[[str, Callable], None]) -> None:
        self._norms: list[Any] = []
        replace("step", self._start)
        for name in NORM_METHODS:
            replace(name, self._listen)

    def _start(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        self._norms.clear()
        return step(*args, **kwargs)

    def _listen(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        self._norms.append(method(*args, **kwargs))
        return self._norms[-1]

    def __call__(self) -> Agreed:
        """False where any group's gradient is not finite; the same on all ranks.

        Reading a norm waits for the accelerator: each is read once per step, whatever the number of calls.

        Raises:
            RuntimeError: on all ranks, if ZeRO has computed no norm in this step, so that nothing is known.
        """
        if not self._norms:
            raise RuntimeError(
                f"deepspeed-muon heard no gradient norm in this step: this DeepSpeed calls none of "
                f"{', '.join(NORM_METHODS)}, which tell whether the gradient is finite. Nothing was updated; run "
                "ds_muon report, and install a tested version of DeepSpeed"
            )
        self._norms = [float(norm) for norm in self._norms]
        return agreed(all(is_valid(norm) for norm in self._norms), is_common=True)


def is_valid(norm: Any) -> bool:
    """Whether a gradient norm, a number or a 0-D tensor, is that of a finite gradient."""
    return 0 <= float(norm) < math.inf  # false of NaN, too


def skips_in_silence(wrapper: Any) -> bool:
    """Whether the wrapper logs nothing when it skips a step: it has no loss scaler, or, before 0.19.8, a static one."""
    scaler = getattr(wrapper, "loss_scaler", None)
    return scaler is None or not {"log_dist", "logger"} & set(type(scaler).update_scale.__code__.co_names)
