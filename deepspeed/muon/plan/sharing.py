# SPDX-License-Identifier: Apache-2.0
"""Decides how many ranks share the Newton-Schulz of each matrix, and whether those that hold all of them share any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed.muon.plan.bucket import Round
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import assign
from deepspeed.muon.plan.placement import PlacedBlock
from deepspeed.muon.plan.plan import bucket_limit, owned_by, rounds_of
from deepspeed.muon.plan.slices import counts_of


def shared_counts(
    items: Sequence[PlacedBlock],
    world_size: int,
    is_replicated: bool,
    cost: CostModel,
    given: Mapping[str, int],
    most: int | None,
    bucket_bytes: int | None = None,
) -> list[int] | None:
    """Return the number of owners of each matrix; ``None``: each rank does all of them, as that is faster.

    Args:
        is_replicated: whether every rank holds every matrix, which several owners that somebody asks for share anyway.
        given, most: as :func:`deepspeed.muon.plan.slices.counts_of`.
        bucket_bytes: as :func:`deepspeed.muon.plan.plan.make_plan`.
    """
    counts = counts_of(items, world_size, cost, given, most)
    is_asked_for = bool(given or most) and max(counts, default=1) > 1
    if is_replicated and not is_asked_for and not is_worth_sharing(items, world_size, cost, counts, bucket_bytes):
        return None
    return counts


def is_worth_sharing(
    items: Sequence[PlacedBlock],
    world_size: int,
    cost: CostModel,
    counts: Sequence[int] = (),
    bucket_bytes: int | None = None,
) -> bool:
    """Return whether ranks that all hold the same matrices finish earlier if each orthogonalizes some of them for all.

    Compares the operations of all matrices with those of the busiest owner, the bytes of the others' results, and the
    broadcasts in which these arrive.

    Args:
        counts: of the owners of each matrix, as :func:`deepspeed.muon.plan.owners.assign` takes them.
    """
    counts = counts or [1] * len(items)
    owners, loads = assign(items, world_size, cost, counts)
    calls = broadcasts(owned_by(items, owners, counts), world_size, cost, bucket_bytes)
    received = sum(item.block.numel for item in items) * cost.bytes_per_element * (world_size - 1) / world_size
    # Without sharing, all ranks do all matrices at the same time.
    without = cost.total(item.shape for item in items)
    return max(loads) + cost.flops_per_byte * received + cost.call * calls < without


def broadcasts(owned: Round, world_size: int, cost: CostModel, bucket_bytes: int | None) -> int:
    """Return how many broadcasts carry all results, one for each owner in a round."""
    limit = bucket_limit([item for _, item in owned], world_size, world_size, cost, bucket_bytes)
    return sum(len({owner for owner, _ in of_round}) for of_round in rounds_of(owned, world_size, limit))
