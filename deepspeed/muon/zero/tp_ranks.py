# SPDX-License-Identifier: Apache-2.0
"""Which ranks hold the parts of one matrix under tensor parallelism: by AutoTP, by a model-parallel unit (mpu) like
Megatron's, or by the "model" axis of a pipeline's topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import bwc

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.groups import gathered, group_of, make_groups
from deepspeed.muon.matrices.tp_sharding import TP_RANK
from deepspeed.muon.optimizer import MuonWithAuxAdam


def tp_rank(engine: Any) -> tuple[int, int]:
    """Return (this rank's number in its tensor-parallel group, size of the group); (0, 1) without one."""
    mpu = engine.mpu
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):  # Ulysses calls its ranks model-parallel, too
        return 0, 1
    return bwc.bwc_tensor_model_parallel_rank(mpu), bwc.bwc_tensor_model_parallel_world_size(mpu)


def note_tp_rank(engine: Any) -> None:
    """Set (rank, size) of the tensor-parallel group on all parameters, because Megatron's marks lack the size."""
    found = tp_rank(engine)
    for param in engine.module.parameters():
        setattr(param, TP_RANK, found)


def tp_group(engine: Any) -> Any:
    """Return the tensor-parallel group of an engine that has one."""
    return bwc.bwc_tensor_model_parallel_group(engine.mpu)


class Grid(NamedTuple):
    """All ranks that train the same layers: a tensor-parallel group times a data-parallel group.

    ``group``: the process group of all these ranks. ``lines``: for each tensor-parallel rank, the ranks within
    ``group`` that share its parameters; for 2 x 2 ranks, for example, ``(range(0, 4, 2), range(1, 4, 2))``.
    """

    group: Any
    lines: tuple[range, ...]


def grid_of(engine: Any) -> Grid | None:
    """Return the grid to which this rank belongs; ``None`` without tensor parallelism. A collective.

    Raises UnsupportedError on all ranks if the ranks of a data-parallel group are not evenly spaced in their grid.
    """
    _, size = tp_rank(engine)
    if size == 1:
        return None
    groups = engine.seq_data_parallel_group, tp_group(engine)
    everyones = gathered([torch.distributed.get_process_group_ranks(group) for group in groups])
    data, tensor = zip(*everyones, strict=True)  # by rank
    positions = _positions(data, tensor)
    lines = _lines(data, tensor, positions)
    if lines is None:
        raise UnsupportedError(
            "deepspeed-muon does not support this engine: the ranks of the mpu's data-parallel groups "
            f"{sorted(set(map(tuple, data)))} are not evenly spaced, as 0, 2, 4 are; pass an mpu that groups them so"
        )
    row = tensor[torch.distributed.get_rank()]
    make_groups(map(list, positions.values()), torch.device(get_accelerator().current_device_name()))
    return Grid(group_of(list(positions[tuple(row)])), tuple(lines[other] for other in row))


Ranks = Sequence[Sequence[int]]
"""For each rank, the members of its data-parallel group, or of its tensor-parallel group."""


def _positions(data: Ranks, tensor: Ranks) -> dict[tuple[int, ...], dict[int, int]]:
    """Return tensor-parallel group -> rank -> position of the rank among all ranks of the grid with this group.

    ``data``, ``tensor``: for each rank, the ranks of its data-parallel and its tensor-parallel group.
    """
    grids = {row: sorted(chain.from_iterable(data[other] for other in row)) for row in map(tuple, tensor)}
    return {row: {rank: at for at, rank in enumerate(members)} for row, members in grids.items()}


def _lines(data: Ranks, tensor: Ranks, positions: Mapping[tuple[int, ...], Mapping[int, int]]) -> list[range] | None:
    """Return for each rank the positions of its data-parallel group in its grid; ``None`` if any is unevenly spaced.

    ``data``, ``tensor``: for each rank, the ranks of its data-parallel and its tensor-parallel group.
    ``positions``: from :func:`_positions`.
    """
    lines = []
    for line, row in zip(data, tensor, strict=True):
        of_grid = positions[tuple(row)]
        first, *others = places = [of_grid[rank] for rank in line]
        step = others[0] - first if others else len(of_grid)
        lines.append(range(first, places[-1] + 1, step))
        if list(lines[-1]) != places:
            return None
    return lines


def matrix_share(engine: Any, optimizer: MuonWithAuxAdam) -> int:
    """Return the index of this rank's share of the model. Ranks with the same index have the same matrices.

    A share is a pipeline stage or, under ``tp_mode: shard``, one tensor-parallel rank's shards of a stage.
    """
    rank, size = tp_rank(engine) if optimizer.config.tp_mode == "shard" else (0, 1)
    return optimizer.stage * size + rank
