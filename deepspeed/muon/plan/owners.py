# SPDX-License-Identifier: Apache-2.0
"""Choose the owners of each matrix, the ranks that orthogonalize it: how many, and which.

A matrix with several owners is sliced along its longer side, so that its Gram matrix is the sum of the slices' Gram
matrices, and the last product of Newton-Schulz acts on each slice independently. The owners of a matrix are consecutive
ranks: with 4 owners each, ranks 0 to 3 form one set, 4 to 7 the next. The numbers of owners in one plan divide each
other, so that a smaller set is inside a larger one, and all ranks of a set meet its matrices in the same order.
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

#: Maximum number of owners of a matrix, unless the config sets the number.
MAX_OWNERS = 16
#: Split a matrix over several owners when it costs more than this multiple of an even share of all work.
MAX_IMBALANCE = 1.25
#: Minimum that splitting must save, as a fraction of the cost with one owner.
MIN_SAVING = 0.2
#: On an accelerator, split a matrix whose temporaries and buffers take more bytes than this, whatever it costs.
MAX_WHOLE_BYTES = 2**30
#: If at most this many ranks hold a part of a matrix, every one of them is a candidate for its owner.
MAX_CANDIDATES = 8


# ---- how many owners ---------------------------------------------------------------------------------------------


def possible_owner_counts(world_size: int, most: int = MAX_OWNERS) -> list[int]:
    """Return the numbers of owners that a matrix may have, ascending, up to ``most``; example: ``12 -> [1, 2, 4, 12]``.

    Each number divides the next one, and ``world_size``.
    """
    counts = [1]
    for count in range(2, min(world_size, most) + 1):
        # If all numbers divide each other, smaller sets are inside larger ones, and no owners wait in a ring.
        if world_size % count == 0 and count % counts[-1] == 0:
            counts.append(count)
    return counts


def count_ranks_per_node(nodes: Sequence[Any]) -> int:
    """Return the largest n such that every n consecutive ranks (0 to n - 1, n to 2n - 1, and so on) share a node.

    n divides the number of ranks. ``nodes``: for each rank, a value that identifies its node, such as a host name.
    """
    sizes = (size for size in range(len(nodes), 0, -1) if len(nodes) % size == 0)
    return next(n for n in sizes if all(len({*nodes[i : i + n]}) == 1 for i in range(0, len(nodes), n)))


def is_sliceable(block: Block, count: int) -> bool:
    """Return whether ``count`` ranks can own one matrix together: ``count`` must divide its rows and its columns.

    A matrix with more rows than columns is cut by rows. It must then have one band: its rows must be equally spaced in
    the parameter (see :class:`deepspeed.muon.matrices.block.Block`).
    """
    is_cut_by_rows = block.rows > block.cols
    return block.rows % count == block.cols % count == 0 and not (is_cut_by_rows and block.bands > 1)


def sliced(item: PlacedBlock, count: int) -> Iterator[PlacedBlock]:
    """Yield ``count`` equal slices of a matrix, cut along its longer side; the matrix itself if ``count`` is 1."""
    if count == 1:
        yield item
        return
    block, axis = item.block, int(item.block.rows <= item.block.cols)
    size = (block.rows, block.cols)[axis] // count
    for part in cut(block, Cut((size,) * count, axis)):
        yield replace(item, block=part, whole=block)


def choose_owner_counts(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, saved_counts: Mapping[str, int], most: int | None
) -> list[int]:
    """Choose how many ranks own each matrix; return one number for each of ``items``.

    Most matrices get 1. Matrices of one shape get the same number, except those that cannot be sliced, which get 1. A
    matrix gets more than one owner for one of two reasons:

    - Balance: it costs clearly more than an even share of all work. It gets just enough owners to bring the cost of
      each owner to an even share or, if that is impossible, the number with the least cost. If slicing saves too
      little, it keeps one.
    - Memory, on an accelerator: its temporaries are large. It gets just enough owners to make them small, if at least
      that many ranks hold parts of it.

    Args:
        items: all matrices that are planned together: those of a parameter group or, at stage 3, a sub-group.
        world_size: number of ranks that share these matrices.
        cost: the cost model of the parameter group.
        saved_counts: :func:`deepspeed.muon.math.choice.shape_key` of a matrix -> number of owners read from a
            checkpoint, which is kept unless ``most`` is set. A number that is not possible with ``world_size`` ranks is
            ignored.
        most: if not ``None``, the number of owners of each matrix that can be sliced, rounded down to a possible one.
    """
    if world_size == 1 or most == 1:
        return [1] * len(items)
    even = cost.total_flops(item.shape for item in items) / world_size
    kept = {n for n in saved_counts.values() if n in possible_owner_counts(world_size)}
    # Sets of different sizes must be inside each other, also those of a checkpoint. Owners share a node,
    # because they send each other more than the exchange does.
    of_node = [n for n in possible_owner_counts(cost.intra_node) if all(n % k == 0 or k % n == 0 for k in kept)]
    allowed = possible_owner_counts(world_size, most) if most else of_node
    holders: dict[tuple[int, int], int] = {}
    for item in items:
        holders[item.shape] = min(holders.get(item.shape, world_size), len(item.spread.holders))

    @cache
    def count_for(shape: tuple[int, int]) -> int:
        rows, cols = shape
        if most is not None:
            return allowed[-1]
        count = saved_counts.get(shape_key(rows, cols))
        if count in kept:
            return count
        fitting = [count for count in allowed if rows % count == cols % count == 0]
        for_memory = _for_memory(rows, cols, fitting, holders[shape], cost)
        return max(for_memory, _for_balance(rows, cols, fitting, even, cost))

    # A matrix whose rows are in bands may not be sliceable although others of its shape are.
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
    # With fewer holders, one of them would need more memory to send its part than slicing saves.
    return small if cost.device_type != "cpu" and small <= holders else 1


# ---- which ranks -------------------------------------------------------------------------------------------------


def assign_owners(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, counts: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Choose which rank owns each matrix, so that all ranks finish at about the same time.

    Matrices with several owners come first: each goes to the consecutive ranks that would finish it first. The others
    follow in descending order of cost (longest processing time first, Graham 1969). Each goes to the rank that would
    finish it first, among those that hold a part of it. Its cost includes receiving the elements that the rank lacks.
    At the end, some of these matrices move from the busiest rank to the least loaded rank.

    ``counts``: for each matrix, its number of owners.

    Returns:
        (owners, loads). ``owners``: for each matrix, its owner, or the first of its consecutive owners. ``loads``: for
        each rank, the cost of all its matrices, in floating-point operations.
    """
    loads = _Loads(world_size)
    weights = [cost.flops(item.block.rows, item.block.cols) for item in items]
    owners, moved_costs = [0] * len(items), [0.0] * len(items)
    few: dict[Spread, dict[int, int]] = {}
    for count in sorted({*counts} - {1}, reverse=True):
        _assign_to_sets(count, items, counts, cost, owners, loads)
    # Equal weights are ordered by index, so that all ranks assign alike.
    for index in sorted((i for i, count in enumerate(counts) if count == 1), key=lambda i: (-weights[i], i)):
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


def _assign_to_sets(
    count: int,
    items: Sequence[PlacedBlock],
    counts: Sequence[int],
    cost: CostModel,
    owners: list[int],
    loads: _Loads,
) -> None:
    """Assign each matrix with ``count`` owners to ``count`` consecutive ranks; update ``owners`` and ``loads``."""
    costs = {index: cost.owner_cost(*items[index].shape, count) for index, n in enumerate(counts) if n == count}
    sets = [(max(loads.values[first : first + count]), first) for first in range(0, len(loads.values), count)]
    heapq.heapify(sets)
    for index in sorted(costs, key=lambda i: (-costs[i], i)):
        load, owners[index] = sets[0]
        heapq.heapreplace(sets, (load + costs[index], owners[index]))
        for rank in range(owners[index], owners[index] + count):
            loads.change(rank, costs[index])


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
    """The load of each rank, in floating-point operations, and the matrices that each rank owns alone."""

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
