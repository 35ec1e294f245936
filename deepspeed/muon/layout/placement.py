# SPDX-License-Identifier: Apache-2.0
"""Where the elements of parameters and blocks are, by arithmetic rules whose size does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from deepspeed.muon.layout.block import Block, Piece
from deepspeed.muon.layout.tensor_parallel import Sharding


@dataclass(frozen=True)
class Placement:
    """The rule that says which rank holds each element of one parameter, and at which index.

    Element e is in part k = ``(origin + e) // span``, which is on rank ``first + k * step``. Its index in the flat
    tensor of that rank is ``base + (origin + e) % span``.

    - ZeRO stages 1 and 2 split a flattened parameter group. ``origin``: offset of the parameter in the group. ``span``:
      size of one rank's partition. ``base``: 0.
    - Stage 3 splits each parameter. ``origin``: 0. ``span``: size of one rank's part of it. ``base``: offset of that
      part in the rank's flat tensor.
    - Stage 0 splits nothing. ``origin``, ``base``: 0. ``span``: size of the parameter. ``copies``: number of ranks.
    - With T tensor-parallel ranks, rank t of them has a parameter of its own. ``first``: t. ``step``: T.
    """

    origin: int
    span: int
    base: int
    copies: int = 1
    first: int = 0
    step: int = 1

    def ranks(self, start: int, stop: int) -> range:
        """Return the ranks that hold any of the parameter's elements from ``start`` to ``stop - 1``."""
        if self.copies > 1:
            return range(self.copies)
        low, high = (self.origin + start) // self.span, (self.origin + stop - 1) // self.span
        return range(self.first + low * self.step, self.first + high * self.step + 1, self.step)

    def held_range(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return (first, end): of elements ``start`` to ``stop - 1``, ``rank`` holds ``first`` to ``end - 1``.

        If ``first >= end``, it holds none of them.
        """
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
        """Return the index of the parameter's ``element`` in the flat tensor of the rank that holds this element."""
        return self.base + (self.origin + element) % self.span


class Rectangle(NamedTuple):
    """A rectangle of a matrix, all of it inside the parameter of one tensor-parallel rank.

    ``block``: the rectangle's indices in that parameter. ``at``: index of its first element in the whole matrix.
    ``placement``: which ranks hold the elements of that parameter.
    """

    block: Block
    at: int
    placement: Placement


class Spread:
    """Which ranks hold which elements of one matrix. All matrices that are spread in the same way share one object.

    ``parts``: the rectangles that form the matrix: a single one without tensor parallelism, otherwise at least one for
    each tensor-parallel rank. If these ranks hold copies of the matrix, their rectangles are the same: the owner reads
    one copy, and sends its result to all. ``cols``: columns of the matrix.
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
        """Return a text that is equal for equal spreads, by which ranks compare their plans."""
        blocks = ((part.block, part.at, part.placement.rule) for part in self.parts)
        return str([(b.offset, b.rows, b.cols, b.stride, b.bands, b.gap, b.step, at, rule) for b, at, rule in blocks])

    def held_elements(self, rank: int) -> int:
        """Return how many elements of the matrix ``rank`` holds."""
        if rank not in self._held:
            self._held[rank] = self._count(rank)
        return self._held[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parts of the matrix that ``rank`` holds, as rectangles of elements; empty if it holds none."""
        if rank not in self._pieces:
            self._pieces[rank] = self._cut(rank)
        return self._pieces[rank]

    def _count(self, rank: int) -> int:
        local = ((block, *placement.held_range(rank, block.offset, block.stop)) for block, _, placement in self.parts)
        return sum(max(0, block.before(high) - block.before(low)) for block, low, high in local)

    def _cut(self, rank: int) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for block, at, placement in self.parts:
            pieces = block.pieces(*placement.held_range(rank, block.offset, block.stop), self._cols)
            found += (piece._replace(at=at + piece.at) for piece in pieces) if at else pieces
        return tuple(found)


@lru_cache(maxsize=1024)
def spread_of(block: Block, sharding: Sharding | None, rules: tuple[tuple[int, int, int, int, int], ...]) -> Spread:
    """Return which ranks hold which elements of ``block``, a matrix.

    ``sharding``: how tensor parallelism splits the parameter; ``None`` if it does not. ``rules``: the
    :attr:`Placement.rule` of each tensor-parallel rank's parameter.
    """
    parts = []
    for t, (origin, span, copies, first, step) in enumerate(rules):
        placement = Placement(origin, span, 0, copies, first, step)
        for part, at in sharding.parts(block, t) if sharding else ((block, 0),):
            parts.append(Rectangle(part, at, placement))
    return Spread(tuple(parts), block.cols)
