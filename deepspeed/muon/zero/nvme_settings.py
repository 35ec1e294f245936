# SPDX-License-Identifier: Apache-2.0
"""Check the settings for offload to NVMe, before ZeRO allocates memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.refusals import offload_device
from deepspeed.muon.zero.wrappers.grids import shard_group
from deepspeed.muon.zero.wrappers.stage3 import part_size, sub_groups

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
    return part_size(getattr(param, "ds_numel", param.numel()), ranks)


Sizes = list[tuple[dict[str, Any], list[int]]]
"""Pairs of a parameter group and the elements that one rank has in each sub-group of it."""


def _sub_group_sizes(engine: Any, group: dict[str, Any]) -> list[int]:
    """Predict how many elements one rank holds of each sub-group into which stage 3 divides a parameter group."""
    limit, ranks = engine._config.zero_config.sub_group_size, comm.get_world_size(shard_group(engine, group))
    parts = [_elements_per_rank(param, ranks) for param in group["params"] if param.requires_grad]
    return [sum(parts[index] for index in indices) for indices in sub_groups(parts, limit)]


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
