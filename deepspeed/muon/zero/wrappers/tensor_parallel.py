# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: let Muon orthogonalize a matrix as a whole if tensor parallelism has split it over ranks.

Each rank of a tensor-parallel group has its own parameters, which ZeRO shards over its data-parallel group as usual.
A :class:`Partition` says which ranks store which elements of a parameter group. Here those of Muon groups are extended
to the data-parallel groups of all these ranks; at stage 0, where ZeRO shards nothing, to the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import deepspeed.comm as comm

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.consensus import gathered
from deepspeed.muon.exchange.placed_params import Partition, Shard
from deepspeed.muon.layout import MatrixSpec, Placement
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.grids import Grid, tp_group
from deepspeed.muon.zero.wrappers.stage0 import Stage0

#: Parameter name -> its placement among the data-parallel ranks, for one tensor-parallel rank.
Placements = Mapping[str, Placement]


def whole_over_tp(adapter: Adapter, grid: Grid, partitions: Sequence[Partition]) -> list[Partition]:
    """Return ``partitions``, changed so that Muon orthogonalizes whole matrices where tensor parallelism splits them.

    In the :class:`Partition` of a Muon group, the shards of a parameter on several tensor-parallel ranks become one
    matrix, which the ranks of ``grid`` share. Partitions of AdamW groups and of experts stay as they are. A collective.

    Raises:
        UnsupportedError: a stage-3 sub-group has different parameters on some ranks, or tensor parallelism splits
            experts.
    """
    optimizer = adapter.optimizer
    group = tp_group(adapter.engine)
    # Experts must be whole; their partitions already have the ranks that hold the same experts.
    groups = optimizer.param_groups
    dense = [partition for partition in partitions if not groups[partition.index].get("moe")]
    experts = [partition for partition in partitions if groups[partition.index].get("moe")]
    _refuse_cut_experts(experts)
    mine = [{shard.spec.name: shard.placement for shard in partition.shards} for partition in dense]
    placements_by_tp_rank = gathered(mine, group)
    spec_of = {spec.name: spec for spec in optimizer.specs.values()}
    if not _hold_same_parameters(placements_by_tp_rank, spec_of):
        raise UnsupportedError(
            "deepspeed-muon does not support this engine: with zero_optimization.sub_group_size, ranks of "
            "a tensor-parallel group have different parameters in a sub-group; set a larger sub_group_size"
        )
    if isinstance(adapter, Stage0):
        size = comm.get_world_size(group)
        grid = Grid(group, tuple(range(t, t + 1, size) for t in range(size)))
    whole = {
        partition.tensors[0]: _spanning_grid(grid, partition, placements, spec_of)
        for partition, *placements in zip(dense, *placements_by_tp_rank, strict=True)
        if optimizer.param_groups[partition.index]["use_muon"]
    }
    return [whole.get(partition.tensors[0], partition) for partition in partitions]


def _refuse_cut_experts(experts: Sequence[Partition]) -> None:
    """Raise UnsupportedError if tensor parallelism splits a matrix of an expert in these partitions."""
    specs = [shard.spec for partition in experts for shard in partition.shards]
    if cut := [spec.name for spec in specs if spec.use_muon and spec.sharding]:
        raise UnsupportedError(
            f"deepspeed-muon does not support this engine: tensor parallelism splits {len(cut)} matrices of experts "
            f"(first: {cut[0]}); leave the experts whole, or name them in optimizer.params.muon_exclude"
        )


def _hold_same_parameters(
    placements_by_tp_rank: Sequence[Sequence[Placements]], spec_of: Mapping[str, MatrixSpec]
) -> bool:
    """Return whether all tensor-parallel ranks have the same parameters in each partition, in the same order.

    A rank may lack a parameter of which it holds no element. ``placements_by_tp_rank``: for each tensor-parallel rank,
    a list with {parameter name: which data-parallel rank holds which elements} for each partition.
    """
    if len({len(partitions) for partitions in placements_by_tp_rank}) > 1:
        return False
    for tp_placements in zip(*placements_by_tp_rank, strict=True):
        names = max(tp_placements, key=len)  # of the rank that has the most, in its order
        for t, placement in enumerate(tp_placements):
            empty = {n for n in names if (cut := spec_of[n].sharding) and not cut.size(t)}
            if [n for n in names if n in placement or n not in empty] != list(placement):
                return False
    return True


def _spanning_grid(
    grid: Grid, local: Partition, placements_by_tp_rank: Sequence[Placements], spec_of: Mapping[str, MatrixSpec]
) -> Partition:
    """Return partition ``local`` of this rank, extended so that the matrices that tensor parallelism splits are whole.

    All ranks of ``grid`` share these matrices. ``placements_by_tp_rank``: for each tensor-parallel rank, {parameter
    name: which data-parallel rank holds which elements} in the same partition.
    """
    rank, world_size = comm.get_rank(grid.group), comm.get_world_size(grid.group)
    t = next(t for t, line in enumerate(grid.lines) if rank in line)
    tensors = {shard.spec.name: shard.tensor for shard in local.shards}
    shards, planned = [], []
    for name in max(placements_by_tp_rank, key=len):
        # A rank that holds no part of a parameter may lack it altogether; its placement is then empty.
        tp_placements = tuple(
            replace(placements.get(name, Placement(0, 1, 0)), copies=1, first=line.start, rank_step=line.step)
            for placements, line in zip(placements_by_tp_rank, grid.lines, strict=True)
        )
        shard = Shard(spec_of[name], tensors.get(name, 0), tp_placements[t], tp_placements)
        shards += [shard] if name in tensors else []
        planned.append(shard)
    return Partition(local.index, local.tensors, tuple(shards), grid.group, rank, world_size, tuple(planned))
