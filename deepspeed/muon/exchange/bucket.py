# SPDX-License-Identifier: Apache-2.0
"""A bucket, the matrices that ranks exchange in one collective, as one rank sees it.

It lists the pieces of these matrices in the rank's ZeRO shard (:class:`ShardRun`, in names "run"), the matrices that
the rank owns, which means that it orthogonalizes them (:class:`Batch`), and the copies that put received pieces into
their matrices (:class:`GridCopy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeVar

from deepspeed.muon.exchange.placed_params import PlacedBlock
from deepspeed.muon.layout import Piece

#: (owner, matrix) pairs of matrices of all owners, not only of those that this rank owns.
OwnedBlocks = list[tuple[int, PlacedBlock]]
#: (rows, columns) of a matrix -> the factor that multiplies its update.
Scale = Callable[[int, int], float]
#: Maximum elements of a span that joins several runs: the temporaries of PyTorch's operations are as large as the span.
MAX_SPAN = 2**16
Part = TypeVar("Part")


class Span(NamedTuple):
    """``numel`` adjacent elements that have places in two flat tensors; one operation updates or copies them all.

    In the first tensor, one of this rank's shard, they begin at index ``start``. In the second, a buffer of the
    :class:`Bucket`, they begin at index ``at``. In :attr:`Bucket.staged_spans` the first tensor is a buffer on the
    accelerator, and the second is host memory.
    """

    start: int
    at: int
    numel: int


class GridCopy(NamedTuple):
    """The places of ``rows`` rows of ``cols`` elements each in two flat tensors, for a copy in either direction.

    In the packed tensor the rows follow each other without gaps, from index ``at``. In the other, the grid, they begin
    ``pitch`` elements apart, from index ``start``. Example: ``GridCopy(at=6, start=100, rows=2, cols=3, pitch=8)``
    pairs the packed elements 6 to 8 with 100 to 102 of the grid, and 9 to 11 with 108 to 110.

    In :attr:`ShardRun.copy` the grid is a tensor of this rank's shard, and the packed tensor is a buffer of the
    :class:`Bucket`. In :attr:`Bucket.received` the grid is the flat tensor of the matrices that this rank
    orthogonalizes, and the packed tensor is the receive buffer.

    If ``times`` > 1, more such copies follow: copy i, counted from 0, has the first indices ``at + i * at_step`` and
    ``start + i * start_step``.
    """

    at: int
    start: int
    rows: int
    cols: int
    pitch: int
    times: int = 1
    at_step: int = 0
    start_step: int = 0

    @property
    def numel(self) -> int:
        """Return the number of elements in all ``times`` repetitions of the copy."""
        return self.times * self.rows * self.cols


class ShardRun(NamedTuple):
    """A part of one matrix that this rank's shard holds: consecutive elements, or equally spaced rows.

    Args:
        parameter: name of the parameter that contains the matrix.
        matrix: name of the matrix.
        tensor: index of the tensor that contains the elements, among those that one call of ``step`` updates.
        copy: where the elements are in that tensor, and where in the send buffer of the :class:`Bucket` or, if
            ``in_place``, in the bucket's matrices.
        in_place: whether the elements are written directly into the bucket's matrices, and not into the send buffer.
            At ZeRO stage 0 all are. At other stages only elements of a matrix that this rank orthogonalizes can be, if
            they are contiguous in it.
        shape: (rows, columns) of the whole matrix.
        draws: the random numbers for stochastic rounding: (name from which their key is computed, number of the first
            element in the sequence of this key).
    """

    parameter: str
    matrix: str
    tensor: int
    copy: GridCopy
    in_place: bool
    shape: tuple[int, int]
    draws: tuple[str, int]


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that this rank orthogonalizes together.

    Args:
        start: index of the batch's first element in the bucket's matrices (:class:`Bucket`). The batch's matrices
            follow each other.
        rows, cols: shape of each matrix.
        axis: axis of a matrix that indexes its outputs (output features): 0 rows, 1 columns.
        names: name of each matrix.
    """

    start: int
    rows: int
    cols: int
    axis: int
    names: tuple[str, ...]

    @cached_property
    def count(self) -> int:
        """Return the number of matrices in the batch."""
        return len(self.names)


@dataclass(frozen=True)
class Bucket:
    """The matrices that all ranks exchange at the same time, as one rank sees them. All counts are in elements.

    ``runs``: the parts of these matrices in this rank's shard. ``batches``: the matrices that this rank owns, which
    means that it orthogonalizes them. In a step the bucket has three flat buffers on this rank: the send buffer, with
    the runs to send to owners; the receive buffer, with what arrives from other ranks; and "the bucket's matrices",
    with the ``batches``.

    At ZeRO stage 0 every rank holds all matrices whole, so nothing is sent to the owners. The bucket's matrices are
    then those of all owners, in one part for each owner. Parts are equal in size, may end in padding, and get their
    results by an all-gather.
    """

    runs: tuple[ShardRun, ...]
    batches: tuple[Batch, ...]
    #: Copies between the receive buffer, which is ordered by source rank and then as that rank sends, and the bucket's
    #: matrices. Each is one kernel launch, so parts of equal matrices, and equal parts from several ranks, are merged.
    received: tuple[GridCopy, ...]
    #: For each rank, elements sent to it and received from it on the way to the owners.
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    #: Elements of the bucket's matrices.
    matrix_elements: int
    #: Whether any rank sends anything; equal on all ranks.
    travels: bool
    #: Names of all matrices in the bucket, whoever owns them.
    names: tuple[str, ...]
    #: At ZeRO stage 0: elements of each owner's part of the bucket's matrices. At other stages 0.
    gathered_part: int = 0

    @cached_property
    def direct_receive_start(self) -> int | None:
        """Return the start of the slice of the bucket's matrices into which the all-to-all can write what it receives.

        Return ``None`` if the bucket needs a receive buffer, because the received elements are in another order than in
        the matrices, or are not contiguous there.
        """
        first = self.received[0].start if self.received else 0
        is_direct = all(
            copy.rows == 1 and copy.start == first + copy.at and (copy.times == 1 or copy.start_step == copy.at_step)
            for copy in self.received
        )
        return first if is_direct else None

    @cached_property
    def receive_copies(self) -> tuple[GridCopy, ...]:
        """Return the copies from the bucket's receive buffer into its matrices; empty without a receive buffer."""
        return self.received if self.direct_receive_start is None else ()

    @cached_property
    def host_places(self) -> tuple[int, ...]:
        """Return, for each of ``runs``, the index of its first element in the bucket's host memory (CPU offload)."""
        # Runs in place come first, then the others in the order of the send buffer.
        places, end = [], 0
        in_place = sum(run.copy.numel for run in self.runs if run.in_place)
        for run in self.runs:
            places.append(end if run.in_place else in_place + run.copy.at)
            end += run.copy.numel if run.in_place else 0
        return tuple(places)

    @cached_property
    def staged_spans(self) -> dict[bool, list[Span]]:
        """Return what CPU offload copies between the bucket's buffers on the accelerator and its host memory.

        The spans under the key True are those of the bucket's matrices, for runs that are ``in_place``. Those under
        False are of the send buffer. ``Span.start`` is an index in that buffer, ``Span.at`` in the host memory.
        """
        spans: dict[bool, list[Span]] = {True: [], False: []}
        for host, run in sorted(zip(self.host_places, self.runs, strict=True), key=itemgetter(0)):
            spans[run.in_place].append(Span(run.copy.at, host, run.copy.numel))
        return {in_place: _merged(found, _one_span) for in_place, found in spans.items()}

    def run_groups(self, scale: Scale) -> list[tuple[int, ...]]:
        """Group the bucket's ``runs`` such that one call can update the momentum, or the weights, of a whole group.

        Return tuples of indices into ``runs``; example: ``[(0, 2), (1,)]``. A :class:`ShardRun` of several rows is a
        group by itself. The others share a group if they have the same ``tensor``, ``in_place`` and scale.
        ``scale``: (rows, columns) of a matrix -> the factor that multiplies its update.
        """
        indices_of_groups: dict[tuple, list[int]] = {}
        for index, run in enumerate(self.runs):
            alike = (run.tensor, run.in_place, scale(*run.shape)) if run.copy.rows == 1 else (index,)
            indices_of_groups.setdefault(alike, []).append(index)
        return [tuple(group) for group in indices_of_groups.values()]

    def spans(self, indices: Iterable[int], staged: bool) -> list[Span]:
        """Return the elements of one group of runs (see :meth:`run_groups`) as :class:`Span` objects.

        Adjacent runs share a span of at most :data:`MAX_SPAN` elements; a single run may be longer. The list is empty
        if the group is a run of several rows. ``indices``: the group's indices into ``Bucket.runs``.
        ``staged``: whether ``Span.at`` is an index in the bucket's host memory (CPU offload); otherwise it is one in
        the bucket's matrices or send buffer.
        """
        copies = [(index, self.runs[index].copy) for index in indices]
        if any(copy.rows > 1 for _, copy in copies):
            return []
        parts = (Span(copy.start, self.host_places[i] if staged else copy.at, copy.numel) for i, copy in copies)
        return _merged(parts, partial(_one_span, limit=MAX_SPAN))

    @cached_property
    def host_elements(self) -> int:
        """Return how many elements the bucket has in host memory under CPU offload: those of all ``runs``."""
        return sum(run.copy.numel for run in self.runs)

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Return the sizes of the bucket's three buffers, in elements: (matrices, send buffer, receive buffer)."""
        received = sum(self.receive_counts) if self.direct_receive_start is None else 0
        return self.matrix_elements, sum(self.send_counts), received


# ---- what a rank sends, receives and owns -------------------------------------------------------------------------


def bucket_of(items: OwnedBlocks, rank: int, world_size: int) -> Bucket:
    """Return one bucket as ``rank`` sees it, for matrices that ranks hold in parts.

    If several ranks hold every matrix whole, call :func:`replicated_bucket` instead. ``items``: all (owner, matrix)
    pairs of the bucket, sorted by owner and then by :func:`batch_key`. ``world_size``: number of ranks that share them.
    """
    own_items = [item for owner, item in items if owner == rank]
    sends_own = len(own_items) == 1 and sends_own_part(own_items[0], rank)
    runs: list[ShardRun] = []
    sent = [0] * world_size
    incoming: list[list[tuple[int, Piece]]] = [[] for _ in range(world_size)]
    own_at = send_at = 0  # index of the next own matrix in the bucket's matrices, of the next part in the send buffer
    for owner, item in items:
        mine, spread = owner == rank, item.spread
        for piece in spread.pieces(rank) if rank in spread.holders else ():
            # Elements that stay on this rank skip the send buffer, unless they are columns: one copy puts all columns
            # of a matrix in order, also those that this rank sends to itself.
            in_place = mine and piece.is_contiguous and not sends_own
            runs.append(_run(item, piece, own_at + piece.at if in_place else send_at, in_place))
            if not in_place:
                numel = piece.numel
                sent[owner] += numel
                send_at += numel
        if mine:  # list what arrives from each source, in the order in which it fills its send buffer
            for source in spread.holders:
                stay = source == rank and not sends_own
                for piece in spread.pieces(source):
                    if not (stay and piece.is_contiguous):
                        incoming[source].append((own_at, piece))
            own_at += item.block.numel
    return Bucket(
        runs=tuple(runs),
        batches=tuple(batches_of(own_items)),
        received=tuple(_unpacking(incoming)),
        send_counts=tuple(sent),
        receive_counts=tuple(sum(piece.numel for _, piece in pieces) for pieces in incoming),
        matrix_elements=own_at,
        # A matrix in several parts (tensor parallelism) may have columns, which even a single holder sends to itself.
        travels=any(len(item.spread.rectangles) > 1 or list(item.spread.holders) != [owner] for owner, item in items),
        names=tuple(item.name for _, item in items),
    )


def replicated_bucket(items: OwnedBlocks, rank: int, world_size: int) -> Bucket:
    """Return one bucket as ``rank`` sees it, if every rank holds every matrix whole (ZeRO stage 0).

    ``items``: all (owner, matrix) pairs of the bucket, sorted by owner and then by :func:`batch_key`.
    """
    by_owner: list[list[PlacedBlock]] = [[] for _ in range(world_size)]
    for owner, item in items:
        by_owner[owner].append(item)
    part, runs = max(sum(item.block.numel for item in owned) for owned in by_owner), []
    for owner, owned in enumerate(by_owner):
        at = owner * part
        for item in owned:
            runs += [_run(item, piece, at + piece.at, in_place=True) for piece in item.spread.pieces(rank)]
            at += item.block.numel
    return Bucket(
        runs=tuple(runs),
        batches=tuple(batches_of(by_owner[rank], start=rank * part)),
        received=(),
        send_counts=(0,) * world_size,
        receive_counts=(0,) * world_size,
        matrix_elements=world_size * part,
        travels=world_size > 1,
        names=tuple(item.name for _, item in items),
        gathered_part=part,
    )


def _run(item: PlacedBlock, piece: Piece, at: int, in_place: bool) -> ShardRun:
    """Return the :class:`ShardRun` for ``piece``, a piece of the matrix ``item`` in this rank's shard.

    ``at``: index of the piece's first element in the send buffer or, if ``in_place``, in the bucket's matrices.
    """
    shard, name = item.shard, item.name
    # In the shard, as in the parameter, rows are ``stride`` apart. ``piece.pitch`` is their distance in the matrix.
    rows, cols = (1, piece.numel) if piece.stride == piece.cols else (piece.rows, piece.cols)
    return ShardRun(
        parameter=shard.spec.name,
        matrix=name,
        tensor=shard.tensor,
        copy=GridCopy(at, shard.placement.position(piece.element), rows, cols, piece.stride if rows > 1 else cols),
        in_place=in_place,
        shape=item.shape,
        # Elements that are contiguous in the block get the same random numbers, whichever rank holds them.
        draws=(name, piece.at) if piece.is_contiguous else (f"{name}@{piece.at}", 0),
    )


def sends_own_part(item: PlacedBlock, rank: int) -> bool:
    """Return whether ``rank`` should send its own part of a matrix to itself too, because that saves memory.

    All parts then arrive in the order of the matrix, so that ``rank`` needs no receive buffer. ``item``: the matrix. It
    must be the only one in the bucket that ``rank`` orthogonalizes.
    """
    # That saves memory if the own part, which takes room in the send buffer, is less than half of the matrix, and
    # neither first nor last in it.
    at, is_between = 0, False
    for source in item.spread.holders:
        first = at
        for piece in item.spread.pieces(source):
            if piece.at != at or not piece.is_contiguous:
                return False
            at += piece.numel
        is_between |= source == rank and first > 0 and at < item.block.numel
    return is_between and 2 * item.spread.held_elements(rank) < item.block.numel


def _unpacking(incoming: Sequence[Iterable[tuple[int, Piece]]]) -> Iterator[GridCopy]:
    """Yield the copies from a bucket's receive buffer into its matrices, merged where possible.

    ``incoming``: for each source rank, an (index, piece) pair for each piece that it sends. The index is that of the
    first element of the piece's matrix in the bucket's matrices.
    """
    at, copies_of_sources = 0, []
    for pieces in incoming:
        copies = []
        for matrix_at, piece in pieces:
            # A piece that is contiguous in the matrix is one row of a copy, whatever its layout at the source.
            rows, cols = (1, piece.numel) if piece.is_contiguous else (piece.rows, piece.cols)
            copies.append(GridCopy(at, matrix_at + piece.at, rows, cols, piece.pitch if rows > 1 else cols))
            at += piece.numel
        copies_of_sources.append(_merged(copies, _joined))
    # The n-th copies of all sources often have one shape and a constant distance, and then become one with ``times``.
    for nth_copies in zip_longest(*filter(None, copies_of_sources)):
        yield from _merged(filter(None, nth_copies), _repeated)


# ---- neighbours as one --------------------------------------------------------------------------------------------


def _merged(in_order: Iterable[Part], merge: Callable[[Part, Part], Part | None]) -> list[Part]:
    """Return ``in_order`` as a list in which neighbours are merged.

    ``merge``: returns one item for two neighbours, or ``None`` if they cannot be merged.
    """
    merged: list[Part] = []
    for part in in_order:
        both = merge(merged[-1], part) if merged else None
        merged[-1:] = [both] if both else [*merged[-1:], part]
    return merged


def _one_span(span: Span, next_span: Span, limit: float = math.inf) -> Span | None:
    """Return one span for two that are adjacent in both tensors; ``None`` for others, or above ``limit`` elements."""
    # Matrices of one shape are in the order of the model, so runs that are neighbours in the shard often are here, too.
    is_next = (span.start + span.numel, span.at + span.numel) == (next_span.start, next_span.at)
    numel = span.numel + next_span.numel
    return span._replace(numel=numel) if is_next and numel <= limit else None


def _adjacent(copy: GridCopy, next_copy: GridCopy) -> GridCopy | None:
    """Return one :class:`GridCopy` for two of single rows that are adjacent in both tensors; ``None`` for others."""
    are_rows = copy.rows == next_copy.rows == copy.times == 1
    if are_rows and (next_copy.at, next_copy.start) == (copy.at + copy.cols, copy.start + copy.cols):
        cols = copy.cols + next_copy.cols
        return GridCopy(copy.at, copy.start, 1, cols, cols)
    return None


def _joined(copy: GridCopy, next_copy: GridCopy) -> GridCopy | None:
    """Return one :class:`GridCopy` that does both copies, as a single grid of rows; ``None`` if impossible.

    ``next_copy`` must begin where ``copy`` ends in the packed tensor.
    """
    pitch = copy.pitch if copy.rows > 1 else next_copy.start - copy.start
    follows = next_copy.start == copy.start + copy.rows * pitch and pitch > copy.cols == next_copy.cols
    if follows and (next_copy.rows == 1 or next_copy.pitch == pitch):
        return GridCopy(copy.at, copy.start, copy.rows + next_copy.rows, copy.cols, pitch)
    return _adjacent(copy, next_copy)


def _repeated(copy: GridCopy, next_copy: GridCopy) -> GridCopy | None:
    """Return one :class:`GridCopy` that does both copies: ``copy`` with ``times`` + 1, or with a longer row.

    Return ``None`` if that is impossible.
    """
    to_at, to_start = next_copy.at - copy.at, next_copy.start - copy.start  # distances to the first repetition
    steps = (copy.at_step, copy.start_step) if copy.times > 1 else (to_at, to_start)
    alike = (copy.rows, copy.cols, copy.pitch) == (next_copy.rows, next_copy.cols, next_copy.pitch)
    both = _adjacent(copy, next_copy)
    if both is None and alike and to_start > 0 and (to_at, to_start) == tuple(copy.times * step for step in steps):
        return copy._replace(times=copy.times + 1, at_step=steps[0], start_step=steps[1])
    return both


def batches_of(items: Iterable[PlacedBlock], start: int = 0) -> Iterator[Batch]:
    """Yield a :class:`Batch` for each shape among the matrices that one rank orthogonalizes in a bucket.

    ``items``: these matrices, sorted by :func:`batch_key`. ``start``: where the first of them begins in the flat tensor
    that holds the bucket's matrices.
    """
    for _, group in groupby(items, key=batch_key):
        alike = list(group)
        first, block = alike[0], alike[0].block
        names = tuple(item.name for item in alike)
        yield Batch(start, block.rows, block.cols, first.axis, names)
        start += len(alike) * block.numel


def batch_key(item: PlacedBlock) -> tuple[int, ...]:
    """Return a key that sorts matrices, the largest first. Matrices with equal keys form a :class:`Batch`."""
    return -item.block.numel, item.block.rows, item.axis
