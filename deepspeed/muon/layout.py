# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a matrix lie: in a parameter, in the flat shards of ZeRO, and under tensor parallelism.

All of this is integer arithmetic: no tensor is read, nothing is sent, and no setting is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A rectangle of a matrix, such as the part that one rank holds: ``rows`` rows of ``cols`` contiguous elements.

    The matrix is a :class:`Block` of a parameter. In the flattened parameter, the rectangle starts at index
    ``element``, and its rows start ``stride`` elements apart. In the flattened block, it starts at index ``at``, and
    its rows start ``pitch`` elements apart. ``pitch`` is larger than ``cols`` only if :meth:`Block.pieces` was called
    for a block that is part of a wider matrix.
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
    a fused weight, for example. Its columns are ``column_stride`` elements apart: every fourth column of a weight that
    holds a LoRA factor of each of 4 experts, for example. With n = rows / bands, the index of element (i, j) is
    ``offset + i // n * gap + i % n * stride + j * column_stride``.
    """

    offset: int
    rows: int
    cols: int
    stride: int
    bands: int = 1
    gap: int = 0
    column_stride: int = 1

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
        return self.offset + band * self.gap + row * self.stride + column * self.column_stride

    def before(self, element: int) -> int:
        """Return how many elements of the block lie before index ``element`` of the flattened parameter."""
        inside, numel = max(0, element - self.offset), self.rows * self.cols
        if self.stride == self.cols and self.bands == 1:  # column_stride is 1
            return min(inside, numel)
        whole = numel // self.bands
        band, inside = divmod(inside, self.gap) if self.bands > 1 else (0, inside)
        row, column = divmod(inside, self.stride)
        columns = min(-(-column // self.column_stride), self.cols)
        return min(band * whole + min(row * self.cols + columns, whole), numel)

    def pieces(self, start: int, stop: int, pitch: int | None = None) -> Iterator[Piece]:
        """Yield rectangles that cover the block's elements with index ``start`` to ``stop - 1`` of the parameter.

        ``start`` and ``stop`` are indices in the flattened parameter. ``pitch``: if the block is one tensor-parallel
        rank's part of a matrix, the number of columns of that matrix. The rectangles' ``at`` and ``pitch`` then refer
        to that matrix, with index 0 at the block's first element, and ``column_stride`` must be 1.
        """
        at, end = self.before(start), self.before(stop)
        in_band = self.numel // self.bands
        while at < end:
            left = min(end, (at // in_band + 1) * in_band) - at
            column = at % self.cols
            if self.column_stride > 1:  # each element is a row of the piece
                rows = left if self.stride == self.cols * self.column_stride else min(self.cols - column, left)
                yield Piece(self.element(at), at, rows, 1, self.column_stride if rows > 1 else 1, 1)
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
        return tuple(
            replace(block, offset=block.offset + start * block.column_stride, cols=size) for start, size in pairs
        )
    bands, gap = by.groups, sum(by.sizes) * stride if by.groups > 1 else 0
    return tuple(
        replace(block, offset=block.offset + i * stride, rows=n * bands, bands=bands, gap=gap) for i, n in pairs
    )


@dataclass(frozen=True)
class Placement:
    """The rule that says which rank holds each element of one parameter, and at which index of its flat tensor.

    Element e is in part k = ``(origin + e) // span``, which is on rank ``first + k * rank_step``. Its index in the flat
    tensor of that rank is ``base + (origin + e) % span``.

    - ZeRO stages 1 and 2 split a flattened parameter group. ``origin``: offset of the parameter in the group. ``span``:
      size of one rank's partition. ``base``: 0.
    - Stage 3 splits each parameter. ``origin``: 0. ``span``: size of one rank's part of it. ``base``: offset of that
      part in the rank's flat tensor.
    - Stage 0 splits nothing. ``origin``, ``base``: 0. ``span``: size of the parameter. ``copies``: number of ranks, all
      of which hold every element.
    - With T tensor-parallel ranks, the parameter of each has its own placement, with ``first``: the rank's index in
      the tensor-parallel group, ``rank_step``: T.
    """

    origin: int
    span: int
    base: int
    copies: int = 1
    first: int = 0
    rank_step: int = 1

    def ranks(self, start: int, stop: int) -> range:
        """Return the ranks that hold any of the parameter's elements from ``start`` to ``stop - 1``."""
        if self.copies > 1:
            return range(self.copies)
        low, high = (self.origin + start) // self.span, (self.origin + stop - 1) // self.span
        return range(self.first + low * self.rank_step, self.first + high * self.rank_step + 1, self.rank_step)

    def held_range(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return (first, end): of elements ``start`` to ``stop - 1``, ``rank`` holds ``first`` to ``end - 1``.

        If ``first >= end``, it holds none of them.
        """
        if self.copies > 1:
            return start, stop
        part, other = divmod(rank - self.first, self.rank_step)
        low = part * self.span - self.origin
        return (max(start, low), min(stop, low + self.span)) if not other else (stop, start)

    @property
    def rule(self) -> tuple[int, int, int, int, int]:
        """Return the fields that decide which rank holds each element: (origin, span, copies, first, rank_step)."""
        return self.origin, self.span, self.copies, self.first, self.rank_step

    def position(self, element: int) -> int:
        """Return the index of the parameter's ``element`` in the flat tensor of the rank that holds this element."""
        return self.base + (self.origin + element) % self.span


class Rectangle(NamedTuple):
    """A rectangle of a matrix, all of it inside the parameter of one tensor-parallel rank.

    ``block``: the rectangle's indices in that parameter. ``at``: index of its first element in the flattened matrix.
    ``placement``: which ranks hold the elements of that parameter.
    """

    block: Block
    at: int
    placement: Placement


class Spread:
    """Which ranks hold which elements of one matrix. All matrices that are spread in the same way share one object.

    ``rectangles``: a single one that is the whole matrix; with tensor parallelism, all rectangles into which the
    tensor-parallel ranks split it. If these ranks hold copies of the matrix, their rectangles are the same: the rank
    that orthogonalizes the matrix reads one copy, and sends the result to all. ``cols``: columns of the matrix.
    """

    def __init__(self, rectangles: tuple[Rectangle, ...], cols: int) -> None:
        self.rectangles, self._cols = rectangles, cols
        ranks = [placement.ranks(block.offset, block.stop) for block, _, placement in rectangles]
        #: The ranks from the first that holds a part of the matrix to the last, in order. Where the matrix has gaps in
        #: its parameter, some of them may hold nothing.
        self.holders: Sequence[int] = ranks[0] if len(rectangles) == 1 else sorted({*chain.from_iterable(ranks)})
        self._held_by_rank: dict[int, int] = {}
        self._pieces_by_rank: dict[int, tuple[Piece, ...]] = {}

    @cached_property
    def text(self) -> str:
        """Return a text that is equal for equal objects of this class. Ranks compare their plans by it."""
        parts = []
        for block, at, placement in self.rectangles:
            shape = block.rows, block.cols, block.stride, block.bands, block.gap, block.column_stride
            parts.append((block.offset, *shape, at, placement.rule))
        return str(parts)

    def held_elements(self, rank: int) -> int:
        """Return how many elements of the matrix ``rank`` holds."""
        if rank not in self._held_by_rank:
            self._held_by_rank[rank] = self._count(rank)
        return self._held_by_rank[rank]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the part of the matrix that ``rank`` holds, as rectangles (:class:`Piece`); empty if it holds none."""
        if rank not in self._pieces_by_rank:
            self._pieces_by_rank[rank] = self._cut(rank)
        return self._pieces_by_rank[rank]

    def _count(self, rank: int) -> int:
        """Compute :meth:`held_elements` without the cache."""
        local = (
            (block, *placement.held_range(rank, block.offset, block.stop)) for block, _, placement in self.rectangles
        )
        return sum(max(0, block.before(high) - block.before(low)) for block, low, high in local)

    def _cut(self, rank: int) -> tuple[Piece, ...]:
        """Compute :meth:`pieces` without the cache."""
        pieces: list[Piece] = []
        for block, at, placement in self.rectangles:
            of_block = block.pieces(*placement.held_range(rank, block.offset, block.stop), self._cols)
            pieces += (piece._replace(at=at + piece.at) for piece in of_block) if at else of_block
        return tuple(pieces)


@lru_cache(maxsize=1024)
def spread_of(block: Block, sharding: Sharding | None, rules: tuple[tuple[int, int, int, int, int], ...]) -> Spread:
    """Return which ranks hold which elements of ``block``, a matrix.

    ``sharding``: how tensor parallelism splits the parameter; ``None`` if it does not. ``rules``: the
    :attr:`Placement.rule` of each tensor-parallel rank's parameter; a single one without tensor parallelism.
    """
    rectangles = []
    for t, (origin, span, copies, first, rank_step) in enumerate(rules):
        placement = Placement(origin, span, 0, copies, first, rank_step)
        for part, at in sharding.parts(block, t) if sharding else ((block, 0),):
            rectangles.append(Rectangle(part, at, placement))
    return Spread(tuple(rectangles), block.cols)


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
        """Return how many rows (``axis`` 0) or columns (``axis`` 1) tensor-parallel rank ``rank`` holds."""
        return sum(size for _, size in self.ranges[rank])

    def parts(self, block: Block, rank: int) -> Iterator[tuple[Block, int]]:
        """Yield (part, start) for each rectangle of ``block`` that lies in the shard of tensor-parallel rank ``rank``.

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


@dataclass(frozen=True)
class MatrixSpec:
    """The routing of one parameter: whether Muon or AdamW updates it, and which matrices in it Muon orthogonalizes.

    Args:
        name: name of the parameter in the model; the first one of a tied parameter.
        shape: shape of the parameter on this rank, after tensor parallelism and before ZeRO split it.
        use_muon: whether Muon updates the parameter; otherwise AdamW does.
        reason: why Muon or AdamW updates the parameter, as a text.
        blocks: the matrices; empty for AdamW. With ``sharding`` their indices are those of the unsplit parameter.
        split: how the parameter is split or flattened, or why it is left whole, as a text; empty if it simply is one
            matrix.
        sharding: how tensor parallelism split the parameter over ranks; ``None`` if it did not, if unknown (AdamW), or
            if Muon updates shards as matrices (``tp_mode`` "shard").
        is_projection: whether the parameter's module has the name of an attention projection.
        chosen_by: ``use_muon``, ``muon_exclude`` or ``muon_include``, the user's option that applied; ``None`` if the
            package's rules decided.
        overrides_rules: whether the package's rules alone would have decided otherwise.
        split_by: ``muon_split``, ``per_head_muon`` or ``muon_fused``, the option that split the parameter, or ``None``.
        split_pattern: the pattern in ``muon_split`` that split the parameter.
        left_whole: whether the parameter stays one matrix although it might be split; ``split`` then says why.
        output_axis: axis of the outputs in each matrix (0: rows, 1: columns); ``None`` if unknown.
        is_lora: whether the parameter is a factor of a low-rank adapter.
        is_unsure: whether only the parameter's place in the model decided if it is an output head, so that the decision
            may be wrong.
    """

    name: str
    shape: tuple[int, ...]
    use_muon: bool
    reason: str
    blocks: tuple[Block, ...] = ()
    split: str = ""
    sharding: Sharding | None = None
    is_projection: bool = False
    chosen_by: str | None = None
    overrides_rules: bool = False
    split_by: str | None = None
    split_pattern: str = ""
    left_whole: bool = False
    output_axis: int | None = 0
    is_lora: bool = False
    is_unsure: bool = False

    @property
    def numel(self) -> int:
        """Return the parameter's number of elements on this rank, before ZeRO partitions it."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the parameter's shape before tensor parallelism split it."""
        return self.sharding.shape if self.sharding else self.shape


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
    """Return the split that Megatron's attributes on a parameter describe; ``None`` with one tensor-parallel rank.

    Raise ValueError if the attributes are incomplete or wrong.
    """
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
            f"the parameter's shape on this rank is {list(local)} and its partition_dim is {axis}; expected at most 2 "
            "dimensions, and a partition_dim below the number of dimensions"
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
