# SPDX-License-Identifier: Apache-2.0
"""The plan of the exchange: owners, and the elements that travel. Pure Python, no communication.

Every rank derives the same owners and buckets from the same facts, then lists only its own part: the runs that it holds
and the matrices that it owns. One rank's plan takes O(matrices + ranks) time.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby
from operator import itemgetter

from deepspeed.muon.plan.bucket import Bucket, Round, bucket_of, kind_of, shared_bucket
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import assign
from deepspeed.muon.plan.placement import PlacedBlock, Shard
from deepspeed.muon.plan.slices import sliced


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
def without_collector() -> Iterator[None]:
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
        is_cut = any(len(item.spread.parts) > 1 or item.shard.placement.copies == 1 for item in self.items)
        return len({item.matrix for item in self.items}) if self.world_size > 1 and is_cut else 0

    @cached_property
    def moved_elements(self) -> int:
        """Return the elements of matrices that go to a rank which holds nothing of them."""
        return sum(item.block.numel for owner, item in self.owned if owner not in item.spread.holders)

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
            return bucket_of(items, rank, self.world_size)
        return shared_bucket(items, rank, self.world_size, only_results)


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
    items = [item for shard in shards for item in shard.items]
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
    for pair in sorted(owned, key=lambda pair: (pair[0], *kind_of(pair[1]))):
        owner, item = pair
        # A matrix that is larger than the limit has a chunk to itself.
        if filled[owner] and filled[owner] + item.block.numel > limit:
            chunk[owner] += 1
            filled[owner] = 0
        filled[owner] += item.block.numel
        if len(rounds) == chunk[owner]:
            rounds.append([])
        rounds[chunk[owner]].append(pair)
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


def is_tight(owned: Round, limit: int, cost: CostModel) -> bool:
    """Whether a matrix is larger than a bucket where memory is scarce: on an accelerator."""
    return cost.device_type != "cpu" and any(item.block.numel > limit for _, item in owned)


def _digest(
    items: Sequence[PlacedBlock],
    owners: Sequence[int],
    counts: Sequence[int],
    rounds: Sequence[Round],
    limit: int,
    tight: bool,
) -> str:
    digest = hashlib.sha256(f"{[*owners]}{[*counts]}{[len(r) for r in rounds]}{limit}{tight}".encode())
    for item in items:
        bases = [placement.base for placement in item.shard.placements]
        digest.update(f"{item.shard.spec.name}{item.spread.text}{bases}".encode())
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
