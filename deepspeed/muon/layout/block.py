# SPDX-License-Identifier: Apache-2.0
"""Matrices inside a parameter: where their elements lie, and how a parameter is split. Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


class Piece(NamedTuple):
    """A rectangle of elements of a :class:`Block` (one matrix): ``rows`` rows of ``cols`` contiguous elements.

    In the flattened parameter, the rectangle starts at index ``element``, and its rows start ``stride`` elements apart.
    In the flattened block, it starts at index ``at``, and its rows start ``pitch`` elements apart. ``pitch`` is larger
    than ``cols`` only if :meth:`Block.pieces` was called for a block that is part of a wider matrix.
    """

    element: int
    at: int
    rows: int
    cols: int
    stride: int
    pitch: int

    @property
    def is_contiguous(self) -> bool:
        """Return whether all elements of the piece are contiguous in the flattened block."""
        return self.rows == 1 or self.pitch == self.cols

    @property
    def numel(self) -> int:
        """Return the piece's number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Block:
    """One matrix ``[rows, cols]`` inside a parameter. Newton-Schulz orthogonalizes each block separately.

    The block starts at index ``offset`` of the flattened parameter, and its rows are ``stride`` elements apart. Rows
    that are not evenly spaced form several ``bands`` of equal size, ``gap`` elements apart: the queries of each head in
    a fused weight, for example. Its columns are ``step`` elements apart: every fourth column of a weight that holds a
    LoRA factor of each of 4 experts, for example. With n = rows / bands, the index of element (i, j) is ``offset +
    i // n * gap + i % n * stride + j * step``.
    """

    offset: int
    rows: int
    cols: int
    stride: int
    bands: int = 1
    gap: int = 0
    step: int = 1

    @property
    def numel(self) -> int:
        """Return the block's number of elements."""
        return self.rows * self.cols

    @cached_property
    def stop(self) -> int:
        """Return 1 + the index of the block's last element in the flattened parameter."""
        return self.element(self.numel - 1) + 1

    def element(self, at: int) -> int:
        """Return the index in the flattened parameter of element ``at`` of the flattened block."""
        row, column = divmod(at, self.cols)
        band, row = divmod(row, self.rows // self.bands)
        return self.offset + band * self.gap + row * self.stride + column * self.step

    def before(self, element: int) -> int:
        """Return how many elements of the block lie before index ``element`` of the flattened parameter."""
        inside, numel = max(0, element - self.offset), self.rows * self.cols
        if self.stride == self.cols and self.bands == 1:  # step is 1
            return min(inside, numel)
        whole = numel // self.bands
        band, inside = divmod(inside, self.gap) if self.bands > 1 else (0, inside)
        row, column = divmod(inside, self.stride)
        columns = min(-(-column // self.step), self.cols)
        return min(band * whole + min(row * self.cols + columns, whole), numel)

    def pieces(self, start: int, stop: int, pitch: int | None = None) -> Iterator[Piece]:
        """Yield rectangles of the block's elements with index ``start`` to ``stop - 1`` in the flattened parameter.

        ``pitch``: if the block is one tensor-parallel rank's part of a matrix, the number of columns of that matrix.
        The rectangles' ``at`` and ``pitch`` then refer to that matrix, with index 0 at the block's first element. Such
        a part has ``step`` 1.
        """
        at, end = self.before(start), self.before(stop)
        in_band = self.numel // self.bands
        while at < end:
            left = min(end, (at // in_band + 1) * in_band) - at
            column = at % self.cols
            if self.step > 1:  # each element is a row of the piece
                rows = left if self.stride == self.cols * self.step else min(self.cols - column, left)
                yield Piece(self.element(at), at, rows, 1, self.step if rows > 1 else 1, 1)
                at += rows
                continue
            if self.rows == 1 or (self.stride == self.cols and pitch in (None, self.cols)):
                rows, cols = 1, left
            elif column or left < self.cols:
                rows, cols = 1, min(self.cols - column, left)
            else:
                rows, cols = left // self.cols, self.cols
            place = at if pitch is None else at // self.cols * pitch + column
            stride = self.stride if rows > 1 else cols
            yield Piece(self.element(at), place, rows, cols, stride, (pitch or self.cols) if rows > 1 else cols)
            at += rows * cols


@dataclass(frozen=True)
class Cut:
    """How a matrix is split into several along ``axis`` (0: rows, 1: columns); a value of ``muon_split``.

    ``sizes``: number of rows or columns of each new matrix; empty if the matrix stays whole. ``groups``: how many times
    the sizes repeat along the rows; a new matrix consists of its rows from all repetitions. ``Cut((2, 1), groups=2)``
    splits 6 rows into matrices of rows (0, 1, 3, 4) and (2, 5).

    Raises:
        ValueError: ``groups`` is above 1 with columns.
    """

    sizes: tuple[int, ...]
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if self.axis == 1 and self.groups > 1:
            raise ValueError("groups above 1 need axis 0 (rows); columns cannot be split in groups")

    def __str__(self) -> str:
        if not self.sizes:
            return "left whole"
        count = len(self.sizes)
        period = next(k for k in range(1, count + 1) if self.sizes[:k] * (count // k) == self.sizes)
        times = f"{count // period} x " if period < count else ""
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{times}{' + '.join(map(str, self.sizes[:period]))} {('rows', 'columns')[self.axis]}{groups}"


def matrices(shape: Sequence[int]) -> tuple[Block, ...]:
    """Return a :class:`Block` for each matrix in a contiguous parameter of shape [..., rows, cols], in memory order."""
    *stack, rows, cols = shape
    return tuple(Block(i * rows * cols, rows, cols, cols) for i in range(math.prod(stack)))


def cut(block: Block, by: Cut) -> tuple[Block, ...]:
    """Split a :class:`Block` (one matrix) by rows (axis 0) or columns (axis 1); return a block for each size in ``by``.

    With ``by.groups`` above 1 the sizes repeat along the rows, and a block gets one band of adjacent rows from each
    group. Sizes (4, 2) in 2 groups split 12 rows into a block of rows 0 to 3 and 6 to 9, and a block of rows 4, 5, 10
    and 11.

    Raises:
        ValueError: the sizes do not add up to the block's rows or columns.
    """
    if not by.sizes:
        return (block,)
    length, total = (block.rows, block.cols)[by.axis], sum(by.sizes) * by.groups
    if total != length:
        raise ValueError(f"{by} add up to {total}, not {length}")
    starts = [sum(by.sizes[:i]) for i in range(len(by.sizes))]
    pairs, stride = zip(starts, by.sizes, strict=True), block.stride
    if by.axis == 1:
        return tuple(replace(block, offset=block.offset + start * block.step, cols=size) for start, size in pairs)
    bands, gap = by.groups, sum(by.sizes) * stride if by.groups > 1 else 0
    return tuple(
        replace(block, offset=block.offset + i * stride, rows=n * bands, bands=bands, gap=gap) for i, n in pairs
    )
