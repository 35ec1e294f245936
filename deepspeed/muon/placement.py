# SPDX-License-Identifier: Apache-2.0
"""How parameters and their blocks lie over the ranks: arithmetic rules, so nothing here grows with the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from deepspeed.muon.blocks import Block, Piece
from deepspeed.muon.routing import MatrixSpec


@dataclass(frozen=True)
class Placement:
    """How one parameter lies over the ranks.

    Element e is on rank ``(origin + e) // span``, at position ``base + (origin + e) % span`` of its tensor.
    Stages 1 and 2 cut the flat group: origin is the parameter's offset in it, span the partition's size,
    base 0. Stage 3 cuts each parameter: origin 0, span its partition's size, base its offset.
    Stage 0 cuts nothing: origin 0, span the parameter's size, base 0, and ``copies`` ranks hold all of it.
    """

    origin: int
    span: int
    base: int
    copies: int = 1

    def ranks(self, start: int, stop: int) -> range:
        """Ranks that hold any of the elements ``start .. stop``."""
        if self.copies > 1:
            return range(self.copies)
        return range((self.origin + start) // self.span, (self.origin + stop - 1) // self.span + 1)

    def held(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """The part of ``start .. stop`` that ``rank`` holds; empty where first >= second."""
        if self.copies > 1:
            return start, stop
        low = rank * self.span - self.origin
        return max(start, low), min(stop, low + self.span)

    def position(self, element: int) -> int:
        """Where ``element`` lies in the tensor of the rank that holds it."""
        return self.base + (self.origin + element) % self.span


@dataclass(frozen=True)
class Shard:
    """A parameter of a partition: its route, the tensor that holds its elements, and how they lie."""

    spec: MatrixSpec
    tensor: int
    placement: Placement


@dataclass(frozen=True)
class PlacedBlock:
    """One matrix to orthogonalize, and where its elements are."""

    shard: Shard
    block: Block

    @property
    def name(self) -> str:
        """The parameter's, with the block's first element where it is not the parameter's."""
        offset = self.block.offset
        return f"{self.shard.spec.name}[{offset}]" if offset else self.shard.spec.name

    @cached_property
    def extent(self) -> tuple[int, int]:
        """First element of the parameter, and one past the last, that the block touches."""
        return self.block.offset, self.block.stop

    @cached_property
    def holders(self) -> range:
        """The ranks that hold a part of the matrix."""
        return self.shard.placement.ranks(*self.extent)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What ``rank`` holds, as :meth:`Block.pieces`."""
        low, high = self.shard.placement.held(rank, *self.extent)
        return self.block.pieces(low, high) if low < high else iter(())

    def held(self, rank: int) -> int:
        """Elements of the matrix that ``rank`` holds."""
        low, high = self.shard.placement.held(rank, *self.extent)
        return self.block.before(high) - self.block.before(low) if low < high else 0

    def missing(self, rank: int) -> int:
        """Elements of the matrix that ``rank`` does not hold."""
        return self.block.numel - self.held(rank)
