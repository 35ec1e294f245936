# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a matrix whose parts are parameters of several ranks is planned as one.

Each rank of a tensor-parallel group has parameters of its own, which its data-parallel group shards as ever. The plan
is made over all these ranks at once; where ZeRO shards nothing, over one tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import deepspeed.comm as comm
from deepspeed.utils import groups

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.consensus import gathered, on_all_ranks

#: Where one rank's parameters lie among its own data-parallel ranks, by name.
Placements = Mapping[str, tuple]


def joined(partitions: list[Partition], optimizer: MuonWithAuxAdam, engine: Any) -> list[Partition]:
    """The partitions; under tensor parallelism those of Muon groups span all ranks of the tensor-parallel group.

    Raises UnsupportedError on all ranks, where they do not have the same parameters in one sub-group.
    """
    if engine.autotp_size() <= 1 or optimizer.config.tp_mode == "shard":
        return partitions
    group = groups.get_tensor_model_parallel_group()
    mine = [{shard.spec.name: astuple(shard.placement) for shard in partition.shards} for partition in partitions]
    everyones = gathered(mine, group)
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    if not _are_alike(everyones, specs):
        raise UnsupportedError(
            "deepspeed-muon does not support this engine: zero_optimization.sub_group_size cuts the ranks of a "
            "tensor-parallel group at different parameters; write a larger one"
        )
    is_sharded = engine.zero_optimization()
    if not is_sharded:
        optimizer.is_finite = on_all_ranks(optimizer.is_finite, group)
    over = comm.get_world_group() if is_sharded else group
    return [
        _over(over, held, placements, specs) if optimizer.param_groups[held.index]["use_muon"] else held
        for held, *placements in zip(partitions, *everyones, strict=True)
    ]


def matrix_share(optimizer: MuonWithAuxAdam) -> int:
    """The index of this rank's share; ranks of one share have the same matrices.

    A share is a pipeline stage or, under ``tp_mode: shard``, a tensor-parallel rank.
    """
    cut = optimizer.config.tp_mode == "shard" and groups._TENSOR_MODEL_PARALLEL_GROUP is not None
    return groups.get_tensor_model_parallel_rank() if cut else optimizer.stage


def _are_alike(everyones: Sequence[Sequence[Placements]], specs: Mapping[str, MatrixSpec]) -> bool:
    """Whether the ranks have the same parameters in each partition, but for those of which they hold nothing."""
    if len({len(partitions) for partitions in everyones}) > 1:
        return False
    for tp_placements in zip(*everyones, strict=True):
        names = max(tp_placements, key=len)  # of the rank that has the most, in its order
        for t, placement in enumerate(tp_placements):
            empty = {n for n in names if (cut := specs[n].sharding) and not cut.size(t)}
            if [n for n in names if n in placement or n not in empty] != list(placement):
                return False
    return True


def _over(group: Any, mine: Partition, everyones: Sequence[Placements], specs: Mapping[str, MatrixSpec]) -> Partition:
    """The partition over ``group``, in which the ranks of a tensor-parallel group are consecutive."""
    size, rank, world_size = len(everyones), comm.get_rank(group), comm.get_world_size(group)
    tensors = {shard.spec.name: shard.tensor for shard in mine.shards}
    shards, planned = [], []
    for name in max(everyones, key=len):
        # A rank that holds nothing of a parameter may not have it.
        alone = (replace(Placement(*placement.get(name, (0, 1, 0))), copies=1) for placement in everyones)
        tp_placements = tuple(replace(placement, first=t, step=size) for t, placement in enumerate(alone))
        shard = Shard(specs[name], tensors.get(name, 0), tp_placements[rank % size], tp_placements)
        shards += [shard] if name in tensors else []
        planned.append(shard)
    return Partition(mine.index, mine.tensors, tuple(shards), group, rank, world_size, tuple(planned))
