# SPDX-License-Identifier: Apache-2.0
"""Assigns each matrix to the rank that orthogonalizes it."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.placement import PlacedBlock, Spread

#: If at most this many ranks hold a part of a matrix, each is considered as its owner.
FEW_HOLDERS = 8


def assign(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, counts: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Owners of the matrices, of several the first one, and loads of the ranks, in operations; the same on every rank.

    Longest processing time first (Graham 1969), among the ranks that hold a part of the matrix: the heaviest matrix
    goes where it would be done earliest. An owner pays for the bytes that it must receive beyond those that the best
    owner must receive; the latter travel anyway. Then matrices leave the busiest rank while that shortens the step
    although all their bytes travel.

    Args:
        counts: of the owners of each matrix; by default 1. Matrices with several go first, to the set of ranks that
            would be done earliest, and stay there.
    """
    counts = counts or [1] * len(items)
    loads = _Loads(world_size)
    weights = [cost.flops(item.block.rows, item.block.cols) for item in items]
    owners, prices = [0] * len(items), [0.0] * len(items)
    few: dict[Spread, dict[int, int]] = {}
    for count in sorted({*counts} - {1}, reverse=True):
        _assign_to_sets(count, items, counts, cost, owners, loads)
    for index in sorted((i for i, count in enumerate(counts) if count == 1), key=lambda i: (-weights[i], i)):
        weight, missing = weights[index], _candidates(items[index], loads.least(), few)
        # The elements that the best owner lacks travel anyway, so only those beyond them have a price.
        fewest = min(missing.values())
        offers = ((weight + cost.worth(elements - fewest), rank) for rank, elements in missing.items())
        _, owner, price = min((loads.values[rank] + price, rank, price) for price, rank in offers)
        owners[index], prices[index] = owner, weight + cost.worth(items[index].block.numel - fewest)
        loads.add(owner, price, index)
    _rebalance(prices, owners, loads)
    return owners, loads.values


def _assign_to_sets(
    count: int,
    items: Sequence[PlacedBlock],
    counts: Sequence[int],
    cost: CostModel,
    owners: list[int],
    loads: _Loads,
) -> None:
    """Those that have this number of owners, the most expensive first."""
    price = {}
    for index in (index for index, of_item in enumerate(counts) if of_item == count):
        rows, cols = items[index].shape
        price[index] = cost.price(rows, cols, count)
    sets = [(max(loads.values[first : first + count]), first) for first in range(0, len(loads.values), count)]
    heapq.heapify(sets)
    for index in sorted(price, key=lambda i: (-price[i], i)):
        load, owners[index] = sets[0]
        heapq.heapreplace(sets, (load + price[index], owners[index]))
        for rank in range(owners[index], owners[index] + count):
            loads.change(rank, price[index])


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
        ranks = holders if len(holders) <= FEW_HOLDERS else (holders[0], middle, holders[-1])
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

    def add(self, rank: int, price: float, index: int) -> None:
        bisect.insort(self.owned[rank], (price, index))
        self.change(rank, price)

    def remove(self, rank: int, position: int) -> None:
        self.change(rank, -self.owned[rank].pop(position)[0])

    def change(self, rank: int, difference: float) -> None:
        self.values[rank] += difference
        heapq.heappush(self._low, (self.values[rank], rank))
        if self._high is not None:
            heapq.heappush(self._high, (-self.values[rank], rank))


def _rebalance(prices: Sequence[float], owners: list[int], loads: _Loads) -> None:
    """Move matrices from the busiest to the least loaded rank while that lowers the higher of the two loads.

    The best matrix to move costs about half the gap between them. ``prices``: at a rank that holds nothing of it.
    """
    for _ in range(len(prices)):
        busiest, least = loads.busiest(), loads.least()
        owned, gap = loads.owned[busiest], loads.values[busiest] - loads.values[least]
        if not owned:
            return
        position = max(0, bisect.bisect_right(owned, (gap / 2, len(prices))) - 1)
        index = owned[position][1]
        # Moved, it would make the other rank at least as busy.
        if prices[index] >= gap:
            return
        loads.remove(busiest, position)
        loads.add(least, prices[index], index)
        owners[index] = least
