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
from deepspeed.muon.model.param_groups import expert_group

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


def watch_norms(replace: Callable[[str, Callable], None]) -> Callable[[], Agreed]:
    """Record the gradient norm of each parameter group during every step at stages 1 to 3.

    Return a function to call during a step, before any weight is updated. It returns whether all norms of this step are
    finite, with the same result on all ranks. It raises RuntimeError, on all ranks, if ZeRO computed no norm.
    ``replace``: :meth:`Adapter.replace` of the engine's adapter.
    """
    # Not the combined norm: a non-finite group has norm -1, which DeepSpeed before 0.19.8 squares into a harmless 1.
    norms: list[Any] = []

    def start(step: Callable, *args: Any, **kwargs: Any) -> Any:
        norms.clear()
        return step(*args, **kwargs)

    def listen(method: Callable, *args: Any, **kwargs: Any) -> Any:
        norms.append(method(*args, **kwargs))
        return norms[-1]

    def are_finite() -> Agreed:
        if not norms:
            raise RuntimeError(
                "deepspeed-muon cannot tell whether the gradient is finite: this version of DeepSpeed called none of "
                f"{', '.join(NORM_METHODS)} in this step. Nothing was updated; run ds_muon report, and install a "
                "tested version of DeepSpeed"
            )
        norms[:] = map(float, norms)  # waits for the accelerator: once per step, whatever the number of calls
        return agreed(all(map(is_valid, norms)), is_same_on_all_ranks=True)

    replace("step", start)
    for name in NORM_METHODS:
        replace(name, listen)
    return are_finite


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
