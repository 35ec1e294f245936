# SPDX-License-Identifier: Apache-2.0
"""Who orthogonalizes a matrix: how many owners it has, and which ranks these are.

A matrix with several owners is sliced along its longer side, so that its Gram matrix is the sum of the slices' Gram
matrices, and the last product of Newton-Schulz acts on each slice independently. Owners of one matrix are neighbours:
with ``count`` owners the ranks form sets of ``count``, one after the other. The counts of one plan divide each other,
so that a smaller set lies within a larger one, and all ranks of a set meet its matrices in the same order.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from deepspeed.muon.config.types import Cut
from deepspeed.muon.math.choice import shape_key
from deepspeed.muon.math.newton_schulz import SPLIT_FROM
from deepspeed.muon.matrices.block import Block, cut
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.placement import PlacedBlock, Spread

MAX_OWNERS = 16
#: Split a matrix over several owners when it costs more than this multiple of an even share of all work.
MAX_IMBALANCE = 1.25
#: What splitting must save at least, as a part of the cost of one owner.
MIN_SAVING = 0.2
#: On an accelerator, split a matrix whose temporaries and buffers take more bytes, whatever its operations.
MAX_WHOLE_BYTES = 2**30
#: If at most this many ranks hold a part of a matrix, each is considered as its owner.
MAX_CANDIDATES = 8


# ---- how many owners ---------------------------------------------------------------------------------------------


def counts_for(world_size: int, most: int = MAX_OWNERS) -> list[int]:
    """Return the numbers of owners that matrices may have, ascending.

    Each is a divisor of the next and of ``world_size``.
    """
    counts = [1]
    for count in range(2, min(world_size, most) + 1):
        if world_size % count == 0 and count % counts[-1] == 0:
            counts.append(count)
    return counts


def neighbours(nodes: Sequence[Any]) -> int:
    """Return the size of the largest sets into which the ranks can be cut, one after the other, each on one node.

    Args:
        nodes: of each rank, in order.
    """
    sizes = (size for size in range(len(nodes), 0, -1) if len(nodes) % size == 0)
    return next(n for n in sizes if all(len({*nodes[i : i + n]}) == 1 for i in range(0, len(nodes), n)))


def is_sliceable(block: Block, count: int) -> bool:
    """Return whether a matrix can be cut into equal slices, and its Gram matrix into equal rows.

    Rows that lie in bands are not cut.
    """
    is_cut_by_rows = block.rows > block.cols
    return block.rows % count == block.cols % count == 0 and not (is_cut_by_rows and block.bands > 1)


def sliced(item: PlacedBlock, count: int) -> Iterator[PlacedBlock]:
    """Yield the slices of a matrix, in the order of their owners; the matrix itself if there is one."""
    if count == 1:
        yield item
        return
    block, axis = item.block, int(item.block.rows <= item.block.cols)
    size = (block.rows, block.cols)[axis] // count
    for part in cut(block, Cut((size,) * count, axis)):
        yield replace(item, block=part, whole=block)


def counts_of(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, pinned: Mapping[str, int], most: int | None
) -> list[int]:
    """Return the number of owners of each matrix, equal for all of one shape that can be cut.

    A matrix that costs clearly more than an even share of all work cannot be balanced by any choice of a single owner:
    it gets the fewest owners that bring it below one, or those for whom it costs least, if they save enough. On an
    accelerator one whose temporaries are large gets the fewest that make them small, if as many ranks hold parts of it:
    one that holds it whole would need more memory to send it to others than it saves.

    Args:
        pinned: by a checkpoint, by :func:`deepspeed.muon.math.choice.shape_key`. A number that does not fit the ranks
            is chosen anew.
        most: that many, or the most below that fit the ranks; ``None``: as above.
    """
    if world_size == 1 or most == 1:
        return [1] * len(items)
    even = cost.total(item.shape for item in items) / world_size
    kept = {n for n in pinned.values() if n in counts_for(world_size)}
    # Sets of several sizes must lie within each other, also with those that a checkpoint has pinned.
    of_node = [n for n in counts_for(cost.intra_node) if all(n % k == 0 or k % n == 0 for k in kept)]
    allowed = counts_for(world_size, most) if most else of_node
    holders: dict[tuple[int, int], int] = {}
    for item in items:
        holders[item.shape] = min(holders.get(item.shape, world_size), len(item.spread.holders))

    @cache
    def count_for(shape: tuple[int, int]) -> int:
        rows, cols = shape
        if most is not None:
            return allowed[-1]
        count = pinned.get(shape_key(rows, cols))
        if count in kept:
            return count
        fitting = [count for count in allowed if rows % count == cols % count == 0]
        for_memory = _for_memory(rows, cols, fitting, holders[shape], cost)
        return max(for_memory, _for_balance(rows, cols, fitting, even, cost))

    # One shape has one number of owners, unless a block of it lies in bands that cannot be cut.
    wanted = [(item.block, count_for(item.shape)) for item in items]
    return [count if is_sliceable(block, count) else 1 for block, count in wanted]


def _for_balance(rows: int, cols: int, allowed: Sequence[int], even: float, cost: CostModel) -> int:
    costs = {count: cost.owner_cost(rows, cols, count) for count in allowed}
    if costs[1] <= MAX_IMBALANCE * even:
        return 1
    cheapest = min(costs, key=lambda count: (costs[count], count))
    found = next((count for count in allowed if costs[count] <= even), cheapest)
    return found if costs[found] <= (1 - MIN_SAVING) * costs[1] else 1


def _for_memory(rows: int, cols: int, allowed: Sequence[int], holders: int, cost: CostModel) -> int:
    def nbytes(count: int) -> int:
        # A slice in two buckets and a temporary, and Gram matrices.
        grams = 3 if count >= SPLIT_FROM else 4
        return cost.bytes_per_element * (3 * rows * cols // count + grams * min(rows, cols) ** 2)

    small = next((count for count in allowed if nbytes(count) <= MAX_WHOLE_BYTES), allowed[-1])
    return small if cost.device_type != "cpu" and small <= holders else 1


# ---- which ranks -------------------------------------------------------------------------------------------------


def assign(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, counts: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the owner of each matrix, of several the first one, and the load of each rank, in operations.

    Longest processing time first (Graham 1969), among the ranks that hold a part of the matrix: the heaviest matrix
    goes where it would be done earliest. An owner pays for the bytes that it must receive beyond those that the best
    owner must receive; the latter travel anyway. Then matrices leave the busiest rank while that shortens the step
    although all their bytes travel.

    Args:
        counts: of the owners of each matrix. Matrices with several go first, to the set of ranks that would be done
            earliest, and stay there.
    """
    loads = _Loads(world_size)
    weights = [cost.flops(item.block.rows, item.block.cols) for item in items]
    owners, moved_costs = [0] * len(items), [0.0] * len(items)
    few: dict[Spread, dict[int, int]] = {}
    for count in sorted({*counts} - {1}, reverse=True):
        _assign_to_sets(count, items, counts, cost, owners, loads)
    for index in sorted((i for i, count in enumerate(counts) if count == 1), key=lambda i: (-weights[i], i)):
        weight, missing = weights[index], _candidates(items[index], loads.least(), few)
        # The elements that the best owner lacks travel anyway, so only those beyond them have a cost.
        fewest = min(missing.values())
        offers = ((weight + cost.bytes_as_flops(elements - fewest), rank) for rank, elements in missing.items())
        _, owner, load = min((loads.values[rank] + load, rank, load) for load, rank in offers)
        owners[index] = owner
        moved_costs[index] = weight + cost.bytes_as_flops(items[index].block.numel - fewest)
        loads.add(owner, load, index)
    _rebalance(moved_costs, owners, loads)
    return owners, loads.values


def _assign_to_sets(
    count: int,
    items: Sequence[PlacedBlock],
    counts: Sequence[int],
    cost: CostModel,
    owners: list[int],
    loads: _Loads,
) -> None:
    """Assign the matrices that have this number of owners, the most expensive first."""
    costs = {index: cost.owner_cost(*items[index].shape, count) for index, n in enumerate(counts) if n == count}
    sets = [(max(loads.values[first : first + count]), first) for first in range(0, len(loads.values), count)]
    heapq.heapify(sets)
    for index in sorted(costs, key=lambda i: (-costs[i], i)):
        load, owners[index] = sets[0]
        heapq.heapreplace(sets, (load + costs[index], owners[index]))
        for rank in range(owners[index], owners[index] + count):
            loads.change(rank, costs[index])


def _candidates(item: PlacedBlock, least: int, few: dict[Spread, dict[int, int]]) -> dict[int, int]:
    """Return the ranks to consider as the owner, with the elements that each of them lacks.

    All holders but the first and the last hold equal parts, so a few stand for many.

    Args:
        least: the rank with the least load.
        few: filled with the ranks to consider whatever the loads, for each way in which a matrix is cut.
    """
    spread, holders = item.spread, item.spread.holders
    middle = holders[len(holders) // 2]
    if spread not in few:
        ranks = holders if len(holders) <= MAX_CANDIDATES else (holders[0], middle, holders[-1])
        few[spread] = {rank: item.block.numel - spread.held(rank) for rank in ranks}
    missing = few[spread]
    if least in holders and least not in missing:
        return missing | {least: missing[middle]}
    return missing


class _Loads:
    """Load of every rank, with fast access to the extremes, and the matrices of each rank, the lightest first.

    Outdated entries stay in the heaps until they reach the top.
    """

    def __init__(self, world_size: int) -> None:
        self.values = [0.0] * world_size
        self.owned: list[list[tuple[float, int]]] = [[] for _ in range(world_size)]
        self._low = [(0.0, rank) for rank in range(world_size)]
        self._high: list[tuple[float, int]] | None = None  # from the first time that it is asked for

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

    The best matrix to move costs about half the gap between them. ``moved_costs``: at a rank that holds nothing of it.
    """
    for _ in range(len(moved_costs)):
        busiest, least = loads.busiest(), loads.least()
        owned, gap = loads.owned[busiest], loads.values[busiest] - loads.values[least]
        if not owned:
            return
        position = max(0, bisect.bisect_right(owned, (gap / 2, len(moved_costs))) - 1)
        load, index = owned[position]
        # Moved, it would make the other rank at least as busy.
        if moved_costs[index] >= gap:
            return
        del owned[position]
        loads.change(busiest, -load)
        loads.add(least, moved_costs[index], index)
        owners[index] = least
