# SPDX-License-Identifier: Apache-2.0
"""Matrices with several owners, each owning a slice: how many owners, and which slices.

A matrix is sliced along its longer side, so that its Gram matrix is the sum of those of its slices, and the last
product of Newton-Schulz acts on each slice alone. Owners of one matrix are neighbours: with ``count`` owners the ranks
form sets of ``count``, one after the other. The counts of one plan divide each other, so that a smaller set lies within
a larger one, and all ranks of a set meet its matrices in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from deepspeed.muon.config.types import Cut
from deepspeed.muon.math.choice import shape_key
from deepspeed.muon.math.newton_schulz import SPLIT_FROM
from deepspeed.muon.matrices.block import Block, cut
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.placement import PlacedBlock

#: The most owners of a matrix.
MOST = 16
#: Bytes of a matrix's own temporaries and buffers on an accelerator above which it is sliced whatever its operations.
LARGE_BYTES = 2**30
#: Even shares of all work that a matrix may cost before several ranks own it.
UNEVEN = 1.25
#: What several owners must save at least, as a part of the operations of one.
WORTH = 0.2


def counts_for(world_size: int, most: int = MOST) -> list[int]:
    """The numbers of owners that matrices may have, ascending, each a divisor of the next and of ``world_size``."""
    counts = [1]
    for count in range(2, min(world_size, most) + 1):
        if world_size % count == 0 and count % counts[-1] == 0:
            counts.append(count)
    return counts


def neighbours(nodes: Sequence[Any]) -> int:
    """The size of the largest sets into which the ranks can be cut, one set after the other, each on one node.

    Args:
        nodes: of each rank, in order.
    """
    sizes = (size for size in range(len(nodes), 0, -1) if len(nodes) % size == 0)
    return next(n for n in sizes if all(len({*nodes[i : i + n]}) == 1 for i in range(0, len(nodes), n)))


def is_sliceable(block: Block, count: int) -> bool:
    """Whether a matrix can be cut into equal slices, and its Gram matrix into equal rows.

    Rows that lie in bands are not cut.
    """
    is_cut_by_rows = block.rows > block.cols
    return block.rows % count == block.cols % count == 0 and not (is_cut_by_rows and block.bands > 1)


def sliced(item: PlacedBlock, count: int) -> Iterator[PlacedBlock]:
    """The slices of a matrix, in the order of their owners; the matrix itself if there is one."""
    if count == 1:
        yield item
        return
    block, axis = item.block, int(item.block.rows <= item.block.cols)
    size = (block.rows, block.cols)[axis] // count
    for part in cut(block, Cut((size,) * count, axis)):
        yield replace(item, block=part, whole=block)


def counts_of(
    items: Sequence[PlacedBlock], world_size: int, cost: CostModel, given: Mapping[str, int], most: int | None
) -> list[int]:
    """The number of owners of each matrix, equal for all of one shape that can be cut.

    A matrix that costs clearly more than an even share of all work cannot be balanced by any choice of a single owner:
    it gets the fewest owners that bring it below one, or those for whom it costs least, if they save enough. On an
    accelerator one whose temporaries are large gets the fewest that make them small, if as many ranks hold parts of it:
    one that holds it whole would need more memory to send it to others than it saves.

    Args:
        given: from a checkpoint, by :func:`deepspeed.muon.math.choice.shape_key`. One that does not fit the ranks is
            chosen anew.
        most: that many, or the most below that fit the ranks; ``None``: as above.
    """
    if cost.sliced is None or world_size == 1 or most == 1:
        return [1] * len(items)
    even = cost.total(item.shape for item in items) / world_size
    kept = {n for n in given.values() if n in counts_for(world_size)}
    # Sets of several sizes must lie within each other, also with those that a checkpoint has pinned.
    of_node = [n for n in counts_for(cost.near) if all(n % k == 0 or k % n == 0 for k in kept)]
    allowed = counts_for(world_size, most) if most else of_node
    holders: dict[tuple[int, int], int] = {}
    for item in items:
        holders[item.shape] = min(holders.get(item.shape, world_size), len(item.spread.holders))

    @cache
    def count_for(shape: tuple[int, int]) -> int:
        rows, cols = shape
        pinned = given.get(shape_key(rows, cols))
        if most is not None:
            return allowed[-1]
        if pinned in kept:
            return pinned
        fitting = [count for count in allowed if rows % count == cols % count == 0]
        for_memory = _for_memory(rows, cols, fitting, holders[shape], cost)
        return max(for_memory, _for_balance(rows, cols, fitting, even, cost))

    # One shape has one number of owners, unless a block of it lies in bands that cannot be cut.
    wanted = [(item.block, count_for(item.shape)) for item in items]
    return [count if is_sliceable(block, count) else 1 for block, count in wanted]


def _for_balance(rows: int, cols: int, allowed: Sequence[int], even: float, cost: CostModel) -> int:
    prices = {count: cost.price(rows, cols, count) for count in allowed}
    if prices[1] <= UNEVEN * even:
        return 1
    cheapest = min(prices, key=lambda count: (prices[count], count))
    found = next((count for count in allowed if prices[count] <= even), cheapest)
    return found if prices[found] <= (1 - WORTH) * prices[1] else 1


def _for_memory(rows: int, cols: int, allowed: Sequence[int], holders: int, cost: CostModel) -> int:
    small = next((count for count in allowed if _large_bytes(rows, cols, count, cost) <= LARGE_BYTES), allowed[-1])
    return small if cost.device_type != "cpu" and small <= holders else 1


def _large_bytes(rows: int, cols: int, count: int, cost: CostModel) -> int:
    """Of a slice in two buckets and a temporary, and of Gram matrices."""
    grams = 3 if count >= SPLIT_FROM else 4
    return cost.bytes_per_element * (3 * rows * cols // count + grams * min(rows, cols) ** 2)
