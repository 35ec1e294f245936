# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a bucket: pieces of matrices that its shard holds (runs), matrices that it owns, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import NamedTuple, TypeVar

from deepspeed.muon.matrices.block import Piece
from deepspeed.muon.plan.placement import PlacedBlock

#: (owner, matrix or slice) pairs.
OwnedBlocks = list[tuple[int, PlacedBlock]]
#: (rows, columns) of a matrix -> the factor of its update.
Scale = Callable[[int, int], float]
#: Maximum elements of a span that joins several runs: the temporaries of PyTorch's operations are as large as the span.
MAX_SPAN = 2**16
Part = TypeVar("Part")


class Segment(NamedTuple):
    """Elements that one copy moves between host memory and an accelerator under CPU offload.

    They start at index ``host`` of the bucket's host memory, and at index ``device`` of its matrices if ``in_place``,
    otherwise of its send buffer.
    """

    host: int
    device: int
    numel: int
    in_place: bool


class Span(NamedTuple):
    """Adjacent runs treated as one: contiguous in the shard, from index ``start``, and in a buffer, from ``at``."""

    start: int
    at: int
    numel: int


class GridCopy(NamedTuple):
    """A copy between elements on a regular grid in one tensor and consecutive elements of another.

    The grid has ``rows`` rows of ``cols`` elements, which start ``pitch`` elements apart, the first at index ``start``.
    In the other tensor the elements are consecutive from index ``at``. With ``times`` > 1 there are that many grids,
    which start ``start_step`` elements apart; in the other tensor they start ``at_step`` apart.
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
        """Return the length of one grid in its tensor, from the first element to the last, gaps included."""
        return (self.rows - 1) * self.pitch + self.cols


class ShardRun(NamedTuple):
    """A piece of one block that this rank's shard holds: consecutive elements, or rows of a grid.

    Args:
        parameter: name of the parameter that the elements belong to.
        matrix: name of the whole matrix that the elements belong to.
        tensor: index, in the parameter group, of the tensor that holds the elements.
        copy: from that tensor to the bucket's matrices if ``in_place``, otherwise to the send buffer.
        in_place: whether the elements are written directly into the bucket's matrices. Only elements of a block that
            this rank owns can be, and only if they are contiguous in it; columns go through the send buffer.
        shape: (rows, columns) of the whole matrix.
        draws: (name, index) of the first element's random number in stochastic rounding. Each element of a matrix has
            one number, on whichever rank it is; columns, which are not contiguous in the matrix, use another name.
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
    """Matrices of one shape, or one slice of each of them; they are adjacent in the bucket, from index ``start`` on.

    ``rows``, ``cols``: of each matrix or slice. ``axis``: along which a matrix has its outputs. ``shape``: (rows,
    columns) of the whole matrices. ``owners``: how many ranks own each matrix, one slice each.
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
        """Return the shorter axis of the whole matrices (0: rows, 1: columns), whose length the Gram matrix has."""
        return int(self.shape[0] > self.shape[1])


@dataclass(frozen=True)
class Bucket:
    """The matrices that are exchanged together, as one rank sees them; positions and counts are in elements.

    If every rank holds the matrices whole, there are two kinds of buckets: one with this rank's own matrices, in which
    nothing travels, followed by some that only send results to all ranks (``only_results``).
    """

    runs: tuple[ShardRun, ...]
    batches: tuple[Batch, ...]
    #: Copies between the receive buffer, which is ordered by source rank and then as that rank sent, and the matrices.
    #: Each is one kernel launch, so parts of equal matrices, and equal parts from several ranks, are merged.
    received: tuple[GridCopy, ...]
    #: By rank, elements sent to it and received from it on the way to the owners.
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    #: Elements of the matrices that this rank owns.
    matrix_elements: int
    #: Whether any rank sends anything; equal on all ranks.
    travels: bool
    #: Names of all matrices in the bucket, whoever owns them.
    names: tuple[str, ...]
    #: Whether only results travel, from each owner to all ranks. ``send_counts`` are then, by rank, the elements of the
    #: results that other owners send.
    only_results: bool = False
    #: With ``only_results``: elements that this rank sends to all others, from the matrices of an earlier bucket.
    own_results: int = 0

    @cached_property
    def received_at(self) -> int | None:
        """Return where in the matrices a collective can receive directly; ``None`` if it needs a receive buffer."""
        first = self.received[0].start if self.received else 0
        is_direct = all(
            copy.rows == 1 and copy.start == first + copy.at and (copy.times == 1 or copy.start_step == copy.at_step)
            for copy in self.received
        )
        return first if is_direct else None

    @property
    def scattered(self) -> tuple[GridCopy, ...]:
        """Return the copies that bring received elements into the matrices; empty if they are received in order."""
        return self.received if self.received_at is None else ()

    @cached_property
    def host_places(self) -> tuple[int, ...]:
        """Return for each run where it starts in the bucket's host memory, which CPU offload uses.

        First come the runs that are ``in_place``, then the others in the order of the send buffer.
        """
        places, end = [], 0
        in_place = sum(run.copy.numel for run in self.runs if run.in_place)
        for run in self.runs:
            places.append(end if run.in_place else in_place + run.copy.at)
            end += run.copy.numel if run.in_place else 0
        return tuple(places)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the copies between host memory and the accelerator; elements adjacent in both share one copy."""
        places = sorted(zip(self.host_places, self.runs, strict=True), key=itemgetter(0))
        parts = (Segment(host, run.copy.at, run.copy.numel, run.in_place) for host, run in places)
        return tuple(_merged(parts, _continued))

    def run_groups(self, scale: Scale) -> list[tuple[int, ...]]:
        """Return groups of runs, as tuples of indices; one call updates momentum and weights of a group.

        Runs that are a single row are grouped by tensor, buffer and ``scale``; any other run is a group of its own.
        """
        groups: dict[tuple, list[int]] = {}
        for index, run in enumerate(self.runs):
            alike = (run.tensor, run.in_place, scale(*run.shape)) if run.copy.rows == 1 else (index,)
            groups.setdefault(alike, []).append(index)
        return [tuple(group) for group in groups.values()]

    def spans(self, runs: Iterable[int], staged: bool) -> list[Span]:
        """Return a group of runs (their indices) as spans, neighbours joined; an empty list for a run on a grid.

        ``staged``: whether their buffer is the bucket's host memory (CPU offload).
        """
        copies = [(index, self.runs[index].copy) for index in runs]
        if any(copy.rows > 1 for _, copy in copies):
            return []
        parts = (Span(copy.start, self.host_places[i] if staged else copy.at, copy.numel) for i, copy in copies)
        return _merged(parts, _one_span)

    @cached_property
    def host_elements(self) -> int:
        """Return how many elements of the bucket's matrices this rank's shard holds."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Return the sizes (matrices, send buffer, receive buffer) in elements."""
        inbox = sum(self.receive_counts) if self.received_at is None else 0
        return self.matrix_elements, sum(self.send_counts), inbox


# ---- what a rank sends, receives and owns -------------------------------------------------------------------------


def bucket_of(items: OwnedBlocks, rank: int, world_size: int) -> Bucket:
    """Return a bucket of sharded matrices as ``rank`` sees it: its runs of all ``items``, and the items it owns."""
    own_items = [item for owner, item in items if owner == rank]
    sends_own = len(own_items) == 1 and sends_own_part(own_items[0], rank)
    runs: list[ShardRun] = []
    sent = [0] * world_size
    incoming: list[list[tuple[int, Piece]]] = [[] for _ in range(world_size)]
    matrices = send_at = 0
    for owner, item in items:
        mine, spread = owner == rank, item.spread
        for piece in spread.pieces(rank) if rank in spread.holders else ():
            # Elements that stay on this rank skip the send buffer, unless they are columns: one copy puts all columns
            # of a matrix in order, also those that this rank sends to itself.
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
        # A matrix in several parts (tensor parallelism) may have columns, which even a single holder sends to itself.
        travels=any(len(item.spread.parts) > 1 or list(item.spread.holders) != [owner] for owner, item in items),
        names=tuple(item.name for _, item in items),
    )


def shared_bucket(items: OwnedBlocks, rank: int, world_size: int, only_results: bool) -> Bucket:
    """Return a bucket as ``rank`` sees it at stage 0, where every rank holds every matrix whole.

    It has the results of all other owners if ``only_results``, otherwise the matrices that ``rank`` owns.
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
    """Return the run for a piece; ``at``: its index in the matrices if ``in_place``, otherwise in the send buffer."""
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
    """Return whether ``rank`` also sends itself its part of a matrix, the only one that it owns in the bucket.

    All parts then arrive in order and need no receive buffer. That saves memory if the own part, which needs room in
    the send buffer, is less than half of the matrix. If it is the first or last part, the others arrive in order
    without it.
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
    """Yield the copies from the receive buffer into the matrices.

    ``incoming``: for each source rank, pairs (index at which the piece's matrix starts, piece).
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
    """Return ``parts`` with neighbours merged wherever ``merge`` returns one part for two instead of ``None``."""
    result: list[Part] = []
    for part in parts:
        both = merge(result[-1], part) if result else None
        result[-1:] = [both] if both else [*result[-1:], part]
    return result


def _continued(first: Segment, second: Segment) -> Segment | None:
    is_next = (first.in_place, first.device + first.numel) == (second.in_place, second.device)
    return first._replace(numel=first.numel + second.numel) if is_next else None


def _one_span(first: Span, second: Span) -> Span | None:
    # Matrices of one shape are in the order of the model, so runs that are neighbours in the shard often are here, too.
    is_next = (first.start + first.numel, first.at + first.numel) == (second.start, second.at)
    numel = first.numel + second.numel
    return first._replace(numel=numel) if is_next and numel <= MAX_SPAN else None


def _adjacent(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies as one row if they are adjacent in both tensors, otherwise ``None``."""
    are_rows = first.rows == second.rows == first.times == 1
    if are_rows and (second.at, second.start) == (first.at + first.cols, first.start + first.cols):
        cols = first.cols + second.cols
        return GridCopy(first.at, first.start, 1, cols, cols)
    return None


def _joined(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies that follow each other in the buffer as one row or one grid; ``None`` if they form neither."""
    pitch = first.pitch if first.rows > 1 else second.start - first.start
    follows = second.start == first.start + first.rows * pitch and pitch > first.cols == second.cols
    if follows and (second.rows == 1 or second.pitch == pitch):
        return GridCopy(first.at, first.start, first.rows + second.rows, first.cols, pitch)
    return _adjacent(first, second)


def _repeated(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Return two copies of equally large grids as one; ``None`` if that is impossible.

    It is possible if they are adjacent, or if ``second`` follows at the distance that the grids of ``first`` have.
    """
    at, start = second.at - first.at, second.start - first.start
    steps = (first.at_step, first.start_step) if first.times > 1 else (at, start)
    alike = (first.rows, first.cols, first.pitch) == (second.rows, second.cols, second.pitch)
    both = _adjacent(first, second)
    if both is None and alike and start > 0 and (at, start) == (first.times * steps[0], first.times * steps[1]):
        return first._replace(times=first.times + 1, at_step=steps[0], start_step=steps[1])
    return both


def batches_of(items: Iterable[PlacedBlock]) -> Iterator[Batch]:
    """Yield a batch for each sequence of matrices with equal :func:`kind_of`, which are stored one after another."""
    start = 0
    for _, group in groupby(items, key=kind_of):
        alike = list(group)
        first, block = alike[0], alike[0].block
        names = tuple(item.name for item in alike)
        yield Batch(start, block.rows, block.cols, first.axis, names, first.shape, first.owners)
        start += len(alike) * block.numel


def kind_of(item: PlacedBlock) -> tuple[int, ...]:
    """Return the key by which matrices are sorted and grouped into batches: most owners first, then largest."""
    return -item.owners, -item.block.numel, item.block.rows, *item.shape, item.axis
