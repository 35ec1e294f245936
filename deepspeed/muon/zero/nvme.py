# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and parameters on NVMe, stage 3: what DeepSpeed's swapper needs, checked before it allocates.

A sub-group whose partition has at least :func:`threshold` bytes lives in one file per tensor. For its step DeepSpeed
reads the files into pinned buffers, which become the storage of weights and states, and writes them back afterwards.
Between steps these tensors are empty; they must stay the same objects, because DeepSpeed has registered them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
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
from deepspeed.muon.zero.wrappers.experts import shard_group

#: DeepSpeed swaps tensors of at least this many bytes, or of ``aio.block_size`` if that is larger.
MIN_SWAPPED_BYTES = 2**20
#: Bit of CAP_IPC_LOCK, the Linux capability that allows a process to lock any amount of memory.
CAP_IPC_LOCK_BIT = 14


def threshold(config: Any) -> int:
    """Return the smallest size in bytes of a tensor that DeepSpeed swaps."""
    return max(MIN_SWAPPED_BYTES, int(config.aio_config["block_size"]))


def check_nvme(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Refuse settings of NVMe, before ZeRO allocates, that would fail later with an unhelpful message.

    Raises UnsupportedError that lists all problems: too few or too small buffers, an unusable folder, a missing
    library, a limit of locked memory that is too low.
    """
    config = engine._config
    asked = [name for name in ("offload_optimizer", "offload_param") if offload_device(config, name) == "nvme"]
    if not asked or engine.zero_optimization_stage() != 3:
        return
    sizes = [(group, _sub_groups(engine, group)) for group in optimizer.param_groups]
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


def _sub_groups(engine: Any, group: dict[str, Any]) -> list[int]:
    """Return how many elements a rank will hold of each sub-group into which stage 3 will divide a parameter group."""
    limit, ranks = engine._config.zero_config.sub_group_size, comm.get_world_size(shard_group(engine, group))
    parts, sizes, open_size = [_elements_per_rank(p, ranks) for p in group["params"] if p.requires_grad], [], 0
    for part in parts:
        open_size += part
        if open_size >= limit:
            sizes.append(open_size)
            open_size = 0
    return sizes + [open_size] * (open_size > 0)


def _buffers_of(group: dict[str, Any], config: Any) -> int:
    """Return how many buffers each sub-group of a group needs in its step: weights, gradient and swapped states."""
    if not group["use_muon"]:
        return 4
    return 2 if config.zero_config.save_muon_momentum_buffer_in_memory else 3


def buffers_needed(config: Any, sizes: Sizes) -> int:
    """Return the smallest ``offload_optimizer.buffer_count`` with which DeepSpeed's swapper can step every sub-group.

    With ``pipeline_read`` or ``pipeline_write`` the next or the previous sub-group holds buffers, too. ``sizes``: see
    :data:`Sizes`.
    """
    section = config.zero_config.offload_optimizer
    needs = [
        _buffers_of(group, config) for group, numels in sizes for numel in numels if 4 * numel >= threshold(config)
    ]
    window = 1 + section.pipeline_read + section.pipeline_write
    return max((sum(needs[at : at + window]) for at in range(len(needs))), default=1)


def _optimizer_problems(config: Any, sizes: Sizes) -> Iterator[str]:
    section, needed = config.zero_config.offload_optimizer, buffers_needed(config, sizes)
    if section.buffer_count < needed:
        window = 1 + section.pipeline_read + section.pipeline_write
        muon = _buffers_of({"use_muon": True}, config)
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
    largest = max((part for part, itemsize in parts if part * itemsize >= threshold(config)), default=0)
    if section.buffer_size < largest:
        yield (
            f"zero_optimization.offload_param.buffer_size: got {section.buffer_size}; write {largest} or more, the "
            "elements of the largest parameter that one rank holds"
        )
    itemsize = max((itemsize for _, itemsize in parts), default=4)
    yield from _lock_problems("offload_param.buffer_size", section.buffer_count * section.buffer_size * itemsize)


def _lock_problems(key: str, wanted: int) -> Iterator[str]:
    """Yield a message if this process may not lock the ``wanted`` bytes of DeepSpeed's buffers, which ``key`` sets."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and wanted > limit and not _may_lock():
        yield (
            f"zero_optimization.{key}: the buffers lock {wanted:,} bytes of memory and the limit of this process is "
            f"{limit:,}; raise it (ulimit -l unlimited), or write a smaller sub_group_size or buffer_size"
        )


def _may_lock() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return True  # not known: let DeepSpeed try
    capabilities = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(capabilities.split()[1], 16) >> CAP_IPC_LOCK_BIT & 1)


def _path_problems(name: str, path: Any) -> Iterator[str]:
    """Yield a message if no file can be written in ``path`` with direct I/O, which DeepSpeed uses."""
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
    """Yield messages if DeepSpeed's swapper is too old or its extension async_io cannot be built.

    Before 0.19.8 the pipelined swapper could not give buffers back, and no tensor could be kept in memory. DeepSpeed
    builds async_io from libaio's headers at first use, unless it was installed with it.
    """
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

    if not hasattr(PipelinedOptimizerSwapper, "release_swap_buffers"):
        yield "zero_optimization: this DeepSpeed's swapper is incomplete; install 0.19.8 or later to offload to NVMe"
    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        yield (
            "zero_optimization: DeepSpeed cannot build async_io here; install libaio with its headers (libaio-dev, "
            "libaio-devel), ninja and a C++ compiler"
        )


@contextmanager
def swapped_in(wrapper: Any, index: int) -> Iterator[Tensor]:
    """Load the flat fp32 weights of sub-group ``index`` from NVMe, and write changes back when the context ends.

    A sub-group that is always in memory is neither read nor written.
    """
    flat, is_swapped = wrapper.fp32_partitioned_groups_flat[index], wrapper._swappable_optimizer_subgroup(index)
    if is_swapped:
        wrapper.optimizer_swapper.swap_in_optimizer_state(parameter=flat, async_parameter=None)
    yield flat
    if is_swapped:
        wrapper.optimizer_swapper.swap_out_optimizer_state(parameter=flat, async_swap=False)
        flat.grad = None


def as_mapped(wrapper: Any, flat: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in the form that a checkpoint saves: the tensor itself or, while swapped out, its mapped file.

    ``tensor`` is ``flat``, the weights of a sub-group, or one of its states.
    """
    info = wrapper.optimizer_swapper.swap_params_info.get(flat.ds_id)  # type: ignore[attr-defined]
    paths = [entry.swap_path for entry in info.tensors if entry.compute_tensor is tensor] if info else []
    if not paths or tensor.numel():
        return tensor
    mapped = torch.from_file(paths[0], shared=False, size=info.numel(), dtype=torch.float32)
    mapped.ds_id = tensor.ds_id  # type: ignore[attr-defined]
    return mapped


def saved_files(engine: Any, folder: Path) -> Path:
    """Return the folder, inside the checkpoint ``folder``, in which older versions saved this rank's swap files."""
    from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return folder / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"


def each_sub_group(wrapper: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, flat fp32 weights) of each sub-group, loaded one by one; changes also reach the model's weights."""
    wrapper._partition_all_parameters()
    for index in range(len(wrapper.fp32_partitioned_groups_flat)):
        with swapped_in(wrapper, index) as flat:
            yield index, flat
            wrapper._reassign_or_swap_out_partitioned_parameters(index)


def swap_out_and_release(wrapper: Any, original: Callable, parameter: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the swapper's ``swap_out_optimizer_state``: call it, then empty the tensors that it wrote.

    With pipelined writes DeepSpeed leaves them pointing to the swapper's buffers, and a checkpoint would save what
    another sub-group has left there.
    """
    original(parameter, *args, **kwargs)
    wrapper.optimizer_swapper.swap_params_info[parameter.ds_id].release_memory()


def forget_gradients(wrapper: Any) -> None:
    """Drop the gradients that were swapped out, so that the next step reads only later ones."""
    for info in wrapper.optimizer_swapper.swap_params_info.values():
        info.swapped_gradients.clear()
        info.unswapped_gradients.clear()


def prepare_with_zero_filled_grads(
    wrapper: Any, original: Callable, sub_group_id: int, *args: Any, **kwargs: Any
) -> Any:
    """Replace the wrapper's ``_prepare_sub_group``: call it, then fill missing gradients with zeros.

    DeepSpeed reads gradients into a buffer that it reuses: a parameter without a gradient would train on the values
    that another tensor has left there.
    """
    result = original(sub_group_id, *args, **kwargs)
    if wrapper._swappable_optimizer_subgroup(sub_group_id):
        flat = wrapper.fp32_partitioned_groups_flat[sub_group_id]
        if flat.grad is None:
            flat.grad = torch.zeros_like(flat)
        info, end = wrapper.optimizer_swapper.swap_params_info[flat.ds_id], 0
        spans = [(at, part.length) for at, part in info.swapped_gradients.items()]
        spans += [(at, part.numel()) for at, part in info.unswapped_gradients.items()]
        for start, length in sorted(spans):
            flat.grad[end:start].zero_()
            end = start + length
        flat.grad[end:].zero_()
    return result
