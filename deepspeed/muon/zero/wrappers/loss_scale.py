# SPDX-License-Identifier: Apache-2.0
"""fp16 where DeepSpeed's own loss scaling is not exact: at stage 0, and under torch's autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Torch's defaults of ``torch.amp.GradScaler``: the first scale, and the steps after which it doubles.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000


def is_fp16_autocast(engine: Any) -> bool:
    """Whether torch's autocast computes in fp16."""
    return engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16


class UnfusedScale:
    """Multiplies the loss by the scale by which ``FP16_UnfusedOptimizer`` divides its gradients.

    The engine scales the loss itself only under ZeRO; at stage 0 it asks ``engine.torch_autocast_z0_gradscaler``, whose
    place this takes. ``replace`` is :meth:`Adapter.replace`.
    """

    REPLACED = ("step", "_update_scale")

    def __init__(self, wrapper: Any, replace: Callable[[str, Callable], None]) -> None:
        self._wrapper, self._config = wrapper, wrapper.loss_scale_config
        self._update: Callable[[], None] = lambda: None
        replace("step", self._take_step)
        replace("_update_scale", self._put_off)

    def _take_step(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """The wrapper would grow the scale before it divides by it, and report the norm of the scaled gradient."""
        result = step(*args, **kwargs)
        self._wrapper._global_grad_norm /= self._config.cur_scale
        self._update()
        return result

    def _put_off(self, update: Callable, skip: bool) -> None:
        self._update = partial(update, skip)

    # ---- what the engine calls of a GradScaler -----------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """The loss in fp32, times the scale."""
        return loss.float() * self._config.cur_scale

    def unscale_(self, optimizer: Any) -> None:
        """Left to the wrapper."""

    def step(self, optimizer: Any) -> None:
        """The wrapper's own."""
        optimizer.step()

    def update(self) -> None:
        """Left to the wrapper."""


def share_autocast_scale(engine: Any) -> None:
    """Let ZeRO's dynamic loss scaler take the place of the ``GradScaler`` that stages 1 to 3 have for fp16 autocast.

    That one decides for each rank and each group alone whether to step, clips before it unscales, and is in no
    checkpoint. The first scale and its growth are as there. An fp16 model has a loss scaler by its own section.

    DeepSpeed's flag of autocast is global, so later engines of the process get a ``GradScaler`` as well.
    """
    wrapper = engine.optimizer
    wrapper.torch_autocast_gradscaler = None
    if not is_fp16_autocast(engine) or engine.fp16_enabled():
        return
    wrapper.check_grad_overflow = True  # of stages 1 and 2, which else tell the scaler nothing
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
def own_scaler(wrapper: Any) -> Iterator[None]:
    """Keep the wrapper's kind of loss scaler while DeepSpeed loads a checkpoint, of a run in another precision perhaps.

    Of its own kind, the checkpoint's takes its place.
    """
    names = ("loss_scaler", "dynamic_loss_scale")
    own = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    yield
    if own and type(wrapper.loss_scaler) is not type(own["loss_scaler"]):
        vars(wrapper).update(own)
