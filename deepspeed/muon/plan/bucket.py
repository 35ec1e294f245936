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
    """Adjacent elements that one copy moves between host memory and an accelerator under CPU offload.

    Args:
        host: index of the first element in the bucket's host memory.
        device: index of the first element on the accelerator: in the bucket's matrices if ``in_place``, otherwise in
            the bucket's send buffer.
        numel: number of elements.
        in_place: whether the elements go to the matrices without passing through the send buffer.
    """

    host: int
    device: int
    numel: int
    in_place: bool


class Span(NamedTuple):
    """Elements that one elementwise operation updates: one :class:`ShardRun`, or several that are adjacent.

    Args:
        start: index of the first element in the shard's tensor.
        at: index of the first element in the bucket's buffer.
        numel: number of elements, which are contiguous in both tensors.
    """

    start: int
    at: int
    numel: int


class GridCopy(NamedTuple):
    """The indices of a copy between two flat tensors: strided rows in one, consecutive elements in the other.

    Args:
        at: index of the first element in the tensor with consecutive elements.
        start: index of the first element in the tensor with strided rows.
        rows: number of rows.
        cols: number of elements in each row.
        pitch: distance from the start of one row to the start of the next.
        times: how often the whole copy is repeated, at other indices.
        at_step: what each repetition adds to ``at``.
        start_step: what each repetition adds to ``start``.
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
        """Return the number of elements that are copied, repetitions included."""
        return self.times * self.rows * self.cols

    @property
    def extent(self) -> int:
        """Return the distance from the first element to the end of the last row in the tensor with strided rows.

        Gaps between rows count; repetitions do not.
        """
        return (self.rows - 1) * self.pitch + self.cols


class ShardRun(NamedTuple):
    """A part of one block that this rank's shard holds: either consecutive elements or equally spaced rows.

    The block is a matrix to orthogonalize or, if several ranks own that matrix, one owner's slice of it.

    Args:
        parameter: name of the parameter that the elements belong to.
        matrix: name of the whole matrix that the elements belong to.
        tensor: index of the tensor, in the parameter group, that holds the elements.
        copy: the copy from that tensor to the bucket's matrices if ``in_place``, otherwise to the bucket's send buffer.
        in_place: whether the elements are written directly into the bucket's matrices. This needs a block that this
            rank owns, and elements that are contiguous in the block. All other elements go through the send buffer.
        shape: (rows, columns) of the whole matrix.
        draws: (name, index) that selects the random number of the first element in stochastic rounding. If the elements
            are contiguous in the block, each gets the same number whichever rank holds it.
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
    """Matrices of one shape that this rank orthogonalizes together; they are adjacent in the bucket.

    If several ranks own each matrix, the batch has this rank's slice of each.

    Args:
        start: index of the first matrix or slice in the bucket's matrices, in elements.
        rows: rows of each matrix or slice.
        cols: columns of each matrix or slice.
        axis: axis of a matrix that its outputs are along: 0 rows, 1 columns.
        names: name of each matrix or slice.
        shape: (rows, columns) of each whole matrix.
        owners: how many ranks own each matrix; every one of them has one slice.
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
        """Return the number of matrices, or of slices, in the batch."""
        return len(self.names)

    @property
    def gram_axis(self) -> int:
        """Return the shorter axis of the whole matrices: 0 rows, 1 columns.

        The Gram matrix has the length of that axis.
        """
        return int(self.shape[0] > self.shape[1])


@dataclass(frozen=True)
class Bucket:
    """The matrices that all ranks exchange at the same time, as one rank sees them.

    ``runs`` are the parts of these matrices in this rank's shard. The "bucket's matrices" are one flat tensor with the
    matrices, or slices, that this rank owns. Positions and counts are in elements.

    If every rank holds the matrices whole (ZeRO stage 0), there are two kinds of buckets. The first kind has this
    rank's own matrices, and sends nothing. The second kind, ``only_results``, sends the results of such a bucket from
    their owners to all ranks.
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
    def direct_receive_start(self) -> int | None:
        """Return the index in the bucket's matrices at which the all-to-all can write what this rank receives.

        ``None`` if the received elements are not in the order of the matrices, so that a receive buffer is needed.
        """
        first = self.received[0].start if self.received else 0
        is_direct = all(
            copy.rows == 1 and copy.start == first + copy.at and (copy.times == 1 or copy.start_step == copy.at_step)
            for copy in self.received
        )
        return first if is_direct else None

    @property
    def receive_copies(self) -> tuple[GridCopy, ...]:
        """Return the copies from the bucket's receive buffer into its matrices; empty without a receive buffer."""
        return self.received if self.direct_receive_start is None else ()

    @cached_property
    def host_places(self) -> tuple[int, ...]:
        """Return, for each :class:`ShardRun` of the bucket, the index of its first element in host memory.

        CPU offload has one flat tensor in host memory for each bucket. Runs that are ``in_place`` come first in that
        tensor, then the others in the order of the send buffer.
        """
        places, end = [], 0
        in_place = sum(run.copy.numel for run in self.runs if run.in_place)
        for run in self.runs:
            places.append(end if run.in_place else in_place + run.copy.at)
            end += run.copy.numel if run.in_place else 0
        return tuple(places)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the copies between the bucket's host memory and the accelerator under CPU offload.

        They are in the order of host memory. Elements that are adjacent on both sides share one copy.
        """
        places = sorted(zip(self.host_places, self.runs, strict=True), key=itemgetter(0))
        parts = (Segment(host, run.copy.at, run.copy.numel, run.in_place) for host, run in places)
        return tuple(_merged(parts, _continued))

    def run_groups(self, scale: Scale) -> list[tuple[int, ...]]:
        """Return the bucket's :class:`ShardRun` objects in groups that one call updates, momentum and weights.

        Each group is a tuple of indices into ``runs``; example: ``[(0, 2), (1,)]``. Runs of consecutive elements form a
        group if they have the same tensor, the same ``in_place`` and the same factor. Any other run is a group of its
        own.

        ``scale``: (rows, columns) of a matrix -> the factor of its update.
        """
        groups: dict[tuple, list[int]] = {}
        for index, run in enumerate(self.runs):
            alike = (run.tensor, run.in_place, scale(*run.shape)) if run.copy.rows == 1 else (index,)
            groups.setdefault(alike, []).append(index)
        return [tuple(group) for group in groups.values()]

    def spans(self, runs: Iterable[int], staged: bool) -> list[Span]:
        """Return the elements of one group of runs as spans. Adjacent runs share a span.

        Args:
            runs: indices into ``runs`` of the bucket: a group from :meth:`run_groups`.
            staged: whether ``Span.at`` is an index in the bucket's host memory (CPU offload); otherwise it is one in
                the bucket's matrices or send buffer.

        Returns:
            The spans, each of at most :data:`MAX_SPAN` elements unless one run is longer. An empty list if the run
            consists of strided rows, which no span can describe.
        """
        copies = [(index, self.runs[index].copy) for index in runs]
        if any(copy.rows > 1 for _, copy in copies):
            return []
        parts = (Span(copy.start, self.host_places[i] if staged else copy.at, copy.numel) for i, copy in copies)
        return _merged(parts, _one_span)

    @cached_property
    def host_elements(self) -> int:
        """Return how many elements the bucket's host memory has (CPU offload): all those in this rank's shard."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Return the elements of the bucket's three buffers on this rank: (matrices, send buffer, receive buffer)."""
        inbox = sum(self.receive_counts) if self.direct_receive_start is None else 0
        return self.matrix_elements, sum(self.send_counts), inbox


# ---- what a rank sends, receives and owns -------------------------------------------------------------------------


def bucket_of(items: OwnedBlocks, rank: int, world_size: int) -> Bucket:
    """Return a bucket as ``rank`` sees it, if the ranks hold shards of the matrices.

    The bucket has a run for every part of ``items`` in this rank's shard, and a batch for the items that ``rank`` owns.
    ``items``: the (owner, matrix or slice) pairs of all ranks in this bucket.
    """
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
    """Return a bucket as ``rank`` sees it, if every rank holds every matrix whole (ZeRO stage 0).

    Args:
        items: the (owner, matrix or slice) pairs of all ranks in this bucket.
        rank: the rank that uses the bucket.
        world_size: number of ranks that share the partition.
        only_results: if true, the bucket receives the results of all other owners; otherwise it has the matrices that
            ``rank`` owns.
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
    """Return the :class:`ShardRun` of one piece of a matrix or slice.

    ``at``: index of the piece's first element in the bucket's matrices if ``in_place``, otherwise in its send buffer.
    """
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
    """Return whether ``rank`` also sends itself the part that it holds of a matrix that it owns.

    Call this only if ``item`` is the only matrix that ``rank`` owns in the bucket. All parts then arrive in the order
    of the matrix, so no receive buffer is needed. The own part takes room in the send buffer instead. That saves memory
    if the own part is less than half of the matrix, and neither its first nor its last part.
    """
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
    """Yield the copies from a bucket's receive buffer into its matrices.

    Adjacent or equally spaced copies are merged. ``incoming``: for each source rank, pairs (index of the matrix in the
    bucket's matrices, piece of that matrix).
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
    """Return ``parts`` with adjacent parts merged where possible.

    ``merge``: takes two parts; returns the one part that replaces them, or ``None`` if they cannot be merged.
    """
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
    """Merge two copies of single rows; return ``None`` unless the rows are adjacent in both tensors."""
    are_rows = first.rows == second.rows == first.times == 1
    if are_rows and (second.at, second.start) == (first.at + first.cols, first.start + first.cols):
        cols = first.cols + second.cols
        return GridCopy(first.at, first.start, 1, cols, cols)
    return None


def _joined(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Merge two copies that are adjacent in the receive buffer into a copy of one row or of equally spaced rows.

    Return ``None`` if the rows of the two copies are not equally long and equally spaced in the bucket's matrices.
    """
    pitch = first.pitch if first.rows > 1 else second.start - first.start
    follows = second.start == first.start + first.rows * pitch and pitch > first.cols == second.cols
    if follows and (second.rows == 1 or second.pitch == pitch):
        return GridCopy(first.at, first.start, first.rows + second.rows, first.cols, pitch)
    return _adjacent(first, second)


def _repeated(first: GridCopy, second: GridCopy) -> GridCopy | None:
    """Merge two copies of equally many, equally long rows; return ``None`` if that is impossible.

    It is possible if the two are adjacent rows, or if ``second`` is the next repetition of ``first``.
    """
    at, start = second.at - first.at, second.start - first.start
    steps = (first.at_step, first.start_step) if first.times > 1 else (at, start)
    alike = (first.rows, first.cols, first.pitch) == (second.rows, second.cols, second.pitch)
    both = _adjacent(first, second)
    if both is None and alike and start > 0 and (at, start) == (first.times * steps[0], first.times * steps[1]):
        return first._replace(times=first.times + 1, at_step=steps[0], start_step=steps[1])
    return both


def batches_of(items: Iterable[PlacedBlock]) -> Iterator[Batch]:
    """Yield a :class:`Batch` for each sequence of items with equal :func:`batch_key`.

    ``items``: the matrices or slices that one rank owns in a bucket, sorted by :func:`batch_key`.
    """
    start = 0
    for _, group in groupby(items, key=batch_key):
        alike = list(group)
        first, block = alike[0], alike[0].block
        names = tuple(item.name for item in alike)
        yield Batch(start, block.rows, block.cols, first.axis, names, first.shape, first.owners)
        start += len(alike) * block.numel


def batch_key(item: PlacedBlock) -> tuple[int, ...]:
    """Return the key that sorts matrices: most owners first, then largest. Matrices with equal keys form a batch."""
    return -item.owners, -item.block.numel, item.block.rows, *item.shape, item.axis
