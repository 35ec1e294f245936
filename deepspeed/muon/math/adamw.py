# SPDX-License-Identifier: Apache-2.0
"""AdamW for the parameters that Muon does not train: torch's functions, fused where supported, on ZeRO's shards."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.math.momentum_storage import Fragment, State
from deepspeed.muon.math.wide_arithmetic import in_fp32

#: Key of a parameter group whose value is {name of a parameter: number of its tensor's steps that it has not made}. One
#: tensor of ZeRO holds many parameters and has one step count. A parameter without an entry has made all these steps.
STARTED = "started_at"


def step(tensors: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any], decoupled: bool) -> None:
    """Make one step of AdamW (``decoupled``) or of Adam with an L2 term, and update weights and states in place.

    All ``tensors`` must have a gradient. ``states``: the AdamW state of each tensor. ``group``: the parameter group
    with its settings, such as ``lr``.
    """
    grads = [p.grad for p in tensors if p.grad is not None]
    means, squares, step_counts = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    _update(list(tensors), grads, means, squares, step_counts, group, decoupled)


def steps_before_start(group: Mapping[str, Any], fragment: Fragment) -> int:
    """Return how many steps fewer a parameter has made than the tensor that holds it, which has one step count.

    Example: 100 if ZeRO's flat tensor has made 100 steps while the parameter was frozen. ``group``: the parameter
    group, which stores these numbers under :data:`STARTED`. For a parameter that is not listed there, return 0.
    ``fragment``: any part of the parameter.
    """
    return group.get(STARTED, {}).get(fragment.name.partition("@")[0], 0)


def step_by_parameter(
    tensor: Tensor, state: State, group: Mapping[str, Any], decoupled: bool, fragments: Sequence[Fragment]
) -> None:
    """Make one step of AdamW or Adam for a contiguous tensor whose parameters have made different numbers of steps.

    ``fragments``: the parts of parameters that the tensor holds; padding between them does not change. The other
    arguments are those of :func:`step`, for one tensor.
    """
    assert tensor.grad is not None
    stored = [x.reshape(-1) for x in (tensor.data, tensor.grad, state["exp_avg"], state["exp_avg_sq"])]
    tensors, grads, means, squares = (
        [x[part.position : part.position + part.numel] for part in fragments] for x in stored
    )
    step_counts = [state["step"] - steps_before_start(group, part) for part in fragments]
    _update(tensors, grads, means, squares, step_counts, group, decoupled)
    state["step"] += 1


def step_in_bf16(
    tensor: Tensor,
    state: State,
    group: Mapping[str, Any],
    decoupled: bool,
    fragments: Sequence[Fragment],
    kernels: KernelSet,
    work: Workspace,
) -> None:
    """Make one step of AdamW or Adam in fp32 for a contiguous bf16 tensor; round weights and moments stochastically.

    ``kernels``: the kernels that round. ``work``: allocates the fp32 copies. The other arguments are those of
    :func:`step_by_parameter`.
    """
    assert tensor.grad is not None
    grad, done = tensor.grad.reshape(-1), float(state["step"])
    stored = [x.view(-1) for x in (tensor, state["exp_avg"], state["exp_avg_sq"])]
    state["step"] += 1
    step = int(done) + 1
    for fragment in fragments:
        name, first, position, numel = fragment
        place, made = slice(position, position + numel), done - steps_before_start(group, fragment)
        # With common random numbers, the rounding errors of weights and moments would have the same sign.
        keys = [key_of(f"{name} {role}", step) for role in ("weight", "exp_avg", "exp_avg_sq")]
        for part, wide in in_fp32([x[place] for x in stored], keys, first, kernels, work):
            weights, means, squares = ([x] for x in wide)
            count = torch.full((), made, dtype=torch.float32, device=tensor.device)
            _update(weights, [grad[place][part].float()], means, squares, [count], group, decoupled)


def _update(
    tensors: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    step_counts: list[Tensor],
    group: Mapping[str, Any],
    decoupled: bool,
) -> None:
    """Call torch's functional ``adamw`` (if ``decoupled``) or ``adam``; both update tensors and counts in place."""
    if not tensors:
        return
    if not group.get("bias_correction", True):  # a checkpoint of an older version has no such key
        torch._foreach_add_(step_counts, 1)
        # At step infinity the bias corrections are 1.
        step_counts = [torch.full_like(count, torch.inf) for count in step_counts]
    settings = {"beta1": group["betas"][0], "beta2": group["betas"][1]}
    settings |= {key: group[key] for key in ("lr", "weight_decay", "eps")}
    settings["has_complex"] = any(p.is_complex() for p in tensors)
    is_fused = not settings["has_complex"] and all(map(has_fused_kernel, {p.device.type for p in tensors}))
    # On a CPU torch's fused kernel is as fast as DeepSpeedCPUAdam without a build, and six times faster than foreach.
    settings["fused" if is_fused else "foreach"] = True
    update = adamw if decoupled else adam
    update(tensors, grads, means, squares, [], step_counts, amsgrad=False, maximize=False, **settings)


@functools.cache
def has_fused_kernel(device_type: str) -> bool:
    """Return whether torch has fused Adam and AdamW kernels for a device type, such as ``cuda``."""
    key = torch._C._dispatch_key_for_device(device_type)
    names = ("aten::_fused_adam_", "aten::_fused_adamw_")
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names)
