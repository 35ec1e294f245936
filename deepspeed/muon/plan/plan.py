# SPDX-License-Identifier: Apache-2.0
"""The plan of the exchange: owners, and the elements that travel. Pure Python, no communication.

Every rank derives the same owners and buckets from the same facts, then lists only its own part: the runs that it holds
and the matrices that it owns. One rank's plan takes O(matrices + ranks) time.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count, groupby, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple

from deepspeed.muon.matrices.block import Block, Piece
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import assign
from deepspeed.muon.plan.placement import PlacedBlock, Placement, Shard
from deepspeed.muon.plan.slices import sliced

#: The matrices of one bucket, each with its owner.
Round = list[tuple[int, PlacedBlock]]


class Segment(NamedTuple):
    """Elements that one copy carries between host memory and an accelerator.

    They begin at ``host`` in the bucket's host memory, and at ``device`` in its matrices if ``in_place``, else in its
    send buffer.
    """

    host: int
    device: int
    numel: int
    in_place: bool


class Copy(NamedTuple):
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
        """Number of elements."""
        return self.times * self.rows * self.cols

    @property
    def extent(self) -> int:
        """Of one grid: from its first element to its last."""
        return (self.rows - 1) * self.pitch + self.cols


@dataclass(frozen=True)
class Run:
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
    copy: Copy
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
        """How many there are."""
        return len(self.names)

    @property
    def gram_axis(self) -> int:
        """The shorter axis of the whole matrices."""
        return int(self.shape[0] > self.shape[1])


@dataclass(frozen=True)
class Bucket:
    """One step of the exchange as one rank sees it; positions and counts are in elements.

    Matrices that every rank holds whole have buckets of two kinds by turns: one with this rank's own matrices, of which
    nothing travels, and then those of the other owners, into which their results arrive (``only_results``).
    """

    runs: tuple[Run, ...]
    batches: tuple[Batch, ...]
    #: Between the receive buffer, which is ordered by source rank and then as that rank sent, and the matrices. Each is
    #: one kernel launch, so parts of equal matrices, and equal parts from several ranks, are one copy.
    received: tuple[Copy, ...]
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

    def lacks(self, runs: Iterable[int], absent: Collection[str]) -> bool:
        """Return whether one of these runs, by index, belongs to a matrix of ``absent``."""
        return bool(absent) and any(self.runs[index].matrix in absent for index in runs)

    @cached_property
    def received_at(self) -> int | None:
        """Where in the matrices all received elements lie as they arrive, so that no receive buffer is needed."""
        first = self.received[0].start if self.received else 0
        is_direct = all(
            copy.rows == 1 and copy.start == first + copy.at and (copy.times == 1 or copy.start_step == copy.at_step)
            for copy in self.received
        )
        return first if is_direct else None

    @property
    def scattered(self) -> tuple[Copy, ...]:
        """What is copied between a receive buffer and the matrices."""
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
        found: list[Segment] = []
        for run, host in sorted(zip(self.runs, self.host_places, strict=True), key=itemgetter(1)):
            last, at, numel = found[-1] if found else None, run.copy.at, run.copy.numel
            if last and (last.in_place, last.device + last.numel) == (run.in_place, at):
                found[-1] = last._replace(numel=last.numel + numel)
            else:
                found.append(Segment(host=host, device=at, numel=numel, in_place=run.in_place))
        return tuple(found)

    @cached_property
    def host_elements(self) -> int:
        """Return how many elements of the bucket this rank has."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def buffer_sizes(self) -> tuple[int, int, int]:
        """Elements of the matrices, of the send buffer and of the receive buffer."""
        inbox = sum(self.receive_counts) if self.received_at is None else 0
        return self.matrix_elements, sum(self.send_counts), inbox


@dataclass(frozen=True)
class Plan:
    """All buckets of one partition and their cost.

    ``owners``: of each matrix, of several the first one; ``counts``: how many each has. ``is_tight``: whether a matrix
    is larger than a bucket on an accelerator, so that fewer are in flight. ``gradient_flags``: matrices of which the
    ranks have to ask each other whether any element has a gradient.
    """

    rank: int
    world_size: int
    buckets: tuple[Bucket, ...]
    owners: tuple[int, ...]
    counts: tuple[int, ...]
    loads: tuple[float, ...]
    moved_elements: int
    is_tight: bool
    gradient_flags: int
    digest: str = field(compare=False)

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to others per step, to the owners and back."""
        copied = sum(bucket.own_results for bucket in self.buckets) * (self.world_size - 1)
        moved = [counts for b in self.buckets if not b.only_results for counts in (b.send_counts, b.receive_counts)]
        return copied + sum(sum(counts) - counts[self.rank] for counts in moved)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds every matrix."""
        return any(bucket.only_results for bucket in self.buckets)

    @property
    def rounds(self) -> int:
        """Return how many buckets are exchanged; where nothing travels, how many there are."""
        return sum(bucket.only_results for bucket in self.buckets) or len(self.buckets)

    @cached_property
    def set_sizes(self) -> list[int]:
        """The numbers of owners that matrices have, where these are several."""
        return sorted({*self.counts} - {1})

    def slots(self, staged: bool) -> int:
        """The most buckets in flight; ``staged``: copied between host and accelerator."""
        travels = staged or any(bucket.travels for bucket in self.buckets)
        return slot_count(travels, self.is_replicated, self.is_tight)

    def storages(self, staged: bool) -> list[int]:
        """Return the number of the storage that each bucket takes, as :func:`storages_of`."""
        return storages_of([bucket.only_results for bucket in self.buckets], self.slots(staged))


def slot_count(travels: bool, replicated: bool, tight: bool) -> int:
    """The most buckets in flight: one on its way to the owners, one with them, one on its way back.

    Replicated matrices have no way there. A tight plan does without the overlap of the way back.
    """
    if not travels:
        return 1
    return 2 if replicated or tight else 3


def storages_of(only_results: Sequence[bool], slots: int) -> list[int]:
    """Return the number of the storage that each bucket takes; buckets that take the same are never in flight at once.

    Results and an owner's matrices take turns with two each: all results of a round, in whatever many buckets, travel
    before the storage of its matrices is used again.
    """
    if not any(only_results):
        return [index % slots for index in range(len(only_results))]
    turns = count(), count()
    return [2 * of_results + next(turns[of_results]) % 2 for of_results in only_results]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which would search again and again through small objects that all live on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class GlobalPlan:
    """The plan of a partition for all of its ranks, from which each takes its :meth:`view`.

    ``items``: the matrices; ``owners``, ``counts``, ``is_tight``, ``gradient_flags`` as in :class:`Plan`. ``owned``:
    every matrix or slice with its owner. ``rounds``: the same, cut into buckets of at most ``limit`` elements of one
    owner. ``loads``: the cost of each rank's matrices. ``copies``: ranks that hold the matrices whole.
    """

    items: Sequence[PlacedBlock]
    world_size: int
    copies: int
    owners: Sequence[int]
    counts: Sequence[int]
    loads: Sequence[float]
    owned: Round
    rounds: Sequence[Round]
    limit: int
    is_tight: bool

    @cached_property
    def digest(self) -> str:
        """Return a hash of all that the ranks must agree on."""
        return _digest(self.items, self.owners, self.counts, self.rounds, self.limit, self.is_tight)

    @cached_property
    def gradient_flags(self) -> int:
        """Return the number as in :class:`Plan`. Ranks that have all of a matrix have the same gradient."""
        is_cut = any(len(item.parts) > 1 or item.shard.placement.copies == 1 for item in self.items)
        return len({item.matrix for item in self.items}) if self.world_size > 1 and is_cut else 0

    @cached_property
    def moved_elements(self) -> int:
        """Return the elements of matrices that go to a rank which holds nothing of them."""
        return sum(item.block.numel for owner, item in self.owned if owner not in item.holders)

    @cached_property
    def parts(self) -> list[tuple[Round, bool]]:
        """Return the matrices of each bucket, and whether only their results travel in it."""
        if self.copies == 1:
            return [(of_round, False) for of_round in self.rounds]
        found: list[tuple[Round, bool]] = []
        for of_round in self.rounds:
            found.append((of_round, False))
            found += [(part, True) for part in parts_of(of_round, self.limit * self.copies)]
        return found

    def view(self, rank: int) -> Plan:
        """Return the plan as one rank sees it."""
        with _without_collector():
            return Plan(
                rank=rank,
                world_size=self.world_size,
                buckets=tuple(self._bucket(items, rank, only_results) for items, only_results in self.parts),
                owners=tuple(self.owners),
                counts=tuple(self.counts),
                loads=tuple(self.loads),
                moved_elements=self.moved_elements,
                is_tight=self.is_tight,
                gradient_flags=self.gradient_flags,
                digest=self.digest,
            )

    def _bucket(self, items: Round, rank: int, only_results: bool) -> Bucket:
        if self.copies == 1:
            return _bucket(items, rank, self.world_size)
        taken = items if only_results else [(owner, item) for owner, item in items if owner == rank]
        return _shared_bucket(taken, rank, self.world_size, only_results)


@_without_collector()
def global_plan(
    shards: Sequence[Shard],
    world_size: int,
    cost: CostModel,
    bucket_bytes: int | None = None,
    counts: Sequence[int] = (),
) -> GlobalPlan:
    """Plan one partition for all of its ranks.

    Args:
        shards: the partition's Muon parameters, in the same order on all ranks.
        cost: weighs Newton-Schulz against the exchange.
        bucket_bytes: the most bytes of one owner's matrices in one bucket, or of all owners' where every rank receives
            all results; by default as :func:`bucket_limit` chooses.
        counts: of the owners of each matrix, as :func:`deepspeed.muon.plan.slices.counts_of`; by default 1.
    """
    items = [PlacedBlock(shard, block) for shard in shards for block in shard.spec.blocks]
    counts = counts or [1] * len(items)
    owners, loads = assign(items, world_size, cost, counts)
    owned = owned_by(items, owners, counts)
    copies = max((shard.placement.copies for shard in shards), default=1)
    limit = bucket_limit(items, world_size, copies, cost, bucket_bytes)
    return GlobalPlan(
        items=items,
        world_size=world_size,
        copies=copies,
        owners=owners,
        counts=counts,
        loads=loads,
        owned=owned,
        rounds=rounds_of(owned, world_size, limit),
        limit=limit,
        is_tight=is_tight(owned, limit, cost),
    )


def make_plan(
    shards: Sequence[Shard],
    rank: int,
    world_size: int,
    cost: CostModel,
    bucket_bytes: int | None = None,
    counts: Sequence[int] = (),
) -> Plan:
    """Plan one partition from the view of ``rank``; as :func:`global_plan`."""
    return global_plan(shards, world_size, cost, bucket_bytes, counts).view(rank)


def owned_by(items: Sequence[PlacedBlock], owners: Sequence[int], counts: Sequence[int]) -> Round:
    """Every matrix, or each slice of one with several owners, with its owner."""
    found = zip(items, owners, counts, strict=True)
    return [(first + k, part) for item, first, count in found for k, part in enumerate(sliced(item, count))]


def rounds_of(owned: Round, world_size: int, limit: int) -> list[Round]:
    """Cut each owner's matrices, equal shapes together, into chunks of at most ``limit`` elements.

    Round k holds every owner's k-th chunk, in the same order on all ranks. Matrices with most owners come first, so
    that all owners of one have it in the same round, at the same place among the others that they share.
    """
    rounds: list[Round] = []
    filled, chunk = [0] * world_size, [0] * world_size
    for index in sorted(range(len(owned)), key=lambda i: (owned[i][0], *_kind(owned[i][1]), i)):
        owner, item = owned[index]
        if filled[owner] and filled[owner] + item.block.numel > limit:
            chunk[owner] += 1
            filled[owner] = 0
        filled[owner] += item.block.numel
        if len(rounds) == chunk[owner]:
            rounds.append([])
        rounds[chunk[owner]].append((owner, item))
    return rounds


def parts_of(of_round: Round, limit: int) -> Iterator[Round]:
    """Cut a round between owners into parts of at most ``limit`` elements, or of one owner's."""
    part: Round = []
    filled = 0
    for _, of_owner in groupby(of_round, key=itemgetter(0)):
        items = list(of_owner)
        numel = sum(item.block.numel for _, item in items)
        if part and filled + numel > limit:
            yield part
            part, filled = [], 0
        part, filled = part + items, filled + numel
    yield part


def _kind(item: PlacedBlock) -> tuple[int, ...]:
    """Equal for matrices that one batch can hold; those of most owners, and of these the largest, come first."""
    return -item.owners, -item.block.numel, item.block.rows, *item.shape, item.axis


def is_tight(owned: Round, limit: int, cost: CostModel) -> bool:
    """Whether a matrix is larger than a bucket where memory is scarce: on an accelerator."""
    return cost.device_type != "cpu" and any(item.block.numel > limit for _, item in owned)


def _bucket(items: Round, rank: int, world_size: int) -> Bucket:
    own_items = [item for owner, item in items if owner == rank]
    sends_own = len(own_items) == 1 and sends_own_part(own_items[0], rank)
    runs: list[Run] = []
    sent = [0] * world_size
    incoming: list[list[tuple[int, Piece]]] = [[] for _ in range(world_size)]
    matrices = send_at = 0
    for owner, item in items:
        mine = owner == rank
        for piece in item.pieces(rank) if rank in item.holders else ():
            in_place = mine and piece.is_contiguous and not sends_own
            runs.append(_run(item, piece, rank, matrices + piece.at if in_place else send_at, in_place))
            if not in_place:
                sent[owner] += piece.numel
                send_at += piece.numel
        if mine:
            for source in item.holders:
                stay = source == rank and not sends_own
                pieces = (piece for piece in item.pieces(source) if not (stay and piece.is_contiguous))
                incoming[source].extend((matrices, piece) for piece in pieces)
            matrices += item.block.numel
    return Bucket(
        runs=tuple(runs),
        batches=tuple(batches_of(own_items)),
        received=tuple(_unpacking(incoming)),
        send_counts=tuple(sent),
        receive_counts=tuple(sum(piece.numel for _, piece in pieces) for pieces in incoming),
        matrix_elements=matrices,
        # A matrix in several parts may have columns that even a lone holder puts together by sending to itself.
        travels=any(len(item.parts) > 1 or list(item.holders) != [owner] for owner, item in items),
        names=tuple(item.name for _, item in items),
    )


def _shared_bucket(items: Round, rank: int, world_size: int, only_results: bool) -> Bucket:
    """Return one with the results of all other owners, or with this rank's own matrices; all lie whole in a tensor."""
    taken = [(owner, item) for owner, item in items if (owner == rank) is not only_results]
    numel, sent, runs = 0, [0] * world_size, []
    for owner, item in taken:
        runs += [_run(item, piece, rank, numel + piece.at, not only_results) for piece in item.pieces(rank)]
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


def _run(item: PlacedBlock, piece: Piece, rank: int, at: int, in_place: bool) -> Run:
    """Return the run of a piece that this rank holds; ``at``: where it goes in the matrices or the send buffer."""
    start = item.shard.placement.position(piece.element)
    return Run(
        parameter=item.shard.spec.name,
        matrix=item.matrix,
        tensor=item.shard.tensor,
        copy=Copy(at, start, piece.rows, piece.cols, piece.stride),
        in_place=in_place,
        shape=item.shape,
        draws=(item.name, piece.at) if piece.is_contiguous else (f"{item.name}@{piece.at}", 0),
    )


def sends_own_part(item: PlacedBlock, rank: int) -> bool:
    """Whether the owner of the only matrix in a bucket sends its own part to itself too.

    Then the parts arrive in order and need no receive buffer, which is larger than an own part of less than half.
    Parts in front of it or behind it alone need none either.
    """
    at, is_between = 0, False
    for source in item.holders:
        first = at
        for piece in item.pieces(source):
            if piece.at != at or not piece.is_contiguous:
                return False
            at += piece.numel
        is_between |= source == rank and first > 0 and at < item.block.numel
    return is_between and 2 * item.held(rank) < item.block.numel


def _unpacking(incoming: Sequence[Iterable[tuple[int, Piece]]]) -> Iterator[Copy]:
    """Where received elements belong, from each source's pieces with the first element of their matrix."""
    at, sources = 0, []
    for pieces in incoming:
        copies = []
        for matrix, piece in pieces:
            # A piece that is contiguous in the matrix is one run, whatever its layout at the source.
            rows, cols = (1, piece.numel) if piece.is_contiguous else (piece.rows, piece.cols)
            copies.append(Copy(at, matrix + piece.at, rows, cols, piece.pitch if rows > 1 else cols))
            at += piece.numel
        sources.append(_merged(copies, _joined))
    for alike in zip_longest(*filter(None, sources)):
        yield from _merged(filter(None, alike), _repeated)


def _merged(copies: Iterable[Copy], merge: Callable[[Copy, Copy], Copy | None]) -> list[Copy]:
    """Neighbours as one copy wherever ``merge`` can express it."""
    result: list[Copy] = []
    for copy in copies:
        both = merge(result[-1], copy) if result else None
        result[-1:] = [both] if both else [*result[-1:], copy]
    return result


def _adjacent(first: Copy, second: Copy) -> Copy | None:
    """Two copies as one, if they are neighbours in both tensors."""
    are_rows = first.rows == second.rows == first.times == 1
    if are_rows and (second.at, second.start) == (first.at + first.cols, first.start + first.cols):
        cols = first.cols + second.cols
        return Copy(first.at, first.start, 1, cols, cols)
    return None


def _joined(first: Copy, second: Copy) -> Copy | None:
    """Two copies that follow each other in the buffer as one row or one grid, if they are that."""
    pitch = first.pitch if first.rows > 1 else second.start - first.start
    follows = second.start == first.start + first.rows * pitch and pitch > first.cols == second.cols
    if follows and (second.rows == 1 or second.pitch == pitch):
        return Copy(first.at, first.start, first.rows + second.rows, first.cols, pitch)
    return _adjacent(first, second)


def _repeated(first: Copy, second: Copy) -> Copy | None:
    """Two copies of equal grids as one, if they are neighbours or the second continues the steps of the first."""
    at, start = second.at - first.at, second.start - first.start
    steps = (first.at_step, first.start_step) if first.times > 1 else (at, start)
    alike = (first.rows, first.cols, first.pitch) == (second.rows, second.cols, second.pitch)
    both = _adjacent(first, second)
    if both is None and alike and start > 0 and (at, start) == (first.times * steps[0], first.times * steps[1]):
        return first._replace(times=first.times + 1, at_step=steps[0], start_step=steps[1])
    return both


def batches_of(items: Iterable[PlacedBlock]) -> Iterator[Batch]:
    """Neighbours of one kind together, of matrices that lie one after the other."""
    start = 0
    for _, group in groupby(items, key=_kind):
        alike = list(group)
        block = alike[0].block
        first, names = alike[0], tuple(item.name for item in alike)
        yield Batch(start, block.rows, block.cols, first.axis, names, first.shape, first.owners)
        start += len(alike) * block.numel


def _digest(
    items: Sequence[PlacedBlock],
    owners: Sequence[int],
    counts: Sequence[int],
    rounds: Sequence[Round],
    limit: int,
    tight: bool,
) -> str:
    of_block, of_placement = (attrgetter(*(each.name for each in fields(kind))) for kind in (Block, Placement))
    digest = hashlib.sha256(f"{[*owners]}{[*counts]}{[len(r) for r in rounds]}{limit}{tight}".encode())
    for item in items:
        placements = [of_placement(part.placement) for part in item.parts]
        digest.update(f"{item.shard.spec.name}{of_block(item.block)}{placements}".encode())
    return digest.hexdigest()[:16]


#: The most bytes of matrices that one owner takes in one bucket; a larger matrix has a bucket to itself. An accelerator
#: needs several large matrices at once to be busy.
CPU_BUCKET_BYTES, BUCKET_BYTES = 8 * 2**20, 128 * 2**20
#: On CPUs buckets shrink, down to this size, until there are this many rounds: nothing hides the first exchange to the
#: owners and the last one back.
LEAST_BUCKET_BYTES, ROUNDS = 2**20, 8


def bucket_limit(
    items: Sequence[PlacedBlock], world_size: int, copies: int, cost: CostModel, bucket_bytes: int | None = None
) -> int:
    """The most elements of one owner in one bucket; ``bucket_bytes`` overrides the rule.

    ``copies``: ranks that hold the matrices whole. With several, a bucket belongs to all owners together and stays
    large.
    """
    if bucket_bytes is None:
        bucket_bytes = CPU_BUCKET_BYTES if cost.device_type == "cpu" else BUCKET_BYTES
        if cost.device_type == "cpu" and world_size > 1 and copies == 1:
            total = sum(item.block.numel for item in items) * cost.bytes_per_element
            bucket_bytes = min(bucket_bytes, max(LEAST_BUCKET_BYTES, total // (ROUNDS * world_size)))
    return max(1, bucket_bytes // copies // cost.bytes_per_element)
