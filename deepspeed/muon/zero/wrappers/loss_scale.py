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
    """Return whether the engine runs the model under torch's autocast with fp16."""
    return engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16


def unfused_scaler(wrapper: Any, replace: Callable[[str, Callable], None]) -> SimpleNamespace:
    """Return a loss scaler for an fp16 model at stage 0, to be stored in ``engine.torch_autocast_z0_gradscaler``.

    Without it the engine would not scale the loss, although ``FP16_UnfusedOptimizer`` divides gradients by the scale.
    ``wrapper``: this optimizer wrapper. ``replace``: :meth:`Adapter.replace` of the engine's adapter.
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
    """Replace torch's ``GradScaler`` by ZeRO's dynamic loss scaler, under fp16 autocast at stages 1 to 3.

    A ``GradScaler`` may skip a step on some ranks only, clips gradients before it unscales them, and is not saved in
    checkpoints. The new scaler has the same first scale and growth as torch's. It is not used for a model that is
    itself fp16, because ZeRO already scales its loss.
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
def keeping_scaler(wrapper: Any) -> Iterator[None]:
    """Return a context for loading a checkpoint: ignore a saved loss scaler of another class than the wrapper's.

    A run in another precision saves such a scaler. The wrapper then keeps its own.
    """
    names = ("loss_scaler", "dynamic_loss_scale")
    before = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    yield
    if before and type(wrapper.loss_scaler) is not type(before["loss_scaler"]):
        vars(wrapper).update(before)
