# SPDX-License-Identifier: Apache-2.0
"""How parameters and their blocks lie over the ranks, by arithmetic rules whose size does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from deepspeed.muon.matrices.block import Block, Piece
from deepspeed.muon.matrices.routing import MatrixSpec


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
        """Ranks that hold any of elements ``start .. stop``."""
        if self.copies > 1:
            return range(self.copies)
        low, high = (self.origin + start) // self.span, (self.origin + stop - 1) // self.span
        return range(self.first + low * self.step, self.first + high * self.step + 1, self.step)

    def held(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """The range within ``start .. stop`` that ``rank`` holds; empty if its start is not below its stop."""
        if self.copies > 1:
            return start, stop
        part, other = divmod(rank - self.first, self.step)
        low = part * self.span - self.origin
        return (max(start, low), min(stop, low + self.span)) if not other else (stop, start)

    def position(self, element: int) -> int:
        """Position of ``element`` in the tensor of the rank that holds it."""
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


class Rectangle(NamedTuple):
    """A rectangle of a matrix inside one parameter or shard; ``at``: index of its first element in the matrix."""

    block: Block
    at: int
    placement: Placement

    @property
    def ranks(self) -> range:
        """Ranks that hold any of it."""
        return self.placement.ranks(self.block.offset, self.block.stop)

    def held(self, rank: int) -> int:
        """Number of elements that ``rank`` holds."""
        low, high = self.placement.held(rank, self.block.offset, self.block.stop)
        return max(0, self.block.before(high) - self.block.before(low))

    def pieces(self, rank: int, pitch: int) -> Iterator[Piece]:
        """The part that ``rank`` holds, as :meth:`Block.pieces` of a matrix with ``pitch`` columns."""
        low, high = self.placement.held(rank, self.block.offset, self.block.stop)
        pieces = self.block.pieces(low, high, pitch)
        return (piece._replace(at=self.at + piece.at) for piece in pieces) if self.at else pieces


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
        """The parameter's name, with the index of the block's first element unless that is 0."""
        return self._named(self.block)

    @property
    def matrix(self) -> str:
        """Return the name of the whole matrix; that of the block itself unless it is a slice."""
        return self._named(self.whole or self.block)

    def _named(self, block: Block) -> str:
        return f"{self.shard.spec.name}[{block.offset}]" if block.offset else self.shard.spec.name

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        block = self.whole or self.block
        return block.rows, block.cols

    @property
    def owners(self) -> int:
        """How many ranks own the whole matrix together, each a slice."""
        return self.whole.numel // self.block.numel if self.whole else 1

    @property
    def axis(self) -> int:
        """The axis of its outputs; 0 where that is not known."""
        return self.shard.spec.output_axis or 0

    @property
    def outputs(self) -> int:
        """How many it has."""
        return self.shape[self.axis]

    @cached_property
    def parts(self) -> tuple[Rectangle, ...]:
        """The rectangles that make it up: one, or those on the ranks of a tensor-parallel group.

        The rectangles of copies are equal. The owner uses any of them, and all get its result, so that copies stay
        equal bit by bit.
        """
        sharding, tp_placements = self.shard.spec.sharding, self.shard.tp_placements or (self.shard.placement,)
        if sharding is None:
            return tuple(Rectangle(self.block, 0, placement) for placement in tp_placements)
        cuts = ((placement, sharding.parts(self.block, t)) for t, placement in enumerate(tp_placements))
        return tuple(Rectangle(block, at, placement) for placement, parts in cuts for block, at in parts)

    @cached_property
    def holders(self) -> Sequence[int]:
        """Ranks that hold a part of the matrix, in order."""
        if len(self.parts) == 1:
            return self.parts[0].ranks
        return sorted({rank for part in self.parts for rank in part.ranks})

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The part that ``rank`` holds, as :meth:`Block.pieces`."""
        return chain.from_iterable(part.pieces(rank, self.block.cols) for part in self.parts)

    def held(self, rank: int) -> int:
        """Number of the matrix's elements that ``rank`` holds."""
        return sum(part.held(rank) for part in self.parts)
