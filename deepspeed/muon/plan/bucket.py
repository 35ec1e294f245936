# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a bucket: the runs that it holds, the matrices that it owns, and the copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeVar

from deepspeed.muon.matrices.block import Piece
from deepspeed.muon.plan.placement import PlacedBlock

#: Matrices, each with its owner.
OwnedBlocks = list[tuple[int, PlacedBlock]]
#: Of a matrix, by rows and columns: the factor of its update.
Scale = Callable[[int, int], float]
#: The most elements of a span of several runs, as the temporaries of an operation are as large as what it takes.
MAX_SPAN = 2**16
Part = TypeVar("Part")


class Segment(NamedTuple):
    """Elements that one copy carries between host memory and an accelerator.

    They begin at ``host`` in the bucket's host memory, and at ``device`` in its matrices if ``in_place``, else in its
    send buffer.
    """

    host: int
    device: int
    numel: int
    in_place: bool


class Span(NamedTuple):
    """Elements of neighbouring runs: without a gap in the shard, from ``start`` on, and in a buffer, from ``at`` on."""

    start: int
    at: int
    numel: int


class GridCopy(NamedTuple):
    """Elements that lie on a grid in one tensor and one after the other in another, from ``at`` on.

    On the grid they are ``rows`` runs of ``cols`` elements, ``pitch`` apart, from ``start`` on. There may be ``times``
    such grids, ``start_step`` apart, whose elements begin ``at_step`` apart in the other tensor.
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
        """Return the number of elements."""
        return self.times * self.rows * self.cols

    @property
    def extent(self) -> int:
        """Return the elements of one grid from its first to its last, with the gaps."""
        return (self.rows - 1) * self.pitch + self.cols


class ShardRun(NamedTuple):
    """Elements of one block that this rank holds.

    Args:
        parameter: name of the one that they belong to.
        matrix: name of the whole matrix that they belong to.
        tensor: index of the tensor that holds them.
        copy: from that tensor to the bucket's matrices if ``in_place``, else to the send buffer.
        in_place: whether they are written straight into the matrices. That needs this rank to own the block and the
            elements to be contiguous in it; columns of an own block travel through the send buffer.
        shape: of the whole matrix.
        draws: the name under which their random numbers are drawn, and the index of the first one. Numbers belong to
            the elements of the matrix. Columns are not contiguous in it and have numbers of their own.
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
    """Matrices of one shape, or slices of such, adjacent in the bucket's matrices from ``start`` on.

    ``axis``: of their outputs. ``shape``: of the whole matrices. ``owners``: ranks that have a slice of each.
    """

    start: int
    rows: int
    cols: int
    axis: int
    names: tuple[str, ...]
    shape: tuple[int, int]
    owners: int = 1

    @property
    def count(self) -> int:
        """Return the number of matrices."""
        return len(self.names)

    @property
    def gram_axis(self) -> int:
        """Return the shorter axis of the whole matrices."""
        return int(self.shape[0] > self.shape[1])


@dataclass(frozen=True)
class Bucket:
    """One step of the exchange as one rank sees it; positions and counts are in elements.

    Matrices that every rank holds whole have buckets of two kinds by turns: one with this rank's own matrices, which
    do not travel, and then one into which the results of the other owners arrive (``only_results``).
    """

    runs: tuple[ShardRun, ...]
    batches: tuple[Batch, ...]
    #: Between the receive buffer, which is ordered by source rank and then as that rank sent, and the matrices. Each is
    #: one kernel launch, so parts of equal matrices, and equal parts from several ranks, are one copy.
    received: tuple[GridCopy, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    matrix_elements: int
    #: Whether any rank sends anything; equal on all ranks.
    travels: bool
    names: tuple[str, ...]
    #: Whether only results travel, from each owner to all. ``send_counts`` are the numbers of elements of the other
    #: owners' results.
    only_results: bool = False
    #: Elements that this rank then sends to all others: the matrices of the last bucket that had any.
    own_results: int = 0

    @cached_property
    def received_at(self) -> int | None:
        """Return where in the matrices elements may be received in place; ``None`` if they need a receive buffer."""
        first = self.received[0].start if self.received else 0
        is_direct = all(
            copy.rows == 1 and copy.start == first + copy.at and (copy.times == 1 or copy.start_step == copy.at_step)
            for copy in self.received
        )
        return first if is_direct else None

    @property
    def scattered(self) -> tuple[GridCopy, ...]:
        """Return the copies between a receive buffer and the matrices."""
        return self.received if self.received_at is None else ()

    @cached_property
    def host_places(self) -> tuple[int, ...]:
        """Return where each run lies in host memory, if that is not the accelerator's.

        Runs in place are first, one after the other, and the send buffer follows as it is.
        """
        places, end = [], 0
        in_place = sum(run.copy.numel for run in self.runs if run.in_place)
        for run in self.runs:
            places.append(end if run.in_place else in_place + run.copy.at)
            end += run.copy.numel if run.in_place else 0
        return tuple(places)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return what one copy carries between host memory and the accelerator: neighbours in both are one."""
        places = sorted(zip(self.host_places, self.runs, strict=True), key=itemgetter(0))
        parts = (Segment(host, run.copy.at, run.copy.numel, run.in_place) for host, run in places)
        return tuple(_merged(parts, _continued))

    def run_groups(self, scale: Scale) -> list[tuple[int, ...]]:
        """Return the runs, as indices, that are advanced, and applied, by one call.

        They are all contiguous runs of one tensor, one buffer and one scale; a run on a grid is a group of its own.
        """
        groups: dict[tuple, list[int]] = {}
        for index, run in enumerate(self.runs):
            alike = (run.tensor, run.in_place, scale(*run.shape)) if run.copy.rows == 1 else (index,)
            groups.setdefault(alike, []).append(index)
        return [tuple(group) for group in groups.values()]

    def spans(self, runs: Iterable[int], staged: bool) -> list[Span]:
        """Return the spans of a group of runs, by index; none of a run on a grid.

        ``staged``: their buffer is the bucket's host memory.
        """
        copies = [(index, self.runs[index].copy) for index in runs]
        if any(copy.rows > 1 for _, copy in copies):
            return []
        parts = (Span(copy.start, self.host_places[i] if staged else copy.at, copy.numel) for i, copy in copies)
        return _merged(parts, _one_span)

    @cached_property
    def host_elements(self) -> int:
        """Return how many elements of the bucket this rank has."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Return the elements of the matrices, of the send buffer and of the receive buffer."""
        inbox = sum(self.receive_counts) if self.received_at is None else 0
        return self.matrix_elements, sum(self.send_counts), inbox


# ---- what a rank sends, receives and owns -------------------------------------------------------------------------


def bucket_of(items: OwnedBlocks, rank: int, world_size: int) -> Bucket:
    """Return the bucket with this rank's parts of all matrices, and with the matrices that it owns."""
    own_items = [item for owner, item in items if owner == rank]
    sends_own = len(own_items) == 1 and sends_own_part(own_items[0], rank)
    runs: list[ShardRun] = []
    sent = [0] * world_size
    incoming: list[list[tuple[int, Piece]]] = [[] for _ in range(world_size)]
    matrices = send_at = 0
    for owner, item in items:
        mine, spread = owner == rank, item.spread
        for piece in spread.pieces(rank) if rank in spread.holders else ():
            # Elements that stay on this rank skip the send buffer, unless they are columns of a matrix.
            in_place = mine and piece.is_contiguous and not sends_own
            runs.append(_run(item, piece, matrices + piece.at if in_place else send_at, in_place))
            if not in_place:
                numel = piece.numel
                sent[owner] += numel
                send_at += numel
        if mine:
            for source in spread.holders:
                stay = source == rank and not sends_own
                for piece in spread.pieces(source):
                    if not (stay and piece.is_contiguous):
                        incoming[source].append((matrices, piece))
            matrices += item.block.numel
    return Bucket(
        runs=tuple(runs),
        batches=tuple(batches_of(own_items)),
        received=tuple(_unpacking(incoming)),
        send_counts=tuple(sent),
        receive_counts=tuple(sum(piece.numel for _, piece in pieces) for pieces in incoming),
        matrix_elements=matrices,
        # A matrix in several parts may have columns that even a lone holder puts together by sending to itself.
        travels=any(len(item.spread.parts) > 1 or list(item.spread.holders) != [owner] for owner, item in items),
        names=tuple(item.name for _, item in items),
    )


def shared_bucket(items: OwnedBlocks, rank: int, world_size: int, only_results: bool) -> Bucket:
    """Return the bucket with the results of all other owners, or with the matrices that this rank owns.

    All matrices lie whole in a tensor.
    """
    taken = [(owner, item) for owner, item in items if (owner == rank) is not only_results]
    numel, sent, runs = 0, [0] * world_size, []
    for owner, item in taken:
        runs += [_run(item, piece, numel + piece.at, not only_results) for piece in item.spread.pieces(rank)]
        numel += item.block.numel
        sent[owner] += item.block.numel * only_results
    own = [item for owner, item in items if owner == rank]
    return Bucket(
        runs=tuple(runs),
        batches=() if only_results else tuple(batches_of(own)),
        received=(),
        send_counts=tuple(sent),
        receive_counts=(0,) * world_size,
        matrix_elements=0 if only_results else numel,
        travels=only_results,
        names=tuple(item.name for _, item in items),
        only_results=only_results,
        own_results=sum(item.block.numel for item in own) * only_results,
    )


def _run(item: PlacedBlock, piece: Piece, at: int, in_place: bool) -> ShardRun:
    """Return the run of a piece that this rank holds; ``at``: where it goes in the matrices or the send buffer."""
    shard, name = item.shard, item.name
    return ShardRun(
        parameter=shard.spec.name,
        matrix=item.matrix if item.whole else name,
        tensor=shard.tensor,
        copy=GridCopy(at, shard.placement.position(piece.element), piece.rows, piece.cols, piece.stride),
        in_place=in_place,
        shape=item.shape,
        draws=(name, piece.at) if piece.is_contiguous else (f"{name}@{piece.at}", 0),
    )


def sends_own_part(item: PlacedBlock, rank: int) -> bool:
    """Return whether the owner of the only matrix in a bucket sends its own part to itself too.

    Then the parts arrive in order and need no receive buffer, which is larger than an own part of less than half.
    If all other parts lie in front of it, or all behind it, they need none either.
    """
    at, is_between = 0, False
    for source in item.spread.holders:
        first = at
        for piece in item.spread.pieces(source):
            if piece.at != at or not piece.is_contiguous:
                return False
            at += piece.numel
        is_between |= source == rank and first > 0 and at < item.block.numel
    return is_between and 2 * item.spread.held(rank) < item.block.numel


def _unpacking(incoming: Sequence[Iterable[tuple[int, Piece]]]) -> Iterator[GridCopy]:
    """Yield the copies that put received elements in place.

    ``incoming``: the pieces from each source, each with the first element of its matrix.
    """
    at, sources = 0, []
    for pieces in incoming:
        copies = []
        for matrix, piece in pieces:
            # A piece that is contiguous in the matrix is one run, whatever its layout at the source.
            rows, cols = (1, piece.numel) if piece.is_contiguous else (piece.rows, piece.cols)
            copies.append(GridCopy(at, matrix + piece.at, rows, cols, piece.pitch if rows > 1 else cols))
            at += piece.numel
        sources.append(_merged(copies, _joined))
    for alike in zip_longest(*filter(None, sources)):
        yield from _merged(filter(None, alike), _repeated)


# ---- neighbours as one --------------------------------------------------------------------------------------------


def _merged(parts: Iterable[Part], merge: Callable[[Part, Part], Part | None]) -> list[Part]:
    """Merge neighbours wherever ``merge`` can express both as one."""
    result: list[Part] = []
    for part in parts:
        both = merge(result[-1], part) if result else None
        result[-1:] = [both] if both else [*result[-1:], part]
    return result


def _continued(first: Segment, second: Segment) -> Segment | None:
    is_next = (first.in_place, first.device + first.numel) == (second.in_place, second.device)
    return first._replace(numel=first.numel + second.numel) if is_next else None


def _one_span(first: Span, second: Span) -> Span | None:
    is_next = (first.start + first.numel, first.at + first.numel) == (second.start, second.at)
    numel = first.numel + second.numel
    return first._replace(numel=numel) if is_next and numel <= MAX_SPAN else None


def _adjacent(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies as one, if they are neighbours in both tensors."""
    are_rows = first.rows == second.rows == first.times == 1
    if are_rows and (second.at, second.start) == (first.at + first.cols, first.start + first.cols):
        cols = first.cols + second.cols
        return GridCopy(first.at, first.start, 1, cols, cols)
    return None


def _joined(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies that follow each other in the buffer as one row or one grid, if they are that."""
    pitch = first.pitch if first.rows > 1 else second.start - first.start
    follows = second.start == first.start + first.rows * pitch and pitch > first.cols == second.cols
    if follows and (second.rows == 1 or second.pitch == pitch):
        return GridCopy(first.at, first.start, first.rows + second.rows, first.cols, pitch)
    return _adjacent(first, second)


def _repeated(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies of equal grids as one, if they are neighbours or the second continues the first's steps."""
    at, start = second.at - first.at, second.start - first.start
    steps = (first.at_step, first.start_step) if first.times > 1 else (at, start)
    alike = (first.rows, first.cols, first.pitch) == (second.rows, second.cols, second.pitch)
    both = _adjacent(first, second)
    if both is None and alike and start > 0 and (at, start) == (first.times * steps[0], first.times * steps[1]):
        return first._replace(times=first.times + 1, at_step=steps[0], start_step=steps[1])
    return both


def batches_of(items: Iterable[PlacedBlock]) -> Iterator[Batch]:
    """Yield a batch for neighbours of one kind, of matrices that lie one after the other."""
    start = 0
    for _, group in groupby(items, key=kind_of):
        alike = list(group)
        first, block = alike[0], alike[0].block
        names = tuple(item.name for item in alike)
        yield Batch(start, block.rows, block.cols, first.axis, names, first.shape, first.owners)
        start += len(alike) * block.numel


def kind_of(item: PlacedBlock) -> tuple[int, ...]:
    """Return the sorting and grouping key of a batch: most owners first, then largest."""
    return -item.owners, -item.block.numel, item.block.rows, *item.shape, item.axis
