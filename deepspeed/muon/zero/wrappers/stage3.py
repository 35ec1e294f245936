# SPDX-License-Identifier: Apache-2.0
"""Stage 3: each parameter is cut over all ranks; a sub-group's parts lie one after the other.

The last ranks' parts may end in padding, which holds anything, even NaN: it never travels.
"""

from __future__ import annotations

from typing import Any

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan.placement import Placement, Shard


def partitions(wrapper: Any, optimizer: MuonWithAuxAdam) -> list[Partition]:
    """One partition per sub-group."""
    from deepspeed import comm  # type: ignore[attr-defined]

    result = []
    for index, (params, group) in enumerate(zip(wrapper.fp16_groups, wrapper.sub_group_process_groups, strict=True)):
        shards, base = [], 0
        for param in params:
            part = param.partition_numel()
            shards.append(Shard(optimizer.specs[param], 0, Placement(0, part, base)))
            base += part
        tensor = wrapper.fp32_partitioned_groups_flat[index]
        rank, world_size = comm.get_rank(group=group), comm.get_world_size(group=group)
        of_group = wrapper.sub_group_to_group_id[index]
        result.append(Partition(of_group, (tensor,), tuple(shards), group, rank, world_size))
    return result
