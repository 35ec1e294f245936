# SPDX-License-Identifier: Apache-2.0
"""Optimizer state by name: what DeepSpeed's functions read, set and move off the accelerator.

``safe_get_full_fp32_param``, ``safe_set_full_optimizer_state`` and their like ask the wrapper, or methods that the
wrapper put on the parameter; ``engine.offload_states()`` asks the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.nvme import swapped_in

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


def attach(param: Any, master: Tensor, optimizer: MuonWithAuxAdam) -> None:
    """Give a parameter of stage 0 the methods by which DeepSpeed finds its master weight and state."""
    whole = _Whole(optimizer, master)
    param._hp_mapping = None
    param.get_full_hp_param, param.set_full_hp_param = whole.get, whole.set
    param.get_full_hp_grad = whole.gradient


# ---- stages 1 and 2, BF16_Optimizer ---------------------------------------------------------------------------


def link(wrapper: Any) -> None:
    """Let parameters find their parts of the state again.

    DeepSpeed links them once, after the first step; loading a checkpoint or moving the state replaces the tensors.
    """
    if getattr(wrapper, "round_robin_gradients", False):
        _link_in_order(wrapper)
    wrapper._hp_optimizer_states_linked = False
    wrapper._lazy_init_hp_params_optimizer_state()


def _link_in_order(wrapper: Any) -> None:
    """DeepSpeed looks up where round-robin has put a parameter only in groups with padding between parameters."""
    padding = wrapper.round_robin_bit16_padding
    wrapper.round_robin_bit16_padding = [[True]] * len(padding)
    try:
        wrapper._link_all_hp_params()
    finally:
        wrapper.round_robin_bit16_padding = padding


# ---- stage 3 --------------------------------------------------------------------------------------------------


class Stage3States:
    """Replacements for the methods of stage 3's wrapper that set and move state."""

    def __init__(self, wrapper: Any, optimizer: MuonWithAuxAdam) -> None:
        self._wrapper, self._optimizer = wrapper, optimizer

    def set_full(self, original: Callable, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """``set_full_hp_param``, also where the ranks do not divide the parameter evenly."""
        if not param.requires_grad:
            return
        if value.numel() != param.ds_numel:
            shape = tuple(param.ds_shape)
            raise ValueError(f"expected {param.ds_numel} elements for shape {shape}, got {value.numel()}")
        part = param.partition_numel()
        start = part * self._wrapper._get_param_partition_rank(param)
        held = value.flatten()[start : start + part]
        padded = torch.nn.functional.pad(held, (0, part - held.numel()))
        self._wrapper.set_local_hp_param(padded, param, optim_state_key)

    def set_local(self, original: Callable, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """``set_local_hp_param``, which waits until pipelined writes to NVMe are done."""
        if not param.requires_grad:
            return
        index, start, count = self._wrapper.grad_position[self._wrapper.get_param_id(param)]
        if value.numel() != count:
            raise ValueError(f"expected {count} elements of this rank's part, got {value.numel()}")
        with swapped_in(self._wrapper, index) as flat:
            target = flat.data if optim_state_key is None else self._optimizer.state[flat][optim_state_key]
            target[start : start + count].copy_(value.flatten())

    def offload(
        self,
        original: Callable,
        include: Any = None,
        device: Any = None,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """``offload_states``, whose part for masters and optimizer state asserts DeepSpeed's own fused Adam."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

        for kind, tensors in self._movable().items():
            if kind in self._wrapper.offloaded_states or (include is not None and kind not in include):
                continue
            for tensor in tensors:
                host = torch.empty_like(tensor, device="cpu", requires_grad=False)
                host = get_accelerator().pin_memory(host) if pin_memory else host
                tensor.data = host.copy_(tensor.detach(), non_blocking=non_blocking)
            self._wrapper.offloaded_states.add(kind)
        self._optimizer.release_workspace()
        original(include, device or OffloadDeviceEnum.cpu, pin_memory, non_blocking)

    def reload(self, original: Callable, non_blocking: bool = False) -> None:
        """``reload_states``."""
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().current_device_name()
        hosts = []  # alive until the copies are done
        for kind, tensors in self._movable().items():
            if kind in self._wrapper.offloaded_states:
                for tensor in tensors:
                    hosts.append(tensor.data)
                    tensor.data = tensor.data.to(device, non_blocking=non_blocking)
                self._wrapper.offloaded_states.remove(kind)
        original(non_blocking)
        if non_blocking:
            get_accelerator().synchronize()

    def _movable(self) -> dict[Any, list[Tensor]]:
        """Masters and optimizer state, by DeepSpeed's kinds."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return {
            OffloadStateTypeEnum.hp_params: list(self._wrapper.fp32_partitioned_groups_flat),
            OffloadStateTypeEnum.optim_states: [value for value in states if torch.is_tensor(value) and value.ndim],
        }
