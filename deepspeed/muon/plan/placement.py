# SPDX-License-Identifier: Apache-2.0
"""How parameters and their blocks lie over the ranks, by arithmetic rules whose size does not grow with the ranks."""

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
    """How one parameter lies over the ranks.

    Element e is in part ``(origin + e) // span``, at position ``base + (origin + e) % span`` of the tensor there. Part
    k is on rank ``first + k * step``.

    - Stages 1 and 2 cut the flat group: origin is the parameter's offset in it, span the partition's size, base 0.
    - Stage 3 cuts each parameter: origin 0, span its partition's size, base its offset.
    - Stage 0 cuts nothing: origin 0, span the parameter's size, base 0; ``copies`` ranks hold all of it.
    - With tensor parallelism, rank t of T has a parameter of its own: first t, step T.
    """

    origin: int
    span: int
    base: int
    copies: int = 1
    first: int = 0
    step: int = 1

    def ranks(self, start: int, stop: int) -> range:
        """Return the ranks that hold any of elements ``start .. stop``."""
        if self.copies > 1:
            return range(self.copies)
        low, high = (self.origin + start) // self.span, (self.origin + stop - 1) // self.span
        return range(self.first + low * self.step, self.first + high * self.step + 1, self.step)

    def held(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return the range within ``start .. stop`` that ``rank`` holds; empty if its start is not below its stop."""
        if self.copies > 1:
            return start, stop
        part, other = divmod(rank - self.first, self.step)
        low = part * self.span - self.origin
        return (max(start, low), min(stop, low + self.span)) if not other else (stop, start)

    @property
    def rule(self) -> tuple[int, int, int, int, int]:
        """Return which ranks hold which elements, wherever they lie there."""
        return self.origin, self.span, self.copies, self.first, self.step

    def position(self, element: int) -> int:
        """Return the position of ``element`` in the tensor of the rank that holds it."""
        return self.base + (self.origin + element) % self.span


@dataclass(frozen=True)
class Shard:
    """A parameter of a partition: its route, the index of the tensor that holds its elements, and its placement.

    ``tp_placements``: with tensor parallelism, the placement of each rank's parameter, a shard or a copy.
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
        """Return the matrices of the parameter."""
        return tuple(PlacedBlock(self, block) for block in self.spec.blocks)


class Rectangle(NamedTuple):
    """A rectangle of a matrix inside one parameter or shard; ``at``: index of its first element in the matrix."""

    block: Block
    at: int
    placement: Placement


class Spread:
    """How the elements of a matrix are spread over the ranks. Matrices that are cut alike have one in common.

    The rectangles of copies are equal. The owner uses any of them, and all get its result, so that copies stay equal
    bit by bit.

    Args:
        parts: the rectangles that make up the matrix: one, or those on the ranks of a tensor-parallel group.
        cols: of the matrix.
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
        """Return all of it in words, for the digest on which the ranks agree."""
        blocks = ((part.block, part.at, part.placement.rule) for part in self.parts)
        return str([(b.offset, b.rows, b.cols, b.stride, b.bands, b.gap, at, rule) for b, at, rule in blocks])

    def held(self, rank: int) -> int:
        """Return the number of elements of the matrix on a rank."""
        if rank not in self._held:
            self._held[rank] = self._count(rank)
        return self._held[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return a rank's part of the matrix; see :meth:`Block.pieces`."""
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
    """Return how a block is spread; ``rules``: of the placements of its parameter."""
    parts = []
    for t, (origin, span, copies, first, step) in enumerate(rules):
        placement = Placement(origin, span, 0, copies, first, step)
        for part, at in sharding.parts(block, t) if sharding else ((block, 0),):
            parts.append(Rectangle(part, at, placement))
    return Spread(tuple(parts), block.cols)


@dataclass(frozen=True)
class PlacedBlock:
    """One matrix to orthogonalize, or a slice of it, with the placement of its elements.

    ``whole``: the matrix that ``block`` is a slice of; ``None``: it is all of it.
    """

    shard: Shard
    block: Block
    whole: Block | None = None

    @property
    def name(self) -> str:
        """Return the parameter's name, with the index of the block's first element unless that is 0."""
        return self._named(self.block)

    @property
    def matrix(self) -> str:
        """Return the name of the whole matrix; that of the block itself unless it is a slice."""
        return self._named(self.whole or self.block)

    def _named(self, block: Block) -> str:
        return f"{self.shard.spec.name}[{block.offset}]" if block.offset else self.shard.spec.name

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns of the whole matrix."""
        block = self.whole or self.block
        return block.rows, block.cols

    @property
    def owners(self) -> int:
        """Return how many ranks own the whole matrix, each a slice."""
        return self.whole.numel // self.block.numel if self.whole else 1

    @property
    def axis(self) -> int:
        """Return the axis of its outputs; 0 where that is not known."""
        return self.shard.spec.output_axis or 0

    @property
    def outputs(self) -> int:
        """Return the number of its outputs."""
        return self.shape[self.axis]

    @cached_property
    def spread(self) -> Spread:
        """Return where the elements of the matrix are."""
        rules = tuple(placement.rule for placement in self.shard.placements)
        return _spread(self.block, self.shard.spec.sharding, rules)
