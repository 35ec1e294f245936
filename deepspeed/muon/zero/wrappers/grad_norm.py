# SPDX-License-Identifier: Apache-2.0
"""Gradient norms, which DeepSpeed's wrappers compute: watched, and corrected where ranks hold different parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.param_groups import expert_group

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class NormWatch:
    """The gradient norm of each parameter group, as ZeRO computes them in the current step."""

    def __init__(self) -> None:
        # Not the combined norm: a bad group has norm -1, which DeepSpeed before 0.19.8 squares into a harmless 1.
        self._norms: list[Any] = []

    def start(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace the wrapper's ``step``: forget the norms of the step before."""
        self._norms.clear()
        return step(*args, **kwargs)

    def listen(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace a method of :data:`NORM_METHODS`: remember what it returns."""
        self._norms.append(method(*args, **kwargs))
        return self._norms[-1]

    def read(self, flags: Tensor) -> list[int]:
        """Return the elements of ``flags``, int32. The norms are read with them: the host waits for the device once."""
        late = [norm for norm in self._norms if isinstance(norm, Tensor) and norm.device == flags.device]
        if not late:
            return flags.tolist()
        norms = torch.cat([norm.reshape(1) for norm in late])
        are_valid = torch.logical_and(norms >= 0, norms < math.inf).to(torch.int32)
        *found, of_norms = torch.cat([flags, are_valid.min().view(1)]).tolist()
        others = [norm for norm in self._norms if not any(norm is one for one in late)]
        self._norms[:] = [*others, 0.0 if of_norms else -1.0]
        return found

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
        return agreed(all(map(is_valid, self._norms)), is_same_on_all_ranks=True)


def watch_norms(replace: Callable[[str, Callable], None]) -> NormWatch:
    """Record the gradient norm of each parameter group during every step at stages 1 to 3.

    Return a function to call during a step, before any weight is updated. ``replace``: :meth:`Adapter.replace` of the
    engine's adapter.
    """
    watch = NormWatch()
    replace("step", watch.start)
    for name in NORM_METHODS:
        replace(name, watch.listen)
    return watch


def is_valid(norm: Any) -> bool:
    """Return whether a gradient norm, a number or 0-D tensor, is that of a finite gradient.

    For other gradients ZeRO reports a norm of -1.
    """
    return 0 <= float(norm) < math.inf  # ZeRO reports -1; comparisons with NaN are false


def with_all_experts(wrapper: Any, norm: Callable, *args: Any) -> Any:
    """Replace ``norm``, the method that returns a parameter group's gradient norm at stages 1 and 2: count all experts.

    The original counts experts on tensor-parallel rank 0 only, as if other ranks had copies of them. ``args``: the
    arguments of ``norm``, of which the last is the list of the group's parameters.
    """
    rank = wrapper.model_parallel_rank
    try:
        wrapper.model_parallel_rank = 0 if any(map(expert_group, args[-1])) else rank
        return norm(*args)
    finally:
        wrapper.model_parallel_rank = rank


def with_norms_of_all_stages(wrapper: Any, missing: int, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``scaled_global_norm`` of the wrapper in a pipeline stage that has fewer parameter groups than others.

    The norm of each group is a collective over all stages. For the ``missing`` groups, which only other stages have,
    this stage joins the collectives with norms of zero.
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
