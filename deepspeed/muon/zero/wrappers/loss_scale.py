# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for fp16 at stage 0 and under torch's autocast, where DeepSpeed's own is not exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

#: Defaults of ``torch.amp.GradScaler``: the first scale, and the number of steps after which it doubles.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000


def is_fp16_autocast(engine: Any) -> bool:
    """Return whether torch's autocast computes in fp16."""
    return engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16


def unfused_scaler(wrapper: Any, replace: Callable[[str, Callable], None]) -> SimpleNamespace:
    """Return a scaler that multiplies the loss by the scale by which ``FP16_UnfusedOptimizer`` divides gradients.

    It is for ``engine.torch_autocast_z0_gradscaler``, which the engine calls at stage 0; without it the engine scales
    the loss only under ZeRO. ``replace`` is :meth:`Adapter.replace`.
    """
    config = wrapper.loss_scale_config
    updates: list[Callable[[], None]] = []

    def take_step(step: Callable, *args: Any, **kwargs: Any) -> Any:
        # The wrapper would grow the scale before it divides by it, and report the norm of the scaled gradient.
        updates.clear()  # of a step that raised
        result = step(*args, **kwargs)
        wrapper._global_grad_norm /= config.cur_scale
        for update in updates:
            update()
        return result

    replace("step", take_step)
    replace("_update_scale", lambda update, skip: updates.append(partial(update, skip)))
    return SimpleNamespace(
        scale=lambda loss: loss.float() * config.cur_scale,
        step=lambda optimizer: optimizer.step(),
        unscale_=lambda optimizer: None,  # left to the wrapper, as is the update
        update=lambda: None,
    )


def share_autocast_scale(engine: Any) -> None:
    """Replace the ``GradScaler`` that stages 1 to 3 use for fp16 autocast by ZeRO's dynamic loss scaler.

    A ``GradScaler`` decides per rank and per group whether to step, clips before it unscales, and is not checkpointed.
    First scale and growth are torch's. An fp16 model keeps the loss scaler of the config's section ``fp16``.
    """
    wrapper = engine.optimizer
    # In every engine: DeepSpeed's autocast flag is global, so engines after one with autocast get a GradScaler as well.
    wrapper.torch_autocast_gradscaler = None
    if not is_fp16_autocast(engine) or engine.fp16_enabled():
        return
    wrapper.check_grad_overflow = True  # without it stages 1 and 2 would never report an overflow
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    wrapper.dynamic_loss_scale = True
    wrapper.loss_scaler = DynamicLossScaler(
        init_scale=FIRST_SCALE,
        scale_window=GROWTH_INTERVAL,
        min_scale=2.0**-14,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )


@contextmanager
def keeping_scaler_class(wrapper: Any) -> Iterator[None]:
    """Keep the wrapper's loss scaler if a checkpoint that is loaded inside this context has one of another class.

    It has one if the saved run used another precision.
    """
    names = ("loss_scaler", "dynamic_loss_scale")
    before = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    yield
    if before and type(wrapper.loss_scaler) is not type(before["loss_scaler"]):
        vars(wrapper).update(before)
