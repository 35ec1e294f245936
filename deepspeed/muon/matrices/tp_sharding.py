# SPDX-License-Identifier: Apache-2.0
"""How tensor parallelism cuts a matrix: which rows or columns each rank of its group holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.matrices.block import Block

#: The attribute in which DeepSpeed's AutoTP describes the layout of a parameter that it cut.
AUTOTP = "ds_autotp_universal_checkpoint_meta"
#: The attributes by which Megatron marks a parameter that it cut; the first is the older one.
MEGATRON = ("model_parallel", "tensor_model_parallel")
#: What Megatron's marks leave open: (rank, number of ranks) of the group that holds the parts.
TP_RANK = "muon_tp_rank"


@dataclass(frozen=True)
class Sharding:
    """A parameter of ``shape``, [rows, cols] for a matrix, cut along one axis over a tensor-parallel group.

    ``axis``: 0 where the ranks hold rows (DeepSpeed's column parallel), 1 where they hold columns. ``ranges``: for each
    rank, the (start, size) of the rows or columns in its shard, in order. A rank has several ranges of a fused weight,
    because each part is cut on its own.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def size(self, rank: int) -> int:
        """Return the number of rows or columns that a rank holds."""
        return sum(size for _, size in self.ranges[rank])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return the shard of a rank, of ``whole`` in any shape; a view where it is one range."""
        parts = [whole.view(self.shape).narrow(self.axis, start, size) for start, size in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def parts(self, block: Block, rank: int) -> Iterator[tuple[Block, int]]:
        """Return the parts of a block of the whole that a rank's shard holds.

        Yields:
            Rectangular blocks of the shard, each with the index of its first element in ``block``.
        """
        width = self.shape[1] if self.axis == 0 else self.size(rank)
        first_row, first_column = divmod(block.offset, self.shape[1])
        height, gap = block.rows // block.bands, block.gap // self.shape[1]
        inside = 0
        for start, size in self.ranges[rank]:
            for band in range(block.bands):
                row, at = first_row + band * gap, band * height * block.cols
                first, length = (row, height) if self.axis == 0 else (first_column, block.cols)
                low, high = max(first, start), min(first + length, start + size)
                place = inside + low - start
                if low < high and self.axis == 0:
                    part = Block(place * width + first_column, high - low, block.cols, width)
                    yield part, at + (low - row) * block.cols
                elif low < high:
                    yield Block(row * width + place, height, high - low, width), at + low - first_column
            inside += size


def sharding_of(param: Any) -> Sharding | None:
    """Return the layout that AutoTP or Megatron recorded on a parameter; ``None`` where each rank has all of it.

    Raises:
        ValueError: the record does not describe the cut by rows or columns.
    """
    note = getattr(param, AUTOTP, None)
    if not note:
        return _sharding_by_megatron(param) if _is_marked(param) else None
    if note["replicated"]:
        return None
    axis, shape = note["partition_dim"], note["logical_shape"] or note["original_shape"]
    widths = note["sub_param_shard_widths"] or ([note["partition_sizes"]] if note["partition_sizes"] else [])
    if not widths or axis not in range(min(len(shape), 2)):
        raise ValueError(note["conversion"]["unsupported_reason"] or "its layout is not described by rows or columns")
    starts = [0, *accumulate(sum(sizes) for sizes in widths)]
    ranges = tuple(
        tuple((start + sum(sizes[:rank]), sizes[rank]) for start, sizes in zip(starts, widths, strict=False))
        for rank in range(len(widths[0]))
    )
    return Sharding(tuple(shape), axis, ranges)


def _is_marked(param: Any) -> bool:
    return any(getattr(param, mark, False) for mark in MEGATRON)


def _sharding_by_megatron(param: Any) -> Sharding | None:
    """Return a layout of equal shards: each rank has ``partition_stride`` equal parts, and the ranks take turns."""
    axis, stride = getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1)
    if axis < 0:
        raise ValueError(f"it is marked {MEGATRON[1]}, but nothing says how it was cut; set its partition_dim")
    if not hasattr(param, TP_RANK):
        raise ValueError(
            f'it is marked {MEGATRON[1]}, but nothing says how many ranks share it; set "type": "Muon" in '
            "ds_config.json, or pass optimizer=lambda params: MuonWithAuxAdam(params, model=model, ...) to "
            "deepspeed.initialize"
        )
    ranks = getattr(param, TP_RANK)[1]
    if ranks == 1:
        return None
    local = local_shape(param)
    if axis >= len(local) or len(local) > 2:
        raise ValueError(f"its partition_dim {axis} is no axis of a matrix")
    if local[axis] % stride:
        raise ValueError(f"its partition_stride {stride} does not divide the {local[axis]} rows or columns of a rank")
    size = local[axis] // stride
    turns = range(0, ranks * stride, ranks)
    ranges = tuple(tuple(((first + rank) * size, size) for first in turns) for rank in range(ranks))
    return Sharding(whole_shape(param), axis, ranges)


def tp_rank(param: Any, module: Any) -> int:
    """Return this rank's number among those that hold the parts of a parameter of the module."""
    return getattr(param, TP_RANK)[0] if hasattr(param, TP_RANK) else module.tp_index


def local_shape(param: Any) -> tuple[int, ...]:
    """Return the shape after tensor parallelism and before ``zero.Init`` cut the parameter."""
    return tuple(getattr(param, "ds_shape", param.shape))


def whole_shape(param: Any) -> tuple[int, ...]:
    """Return the shape before tensor parallelism cut the parameter."""
    note = getattr(param, AUTOTP, None) or {}
    if shape := note.get("logical_shape") or note.get("original_shape"):
        return tuple(shape)
    axis = getattr(param, "partition_dim", -1) if _is_marked(param) else -1
    _, ranks = getattr(param, TP_RANK, (0, 1))
    return tuple(size * ranks if i == axis else size for i, size in enumerate(local_shape(param)))
