# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own functions do with optimizer state: find and set it by name, move it off the accelerator.

``safe_get_full_fp32_param``, ``safe_set_full_optimizer_state`` and their like ask the wrapper, or methods that the
wrapper put on the parameter; ``engine.offload_states()`` asks the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.nvme import swapped_in


def keep_accessible(wrapper: Any, optimizer: MuonWithAuxAdam) -> None:
    """Make the state of all groups readable, writable and movable by name, at every stage."""
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        wrapper.set_full_hp_param = functools.partial(_set_full, wrapper)
        wrapper.set_local_hp_param = functools.partial(_set_local, wrapper)
        wrapper.offload_states = functools.partial(_offload_stage3, wrapper, optimizer, wrapper.offload_states)
        wrapper.reload_states = functools.partial(_reload_stage3, wrapper, optimizer, wrapper.reload_states)
    elif kind == "DeepSpeedZeroOptimizer":
        wrapper.offload_states = functools.partial(_move_stage12, wrapper, optimizer, wrapper.offload_states)
        wrapper.reload_states = functools.partial(_move_stage12, wrapper, optimizer, wrapper.reload_states)
        link(wrapper)
    elif kind == "BF16_Optimizer":
        link(wrapper)
    else:
        _attach(wrapper, optimizer)


def link(wrapper: Any) -> None:
    """Let parameters find their parts of the state again, at stages 1 and 2 and in ``BF16_Optimizer``.

    Stock links them once, after the first step; loading a checkpoint or moving the state replaces the tensors.
    """
    if not hasattr(wrapper, "_hp_optimizer_states_linked"):
        return
    if getattr(wrapper, "round_robin_gradients", False):
        _link_in_order(wrapper)
    wrapper._hp_optimizer_states_linked = False
    wrapper._lazy_init_hp_params_optimizer_state()


def _link_in_order(wrapper: Any) -> None:
    """Stock looks up where round-robin has put a parameter only in groups with padding between parameters."""
    padding = wrapper.round_robin_bit16_padding
    wrapper.round_robin_bit16_padding = [[True]] * len(padding)
    try:
        wrapper._link_all_hp_params()
    finally:
        wrapper.round_robin_bit16_padding = padding


# ---- stage 0 --------------------------------------------------------------------------------------------------


class _Whole:
    """What ``safe_get_*`` and ``safe_set_*`` call of a parameter that every rank holds whole.

    A pickled or copied model leaves the optimizer behind, and so do these.
    """

    def __init__(self, optimizer: MuonWithAuxAdam | None = None, master: Tensor | None = None) -> None:
        self._optimizer, self._master = optimizer, master

    def __reduce__(self) -> tuple:
        return _Whole, ()

    def _find(self, key: str | None) -> Tensor | None:
        if self._optimizer is None or self._master is None:
            return None
        if key is None:
            return self._master.detach()
        state = self._optimizer.state[self._master]
        if key not in state:
            raise ValueError(f"the optimizer state has no {key!r} here; it has {', '.join(sorted(state))}")
        return state[key]

    def get(self, optim_state_key: str | None = None) -> Tensor | None:
        found = self._find(optim_state_key)
        return None if found is None else found.to(torch.float32, copy=True)

    def set(self, value: Tensor, optim_state_key: str | None = None) -> None:
        found = self._find(optim_state_key)
        if found is not None:
            found.copy_(value.reshape(found.shape))

    def gradient(self) -> None:
        """Stage 0 keeps gradients in ``param.grad`` only."""


def _attach(wrapper: Any, optimizer: MuonWithAuxAdam) -> None:
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"] if wrapper is optimizer else wrapper.fp16_groups[index]
        for param, master in zip(params, group["params"], strict=True):
            whole = _Whole(optimizer, master)
            param._hp_mapping = None
            param.get_full_hp_param, param.set_full_hp_param = whole.get, whole.set
            param.get_full_hp_grad = whole.gradient


# ---- stages 1 and 2 -------------------------------------------------------------------------------------------


def _move_stage12(wrapper: Any, optimizer: MuonWithAuxAdam, move: Callable, *args: Any, **kwargs: Any) -> None:
    """Stock moves every state tensor by putting another in its place, which parameters do not find by themselves."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    optimizer.release_workspace()
    move(*args, **kwargs)
    if OffloadStateTypeEnum.hp_params not in wrapper.offloaded_states:
        link(wrapper)


# ---- stage 3 --------------------------------------------------------------------------------------------------


def _set_full(wrapper: Any, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
    """Stage 3's ``set_full_hp_param``, also where the ranks do not divide the parameter evenly."""
    if not param.requires_grad:
        return
    if value.numel() != param.ds_numel:
        raise ValueError(f"expected {param.ds_numel} elements for shape {tuple(param.ds_shape)}, got {value.numel()}")
    part = param.partition_numel()
    start = part * wrapper._get_param_partition_rank(param)
    held = value.flatten()[start : start + part]
    _set_local(wrapper, torch.nn.functional.pad(held, (0, part - held.numel())), param, optim_state_key)


def _set_local(wrapper: Any, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
    """Stage 3's ``set_local_hp_param``, whose write to NVMe stock does not wait for where it is pipelined."""
    if not param.requires_grad:
        return
    index, start, count = wrapper.grad_position[wrapper.get_param_id(param)]
    if value.numel() != count:
        raise ValueError(f"expected {count} elements of this rank's part, got {value.numel()}")
    with swapped_in(wrapper, index) as flat:
        target = flat.data if optim_state_key is None else wrapper.optimizer.state[flat][optim_state_key]
        target[start : start + count].copy_(value.flatten())


def _own_states(wrapper: Any, optimizer: MuonWithAuxAdam) -> dict[Any, list[Tensor]]:
    """The tensors that stock moves for its own fused Adam only: masters and optimizer state, by stock's kinds."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        OffloadStateTypeEnum.hp_params: list(wrapper.fp32_partitioned_groups_flat),
        OffloadStateTypeEnum.optim_states: [value for value in states if value.ndim],
    }


def _offload_stage3(
    wrapper: Any,
    optimizer: MuonWithAuxAdam,
    offload: Callable,
    include: Any = None,
    device: Any = None,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    for kind, tensors in _own_states(wrapper, optimizer).items():
        if kind in wrapper.offloaded_states or (include is not None and kind not in include):
            continue
        for tensor in tensors:
            host = torch.empty_like(tensor, device="cpu", requires_grad=False)
            host = get_accelerator().pin_memory(host) if pin_memory else host
            tensor.data = host.copy_(tensor.detach(), non_blocking=non_blocking)
        wrapper.offloaded_states.add(kind)
    optimizer.release_workspace()
    offload(include, device or OffloadDeviceEnum.cpu, pin_memory, non_blocking)


def _reload_stage3(wrapper: Any, optimizer: MuonWithAuxAdam, reload: Callable, non_blocking: bool = False) -> None:
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().current_device_name()
    hosts = []  # alive until the copies are done
    for kind, tensors in _own_states(wrapper, optimizer).items():
        if kind in wrapper.offloaded_states:
            for tensor in tensors:
                hosts.append(tensor.data)
                tensor.data = tensor.data.to(device, non_blocking=non_blocking)
            wrapper.offloaded_states.remove(kind)
    reload(non_blocking)
    if non_blocking:
        get_accelerator().synchronize()
