# SPDX-License-Identifier: Apache-2.0
"""Choose the owner of each matrix: the rank that orthogonalizes it."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.placement import PlacedBlock, Spread

#: If at most this many ranks hold a part of a matrix, every one of them is a candidate for its owner.
MAX_CANDIDATES = 8


def assign_owners(items: Sequence[PlacedBlock], world_size: int, cost: CostModel) -> tuple[list[int], list[float]]:
    """Choose which rank owns each matrix, so that all ranks finish at about the same time.

    The costliest matrix comes first (longest processing time first, Graham 1969). Each goes to the rank that would
    finish it first, among those that hold a part of it. Its cost includes receiving the elements that the rank lacks.
    At the end, some matrices move from the busiest rank to the least loaded rank.

    Returns:
        (owners, loads). ``owners``: for each matrix, its owner. ``loads``: for each rank, the cost of all its
        matrices, in floating-point operations.
    """
    loads = _Loads(world_size)
    weights = [cost.flops(*item.shape) for item in items]
    owners, moved_costs = [0] * len(items), [0.0] * len(items)
    few: dict[Spread, dict[int, int]] = {}
    # Equal weights are ordered by index, so that all ranks assign alike.
    for index in sorted(range(len(items)), key=lambda i: (-weights[i], i)):
        weight, missing = weights[index], _candidates(items[index], loads.least(), few)
        # The elements that the best-placed rank lacks are sent in any case, so only those beyond them have a cost.
        fewest = min(missing.values())
        offers = ((weight + cost.bytes_as_flops(elements - fewest), rank) for rank, elements in missing.items())
        _, owner, load = min((loads.values[rank] + load, rank, load) for load, rank in offers)
        owners[index] = owner
        moved_costs[index] = weight + cost.bytes_as_flops(items[index].block.numel - fewest)
        loads.add(owner, load, index)
    _rebalance(moved_costs, owners, loads)
    return owners, loads.values


def _candidates(item: PlacedBlock, least: int, few: dict[Spread, dict[int, int]]) -> dict[int, int]:
    """Return {rank: number of the matrix's elements that it lacks} for the ranks that may own the matrix.

    These are the ranks that hold a part of it or, if they are many, up to four of them: the first, the middle and the
    last and, if it holds a part, ``least``, the rank with the least load of all. ``few``: a cache that this function
    fills, :class:`Spread` of a matrix -> the result without ``least``.
    """
    spread, holders = item.spread, item.spread.holders
    middle = holders[len(holders) // 2]
    if spread not in few:
        ranks = holders if len(holders) <= MAX_CANDIDATES else (holders[0], middle, holders[-1])
        few[spread] = {rank: item.block.numel - spread.held_elements(rank) for rank in ranks}
    missing = few[spread]
    # All holders except the first and the last hold equal parts.
    if least in holders and least not in missing:
        return missing | {least: missing[middle]}
    return missing


class _Loads:
    """The load of each rank, in floating-point operations, and the matrices that each rank owns."""

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

    ``owners`` and ``loads`` are updated. ``moved_costs``: for each matrix, its cost on a rank that holds no part of it.
    """
    for _ in range(len(moved_costs)):
        busiest, least = loads.busiest(), loads.least()
        owned, gap = loads.owned[busiest], loads.values[busiest] - loads.values[least]
        if not owned:
            return
        # The heaviest matrix of at most half the gap; if there is none, the lightest of all.
        position = max(0, bisect.bisect_right(owned, (gap / 2, len(moved_costs))) - 1)
        load, index = owned[position]
        # Moving it would make the least loaded rank at least as busy as the busiest one is now.
        if moved_costs[index] >= gap:
            return
        del owned[position]
        loads.change(busiest, -load)
        loads.add(least, moved_costs[index], index)
        owners[index] = least
