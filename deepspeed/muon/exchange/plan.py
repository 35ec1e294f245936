# SPDX-License-Identifier: Apache-2.0
"""Plan the exchange: which rank owns each matrix, and which elements are sent in which bucket.

The owner of a matrix is the rank that orthogonalizes it. A bucket is the matrices that ranks exchange in one
collective.

Ranks do not communicate to plan: every rank derives the same owners and buckets from the same facts. Each rank then
lists only the matrices that it owns, and the pieces of matrices that its shard holds (runs). This takes each rank
O(matrices + ranks) time, up to logarithms, and not O(matrices x ranks).
"""

from __future__ import annotations

import bisect
import functools
import gc
import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from deepspeed.muon.exchange.bucket import Bucket, OwnedBlocks, batch_key, bucket_of, replicated_bucket
from deepspeed.muon.exchange.placed_params import PlacedBlock, Shard
from deepspeed.muon.layout import Spread

#: Floating-point operations that take as long as sending one byte: for CPU cores over gloo, and for an accelerator over
#: its fabric. Moving a matrix to a rank that does not hold it must save more than this per byte.
CPU_FLOPS_PER_BYTE, ACCELERATOR_FLOPS_PER_BYTE = 200.0, 8000.0
#: Floating-point operations that take as long as the latency of a collective within a node.
CPU_CALL, ACCELERATOR_CALL = 5e7, 8e9


@dataclass(frozen=True)
class CostModel:
    """The cost of Newton-Schulz and of communication, by which matrices are divided among ranks.

    Both are counted in floating-point operations. The cost of communication is the number of operations that the device
    could do in the same time.

    Args:
        flops: (rows, columns) of a matrix -> the operations of Newton-Schulz on it.
        flops_per_byte: operations that take as long as sending one byte.
        bytes_per_element: bytes of each element that is sent to the rank that orthogonalizes it, or back.
        device_type: where Newton-Schulz runs, such as ``cpu``.
    """

    flops: Callable[[int, int], float]
    flops_per_byte: float
    bytes_per_element: int
    device_type: str = "cpu"

    def total_flops(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the floating-point operations of Newton-Schulz on matrices of all ``shapes``, each (rows, columns)."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def round_trip_as_flops(self, elements: int) -> float:
        """Return the cost of sending ``elements`` elements to another rank and back, in floating-point operations."""
        # Results go back where the parts came from.
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    @property
    def latency_as_flops(self) -> float:
        """Return the cost of the latency of one collective, in floating-point operations."""
        return CPU_CALL if self.device_type == "cpu" else ACCELERATOR_CALL


def cost_model(flops: Callable[[int, int], float], wire_bytes: int, device_type: str) -> CostModel:
    """Return the cost model of one parameter group.

    ``flops``, ``device_type``: as for :class:`CostModel`. ``wire_bytes``: bytes of a sent element.
    """
    flops_per_byte = CPU_FLOPS_PER_BYTE if device_type == "cpu" else ACCELERATOR_FLOPS_PER_BYTE
    return CostModel(functools.cache(flops), flops_per_byte, wire_bytes, device_type)


#: If at most this many ranks hold a part of a matrix, every one of them is a candidate for its owner.
MAX_CANDIDATES = 8


def assign_owners(items: Sequence[PlacedBlock], world_size: int, cost: CostModel) -> tuple[list[int], list[float]]:
    """Choose an owner for each matrix, the rank that orthogonalizes it, so that ranks finish at about the same time.

    The costliest matrix comes first (longest processing time first, Graham 1969). Each goes to the rank that would
    finish it first, among ranks that hold a part of it. The cost includes sending the elements that this rank lacks to
    it and back, less the fewest elements that any of these ranks lacks. At the end, some matrices move from the busiest
    rank to the least loaded rank.

    Returns:
        (owners, loads). ``owners``: for each matrix, its owner. ``loads``: for each rank, the cost of all its
        matrices, in floating-point operations.
    """
    loads = _Loads(world_size)
    weights = [cost.flops(*item.shape) for item in items]
    owners, moved_costs = [0] * len(items), [0.0] * len(items)
    missing_of: dict[Spread, dict[int, int]] = {}
    # Equal weights are ordered by index, so that all ranks assign alike.
    for index in sorted(range(len(items)), key=lambda i: (-weights[i], i)):
        weight, missing = weights[index], _candidates(items[index], loads.least(), missing_of)
        # The elements that the best-placed rank lacks are sent in any case, so only those beyond them have a cost.
        fewest = min(missing.values())
        offers = ((weight + cost.round_trip_as_flops(elements - fewest), rank) for rank, elements in missing.items())
        _, owner, cost_here = min((loads.values[rank] + cost_here, rank, cost_here) for cost_here, rank in offers)
        owners[index] = owner
        moved_costs[index] = weight + cost.round_trip_as_flops(items[index].block.numel - fewest)
        loads.add(owner, cost_here, index)
    _rebalance(moved_costs, owners, loads)
    return owners, loads.values


def _candidates(item: PlacedBlock, least: int, missing_of: dict[Spread, dict[int, int]]) -> dict[int, int]:
    """Return {rank: number of the matrix's elements that it lacks} for the ranks that may own the matrix.

    These are the ranks that hold a part of it or, if there are more than :data:`MAX_CANDIDATES`, up to four of them:
    the first, the middle, the last and, if it holds a part, ``least``, the rank with the least load of all.

    ``missing_of``: a cache that this function fills, :class:`Spread` of a matrix -> the result without ``least``.
    Matrices with the same Spread have the same shape, and the same ranks hold the same parts of them.
    """
    spread, holders = item.spread, item.spread.holders
    middle = holders[len(holders) // 2]
    if spread not in missing_of:
        ranks = holders if len(holders) <= MAX_CANDIDATES else (holders[0], middle, holders[-1])
        missing_of[spread] = {rank: item.block.numel - spread.held_elements(rank) for rank in ranks}
    missing = missing_of[spread]
    if least in holders and least not in missing:
        return missing | {least: item.block.numel - spread.held_elements(least)}
    return missing


class _Loads:
    """The load of each rank, in floating-point operations, and the matrices assigned to it, by index.

    It finds the least loaded and the busiest rank in logarithmic time.
    """

    def __init__(self, world_size: int) -> None:
        self.values = [0.0] * world_size
        self.owned: list[list[tuple[float, int]]] = [[] for _ in range(world_size)]  # (load, matrix), lightest first
        # Heaps of the least and the most loaded ranks. Outdated entries are dropped when they reach the top.
        self._low = [(0.0, rank) for rank in range(world_size)]
        self._high: list[tuple[float, int]] | None = None  # built on first use: only `_rebalance` needs it

    def least(self) -> int:
        while self._low[0][0] != self.values[self._low[0][1]]:
            heapq.heappop(self._low)
        return self._low[0][1]

    def busiest(self) -> int:
        if self._high is None:
            self._high = [(-value, rank) for rank, value in enumerate(self.values)]
            heapq.heapify(self._high)
        while -self._high[0][0] != self.values[self._high[0][1]]:
            heapq.heappop(self._high)
        return self._high[0][1]

    def add(self, rank: int, load: float, index: int) -> None:
        bisect.insort(self.owned[rank], (load, index))
        self.change(rank, load)

    def change(self, rank: int, difference: float) -> None:
        self.values[rank] += difference
        heapq.heappush(self._low, (self.values[rank], rank))
        if self._high is not None:
            heapq.heappush(self._high, (-self.values[rank], rank))


def _rebalance(moved_costs: Sequence[float], owners: list[int], loads: _Loads) -> None:
    """Move matrices from the busiest to the least loaded rank while that lowers the higher of the two loads.

    ``owners`` (for each matrix, the rank that orthogonalizes it) and ``loads`` are updated. ``moved_costs``: for each
    matrix, its cost on a rank that holds no part of it.
    """
    for _ in range(len(moved_costs)):  # at most one move per matrix
        busiest, least = loads.busiest(), loads.least()
        owned, gap = loads.owned[busiest], loads.values[busiest] - loads.values[least]
        if not owned:
            return
        # The heaviest matrix of at most half the gap; if there is none, the lightest of all. ``owned`` is sorted by
        # (load, index), and every index is below ``len(moved_costs)``, so loads of exactly half the gap are included.
        position = max(0, bisect.bisect_right(owned, (gap / 2, len(moved_costs))) - 1)
        load, index = owned[position]
        # Moving it would make the least loaded rank at least as busy as the busiest one is now.
        if moved_costs[index] >= gap:
            return
        del owned[position]
        loads.change(busiest, -load)
        loads.add(least, moved_costs[index], index)
        owners[index] = least


#: Default limit of the bytes of one owner's matrices in one bucket, on CPUs and on accelerators; a larger matrix gets a
#: bucket to itself. An accelerator needs several large matrices at once to be busy.
CPU_BUCKET_BYTES, BUCKET_BYTES = 8 * 2**20, 128 * 2**20
#: On CPUs buckets shrink until there are ``MIN_BUCKETS`` of them, but not below ``MIN_BUCKET_BYTES``: no computation
#: hides the first bucket's way to the owners and the last one's way back.
MIN_BUCKET_BYTES, MIN_BUCKETS = 2**20, 8


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
class Plan:
    """The plan of a parameter group (or sub-group of ZeRO stage 3): each matrix's owner and bucket.

    The owner of a matrix is the rank that orthogonalizes it. A bucket is the matrices that ranks exchange in one
    collective; ranks process one bucket after another. ``owners`` and ``pairs`` cover all ranks. :attr:`buckets` says
    what this rank sends, receives and orthogonalizes.

    Args:
        shards: the group's Muon parameters, in the same order on all ranks.
        items: the matrices of these parameters.
        world_size: number of ranks that share these parameters.
        copies: how many ranks hold every matrix whole (ZeRO stage 0); 1 if ranks hold shards.
        owners: for each matrix, its owner.
        loads: for each rank, the cost of the matrices that it owns, in floating-point operations.
        pairs: (owner, matrix) pairs in lists, one for each bucket, in the order of the step; see
            :func:`cut_into_buckets`.
        limit: maximum number of elements of one owner in a bucket, unless one matrix is larger.
        is_tight: whether memory is scarce, because a matrix on an accelerator is larger than ``limit``.
        rank: this rank's index among the ranks that share the parameters.
    """

    shards: tuple[Shard, ...]
    items: list[PlacedBlock]
    world_size: int
    copies: int
    owners: list[int]
    loads: list[float]
    pairs: list[OwnedBlocks]
    limit: int
    is_tight: bool
    rank: int = 0

    @cached_property
    def digest(self) -> str:
        """Return a hash, 16 hexadecimal digits, of all that must be equal in the plans of all ranks.

        Ranks compare it before the first step, because ranks with different plans would hang in collectives.
        """
        numbers = self.owners, [len(owned) for owned in self.pairs], self.limit, self.is_tight
        digest = hashlib.sha256("".join(map(str, numbers)).encode())
        for item in self.items:
            bases = [placement.base for placement in item.shard.placements]
            digest.update(f"{item.shard.spec.name}{item.spread.text}{bases}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def exchanges_gradient_flags(self) -> bool:
        """Return whether the ranks exchange a flag for each matrix, to learn which matrices have a gradient.

        They do not if every rank holds every matrix whole: all ranks then have the same gradients.
        """
        is_cut = any(len(item.spread.rectangles) > 1 or item.shard.placement.copies == 1 for item in self.items)
        return self.world_size > 1 and is_cut

    @cached_property
    def owners_of_parameters(self) -> dict[str, set[int]]:
        """Return {name of a parameter: the ranks that own its matrices}."""
        owners: dict[str, set[int]] = {}
        for item, owner in zip(self.items, self.owners, strict=True):
            owners.setdefault(item.shard.spec.name, set()).add(owner)
        return owners

    @cached_property
    def moved_elements(self) -> int:
        """Return how many elements are in matrices whose owner holds no part of them in its shard."""
        owned = zip(self.owners, self.items, strict=True)
        return sum(item.block.numel for owner, item in owned if not item.spread.held_elements(owner))

    def slots(self, travels: bool) -> int:
        """Return how many buckets are in memory at a time.

        3: one bucket is sent to the owners while another is orthogonalized and a third is sent back. 2: if memory is
        scarce (``is_tight``). 1: if matrices move neither between ranks nor between host memory and the accelerator;
        ``travels``, the result of :meth:`Plan.travels`, is then false.
        """
        if not travels:
            return 1
        return 2 if self.is_tight else 3

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets as this rank sees them: what it sends, receives and orthogonalizes."""
        view = bucket_of if self.copies == 1 else replicated_bucket
        return tuple(view(owned, self.rank, self.world_size) for owned in self.pairs)

    @property
    def sent_elements(self) -> int:
        """Return how many elements this rank sends in one step: matrix parts to owners, and results to other ranks."""
        gathered = sum(bucket.gathered_part for bucket in self.buckets) * (self.world_size - 1)
        moved = [counts for bucket in self.buckets for counts in (bucket.send_counts, bucket.receive_counts)]
        return gathered + sum(sum(counts) - counts[self.rank] for counts in moved)

    def travels(self, staged: bool) -> bool:
        """Return whether a step moves matrices between ranks, or between host memory and the accelerator.

        ``staged``: whether shards are in host memory while Newton-Schulz runs on an accelerator (CPU offload).
        """
        return staged or any(bucket.travels for bucket in self.buckets)


# ---- planning -----------------------------------------------------------------------------------------------------


def plan_partition(
    shards: Sequence[Shard], world_size: int, cost: CostModel, bucket_bytes: int | None = None, rank: int = 0
) -> Plan:
    """Return the plan of a parameter group (or sub-group of ZeRO stage 3), with or without sharing its matrices.

    Ranks share the matrices, except at ZeRO stage 0 if that is not faster: the plan then has ``world_size`` 1, and
    every rank orthogonalizes all matrices, without communication. The arguments are those of :func:`plan_shards`.
    """
    plan = plan_shards(shards, world_size, cost, bucket_bytes, rank)
    if plan.copies == 1 or is_worth_sharing(plan, cost):
        return plan
    unshared = [replace(shard, placement=replace(shard.placement, copies=1)) for shard in shards]
    return plan_shards(unshared, 1, cost, bucket_bytes)


def is_worth_sharing(plan: Plan, cost: CostModel) -> bool:
    """Return whether a step at ZeRO stage 0 is faster with ``plan`` than if each rank orthogonalizes all matrices."""
    received = sum(bucket.gathered_part for bucket in plan.buckets) * (plan.world_size - 1) * cost.bytes_per_element
    # Without sharing, all ranks do all matrices at the same time. With it, nothing is sent to the owners.
    unshared = cost.total_flops(item.shape for item in plan.items)
    # With sharing, a step takes the busiest owner's work, receiving results, and the latency of the all-gathers.
    return max(plan.loads) + cost.flops_per_byte * received + cost.latency_as_flops * len(plan.buckets) < unshared


def plan_shards(
    shards: Sequence[Shard], world_size: int, cost: CostModel, bucket_bytes: int | None = None, rank: int = 0
) -> Plan:
    """Return a plan in which ranks share the matrices of a parameter group (or sub-group of ZeRO stage 3).

    Call :func:`plan_partition` for a plan that shares them only if that is faster.

    Args:
        shards: the group's Muon parameters, in the same order on all ranks.
        world_size: number of ranks that share these parameters.
        cost: the cost model of the parameter group.
        bucket_bytes: see :func:`bucket_limit`.
        rank: this rank's index among the ``world_size`` ranks. Only :attr:`Plan.buckets` depends on it.
    """
    items = [item for shard in shards for item in shard.items]
    owners, loads = assign_owners(items, world_size, cost)
    copies = max((shard.placement.copies for shard in shards), default=1)
    limit = bucket_limit(items, world_size, copies, cost, bucket_bytes)
    return Plan(
        shards=tuple(shards),
        items=items,
        world_size=world_size,
        copies=copies,
        owners=owners,
        loads=loads,
        pairs=cut_into_buckets([*zip(owners, items, strict=True)], world_size, limit),
        limit=limit,
        is_tight=cost.device_type != "cpu" and any(item.block.numel > limit for item in items),
        rank=rank,
    )


# ---- buckets ------------------------------------------------------------------------------------------------------


def cut_into_buckets(owned: OwnedBlocks, world_size: int, limit: int) -> list[OwnedBlocks]:
    """Split (owner, matrix) pairs into buckets, and return these. Ranks exchange the matrices of a bucket at once.

    Each owner's matrices fill bucket 0, then bucket 1, and so on, the largest first. In a bucket, an owner has at most
    ``limit`` elements, or a single larger matrix. A bucket is sorted by owner, then by :func:`batch_key`.
    """
    buckets: list[OwnedBlocks] = []
    filled, number = [0] * world_size, [0] * world_size
    for pair in sorted(owned, key=lambda pair: (pair[0], *batch_key(pair[1]))):
        owner, item = pair
        # A matrix that is larger than the limit has a bucket to itself.
        if filled[owner] and filled[owner] + item.block.numel > limit:
            number[owner] += 1
            filled[owner] = 0
        filled[owner] += item.block.numel
        if len(buckets) == number[owner]:
            buckets.append([])
        buckets[number[owner]].append(pair)
    return buckets


def bucket_limit(
    items: Sequence[PlacedBlock], world_size: int, copies: int, cost: CostModel, bucket_bytes: int | None = None
) -> int:
    """Return how many elements one owner may have in one bucket, the ``limit`` of :func:`cut_into_buckets`.

    Args:
        items: all matrices that are planned together: those of a parameter group or, at stage 3, a sub-group.
        world_size: number of ranks that share these matrices.
        copies: as in :class:`Plan`. If it is above 1, ``bucket_bytes`` is the maximum of all owners together.
        cost: the cost model, which has the bytes of an element, and the device type of Newton-Schulz.
        bucket_bytes: maximum bytes of one owner's matrices in one bucket; ``None``: :data:`CPU_BUCKET_BYTES` or
            :data:`BUCKET_BYTES`, or less if there would be few buckets on CPUs.
    """
    if bucket_bytes is None:
        bucket_bytes = CPU_BUCKET_BYTES if cost.device_type == "cpu" else BUCKET_BYTES
        if cost.device_type == "cpu" and world_size > 1 and copies == 1:
            total = sum(item.block.numel for item in items) * cost.bytes_per_element
            bucket_bytes = min(bucket_bytes, max(MIN_BUCKET_BYTES, total // (MIN_BUCKETS * world_size)))
    return max(1, bucket_bytes // copies // cost.bytes_per_element)
