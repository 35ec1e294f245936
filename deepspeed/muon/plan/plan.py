# SPDX-License-Identifier: Apache-2.0
"""Plan the exchange: which rank owns each matrix, and which elements are sent in which bucket. No communication.

Every rank derives the same owners and buckets from the same facts, then lists only its own part: the matrices that it
owns, and the contiguous pieces of matrices that its shard holds (runs). One rank's plan takes O(matrices + ranks) time.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, groupby
from operator import itemgetter

from deepspeed.muon.plan.bucket import Bucket, OwnedBlocks, batch_key, bucket_of, shared_bucket
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import assign_owners, choose_owner_counts, sliced
from deepspeed.muon.plan.placement import PlacedBlock, Shard

#: Default limit of the bytes of one owner's matrices in one bucket, on CPUs and on accelerators; a larger matrix gets a
#: bucket to itself. An accelerator needs several large matrices at once to be busy.
CPU_BUCKET_BYTES, BUCKET_BYTES = 8 * 2**20, 128 * 2**20
#: On CPUs buckets shrink until there are ``MIN_ROUNDS`` rounds, but not below ``MIN_BUCKET_BYTES``: no computation
#: hides the first bucket's way to the owners and the last one's way back.
MIN_BUCKET_BYTES, MIN_ROUNDS = 2**20, 8


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's garbage collector within a ``with`` block, because it makes planning slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class GlobalPlan:
    """The plan of all ranks for a parameter group (or sub-group of ZeRO stage 3): each matrix's owner and bucket.

    Args:
        shards: the group's Muon parameters, in the same order on all ranks.
        items: the matrices of these parameters.
        world_size: number of ranks that share these parameters.
        copies: how many ranks hold every matrix whole (ZeRO stage 0); 1 if ranks hold shards.
        owners: for each matrix, its owner, or the first of its consecutive owners.
        counts: for each matrix, its number of owners.
        loads: for each rank, the cost of the matrices that it owns, in floating-point operations.
        owned: (owner, matrix) pairs; (owner, slice) pairs for a matrix with several owners.
        rounds: the pairs of ``owned`` in lists, one for each round; see :func:`cut_into_rounds`.
        limit: maximum number of elements of one owner in a round, unless one matrix is larger.
        is_tight: whether memory is scarce, because a matrix on an accelerator is larger than ``limit``.
    """

    shards: tuple[Shard, ...]
    items: list[PlacedBlock]
    world_size: int
    copies: int
    owners: list[int]
    counts: list[int]
    loads: list[float]
    owned: OwnedBlocks
    rounds: list[OwnedBlocks]
    limit: int
    is_tight: bool

    @cached_property
    def digest(self) -> str:
        """Return a hash, 16 hexadecimal digits, of everything in the plan that must be equal on all ranks."""
        numbers = self.owners, self.counts, [len(owned) for owned in self.rounds], self.limit, self.is_tight
        digest = hashlib.sha256("".join(map(str, numbers)).encode())
        for item in self.items:
            bases = [placement.base for placement in item.shard.placements]
            digest.update(f"{item.shard.spec.name}{item.spread.text}{bases}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def gradient_flag_count(self) -> int:
        """Return how many flags the ranks exchange in a step to learn which matrices have a gradient.

        There is one flag for each matrix. There is none if every rank holds every matrix whole: all ranks then have the
        same gradients.
        """
        is_cut = any(len(item.spread.parts) > 1 or item.shard.placement.copies == 1 for item in self.items)
        return len({item.matrix for item in self.items}) if self.world_size > 1 and is_cut else 0

    @cached_property
    def moved_elements(self) -> int:
        """Return how many elements are in matrices (or slices) whose owner holds no part of them in its shard."""
        return sum(item.block.numel for owner, item in self.owned if owner not in item.spread.holders)

    @property
    def shared_owner_counts(self) -> list[int]:
        """Return the different numbers of owners that matrices have, ascending and without 1; example: ``[2, 4]``."""
        return sorted({*self.counts} - {1})

    @property
    def broadcasts(self) -> int:
        """Return how many broadcasts a step takes at stage 0: one for each owner in each list of ``rounds``."""
        return sum(len({owner for owner, _ in owned}) for owned in self.rounds)

    @cached_property
    def buckets(self) -> list[tuple[OwnedBlocks, bool]]:
        """Return (owned, only_results) of each bucket, in the order of the step.

        ``owned``: the bucket's (owner, matrix or slice) pairs. ``only_results``: whether the bucket sends the results
        of an earlier bucket from their owners to all ranks (ZeRO stage 0).
        """
        if self.copies == 1:
            return [(owned, False) for owned in self.rounds]
        found: list[tuple[OwnedBlocks, bool]] = []
        for owned in self.rounds:
            found.append((owned, False))
            found += [(part, True) for part in split_round(owned, self.limit * self.copies)]
        return found

    @property
    def exchanges(self) -> int:
        """Return how many buckets of a step are sent between ranks: all or, at stage 0, only the buckets of results."""
        return sum(only_results for _, only_results in self.buckets) or len(self.buckets)

    def slots(self, travels: bool) -> int:
        """Return how many buckets may be in use at the same time.

        3: one bucket is sent to the owners while another is orthogonalized and a third is sent back. 2: at stage 0,
        where nothing is sent to the owners, and if memory is scarce (``is_tight``). 1: if ``travels``, the result of
        :meth:`Plan.travels`, is false.
        """
        if not travels:
            return 1
        return 2 if self.copies > 1 or self.is_tight else 3

    def storages(self, travels: bool) -> list[int]:
        """Return for each bucket the index of its memory. Buckets with the same index use it one after another.

        ``travels``: the result of :meth:`Plan.travels`.
        """
        if self.copies == 1:
            slots = self.slots(travels)
            return [index % slots for index in range(len(self.buckets))]
        # Buckets of owned matrices alternate between 0 and 1, buckets of results between 2 and 3. All results of a
        # round are sent before the memory of the round's matrices is used again.
        turns = count(), count()
        return [2 * of_results + next(turns[of_results]) % 2 for _, of_results in self.buckets]

    def view(self, rank: int) -> Plan:
        """Return the :class:`Plan` of ``rank``: the buckets as it sees them."""
        if self.copies == 1:
            return Plan(self, rank, tuple(bucket_of(owned, rank, self.world_size) for owned in self.rounds))
        pairs = self.buckets
        return Plan(self, rank, tuple(shared_bucket(owned, rank, self.world_size, *kind) for owned, *kind in pairs))


@dataclass(frozen=True)
class Plan:
    """What one rank does in a step: what it sends, receives and orthogonalizes in each bucket of ``of_all``.

    ``of_all``: the plan that all ranks share, which says which rank owns which matrix.
    """

    of_all: GlobalPlan
    rank: int
    buckets: tuple[Bucket, ...]

    @property
    def sent_elements(self) -> int:
        """Return how many elements this rank sends in one step: matrix parts to owners, and results to other ranks."""
        copied = sum(bucket.own_results for bucket in self.buckets) * (self.of_all.world_size - 1)
        moved = [counts for b in self.buckets if not b.only_results for counts in (b.send_counts, b.receive_counts)]
        return copied + sum(sum(counts) - counts[self.rank] for counts in moved)

    def travels(self, staged: bool) -> bool:
        """Return whether a step moves matrices between ranks, or between host memory and the accelerator.

        ``staged``: whether shards are in host memory while Newton-Schulz runs on an accelerator (CPU offload).
        """
        return staged or any(bucket.travels for bucket in self.buckets)


# ---- planning -----------------------------------------------------------------------------------------------------


def plan_partition(
    shards: Sequence[Shard],
    world_size: int,
    cost: CostModel,
    bucket_bytes: int | None = None,
    saved_counts: Mapping[str, int] | None = None,
    most_owners: int | None = None,
) -> GlobalPlan:
    """Plan a parameter group (or sub-group of ZeRO stage 3) for all ranks; choose how many owners each matrix has.

    At stage 0, if sharing the work is not faster, return a plan for a single rank: every rank carries it out for all
    matrices, without communication. This never happens if a matrix has several owners because of a checkpoint or
    ``most_owners``.

    Args:
        shards, world_size, cost, bucket_bytes: see :func:`global_plan`.
        saved_counts: as in :func:`deepspeed.muon.plan.owners.choose_owner_counts`; ``None`` if none are saved.
        most_owners: ``most`` of :func:`deepspeed.muon.plan.owners.choose_owner_counts`.
    """
    items, saved_counts = [item for shard in shards for item in shard.items], saved_counts or {}
    counts = choose_owner_counts(items, world_size, cost, saved_counts, most_owners)
    plan = global_plan(shards, world_size, cost, bucket_bytes, counts)
    # Several owners round a sum differently from one, so a number from a checkpoint or the config must be kept.
    is_asked_for = bool(saved_counts or most_owners) and max(counts, default=1) > 1
    if plan.copies == 1 or is_asked_for or is_worth_sharing(plan, cost):
        return plan
    unshared = [replace(shard, placement=replace(shard.placement, copies=1)) for shard in shards]
    return global_plan(unshared, 1, cost, bucket_bytes)


def is_worth_sharing(plan: GlobalPlan, cost: CostModel) -> bool:
    """Return whether a step at stage 0 is faster if the ranks share the matrices instead of each computing all."""
    numel = sum(item.block.numel for item in plan.items)
    received = numel * cost.bytes_per_element * (plan.world_size - 1) / plan.world_size
    # Without sharing, all ranks do all matrices at the same time.
    unshared = cost.total_flops(item.shape for item in plan.items)
    # With sharing, a step takes the busiest owner's work, receiving results, and the latency of the broadcasts.
    return max(plan.loads) + cost.flops_per_byte * received + cost.latency_as_flops * plan.broadcasts < unshared


def global_plan(
    shards: Sequence[Shard],
    world_size: int,
    cost: CostModel,
    bucket_bytes: int | None = None,
    counts: Sequence[int] = (),
) -> GlobalPlan:
    """Plan a parameter group (or sub-group of ZeRO stage 3) for all ranks, with given numbers of owners.

    Args:
        shards: the group's Muon parameters, in the same order on all ranks.
        world_size: number of ranks that share these parameters.
        cost: the cost model of the parameter group.
        bucket_bytes: see :func:`bucket_limit`.
        counts: for each matrix, its number of owners; if empty, every matrix has one.
    """
    items = [item for shard in shards for item in shard.items]
    counts = counts or [1] * len(items)
    owners, loads = assign_owners(items, world_size, cost, counts)
    first_owners = zip(items, owners, counts, strict=True)
    owned = [(first + k, part) for item, first, n in first_owners for k, part in enumerate(sliced(item, n))]
    copies = max((shard.placement.copies for shard in shards), default=1)
    limit = bucket_limit(items, world_size, copies, cost, bucket_bytes)
    return GlobalPlan(
        shards=tuple(shards),
        items=items,
        world_size=world_size,
        copies=copies,
        owners=owners,
        counts=[*counts],
        loads=loads,
        owned=owned,
        rounds=cut_into_rounds(owned, world_size, limit),
        limit=limit,
        is_tight=cost.device_type != "cpu" and any(item.block.numel > limit for _, item in owned),
    )


# ---- buckets ------------------------------------------------------------------------------------------------------


def cut_into_rounds(owned: OwnedBlocks, world_size: int, limit: int) -> list[OwnedBlocks]:
    """Split (owner, matrix or slice) pairs into rounds of at most ``limit`` elements, or one larger matrix, per owner.

    The ranks exchange the matrices of a round at the same time. A round is sorted by owner, then by :func:`batch_key`.
    All owners of a matrix have it in the same round.
    """
    # Matrices with most owners come first, so that two owners have all matrices that they share in the same order.
    # Otherwise they could wait for each other in collectives of different matrices.
    rounds: list[OwnedBlocks] = []
    filled, chunk = [0] * world_size, [0] * world_size
    for pair in sorted(owned, key=lambda pair: (pair[0], *batch_key(pair[1]))):
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


def split_round(owned: OwnedBlocks, limit: int) -> Iterator[OwnedBlocks]:
    """Split a round into parts of at most ``limit`` elements, one for each bucket of results (ZeRO stage 0).

    ``owned``: the round's (owner, matrix or slice) pairs, sorted by owner. The matrices of one owner stay together, in
    a part of their own if they have more than ``limit`` elements.
    """
    part: OwnedBlocks = []
    filled = 0
    for _, of_owner in groupby(owned, key=itemgetter(0)):
        items = list(of_owner)
        numel = sum(item.block.numel for _, item in items)
        if part and filled + numel > limit:
            yield part
            part, filled = [], 0
        part, filled = part + items, filled + numel
    yield part


def bucket_limit(
    items: Sequence[PlacedBlock], world_size: int, copies: int, cost: CostModel, bucket_bytes: int | None = None
) -> int:
    """Return the maximum number of elements that one owner has in one bucket.

    Args:
        items: all matrices that are planned together: those of a parameter group or, at stage 3, a sub-group.
        world_size: number of ranks that share these matrices.
        copies: as in :class:`GlobalPlan`. If it is above 1, ``bucket_bytes`` is the maximum of all owners together.
        cost: gives the bytes of an element, and where Newton-Schulz runs.
        bucket_bytes: maximum bytes of one owner's matrices in one bucket; ``None``: :data:`CPU_BUCKET_BYTES` or
            :data:`BUCKET_BYTES`, or less if there would be few buckets on CPUs.
    """
    if bucket_bytes is None:
        bucket_bytes = CPU_BUCKET_BYTES if cost.device_type == "cpu" else BUCKET_BYTES
        if cost.device_type == "cpu" and world_size > 1 and copies == 1:
            total = sum(item.block.numel for item in items) * cost.bytes_per_element
            bucket_bytes = min(bucket_bytes, max(MIN_BUCKET_BYTES, total // (MIN_ROUNDS * world_size)))
    return max(1, bucket_bytes // copies // cost.bytes_per_element)
