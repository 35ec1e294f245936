# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and parameters on NVMe at stage 3: checks of the settings, and access to swapped tensors.

DeepSpeed swaps each tensor of a sub-group to a file of its own. For the sub-group's step it reads the files into pinned
buffers, which become the tensors' storage. Between steps the tensors are empty; they must stay the same objects.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import deepspeed.comm as comm
import torch
from torch import Tensor

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.refusals import offload_device
from deepspeed.muon.zero.wrappers.grids import shard_group

#: DeepSpeed swaps tensors of at least this many bytes, or of ``aio.block_size`` if that is larger.
MIN_SWAPPED_BYTES = 2**20
#: Bit of CAP_IPC_LOCK, the Linux capability that allows a process to lock any amount of memory.
CAP_IPC_LOCK_BIT = 14


def swap_threshold(config: Any) -> int:
    """Return the size in bytes of the smallest tensor that DeepSpeed swaps to NVMe. Smaller tensors stay in memory."""
    return max(MIN_SWAPPED_BYTES, int(config.aio_config["block_size"]))


def check_nvme(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Check the settings for offload to NVMe before ZeRO allocates memory; do nothing without such offload.

    Raises:
        UnsupportedError: lists all problems, such as too few buffers, or a folder that cannot be written to.
    """
    config = engine._config
    asked = [name for name in ("offload_optimizer", "offload_param") if offload_device(config, name) == "nvme"]
    if not asked or engine.zero_optimization_stage() != 3:
        return
    sizes = [(group, _sub_group_sizes(engine, group)) for group in optimizer.param_groups]
    problems = [
        *(problem for name in asked for problem in _path_problems(name, getattr(config.zero_config, name).nvme_path)),
        *_library_problems(),
        *(_optimizer_problems(config, sizes) if "offload_optimizer" in asked else ()),
        *(_param_problems(config, sizes, engine.dp_world_size) if "offload_param" in asked else ()),
    ]
    if problems:
        raise UnsupportedError("offload to NVMe cannot work as configured:\n  " + "\n  ".join(problems))


def _elements_per_rank(param: Tensor, ranks: int) -> int:
    return ceil(getattr(param, "ds_numel", param.numel()) / ranks)


Sizes = list[tuple[dict[str, Any], list[int]]]
"""Pairs of a parameter group and the elements that one rank has in each sub-group of it."""


def _sub_group_sizes(engine: Any, group: dict[str, Any]) -> list[int]:
    """Predict how many elements one rank holds of each sub-group into which stage 3 divides a parameter group."""
    limit, ranks = engine._config.zero_config.sub_group_size, comm.get_world_size(shard_group(engine, group))
    parts, sizes, open_size = [_elements_per_rank(p, ranks) for p in group["params"] if p.requires_grad], [], 0
    for part in parts:
        open_size += part
        if open_size >= limit:
            sizes.append(open_size)
            open_size = 0
    return sizes + [open_size] * (open_size > 0)


def _buffers_per_sub_group(group: dict[str, Any], config: Any) -> int:
    """Return how many swap buffers a sub-group needs in its step: for weights, gradient and each swapped state."""
    if not group["use_muon"]:
        return 4
    return 2 if config.zero_config.save_muon_momentum_buffer_in_memory else 3


def buffers_needed(config: Any, sizes: Sizes) -> int:
    """Return the smallest ``offload_optimizer.buffer_count`` with which DeepSpeed's swapper can step every sub-group.

    ``config``: the ``DeepSpeedConfig``. ``sizes``: for each parameter group, how many elements one rank holds of each
    sub-group, such as ``[(group, [1000, 600])]``.
    """
    section = config.zero_config.offload_optimizer
    needs = [
        _buffers_per_sub_group(group, config)
        for group, numels in sizes
        for numel in numels
        if 4 * numel >= swap_threshold(config)
    ]
    # Sub-groups with buffers at the same time: also the next one while it is read, the previous while it is written.
    window = 1 + section.pipeline_read + section.pipeline_write
    return max((sum(needs[at : at + window]) for at in range(len(needs))), default=1)


def _optimizer_problems(config: Any, sizes: Sizes) -> Iterator[str]:
    section, needed = config.zero_config.offload_optimizer, buffers_needed(config, sizes)
    if section.buffer_count < needed:
        window = 1 + section.pipeline_read + section.pipeline_write
        muon = _buffers_per_sub_group({"use_muon": True}, config)
        yield (
            f"zero_optimization.offload_optimizer.buffer_count: got {section.buffer_count}; write {needed} or more. "
            f"A Muon sub-group takes {muon} buffers, an AdamW sub-group 4, and up to {window} sub-groups are in memory "
            "at once"
        )
    largest = max((numel for _, numels in sizes for numel in numels), default=0)
    yield from _lock_problems("offload_optimizer.buffer_count", max(section.buffer_count, needed) * largest * 4)


def _param_problems(config: Any, sizes: Sizes, world_size: int) -> Iterator[str]:
    section, params = config.zero_config.offload_param, [p for group, _ in sizes for p in group["params"]]
    parts = [(_elements_per_rank(p, world_size), p.element_size()) for p in params]
    largest = max((part for part, itemsize in parts if part * itemsize >= swap_threshold(config)), default=0)
    if section.buffer_size < largest:
        yield (
            f"zero_optimization.offload_param.buffer_size: got {section.buffer_size}; write {largest} or more, the "
            "number of elements of the largest parameter that one rank holds"
        )
    itemsize = max((itemsize for _, itemsize in parts), default=4)
    yield from _lock_problems("offload_param.buffer_size", section.buffer_count * section.buffer_size * itemsize)


def _lock_problems(key: str, wanted: int) -> Iterator[str]:
    """Yield an error message if this process may not lock ``wanted`` bytes of memory for DeepSpeed's buffers.

    ``key``: config key of the number or size of these buffers, for the message.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and wanted > limit and not _may_lock():
        yield (
            f"zero_optimization.{key}: the buffers lock {wanted:,} bytes of memory and the limit of this process is "
            f"{limit:,}; raise this limit (ulimit -l unlimited), or write a smaller sub_group_size or buffer_size"
        )


def _may_lock() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return True  # not known: let DeepSpeed try
    capabilities = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(capabilities.split()[1], 16) >> CAP_IPC_LOCK_BIT & 1)


def _path_problems(name: str, path: Any) -> Iterator[str]:
    """Yield an error message if no file can be written with direct I/O in the ``nvme_path`` of the section ``name``."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        probe = Path(path) / f".deepspeed_muon_{os.getpid()}"
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0)))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        yield (
            f"zero_optimization.{name}.nvme_path: no file can be written to {path} with direct I/O ({error.strerror}); "
            "name a folder on a disk that this user can write to"
        )


def _library_problems() -> Iterator[str]:
    """Yield error messages if this DeepSpeed's NVMe swapper is too old, or its extension async_io cannot be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

    # Without this method no buffer can be released, and no tensor can be kept in memory.
    if not hasattr(PipelinedOptimizerSwapper, "release_swap_buffers"):
        yield (
            "zero_optimization: this DeepSpeed cannot offload Muon's states to NVMe; install DeepSpeed 0.19.8 or later"
        )
    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        yield (
            "zero_optimization: DeepSpeed cannot build async_io here; install libaio with its headers (libaio-dev, "
            "libaio-devel), ninja and a C++ compiler"
        )


@contextmanager
def swapped_in(wrapper: Any, index: int) -> Iterator[Tensor]:
    """Load the flat fp32 weights of sub-group ``index`` from NVMe, and yield them.

    When the context ends, write weights and states back. For a sub-group that stays in memory, only yield the weights.
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
def restore(wrapper: Any, optimizer: MuonWithAuxAdam, saved: Mapping[str, Any], load_states: bool) -> None:
    """Load ``saved``, a rank's ZeRO state, into an engine that keeps weights or states on NVMe.

    ``load_states``: whether to load optimizer states, settings of groups and the loss scale too, or only fp32 weights.
    """
    loaded: dict[Tensor, dict[str, Any]] = {}
    if load_states:
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
            setattr(wrapper, name, saved[name])
        loaded = _load_settings(wrapper, optimizer, saved["optimizer_state_dict"])
    for index, flat in each_sub_group(wrapper):
        flat.data.copy_(saved["fp32_flat_groups"][index])
        for name, value in loaded.get(flat, {}).items():
            optimizer.write_state(flat, name, value)


def _load_settings(wrapper: Any, optimizer: MuonWithAuxAdam, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Load the settings of parameter groups; return {flat weights: {state key: saved state}} for the caller to copy."""
    swapped = {flat: optimizer.state[flat] for flat in wrapper.fp32_partitioned_groups_flat}
    wrapper._set_fp32_optimizer_param_groups()
    try:
        optimizer.load_state_dict(saved)
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
    """Replace the wrapper's ``_prepare_sub_group``: call the original, then zero gradients that no backward wrote."""
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
