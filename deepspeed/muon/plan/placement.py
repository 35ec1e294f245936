# SPDX-License-Identifier: Apache-2.0
"""Where the elements of parameters and blocks are, by arithmetic rules whose size does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from deepspeed.muon.matrices.block import Block, Piece
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.matrices.tp_sharding import Sharding


@dataclass(frozen=True)
class Placement:
    """Which rank holds each element of one parameter, and where.

    Element e is in part k = ``(origin + e) // span``, which is on rank ``first + k * step``. Its index in the flat
    tensor of that rank is ``base + (origin + e) % span``.

    - Stages 1 and 2 split a flattened group: origin is the parameter's offset in it, span a partition's size, base 0.
    - Stage 3 splits each parameter: origin 0, span the size of its part on each rank, base the offset of that part.
    - Stage 0 splits nothing: origin 0, span the parameter's size, base 0; ``copies`` ranks hold all of it.
    - With tensor parallelism, rank t of T has a parameter of its own: first t, step T.
    """

    origin: int
    span: int
    base: int
    copies: int = 1
    first: int = 0
    step: int = 1

    def ranks(self, start: int, stop: int) -> range:
        """Return the ranks that hold any of the elements from ``start`` to ``stop - 1``."""
        if self.copies > 1:
            return range(self.copies)
        low, high = (self.origin + start) // self.span, (self.origin + stop - 1) // self.span
        return range(self.first + low * self.step, self.first + high * self.step + 1, self.step)

    def held(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return (first, end) of the range's elements on ``rank``, end excluded; there are none if first >= end."""
        if self.copies > 1:
            return start, stop
        part, other = divmod(rank - self.first, self.step)
        low = part * self.span - self.origin
        return (max(start, low), min(stop, low + self.span)) if not other else (stop, start)

    @property
    def rule(self) -> tuple[int, int, int, int, int]:
        """Return the fields that decide which rank holds each element: (origin, span, copies, first, step)."""
        return self.origin, self.span, self.copies, self.first, self.step

    def position(self, element: int) -> int:
        """Return the index of ``element`` in the flat tensor of the rank that holds it."""
        return self.base + (self.origin + element) % self.span


@dataclass(frozen=True)
class Shard:
    """A parameter of a partition: its ``spec``, its ``placement``, and ``tensor``, an index in ``Partition.tensors``.

    ``tp_placements``: with tensor parallelism, the placement of each tensor-parallel rank's shard or copy.
    """

    spec: MatrixSpec
    tensor: int
    placement: Placement
    tp_placements: tuple[Placement, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement of each tensor-parallel rank's parameter; one without tensor parallelism."""
        return self.tp_placements or (self.placement,)

    @cached_property
    def items(self) -> tuple[PlacedBlock, ...]:
        """Return the matrices of the parameter, one per block."""
        return tuple(PlacedBlock(self, block) for block in self.spec.blocks)


class Rectangle(NamedTuple):
    """A rectangle of a matrix that is inside the parameter of one tensor-parallel rank. ``block``: where it is in that
    parameter. ``at``: index of its first element in the whole matrix.
    """

    block: Block
    at: int
    placement: Placement


class Spread:
    """Which ranks hold which elements of a matrix. Matrices that are spread alike share one object.

    If tensor-parallel ranks hold copies of a matrix, their rectangles coincide. The owner uses any of the copies and
    sends its result to all of them, so that they stay equal bit by bit.

    Args:
        parts: the rectangles that make up the matrix: one, or one or more for each rank of a tensor-parallel group.
        cols: columns of the matrix.
    """

    def __init__(self, parts: tuple[Rectangle, ...], cols: int) -> None:
        self.parts, self._cols = parts, cols
        ranks = [placement.ranks(block.offset, block.stop) for block, _, placement in parts]
        #: Ranks that hold a part of the matrix, in order.
        self.holders: Sequence[int] = ranks[0] if len(parts) == 1 else sorted({*chain.from_iterable(ranks)})
        self._held: dict[int, int] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}

    @cached_property
    def text(self) -> str:
        """Return the spread as text, for the digest that must be equal on all ranks."""
        blocks = ((part.block, part.at, part.placement.rule) for part in self.parts)
        return str([(b.offset, b.rows, b.cols, b.stride, b.bands, b.gap, at, rule) for b, at, rule in blocks])

    def held(self, rank: int) -> int:
        """Return how many elements of the matrix ``rank`` holds."""
        if rank not in self._held:
            self._held[rank] = self._count(rank)
        return self._held[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the elements of the matrix that ``rank`` holds, as pieces of the matrix."""
        if rank not in self._pieces:
            self._pieces[rank] = self._cut(rank)
        return self._pieces[rank]

    def _count(self, rank: int) -> int:
        local = ((block, *placement.held(rank, block.offset, block.stop)) for block, _, placement in self.parts)
        return sum(max(0, block.before(high) - block.before(low)) for block, low, high in local)

    def _cut(self, rank: int) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for block, at, placement in self.parts:
            pieces = block.pieces(*placement.held(rank, block.offset, block.stop), self._cols)
            found += (piece._replace(at=at + piece.at) for piece in pieces) if at else pieces
        return tuple(found)


@lru_cache(maxsize=1024)
def _spread(block: Block, sharding: Sharding | None, rules: tuple[tuple[int, int, int, int, int], ...]) -> Spread:
    """Return how a block is spread. ``rules``: :attr:`Placement.rule`, one per tensor-parallel rank."""
    parts = []
    for t, (origin, span, copies, first, step) in enumerate(rules):
        placement = Placement(origin, span, 0, copies, first, step)
        for part, at in sharding.parts(block, t) if sharding else ((block, 0),):
            parts.append(Rectangle(part, at, placement))
    return Spread(tuple(parts), block.cols)


@dataclass(frozen=True)
class PlacedBlock:
    """One matrix to orthogonalize, or a slice of it, with the placement of its elements. ``whole``: the matrix that
    ``block`` is a slice of; ``None`` if ``block`` is a whole matrix.
    """

    shard: Shard
    block: Block
    whole: Block | None = None

    @property
    def name(self) -> str:
        """Return the parameter's name, with the index of the block's first element in brackets unless that is 0."""
        return self._named(self.block)

    @property
    def matrix(self) -> str:
        """Return the name of the whole matrix, which all of its slices share."""
        return self._named(self.whole or self.block)

    def _named(self, block: Block) -> str:
        return f"{self.shard.spec.name}[{block.offset}]" if block.offset else self.shard.spec.name

    @property
    def shape(self) -> tuple[int, int]:
        """Return (rows, columns) of the whole matrix."""
        block = self.whole or self.block
        return block.rows, block.cols

    @property
    def owners(self) -> int:
        """Return how many ranks own the whole matrix, one slice each."""
        return self.whole.numel // self.block.numel if self.whole else 1

    @property
    def axis(self) -> int:
        """Return the axis along which the matrix has its outputs: 0 rows, 1 columns; 0 if unknown."""
        return self.shard.spec.output_axis or 0

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the whole matrix."""
        return self.shape[self.axis]

    @cached_property
    def spread(self) -> Spread:
        """Return which ranks hold which elements of the matrix or slice."""
        rules = tuple(placement.rule for placement in self.shard.placements)
        return _spread(self.block, self.shard.spec.sharding, rules)
