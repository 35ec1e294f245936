# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what: tensor-parallel groups, grids of tensor and data parallelism, and groups of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import deepspeed.comm as comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import bwc

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.consensus import gathered, own_group
from deepspeed.muon.layout import TP_RANK
from deepspeed.muon.optimizer import MuonWithAuxAdam


def tp_rank(engine: Any) -> tuple[int, int]:
    """Return (this rank's index in its tensor-parallel group, size of that group); without such a group ``(0, 1)``."""
    mpu = engine.mpu
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):  # Ulysses calls its ranks model-parallel, too
        return 0, 1
    return bwc.bwc_tensor_model_parallel_rank(mpu), bwc.bwc_tensor_model_parallel_world_size(mpu)


def note_tp_rank(engine: Any) -> None:
    """Store (rank, size) from :func:`tp_rank` as attribute :data:`TP_RANK` of each parameter of the engine's model.

    Megatron's own attributes of a split parameter lack the size of the tensor-parallel group.
    """
    index_and_size = tp_rank(engine)  # Megatron's attributes of a sharded parameter lack the size of the group
    for param in engine.module.parameters():
        setattr(param, TP_RANK, index_and_size)


def tp_group(engine: Any) -> Any:
    """Return the process group for tensor parallelism. The engine must have tensor parallelism."""
    return bwc.bwc_tensor_model_parallel_group(engine.mpu)


class Grid(NamedTuple):
    """The ranks that train the same layers under tensor parallelism: tensor-parallel times data-parallel ranks.

    Attributes:
        group: the process group of all these ranks.
        lines: for each rank of a tensor-parallel group, the ranks over which its parameters are sharded, as indices
            within ``group``. For 2 times 2 ranks, for example, ``(range(0, 4, 2), range(1, 4, 2))``.
    """

    group: Any
    lines: tuple[range, ...]


def grid_of(engine: Any) -> Grid | None:
    """Return the :class:`Grid` of this rank; ``None`` without tensor parallelism. A collective.

    Raise UnsupportedError on all ranks if the ranks of a data-parallel group are not evenly spaced within their grid.
    """
    _, size = tp_rank(engine)
    if size == 1:
        return None
    groups = engine.seq_data_parallel_group, tp_group(engine)
    everyones = gathered([torch.distributed.get_process_group_ranks(group) for group in groups])
    dp_ranks, tp_ranks = zip(*everyones, strict=True)  # for each rank
    positions = _positions(dp_ranks, tp_ranks)
    lines = _lines(dp_ranks, tp_ranks, positions)
    if lines is None:
        raise UnsupportedError(
            "deepspeed-muon does not support this engine: it needs an mpu whose data-parallel groups consist of evenly "
            f"spaced ranks, such as 0, 2, 4; this mpu's groups are {sorted(set(map(tuple, dp_ranks)))}"
        )
    row = tp_ranks[torch.distributed.get_rank()]
    group = own_group(map(list, positions.values()), torch.device(get_accelerator().current_device_name()))
    return Grid(group, tuple(lines[other] for other in row))


Ranks = Sequence[Sequence[int]]
"""For each rank, the members of its data-parallel group, or of its tensor-parallel group."""


def _positions(dp_ranks: Ranks, tp_ranks: Ranks) -> dict[tuple[int, ...], dict[int, int]]:
    """Return {global ranks of a tensor-parallel group: {global rank in its :class:`Grid`: rank in the grid's group}}.

    ``dp_ranks``, ``tp_ranks``: for each rank, the members of its data-parallel group, and of its tensor-parallel group.
    """
    grids = {row: sorted(chain.from_iterable(dp_ranks[other] for other in row)) for row in map(tuple, tp_ranks)}
    return {row: {rank: at for at, rank in enumerate(members)} for row, members in grids.items()}


def _lines(
    dp_ranks: Ranks, tp_ranks: Ranks, positions: Mapping[tuple[int, ...], Mapping[int, int]]
) -> list[range] | None:
    """Return for each rank its data-parallel group as indices in its :class:`Grid`, such as ``range(0, 4, 2)``.

    Return ``None`` if the ranks of any data-parallel group are not evenly spaced. ``dp_ranks``, ``tp_ranks``: for each
    rank, the members of its data-parallel group, and of its tensor-parallel group. ``positions``: from
    :func:`_positions`.
    """
    lines = []
    for line, row in zip(dp_ranks, tp_ranks, strict=True):
        of_grid = positions[tuple(row)]
        first, *others = places = [of_grid[rank] for rank in line]
        step = others[0] - first if others else len(of_grid)
        lines.append(range(first, places[-1] + 1, step))
        if list(lines[-1]) != places:
            return None
    return lines


def stage_number(engine: Any, optimizer: MuonWithAuxAdam) -> int:
    """Return the number of this rank's part of the model. Ranks with equal numbers have the same Muon matrices.

    The part is a pipeline stage or, under ``tp_mode: shard``, one tensor-parallel rank's shards of a pipeline stage.
    """
    rank, size = tp_rank(engine) if optimizer.config.tp_mode == "shard" else (0, 1)
    return optimizer.stage * size + rank


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

    There is one text for each number of ranks that share an expert. The list is empty for a model without experts.
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
