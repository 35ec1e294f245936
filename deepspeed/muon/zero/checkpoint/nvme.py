# SPDX-License-Identifier: Apache-2.0
"""Access to optimizer states and parameters on NVMe at stage 3.

DeepSpeed swaps each tensor of a sub-group to a file of its own. For the sub-group's step it reads the files into pinned
buffers, which become the tensors' storage. Between steps the tensors have no elements. They must stay the same objects,
because DeepSpeed's swapper refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.optimizer import MuonWithAuxAdam


@contextmanager
def swapped_in(wrapper: Any, index: int) -> Iterator[Tensor]:
    """Load the weights and optimizer states of sub-group ``index`` from NVMe; yield its flat fp32 weights.

    When the ``with`` block ends, write weights and states back. For a sub-group that stays in memory, only yield the
    weights.
    """
    flat, is_swapped = wrapper.fp32_partitioned_groups_flat[index], wrapper._swappable_optimizer_subgroup(index)
    if is_swapped:
        wrapper.optimizer_swapper.swap_in_optimizer_state(parameter=flat, async_parameter=None)
    yield flat
    if is_swapped:
        wrapper.optimizer_swapper.swap_out_optimizer_state(parameter=flat, async_swap=False)
        flat.grad = None


def mapped_if_swapped(wrapper: Any, flat: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor to save in a checkpoint: ``tensor`` or, if it is swapped out, a 1-D fp32 memory map of its file.

    Args:
        wrapper: DeepSpeed's stage-3 optimizer.
        flat: the flat fp32 weights of a sub-group.
        tensor: these weights, or an optimizer state of the same sub-group.
    """
    info = wrapper.optimizer_swapper.swap_params_info.get(flat.ds_id)  # type: ignore[attr-defined]
    paths = [entry.swap_path for entry in info.tensors if entry.compute_tensor is tensor] if info else []
    if not paths or tensor.numel():
        return tensor
    mapped = torch.from_file(paths[0], shared=False, size=info.numel(), dtype=torch.float32)
    mapped.ds_id = tensor.ds_id  # type: ignore[attr-defined]
    return mapped


def each_sub_group(wrapper: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, flat fp32 weights) of each sub-group in turn, loaded from NVMe if necessary.

    The caller may change the weights. The change is copied to the model's parameters and written back to NVMe.
    """
    wrapper._partition_all_parameters()
    for index in range(len(wrapper.fp32_partitioned_groups_flat)):
        with swapped_in(wrapper, index) as flat:
            yield index, flat
            wrapper._reassign_or_swap_out_partitioned_parameters(index)


@torch.no_grad()
def restore(wrapper: Any, optimizer: MuonWithAuxAdam, zero_state: Mapping[str, Any], load_states: bool) -> None:
    """Load ``zero_state``, this rank's saved ZeRO state, into an engine that keeps weights or states on NVMe.

    ``load_states``: whether to load optimizer states, settings of groups and the loss scale too, or only fp32 weights.
    """
    states_of: dict[Tensor, dict[str, Any]] = {}
    if load_states:
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
            setattr(wrapper, name, zero_state[name])
        states_of = _load_settings(wrapper, optimizer, zero_state["optimizer_state_dict"])
    for index, flat in each_sub_group(wrapper):
        flat.data.copy_(zero_state["fp32_flat_groups"][index])
        for name, value in states_of.get(flat, {}).items():
            optimizer.write_state(flat, name, value)


def _load_settings(
    wrapper: Any, optimizer: MuonWithAuxAdam, state_dict: dict[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Load the settings of parameter groups from ``state_dict``, the saved state dict of the optimizer.

    Do not load its states; return {flat weights of a sub-group: {state key: saved state}}, for the caller to copy.
    """
    swapped = {flat: optimizer.state[flat] for flat in wrapper.fp32_partitioned_groups_flat}
    wrapper._set_fp32_optimizer_param_groups()
    try:
        optimizer.load_state_dict(state_dict)
        return {flat: optimizer.state[flat] for flat in swapped}
    finally:
        wrapper._clear_fp32_optimizer_param_groups()
        optimizer.state.update(swapped)


@torch.no_grad()
def refresh_fp32_weights(wrapper: Any) -> None:
    """Copy the model's 16-bit weights to the optimizer's fp32 weights, also to those on NVMe."""
    for index, bit16 in enumerate(wrapper.fp16_partitioned_groups_flat):
        with swapped_in(wrapper, index) as flat:
            if bit16 is None:
                bit16 = torch.empty_like(flat)
                wrapper._swap_in_sub_group_to_flat_buffer(bit16, index)
            flat.data.copy_(bit16.data)


def swap_out_and_release(wrapper: Any, original: Callable, parameter: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the swapper's ``swap_out_optimizer_state``: call the original, then empty the tensors that it wrote."""
    original(parameter, *args, **kwargs)
    # After pipelined writes DeepSpeed leaves the tensors pointing to buffers, which the next sub-group overwrites. A
    # checkpoint would then save wrong values.
    wrapper.optimizer_swapper.swap_params_info[parameter.ds_id].release_memory()


def forget_gradients(wrapper: Any) -> None:
    """Discard the gradients that were swapped to NVMe, so that the next step does not read them again."""
    for info in wrapper.optimizer_swapper.swap_params_info.values():
        info.swapped_gradients.clear()
        info.unswapped_gradients.clear()


def prepare_with_zero_filled_grads(
    wrapper: Any, original: Callable, sub_group_id: int, *args: Any, **kwargs: Any
) -> Any:
    """Replace the wrapper's ``_prepare_sub_group``: call the original, then zero gradients that no backward wrote.

    The original reads gradients from NVMe into a buffer, and leaves old values where there is none to read.
    """
    result = original(sub_group_id, *args, **kwargs)
    if wrapper._swappable_optimizer_subgroup(sub_group_id):
        flat = wrapper.fp32_partitioned_groups_flat[sub_group_id]
        if flat.grad is None:
            flat.grad = torch.zeros_like(flat)
        # DeepSpeed reads gradients into a buffer that holds those of other parameters.
        info, end = wrapper.optimizer_swapper.swap_params_info[flat.ds_id], 0
        spans = [(at, part.length) for at, part in info.swapped_gradients.items()]
        spans += [(at, part.numel()) for at, part in info.unswapped_gradients.items()]
        for start, length in sorted(spans):
            flat.grad[end:start].zero_()
            end = start + length
        flat.grad[end:].zero_()
    return result
