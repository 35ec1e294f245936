# SPDX-License-Identifier: Apache-2.0
"""Matrices inside a parameter: where their elements lie, and how a parameter is split. Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from deepspeed.muon.config.types import Cut


class Piece(NamedTuple):
    """Elements of a block on a grid of ``rows`` x ``cols``; each row is contiguous in the parameter and in the block.

    In the flat parameter the first element is number ``element``, and rows begin ``stride`` elements apart. In the flat
    block the first element is number ``at``, and rows begin ``pitch`` apart: ``cols``, unless the block is part of a
    wider matrix.
    """

    element: int
    at: int
    rows: int
    cols: int
    stride: int
    pitch: int

    @property
    def is_contiguous(self) -> bool:
        """Return whether the piece is contiguous in the block."""
        return self.rows == 1 or self.pitch == self.cols

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols


@dataclass(frozen=True)
class Block:
    """A rows x cols matrix inside a parameter, which Newton-Schulz orthogonalizes separately.

    The matrix starts at element ``offset`` of the flat parameter. Its rows are divided into ``bands`` equal groups,
    which start ``gap`` elements apart; rows of one band start ``stride`` elements apart. So with n = rows / bands,
    element (i, j) of the matrix is element ``offset + i // n * gap + i % n * stride + j`` of the flat parameter.
    """

    offset: int
    rows: int
    cols: int
    stride: int
    bands: int = 1
    gap: int = 0

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols

    @cached_property
    def stop(self) -> int:
        """Return 1 + the index of the block's last element in the flat parameter."""
        return self.element(self.numel - 1) + 1

    def element(self, at: int) -> int:
        """Return the index in the flat parameter of the block's element number ``at``, counted row by row."""
        row, column = divmod(at, self.cols)
        band, row = divmod(row, self.rows // self.bands)
        return self.offset + band * self.gap + row * self.stride + column

    def before(self, element: int) -> int:
        """Return how many of the block's elements come before index ``element`` of the flat parameter."""
        inside, numel = max(0, element - self.offset), self.rows * self.cols
        if self.stride == self.cols and self.bands == 1:
            return min(inside, numel)
        whole = numel // self.bands
        band, inside = divmod(inside, self.gap) if self.bands > 1 else (0, inside)
        row, column = divmod(inside, self.stride)
        return min(band * whole + min(row * self.cols + min(column, self.cols), whole), numel)

    def pieces(self, start: int, stop: int, pitch: int | None = None) -> Iterator[Piece]:
        """Yield, as pieces in order, the block's elements with indices ``start`` to ``stop - 1`` in the flat parameter.

        ``pitch``: number of columns of the wider matrix that the block is part of, if any; the pieces' ``at`` then
        counts elements of that matrix.
        """
        at, end = self.before(start), self.before(stop)
        in_band = self.numel // self.bands
        while at < end:
            left = min(end, (at // in_band + 1) * in_band) - at
            column = at % self.cols
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


def matrices(shape: Sequence[int]) -> tuple[Block, ...]:
    """Return one block per matrix of a contiguous parameter ``[..., rows, cols]``; one block for ``[rows, cols]``."""
    *stack, rows, cols = shape
    return tuple(Block(i * rows * cols, rows, cols, cols) for i in range(math.prod(stack)))


def cut(block: Block, by: Cut) -> tuple[Block, ...]:
    """Split a matrix into ranges of rows (axis 0) or columns (axis 1); return one matrix per entry of ``by.sizes``.

    With several groups the sizes repeat along the axis, as in Megatron's fused queries, keys and values. The ranges of
    one entry, one per group, then form one matrix, as its bands. Raise ValueError if the sizes do not add up.
    """
    if not by.sizes:
        return (block,)
    length, total = (block.rows, block.cols)[by.axis], sum(by.sizes) * by.groups
    if total != length:
        raise ValueError(f"{by} add up to {total}, not {length}")
    starts = [sum(by.sizes[:i]) for i in range(len(by.sizes))]
    pairs, stride = zip(starts, by.sizes, strict=True), block.stride
    if by.axis == 1:
        return tuple(replace(block, offset=block.offset + start, cols=size) for start, size in pairs)
    bands, gap = by.groups, sum(by.sizes) * stride if by.groups > 1 else 0
    return tuple(Block(block.offset + i * stride, n * bands, block.cols, stride, bands, gap) for i, n in pairs)
