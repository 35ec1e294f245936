# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2, and ``BF16_Optimizer``: each group is one flat tensor, cut into equal partitions.

A matrix may straddle a border. The offsets are those of the order in which the group was flattened,
which ``round_robin_gradients`` changes; stock's ``_hp_mapping`` does not follow it and is not used.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan.placement import Placement, Shard


def partitions(wrapper: Any, optimizer: MuonWithAuxAdam) -> list[Partition]:
    """One partition per group."""
    from deepspeed import comm  # type: ignore[attr-defined]

    result = []
    for index, (params, offsets, flat, tensor) in enumerate(_groups(wrapper)):
        group = wrapper.real_dp_process_group[index]
        world_size = comm.get_world_size(group=group)
        span = flat.numel() // world_size
        shards = [
            Shard(optimizer.specs[param], 0, Placement(offset, span, 0))
            for param, offset in zip(params, offsets, strict=True)
        ]
        result.append(Partition(index, (tensor,), tuple(shards), group, comm.get_rank(group=group), world_size))
    return result


def _groups(wrapper: Any) -> list[tuple[list, list[int], Tensor, Tensor]]:
    """(parameters in flattened order, their offsets, the whole flat group, this rank's fp32 part) per group."""
    if hasattr(wrapper, "bf16_groups"):
        ordered, flats, tensors = wrapper.bf16_groups, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition
    else:
        ordered, flats = wrapper.round_robin_bit16_groups, wrapper.bit16_groups_flat
        tensors = wrapper.single_partition_of_fp32_groups
    offsets = getattr(wrapper, "round_robin_bit16_offsets", None)
    if offsets is None:  # BF16_Optimizer puts parameters one after the other
        offsets = [[0, *accumulate(param.numel() for param in params)][: len(params)] for params in ordered]
    return list(zip(ordered, offsets, flats, tensors, strict=True))
