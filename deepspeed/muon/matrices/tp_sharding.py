# SPDX-License-Identifier: Apache-2.0
"""How tensor parallelism cuts a matrix: which rows or columns each rank of its group holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deepspeed.muon.matrices.block import Block

#: The attribute in which DeepSpeed's AutoTP describes the layout of a parameter that it cut.
AUTOTP = "ds_autotp_universal_checkpoint_meta"


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
        """Number of rows or columns that a rank holds."""
        return sum(size for _, size in self.ranges[rank])

    def parts(self, block: Block, rank: int) -> Iterator[tuple[Block, int]]:
        """The parts of a block of the whole that a rank's shard holds.

        Yields:
            Rectangular blocks of the shard, each with the index of its first element in the given block.
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
                    held = Block(place * width + first_column, high - low, block.cols, width)
                    yield held, at + (low - row) * block.cols
                elif low < high:
                    yield Block(row * width + place, height, high - low, width), at + low - first_column
            inside += size


def sharding_of(param: Any) -> Sharding | None:
    """The layout that AutoTP recorded on a parameter; ``None`` where every rank of the group holds it whole.

    Raises:
        ValueError: the record does not describe the cut by rows or columns.
    """
    note = getattr(param, AUTOTP, None)
    if not note and getattr(param, "tensor_model_parallel", False):
        raise ValueError("it is marked tensor_model_parallel, but nothing says how it was cut")
    if not note or note["replicated"]:
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


def local_shape(param: Any) -> tuple[int, ...]:
    """The shape after tensor parallelism and before ``zero.Init`` cut the parameter."""
    return tuple(getattr(param, "ds_shape", param.shape))


def whole_shape(param: Any) -> tuple[int, ...]:
    """The shape before tensor parallelism cut the parameter."""
    note = getattr(param, AUTOTP, None) or {}
    return tuple(note.get("logical_shape") or note.get("original_shape") or local_shape(param))
