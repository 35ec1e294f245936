# SPDX-License-Identifier: Apache-2.0
"""Patches that make the gradient norms and loss scales of DeepSpeed's wrappers correct and equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.consensus import Agreed, same_on_all_ranks
from deepspeed.muon.model.param_groups import expert_group

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class NormWatch:
    """Record the gradient norms that ZeRO computes in the current step, one per parameter group.

    Call an instance to learn whether they are all finite.
    """

    def __init__(self) -> None:
        # Not the combined norm: a bad group has norm -1, which DeepSpeed before 0.19.8 squares into a harmless 1.
        self._norms: list[Any] = []

    def start(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace the wrapper's ``step``: forget the norms of the step before."""
        self._norms.clear()
        return original(*args, **kwargs)

    def listen(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace a method of :data:`NORM_METHODS`: remember what it returns."""
        self._norms.append(original(*args, **kwargs))
        return self._norms[-1]

    def read(self, flags: Tensor) -> list[int]:
        """Return the elements of ``flags``, a 1-D int32 tensor on the device, for which the host waits.

        The same transfer reads the recorded norms, so that a later call of this instance does not wait again.
        """
        late = [norm for norm in self._norms if isinstance(norm, Tensor) and norm.device == flags.device]
        if not late:
            return flags.tolist()
        norms = torch.cat([norm.reshape(1) for norm in late])
        are_valid = torch.logical_and(norms >= 0, norms < math.inf).to(torch.int32)
        *elements, of_norms = torch.cat([flags, are_valid.min().view(1)]).tolist()
        others = [norm for norm in self._norms if not any(norm is one for one in late)]
        self._norms[:] = [*others, 0.0 if of_norms else -1.0]
        return elements

    def __call__(self) -> Agreed:
        """Return whether all norms of this step are finite, with the same result on all ranks.

        Raise RuntimeError, on all ranks, if ZeRO computed no norm.
        """
        if not self._norms:
            raise RuntimeError(
                "deepspeed-muon cannot tell whether the gradient is finite: this version of DeepSpeed called none of "
                f"{', '.join(NORM_METHODS)} in this step. Nothing was updated; run ds_muon report, and install a "
                "tested version of DeepSpeed"
            )
        self._norms[:] = map(float, self._norms)  # waits for the accelerator, if read() has not
        return same_on_all_ranks(all(map(is_valid, self._norms)))


def watch_norms(patch: Callable[[str, Callable], None]) -> NormWatch:
    """Return a new :class:`NormWatch` that records the gradient norms of every step at stages 1 to 3.

    Call the NormWatch during a step, before any weight is updated. ``patch``: :meth:`Adapter.patch` of the engine's
    adapter, which replaces a method of ZeRO's wrapper.
    """
    watch = NormWatch()
    patch("step", watch.start)
    for name in NORM_METHODS:
        patch(name, watch.listen)
    return watch


def is_valid(norm: Any) -> bool:
    """Return whether a gradient norm, a number or 0-D tensor, is that of a finite gradient.

    If the gradient is not finite, ZeRO reports a norm of -1.
    """
    return 0 <= float(norm) < math.inf  # ZeRO reports -1; comparisons with NaN are false


def with_all_experts(wrapper: Any, original: Callable, *args: Any) -> Any:
    """Replace a method of :data:`NORM_METHODS` at stages 1 and 2: include the experts of all tensor-parallel ranks.

    The original includes only those of tensor-parallel rank 0, as if other ranks had copies of them. ``args``: the
    method's arguments; the last one is the list of the group's parameters.
    """
    rank = wrapper.model_parallel_rank
    try:
        wrapper.model_parallel_rank = 0 if any(map(expert_group, args[-1])) else rank
        return original(*args)
    finally:
        wrapper.model_parallel_rank = rank


def with_norms_of_all_stages(wrapper: Any, missing: int, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``scaled_global_norm`` of the wrapper in a pipeline stage that has fewer parameter groups than others.

    The norm of each group is a collective over all pipeline stages. This stage joins the collectives of the ``missing``
    groups, which only other stages have, with norms of zero.
    """
    from deepspeed.runtime import utils

    if wrapper.cpu_offload:
        none = partial(wrapper.complete_grad_norm_calculation_for_cpu_offload, [])
    else:
        none = partial(wrapper.get_grad_norm_direct, [], [])
    norms = [original(*args, **kwargs), *(none() for _ in range(missing))]
    tensors = [torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms]
    combine = getattr(utils, "combine_grad_norm_groups", None)  # combine them as the installed DeepSpeed does
    return combine(tensors) if combine else torch.linalg.vector_norm(torch.stack(tensors))


def mark_gradients(params: Iterable[Tensor]) -> None:
    """Copy two attributes of parameters to their gradients, so that a norm over all ranks counts each element once.

    ``model_parallel`` is true for a tensor-parallel shard, ``ds_pipe_replicated`` for the copies of a tied weight,
    except on its first pipeline stage.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    for param in params:
        if param.grad is not None:
            param.grad.model_parallel = is_model_parallel_parameter(param)  # type: ignore[attr-defined]
            param.grad.ds_pipe_replicated = getattr(param, "ds_pipe_replicated", False)  # type: ignore[attr-defined]


#: Defaults of ``torch.amp.GradScaler``: the first scale, and the number of steps after which it doubles.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000


def is_fp16_autocast(engine: Any) -> bool:
    """Return whether the engine runs the model under torch's autocast with fp16."""
    return engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16


def unfused_scaler(wrapper: Any, patch: Callable[[str, Callable], None]) -> SimpleNamespace:
    """Return a loss scaler for an fp16 model at stage 0, to be stored in ``engine.torch_autocast_z0_gradscaler``.

    Without it the engine would not scale the loss, although ``FP16_UnfusedOptimizer`` divides gradients by the scale.
    ``wrapper``: the ``FP16_UnfusedOptimizer``. ``patch``: :meth:`Adapter.patch` of the engine's adapter.
    """
    config = wrapper.loss_scale_config
    updates: list[Callable[[], None]] = []

    def take_step(original: Callable, *args: Any, **kwargs: Any) -> Any:
        # The wrapper would grow the scale before it divides by it, and report the norm of the scaled gradient.
        updates.clear()  # of a step that raised
        result = original(*args, **kwargs)
        wrapper._global_grad_norm /= config.cur_scale
        for update in updates:
            update()
        return result

    patch("step", take_step)
    patch("_update_scale", lambda update, skip: updates.append(partial(update, skip)))
    return SimpleNamespace(
        scale=lambda loss: loss.float() * config.cur_scale,
        step=lambda optimizer: optimizer.step(),
        unscale_=lambda optimizer: None,  # left to the wrapper, as is the update
        update=lambda: None,
    )


def share_autocast_scale(engine: Any) -> None:
    """Replace torch's ``GradScaler`` with ZeRO's dynamic loss scaler, under fp16 autocast at stages 1 to 3.

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
