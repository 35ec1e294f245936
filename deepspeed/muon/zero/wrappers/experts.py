# SPDX-License-Identifier: Apache-2.0
"""Support for experts that are spread over ranks by DeepSpeed's MoE layers or AutoEP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed.comm as comm

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam


def shard_group(engine: Any, group: Mapping[str, Any]) -> Any:
    """Return the process group over which ZeRO shards a parameter group; at stage 0 its ranks hold the group whole.

    It consists of all data-parallel ranks or, for experts, of the ranks that hold the same experts.
    """
    return engine.expert_data_parallel_group[group["name"]] if group.get("moe") else engine.seq_data_parallel_group


def with_names(params: Iterable[Any]) -> list[Any]:
    """Name the unnamed groups in ``params`` by their index: DeepSpeed needs names to separate the groups of experts."""
    return [{"name": f"group{i}", **item} if isinstance(item, dict) else item for i, item in enumerate(params)]


def expert_counts(engine: Any, optimizer: MuonWithAuxAdam) -> list[str]:
    """Return texts for the log: how many matrices are experts, one text for each number of ranks that share them."""
    counts: Counter[int] = Counter()
    for partition in optimizer.partitions:
        group = optimizer.param_groups[partition.index]
        if group.get("moe"):
            counts[comm.get_world_size(shard_group(engine, group))] += len(partition.blocks)
    return [f"{count} of them are experts shared by {ranks} ranks" for ranks, count in counts.items()]


def refuse_replaced(optimizer: MuonWithAuxAdam) -> None:
    """Raise UnsupportedError if DeepSpeed replaced parameters after the script built the optimizer."""
    if any(param not in optimizer.specs for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedError(
            "DeepSpeed replaced parameters (AutoEP, AutoTP) after the optimizer was built, which does not know the new "
            'ones; set "type": "Muon" in ds_config.json, or pass optimizer=lambda params: MuonWithAuxAdam(params, '
            "model=model, ...) to deepspeed.initialize"
        )
