# SPDX-License-Identifier: Apache-2.0
"""How tensor parallelism splits a matrix: which rows or columns each rank of the tensor-parallel group holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deepspeed.muon.layout.block import Block

#: The attribute in which DeepSpeed's AutoTP describes how it split a parameter.
AUTOTP = "ds_autotp_universal_checkpoint_meta"
#: The attributes by which Megatron marks a parameter that it split; the first is the older one.
MEGATRON = ("model_parallel", "tensor_model_parallel")
#: Our attribute on parameters that Megatron split: (this rank's index, number of ranks) in the tensor-parallel group.
TP_RANK = "muon_tp_rank"


@dataclass(frozen=True)
class Sharding:
    """How a parameter is split over the ranks of a tensor-parallel group.

    ``shape``: shape before the split. ``axis``: 0 if each rank holds some rows (DeepSpeed calls that column parallel),
    1 if it holds some columns. ``ranges``: for each rank the (start, size) of the rows or columns that it holds:
    ``[[(0, 4)], [(4, 4)]]`` for two ranks. Of a fused weight, a rank may hold one range from each projection.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def size(self, rank: int) -> int:
        """Return the number of rows (``axis`` 0) or columns (``axis`` 1) of the parameter that ``rank`` holds."""
        return sum(size for _, size in self.ranges[rank])

    def parts(self, block: Block, rank: int) -> Iterator[tuple[Block, int]]:
        """Yield (part, start) for each rectangle of ``block`` that lies in the shard of ``rank``.

        ``block``: a matrix in the unsplit parameter. ``part``: the rectangle, as a block of the shard. ``start``: index
        of the rectangle's first element in the flattened ``block``.
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
    """Return how tensor parallelism split a parameter, read from the attributes that AutoTP or Megatron has set.

    Return ``None`` if each rank holds the whole parameter.

    Raises:
        ValueError: the attributes are incomplete, or do not describe a split by rows or columns.
    """
    note = getattr(param, AUTOTP, None)
    if not note:
        return _sharding_by_megatron(param) if _is_marked(param) else None
    if note["replicated"]:
        return None
    axis, shape = note["partition_dim"], note["logical_shape"] or note["original_shape"]
    widths = note["sub_param_shard_widths"] or ([note["partition_sizes"]] if note["partition_sizes"] else [])
    if not widths or axis not in range(min(len(shape), 2)):
        raise ValueError(note["conversion"]["unsupported_reason"] or "AutoTP describes no split by rows or columns")
    starts = [0, *accumulate(sum(sizes) for sizes in widths)]
    ranges = tuple(
        tuple((start + sum(sizes[:rank]), sizes[rank]) for start, sizes in zip(starts, widths, strict=False))
        for rank in range(len(widths[0]))
    )
    return Sharding(tuple(shape), axis, ranges)


def _is_marked(param: Any) -> bool:
    return any(getattr(param, mark, False) for mark in MEGATRON)


def _sharding_by_megatron(param: Any) -> Sharding | None:
    """Return the split that Megatron's attributes on a parameter describe; ``None`` if there is only one rank."""
    axis, stride = getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1)
    if axis < 0:
        raise ValueError(
            f"the parameter has the attribute {MEGATRON[1]}, but partition_dim, the axis of the split, is not set; set "
            "partition_dim to 0 (rows) or 1 (columns)"
        )
    if not hasattr(param, TP_RANK):
        raise ValueError(
            f"the parameter has the attribute {MEGATRON[1]}, but the number of tensor-parallel ranks is unknown; "
            'set "type": "Muon" in ds_config.json, or pass optimizer=lambda params: '
            "MuonWithAuxAdam(params, model=model, ...) to deepspeed.initialize"
        )
    ranks = getattr(param, TP_RANK)[1]
    if ranks == 1:
        return None
    local = local_shape(param)
    if axis >= len(local) or len(local) > 2:
        raise ValueError(
            f"the parameter has shape {list(local)} and partition_dim {axis}; expected at most 2 dimensions, and a "
            "partition_dim below the number of dimensions"
        )
    if local[axis] % stride:
        raise ValueError(
            f"the parameter's size {local[axis]} on a rank along partition_dim is not a multiple of partition_stride "
            f"{stride}; set partition_stride to the number of fused projections, such as 2 for gate and up, or 1"
        )
    # Along partition_dim each rank has partition_stride ranges of equal size; range i belongs to rank i % ranks.
    size = local[axis] // stride
    turns = range(0, ranks * stride, ranks)
    ranges = tuple(tuple(((first + rank) * size, size) for first in turns) for rank in range(ranks))
    return Sharding(whole_shape(param), axis, ranges)


def tp_rank(param: Any, module: Any) -> int:
    """Return this rank's index in the tensor-parallel group that holds ``param``, a parameter of ``module``."""
    return getattr(param, TP_RANK)[0] if hasattr(param, TP_RANK) else module.tp_index


def local_shape(param: Any) -> tuple[int, ...]:
    """Return a parameter's shape on this rank, after tensor parallelism and before ZeRO-3 split it."""
    return tuple(getattr(param, "ds_shape", param.shape))


def whole_shape(param: Any) -> tuple[int, ...]:
    """Return a parameter's shape before tensor parallelism and ZeRO split it."""
    note = getattr(param, AUTOTP, None) or {}
    if shape := note.get("logical_shape") or note.get("original_shape"):
        return tuple(shape)
    axis = getattr(param, "partition_dim", -1) if _is_marked(param) else -1
    _, ranks = getattr(param, TP_RANK, (0, 1))
    return tuple(size * ranks if i == axis else size for i, size in enumerate(local_shape(param)))
