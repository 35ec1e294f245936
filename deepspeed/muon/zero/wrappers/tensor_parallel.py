# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a matrix whose parts are parameters of several ranks is planned as one.

Each rank of a tensor-parallel group has parameters of its own, which its data-parallel group shards as ever. The plan
is made over all these ranks at once; where ZeRO shards nothing, over one tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import deepspeed.comm as comm

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.consensus import gathered
from deepspeed.muon.zero.tp_ranks import Grid, tp_group
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.stage0 import Stage0

#: Where one rank's parameters lie among its own data-parallel ranks, by name.
Placements = Mapping[str, Placement]


def joined(adapter: Adapter, grid: Grid | None) -> list[Partition]:
    """Return the partitions; under tensor parallelism those of Muon groups span all ranks of its group.

    Raises UnsupportedError on all ranks, where they do not have the same parameters in one sub-group.
    """
    optimizer, partitions = adapter.optimizer, adapter.partitions()
    if grid is None or optimizer.config.tp_mode == "shard":
        return partitions
    group = tp_group(adapter.engine)
    # Experts are not cut; the ranks that have the same ones share them among themselves.
    groups = optimizer.param_groups
    dense = [partition for partition in partitions if not groups[partition.index].get("moe")]
    experts = [partition for partition in partitions if groups[partition.index].get("moe")]
    _refuse_cut_experts(experts)
    mine = [{shard.spec.name: shard.placement for shard in partition.shards} for partition in dense]
    everyones = gathered(mine, group)
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    if not _are_alike(everyones, specs):
        raise UnsupportedError(
            "deepspeed-muon does not support this engine: zero_optimization.sub_group_size cuts the ranks of a "
            "tensor-parallel group at different parameters; write a larger one"
        )
    if isinstance(adapter, Stage0):
        size = comm.get_world_size(group)
        grid = Grid(group, tuple(range(t, t + 1, size) for t in range(size)))
    whole = {
        partition.tensors[0]: _over(grid, partition, placements, specs)
        for partition, *placements in zip(dense, *everyones, strict=True)
        if optimizer.param_groups[partition.index]["use_muon"]
    }
    return [whole.get(partition.tensors[0], partition) for partition in partitions]


def _refuse_cut_experts(experts: Sequence[Partition]) -> None:
    """Raise UnsupportedError for experts whose matrices tensor parallelism cut."""
    specs = [shard.spec for partition in experts for shard in partition.shards]
    if cut := [spec.name for spec in specs if spec.use_muon and spec.sharding]:
        raise UnsupportedError(
            f"deepspeed-muon does not support this engine: tensor parallelism cuts {len(cut)} matrices of experts, "
            f"first {cut[0]}; leave the experts whole, or name them in optimizer.params.muon_exclude"
        )


def _are_alike(everyones: Sequence[Sequence[Placements]], specs: Mapping[str, MatrixSpec]) -> bool:
    """Return whether the ranks have the same parameters in each partition, except those without a part on a rank."""
    if len({len(partitions) for partitions in everyones}) > 1:
        return False
    for tp_placements in zip(*everyones, strict=True):
        names = max(tp_placements, key=len)  # of the rank that has the most, in its order
        for t, placement in enumerate(tp_placements):
            empty = {n for n in names if (cut := specs[n].sharding) and not cut.size(t)}
            if [n for n in names if n in placement or n not in empty] != list(placement):
                return False
    return True


def _over(grid: Grid, mine: Partition, everyones: Sequence[Placements], specs: Mapping[str, MatrixSpec]) -> Partition:
    rank, world_size = comm.get_rank(grid.group), comm.get_world_size(grid.group)
    t = next(t for t, line in enumerate(grid.lines) if rank in line)
    tensors = {shard.spec.name: shard.tensor for shard in mine.shards}
    shards, planned = [], []
    for name in max(everyones, key=len):
        # A rank that holds nothing of a parameter may not have it.
        tp_placements = tuple(
            replace(placements.get(name, Placement(0, 1, 0)), copies=1, first=line.start, step=line.step)
            for placements, line in zip(everyones, grid.lines, strict=True)
        )
        shard = Shard(specs[name], tensors.get(name, 0), tp_placements[t], tp_placements)
        shards += [shard] if name in tensors else []
        planned.append(shard)
    return Partition(mine.index, mine.tensors, tuple(shards), grid.group, rank, world_size, tuple(planned))
