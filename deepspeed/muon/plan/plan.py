# SPDX-License-Identifier: Apache-2.0
"""Who orthogonalizes which matrix, and which elements travel for it. Pure Python, no communication.

Every rank derives the same owners and buckets from the same facts, then lists only its own part: the
runs that it holds and the matrices that it owns. The work is O(matrices + ranks) for one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from deepspeed.muon.matrices.block import Block, Piece
from deepspeed.muon.plan.owners import CostModel, assign
from deepspeed.muon.plan.placement import PlacedBlock, Shard


@dataclass(frozen=True)
class Run:
    """Elements of one block in this rank's tensor, where the first of them is element ``start``.

    ``at`` is their place in the bucket's matrices where ``in_place``, else in this rank's send buffer: there they are
    contiguous. They are in place where this rank owns the block, unless they are columns of it: those it sends to
    itself. ``rows`` and ``cols`` are the block's, ``name`` is the parameter's, with the block's first element where it
    is not the parameter's.
    """

    tensor: int
    start: int
    piece: Piece
    in_place: bool
    at: int
    rows: int
    cols: int
    name: str

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.piece.numel

    @property
    def draws(self) -> tuple[str, int]:
        """Whose random numbers its elements take, and the first one's: the matrix's, by element.

        Columns of a matrix do not follow each other in it, so they have numbers of their own.
        """
        return (self.name, self.piece.at) if self.piece.is_contiguous else (f"{self.name}@{self.piece.at}", 0)


@dataclass(frozen=True)
class Batch:
    """Equal matrices that lie one after the other in the bucket's matrices."""

    start: int
    count: int
    rows: int
    cols: int


class Unpack(NamedTuple):
    """Received elements, contiguous from ``source`` on in the receive buffer: where they belong in the matrices.

    There they are ``rows`` runs of ``cols`` elements, ``pitch`` apart, from ``target`` on.
    """

    source: int
    target: int
    rows: int
    cols: int
    pitch: int


@dataclass(frozen=True)
class Bucket:
    """One round of the exchange, as one rank sees it. All positions and counts are in elements."""

    runs: tuple[Run, ...]
    batches: tuple[Batch, ...]
    received: tuple[Unpack, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    matrix_elements: int
    #: Whether any rank sends anything in this round; the same on all ranks.
    travels: bool
    names: tuple[str, ...]
    #: Whether every rank holds every matrix: then only results travel, each owner's to all, and ``send_counts`` are
    #: the elements of each owner's.
    replicated: bool


@dataclass(frozen=True)
class Plan:
    """All rounds of one partition, with what they cost."""

    rank: int
    world_size: int
    buckets: tuple[Bucket, ...]
    owners: tuple[int, ...]
    loads: tuple[float, ...]
    moved_elements: int
    digest: str = field(compare=False)

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to others per step, there and back."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return sum(
            bucket.matrix_elements * (self.world_size - 1)
            if bucket.replicated
            else sum(counts[to] for counts in (bucket.send_counts, bucket.receive_counts) for to in others)
            for bucket in self.buckets
        )


def make_plan(
    shards: Sequence[Shard], rank: int, world_size: int, cost: CostModel, bucket_bytes: int | None = None
) -> Plan:
    """Plan one partition from the view of ``rank``.

    Args:
        shards: the partition's Muon parameters, in the same order on all ranks.
        cost: weighs Newton-Schulz against exchange.
        bucket_bytes: bound on the matrices of one owner in one bucket; where every rank receives all
            results, of all owners together. By default that of :mod:`deepspeed.muon.plan.plan`.
    """
    items = [PlacedBlock(shard, block) for shard in shards for block in shard.spec.blocks]
    owners, loads = assign(items, world_size, cost)
    moved = sum(item.block.numel for item, owner in zip(items, owners, strict=True) if owner not in item.holders)
    copies = max((shard.placement.copies for shard in shards), default=1)
    limit = bucket_limit(items, world_size, copies, cost, bucket_bytes)
    rounds = _rounds(items, owners, world_size, limit)
    buckets = tuple(_bucket(round_items, rank, world_size) for round_items in rounds)
    return Plan(rank, world_size, buckets, tuple(owners), tuple(loads), moved, _digest(items, owners, rounds))


def _rounds(
    items: list[PlacedBlock], owners: list[int], world_size: int, limit: int
) -> list[list[tuple[int, PlacedBlock]]]:
    """Cut each owner's matrices, equal shapes together, into chunks of at most ``limit`` elements.

    Round k is every owner's k-th chunk, as (owner, item) in an order that all ranks share.
    """
    order = sorted(range(len(items)), key=lambda i: (owners[i], -items[i].block.numel, items[i].block.rows, i))
    rounds: list[list[tuple[int, PlacedBlock]]] = []
    filled = [0] * world_size
    chunk = [0] * world_size
    for index in order:
        owner, item = owners[index], items[index]
        if filled[owner] and filled[owner] + item.block.numel > limit:
            chunk[owner] += 1
            filled[owner] = 0
        filled[owner] += item.block.numel
        while len(rounds) <= chunk[owner]:
            rounds.append([])
        rounds[chunk[owner]].append((owner, item))
    return rounds


def _bucket(items: list[tuple[int, PlacedBlock]], rank: int, world_size: int) -> Bucket:
    runs: list[Run] = []
    sent = [0] * world_size
    incoming: list[list[tuple[int, Piece]]] = [[] for _ in range(world_size)]
    shapes: list[tuple[int, Block]] = []
    matrices = 0
    send_at = 0
    replicated = any(item.shard.placement.copies > 1 for _, item in items)
    for owner, item in items:
        mine = owner == rank
        for piece in item.pieces(rank):
            position = item.shard.placement.position(piece.element)
            in_place = mine and piece.is_contiguous
            where = matrices + piece.at if in_place else send_at
            shape = item.block.rows, item.block.cols
            runs.append(Run(item.shard.tensor, position, piece, in_place, where, *shape, item.name))
            if not in_place:
                send_at += piece.numel
                sent[owner] += piece.numel
        if mine:
            for source in () if replicated else item.holders:
                pieces = (piece for piece in item.pieces(source) if source != rank or not piece.is_contiguous)
                incoming[source].extend((matrices, piece) for piece in pieces)
            shapes.append((matrices, item.block))
            matrices += item.block.numel
    received, counts = _unpacking(incoming)
    travels = any(item.holders != range(owner, owner + 1) for owner, item in items)
    names = tuple(item.name for _, item in items)
    batches = tuple(_batches(shapes))
    return Bucket(tuple(runs), batches, received, tuple(sent), counts, matrices, travels, names, replicated)


def _unpacking(incoming: list[list[tuple[int, Piece]]]) -> tuple[tuple[Unpack, ...], tuple[int, ...]]:
    """Where received elements belong: the receive buffer is ordered by source, then as the source sent."""
    received, counts, at = [], [], 0
    for pieces in incoming:
        before = at
        for matrix, piece in pieces:
            # A contiguous piece is one run, however its elements lie where they come from.
            rows, cols = (1, piece.numel) if piece.is_contiguous else (piece.rows, piece.cols)
            received.append(Unpack(at, matrix + piece.at, rows, cols, piece.pitch))
            at += piece.numel
        counts.append(at - before)
    return tuple(received), tuple(counts)


def _batches(shapes: Iterable[tuple[int, Block]]) -> Iterator[Batch]:
    current: Batch | None = None
    for start, block in shapes:
        if current and (current.rows, current.cols) == (block.rows, block.cols):
            current = Batch(current.start, current.count + 1, block.rows, block.cols)
            continue
        if current:
            yield current
        current = Batch(start, 1, block.rows, block.cols)
    if current:
        yield current


def _digest(items: list[PlacedBlock], owners: list[int], rounds: list[list[tuple[int, PlacedBlock]]]) -> str:
    """A hash of everything that the ranks must agree on."""
    text = hashlib.sha256()
    for item, owner in zip(items, owners, strict=True):
        places = [(p.placement.origin, p.placement.span, p.placement.base) for p in item.parts]
        text.update(f"{item.shard.spec.name}{astuple(item.block)}{places} {owner};".encode())
    text.update(str([len(r) for r in rounds]).encode())
    return text.hexdigest()[:16]


#: Bytes of matrices that one owner takes in one bucket, at most; a larger matrix makes a bucket of its own. On an
#: accelerator several large matrices at once fill the chip.
CPU_BUCKET_BYTES, BUCKET_BYTES = 8 * 2**20, 128 * 2**20
#: On CPUs buckets shrink to no less than this where there would be fewer rounds than so many: the first way there and
#: the last way back hide behind nothing.
LEAST_BUCKET_BYTES, ROUNDS = 2**20, 8


def bucket_limit(
    items: Sequence[PlacedBlock], world_size: int, copies: int, cost: CostModel, bucket_bytes: int | None = None
) -> int:
    """Elements of one owner in one bucket.

    Args:
        items: all matrices of the partition.
        copies: ranks that hold the matrices whole; there a bucket, which stays large, is that of all owners together.
        bucket_bytes: instead of the rule's.
    """
    if bucket_bytes is None:
        bucket_bytes = CPU_BUCKET_BYTES if cost.device_type == "cpu" else BUCKET_BYTES
        if cost.device_type == "cpu" and world_size > 1 and copies == 1:
            total = sum(item.block.numel for item in items) * cost.bytes_per_element
            bucket_bytes = min(bucket_bytes, max(LEAST_BUCKET_BYTES, total // (ROUNDS * world_size)))
    return max(1, bucket_bytes // copies // cost.bytes_per_element)
