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
    """Return the process group over which ZeRO shards a parameter group.

    It consists of all data-parallel ranks or, for experts, of the ranks that hold the same experts. At stage 0, each of
    these ranks holds the whole parameter group.
    """
    return engine.expert_data_parallel_group[group["name"]] if group.get("moe") else engine.seq_data_parallel_group


def with_group_names(params: Iterable[Any]) -> list[Any]:
    """Return ``params`` with a name in each parameter group that has none: ``group0`` in the first, and so on.

    DeepSpeed needs these names to put experts into parameter groups of their own.
    """
    return [{"name": f"group{i}", **item} if isinstance(item, dict) else item for i, item in enumerate(params)]


def expert_counts(engine: Any, optimizer: MuonWithAuxAdam) -> list[str]:
    """Return how many of Muon's matrices are experts, as texts such as ``"8 of them are experts shared by 2 ranks"``.

    There is one text for each number of ranks. The list is empty for a model without experts.
    """
    counts: Counter[int] = Counter()
    for partition in optimizer.partitions:
        group = optimizer.param_groups[partition.index]
        if group.get("moe"):
            counts[comm.get_world_size(shard_group(engine, group))] += len(partition.blocks)
    return [f"{count} of them are experts shared by {ranks} ranks" for ranks, count in counts.items()]


def refuse_replaced_parameters(optimizer: MuonWithAuxAdam) -> None:
    """Raise UnsupportedError if DeepSpeed replaced parameters of the model after the script built the optimizer."""
    if any(param not in optimizer.specs for group in optimizer.param_groups for param in group["params"]):
        raise UnsupportedError(
            "DeepSpeed replaced parameters (AutoEP, AutoTP) after the script built the optimizer, which would not "
            'update the new ones; set "type": "Muon" in ds_config.json, or pass '
            "optimizer=lambda params: MuonWithAuxAdam(params, model=model, ...) to deepspeed.initialize"
        )
