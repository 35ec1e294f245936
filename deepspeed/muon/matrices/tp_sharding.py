# SPDX-License-Identifier: Apache-2.0
"""How tensor parallelism splits a matrix: which rows or columns each rank of the tensor-parallel group holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.matrices.block import Block

#: The attribute in which DeepSpeed's AutoTP describes how it split a parameter.
AUTOTP = "ds_autotp_universal_checkpoint_meta"
#: The attributes by which Megatron marks a parameter that it split; the first is the older one.
MEGATRON = ("model_parallel", "tensor_model_parallel")
#: Our attribute on parameters that Megatron split: (this rank's index, number of ranks) in the tensor-parallel group.
TP_RANK = "muon_tp_rank"


@dataclass(frozen=True)
class Sharding:
    """How a parameter is split over the ranks of a tensor-parallel group.

    ``shape``: shape before the split, [rows, cols] for a matrix. ``axis``: 0 if each rank holds some rows (DeepSpeed
    calls that column parallel), 1 if it holds some columns. ``ranges``: for each rank the (start, size) of the rows or
    columns that it holds, such as ``[[(0, 4)], [(4, 4)]]``. With a fused weight a rank holds a range of each part.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def size(self, rank: int) -> int:
        """Return the number of rows (``axis`` 0) or columns (``axis`` 1) of the parameter that ``rank`` holds."""
        return sum(size for _, size in self.ranges[rank])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank``, cut from the unsplit parameter ``whole``; a view if it is a single range."""
        parts = [whole.view(self.shape).narrow(self.axis, start, size) for start, size in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)

    def parts(self, block: Block, rank: int) -> Iterator[tuple[Block, int]]:
        """Yield (part, start) for each rectangle of ``block`` that lies in the shard of ``rank``.

        ``block``: a matrix in the unsplit parameter. ``part``: where the rectangle lies in the shard. ``start``: index
        of its first element in the flattened ``block``.
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
    """Return how tensor parallelism split a parameter; ``None`` if each rank holds the whole parameter.

    AutoTP and Megatron set attributes on the parameter that tell.

    Raises:
        ValueError: these attributes do not describe a split by rows or columns.
    """
    note = getattr(param, AUTOTP, None)
    if not note:
        return _sharding_by_megatron(param) if _is_marked(param) else None
    if note["replicated"]:
        return None
    axis, shape = note["partition_dim"], note["logical_shape"] or note["original_shape"]
    widths = note["sub_param_shard_widths"] or ([note["partition_sizes"]] if note["partition_sizes"] else [])
    if not widths or axis not in range(min(len(shape), 2)):
        raise ValueError(note["conversion"]["unsupported_reason"] or "AutoTP does not describe it as rows or columns")
    starts = [0, *accumulate(sum(sizes) for sizes in widths)]
    ranges = tuple(
        tuple((start + sum(sizes[:rank]), sizes[rank]) for start, sizes in zip(starts, widths, strict=False))
        for rank in range(len(widths[0]))
    )
    return Sharding(tuple(shape), axis, ranges)


def _is_marked(param: Any) -> bool:
    return any(getattr(param, mark, False) for mark in MEGATRON)


def _sharding_by_megatron(param: Any) -> Sharding | None:
    """Return the split that Megatron's attributes on a parameter describe; ``None`` if there is only one rank.

    Along ``partition_dim`` each rank has ``partition_stride`` ranges of equal size; range i belongs to rank i % ranks.

    Raises:
        ValueError: an attribute is missing, or does not fit the parameter's shape.
    """
    axis, stride = getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1)
    if axis < 0:
        raise ValueError(f"it is marked {MEGATRON[1]} without an axis; set its attribute partition_dim to 0 or 1")
    if not hasattr(param, TP_RANK):
        raise ValueError(
            f'it is marked {MEGATRON[1]}, but the number of ranks is unknown; set "type": "Muon" in '
            "ds_config.json, or pass optimizer=lambda params: MuonWithAuxAdam(params, model=model, ...) to "
            "deepspeed.initialize"
        )
    ranks = getattr(param, TP_RANK)[1]
    if ranks == 1:
        return None
    local = local_shape(param)
    if axis >= len(local) or len(local) > 2:
        raise ValueError(
            f"its shape is {list(local)} and its partition_dim {axis}; expected at most 2 dimensions, and "
            "partition_dim 0 (rows) or 1 (columns)"
        )
    if local[axis] % stride:
        raise ValueError(
            f"its {local[axis]} rows or columns on a rank are not a multiple of its partition_stride {stride}"
        )
    size = local[axis] // stride
    turns = range(0, ranks * stride, ranks)
    ranges = tuple(tuple(((first + rank) * size, size) for first in turns) for rank in range(ranks))
    return Sharding(whole_shape(param), axis, ranges)


def tp_rank(param: Any, module: Any) -> int:
    """Return this rank's index in the tensor-parallel group that shares ``param``, which belongs to ``module``."""
    return getattr(param, TP_RANK)[0] if hasattr(param, TP_RANK) else module.tp_index


def local_shape(param: Any) -> tuple[int, ...]:
    """Return a parameter's shape on this rank, after the split by tensor parallelism and before that by ZeRO-3."""
    return tuple(getattr(param, "ds_shape", param.shape))


def whole_shape(param: Any) -> tuple[int, ...]:
    """Return a parameter's shape before tensor parallelism and ZeRO split it."""
    note = getattr(param, AUTOTP, None) or {}
    if shape := note.get("logical_shape") or note.get("original_shape"):
        return tuple(shape)
    axis = getattr(param, "partition_dim", -1) if _is_marked(param) else -1
    _, ranks = getattr(param, TP_RANK, (0, 1))
    return tuple(size * ranks if i == axis else size for i, size in enumerate(local_shape(param)))
