# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over ranks: DeepSpeed's MoE layers and AutoEP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed.comm as comm

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.param_groups import expert_group


def shard_group(engine: Any, group: Mapping[str, Any]) -> Any:
    """Return the process group over which ZeRO shards a parameter group, or whose ranks all hold it.

    It has all data-parallel ranks, except for experts: those with the same ones.
    """
    return engine.expert_data_parallel_group[group["name"]] if group.get("moe") else engine.seq_data_parallel_group


def with_names(params: Iterable[Any]) -> list[Any]:
    """Return parameter groups with a name each, which DeepSpeed needs to separate those of experts."""
    return [{"name": f"group{i}", **item} if isinstance(item, dict) else item for i, item in enumerate(params)]


def with_all_experts(wrapper: Any, norm: Callable, *args: Any) -> Any:
    """Return the norm of a group's gradients at stages 1 and 2; ``args`` end in its parameters.

    Under tensor parallelism DeepSpeed treats experts as replicas, which only the first rank counts, but each rank of
    the group has its own part of them.
    """
    rank = wrapper.model_parallel_rank
    try:
        wrapper.model_parallel_rank = 0 if any(map(expert_group, args[-1])) else rank
        return norm(*args)
    finally:
        wrapper.model_parallel_rank = rank


def expert_counts(engine: Any, optimizer: MuonWithAuxAdam) -> list[str]:
    """Return for the log how many matrices are experts, by the number of ranks that share them."""
    counts: Counter[int] = Counter()
    for partition in optimizer.partitions:
        group = optimizer.param_groups[partition.index]
        if group.get("moe"):
            counts[comm.get_world_size(shard_group(engine, group))] += len(partition.blocks)
    return [f"{count} of them are experts that {ranks} ranks have" for ranks, count in counts.items()]


def refuse_replaced(optimizer: MuonWithAuxAdam) -> None:
    """Raise UnsupportedError if DeepSpeed has replaced parameters of an optimizer that the script has built."""
    if any(param not in optimizer.specs for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedError(
            "DeepSpeed has replaced parameters (AutoEP, AutoTP) since the optimizer was built, which does not know the "
            'new ones; set "type": "Muon" in ds_config.json, or pass optimizer=lambda params: MuonWithAuxAdam(params, '
            "model=model, ...) to deepspeed.initialize"
        )
