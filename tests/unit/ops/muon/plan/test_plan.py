# SPDX-License-Identifier: Apache-2.0
"""The plan: balance, bounds of buckets and traffic, few copies, number of owners. What travels where: test_program."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from deepspeed.muon.config.schema import parse
from deepspeed.muon.math.choice import shape_key
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.plan.bucket import MAX_SPAN
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import (
    MAX_WHOLE_BYTES,
    assign_owners,
    choose_owner_counts,
    count_ranks_per_node,
    possible_owner_counts,
)
from deepspeed.muon.plan.placement import PlacedBlock, Placement, Shard
from deepspeed.muon.plan.plan import bucket_limit
from helpers.plans import COST, counted_cost, flat_layout, make_plan, part_layout, specs


def test_parts_that_are_not_equal_have_copies_of_their_own() -> None:
    """The last of three ranks holds seven elements of each matrix of 25, the others nine."""
    shards, _ = part_layout(specs([(5, 5)] * 9), 3)
    plans = [make_plan(shards, rank, 3, COST, bucket_bytes=2**20) for rank in range(3)]
    n = [plans[0].of_all.owners.count(rank) for rank in range(3)]
    found = [[(copy.times, copy.rows, copy.cols) for copy in plan.buckets[0].received] for plan in plans]
    assert found == [[(1, n[0], 9), (1, n[0], 7)], [(1, n[1], 9), (1, n[1], 7)], [(2, n[2], 9)]]


MIB = 2**20
LIMITS = [
    # bytes of all matrices, ranks, device, copies, bytes of one owner in one bucket
    (2**40, 4, "cpu", 1, 8 * MIB),
    (64 * MIB, 2, "cpu", 1, 4 * MIB),
    (64 * MIB, 4, "cpu", 1, 2 * MIB),
    (64 * MIB, 64, "cpu", 1, MIB),
    (64 * MIB, 1, "cpu", 1, 8 * MIB),
    (64 * MIB, 4, "cpu", 4, 2 * MIB),
    (64 * MIB, 4, "cuda", 1, 128 * MIB),
    (64 * MIB, 1, "xpu", 1, 128 * MIB),
    (64 * MIB, 4, "cuda", 4, 32 * MIB),
]


@pytest.mark.parametrize(("total", "world_size", "device_type", "copies", "expected"), LIMITS, ids=str)
def test_the_size_of_a_bucket(total: int, world_size: int, device_type: str, copies: int, expected: int) -> None:
    """In the matrices' own bytes: half as many elements in bf16."""
    cost = replace(COST, device_type=device_type)
    (spec,) = specs([(total // 2**12, 2**11)])
    items = [PlacedBlock(Shard(spec, 0, Placement(0, 1, 0)), spec.blocks[0])]
    assert bucket_limit(items, world_size, copies, cost) * cost.bytes_per_element == expected


@pytest.mark.parametrize("world_size", [2, 3, 4, 9])
@pytest.mark.parametrize("by_part", [True, False])
def test_a_matrix_alone_in_its_bucket_is_received_where_it_is_orthogonalized(by_part: bool, world_size: int) -> None:
    """All that a rank needs for it is the matrix and less than that to send, or half of it to receive."""
    items, received = specs([(12, 30)] * (2 * world_size + 1)), 0
    shards, _ = part_layout(items, world_size) if by_part else flat_layout(items, world_size, gap=7)
    for rank in range(world_size):
        for bucket in make_plan(shards, rank, world_size, COST, bucket_bytes=2).buckets:
            matrices, _, inbox = bucket.buffer_sizes
            received += sum(bucket.receive_counts)
            assert matrices in (0, 360) and inbox == 0
            assert bucket.receive_counts[rank] == 0 or 0 < rank < world_size - 1
    assert received > 0


@pytest.mark.parametrize(
    ("device_type", "bucket_bytes", "slots"), [("cuda", 200, 2), ("cuda", 2000, 3), ("cpu", 200, 3)]
)
def test_buckets_in_flight(device_type: str, bucket_bytes: int, slots: int) -> None:
    """Fewer where a matrix is larger than a bucket on an accelerator; one where nothing is sent."""
    cost, items = replace(COST, device_type=device_type), specs([(12, 30)] * 8)
    plan = make_plan(part_layout(items, 2)[0], 0, 2, cost, bucket_bytes)
    assert plan.of_all.slots(plan.travels(staged=False)) == plan.of_all.slots(True) == slots
    alone = make_plan(part_layout(items, 1)[0], 0, 1, cost, bucket_bytes)
    assert [alone.of_all.slots(alone.travels(staged)) for staged in (False, True)] == [1, slots]


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_owners_are_balanced(world_size: int) -> None:
    """Longest first: no owner above 4/3 of the best possible (Graham 1969)."""
    shapes = [(64, 64), (256, 64), (64, 256), (192, 64)] * 24
    shards, _ = part_layout(specs(shapes), world_size)
    loads = make_plan(shards, 0, world_size, replace(COST, flops_per_byte=0.0)).of_all.loads
    assert max(loads) <= 4 / 3 * max(sum(loads) / world_size, *(COST.flops(*s) for s in shapes))


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_3_traffic_bound(world_size: int) -> None:
    """4 N (W - 1) / W^2 bytes as the mean; no rank above 1.1x that or four bytes per element of the largest.

    Stages 1 and 2 send less: what straddles and what balances.
    """
    shapes = [(512, 512), (2048, 512), (512, 2048)] * 8
    shards, _ = part_layout(specs(shapes), world_size)
    sent = [make_plan(shards, rank, world_size, COST).sent_elements * 2 for rank in range(world_size)]
    numel = sum(rows * cols for rows, cols in shapes)
    mean = 4 * numel * (world_size - 1) / world_size**2
    assert sum(sent) / world_size <= mean * 1.0001
    assert max(sent) <= max(1.1 * mean, 4 * max(r * c for r, c in shapes))
    flat, _ = flat_layout(specs(shapes), world_size)
    assert sum(make_plan(flat, rank, world_size, COST).sent_elements * 2 for rank in range(world_size)) < sum(sent)


def test_matrices_stay_with_their_holders_where_bytes_are_dear() -> None:
    shapes = [(8, 8)] * 6 + [(32, 32)]
    shards, _ = flat_layout(specs(shapes), 2)
    dear = make_plan(shards, 0, 2, replace(COST, flops_per_byte=1e12))
    assert dear.of_all.moved_elements == 0
    holders = [shard.placement.ranks(0, shard.spec.numel) for shard in shards]
    assert all(owner in ranks for owner, ranks in zip(dear.of_all.owners, holders, strict=True))
    assert make_plan(shards, 0, 2, replace(COST, flops_per_byte=0.0)).of_all.moved_elements > 0
    # A lone matrix: another owner would take as long, after the bytes.
    (spec,) = specs([(64, 64)])
    assert make_plan([Shard(spec, 0, Placement(0, spec.numel, 0))], 0, 2, COST).of_all.owners == [0]


def test_planning_is_linear_in_matrices_and_ranks() -> None:
    """One rank of 1024 lists its own runs and its own matrices, not every rank's."""
    shards, _ = part_layout(specs([(64, 64)] * 512), 1024)
    plan = make_plan(shards, 3, 1024, COST)
    assert sum(len(bucket.runs) for bucket in plan.buckets) == 512
    assert sum(len(bucket.received) for bucket in plan.buckets) <= 1024


def test_the_digest_tells_layouts_apart() -> None:
    base, _ = part_layout(specs([(4, 4), (4, 6)]), 2)
    other, _ = part_layout(specs([(4, 4), (6, 4)]), 2)
    assert make_plan(base, 0, 2, COST).of_all.digest == make_plan(base, 1, 2, COST).of_all.digest
    assert make_plan(base, 0, 2, COST).of_all.digest != make_plan(other, 0, 2, COST).of_all.digest


def test_a_bucket_cuts_batches_only_where_it_is_full() -> None:
    """The equal matrices of one owner are in no more calls than their bytes need, and one more at each end."""
    shapes = [(64, 16), (16, 64), (32, 32), (8, 8)] * 12
    shards, _ = part_layout(specs(shapes), 2)
    for rank, bucket_bytes in itertools.product(range(2), (4096, 8192, 2**20)):
        plan = make_plan(shards, rank, 2, COST, bucket_bytes)
        batches = [batch for bucket in plan.buckets for batch in bucket.batches]
        for rows, cols in set(shapes):
            counts = [batch.count for batch in batches if (batch.rows, batch.cols) == (rows, cols)]
            fit = bucket_bytes // (rows * cols * COST.bytes_per_element)
            assert max(counts, default=0) <= fit and len(counts) <= math.ceil(sum(counts) / fit) + 1
            assert all(count == fit for count in counts[1:-1])


# ---- runs that are updated by one call; each once: test_program.py ------------------------------------------------


def test_matrices_that_lie_as_in_their_bucket_are_one_span() -> None:
    shards, _ = flat_layout(specs([(8, 8)] * 50), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    (call,) = bucket.run_groups(lambda rows, cols: 1.0)
    assert bucket.spans(call, staged=False) == [(0, 0, 50 * 64)]


def test_a_span_is_no_longer_than_its_limit_unless_a_run_is() -> None:
    shards, _ = flat_layout(specs([(256, 256)] * 2 + [(128, 256)] * 5), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    spans = [span for call in bucket.run_groups(lambda rows, cols: 1.0) for span in bucket.spans(call, staged=False)]
    assert [span.numel for span in spans] == [MAX_SPAN] * 4 + [MAX_SPAN // 2]


# ---- how many owners a matrix has -------------------------------------------------------------------------------


def cost_of(device_type: str, near: int) -> CostModel:
    return counted_cost("auto", schedule("simple"), "bf16", 2, device_type, near)


def counts(
    shapes: list[tuple[int, int]],
    world: int,
    cost: CostModel,
    most: int | None = None,
    saved_counts: dict | None = None,
) -> list[int]:
    return choose_owner_counts(placed(shapes, world), world, cost, saved_counts or {}, most)


def placed(shapes: list[tuple[int, int]], world_size: int) -> list[PlacedBlock]:
    shards, _ = part_layout(specs(shapes), world_size)
    return [PlacedBlock(shard, block) for shard in shards for block in shard.spec.blocks]


@pytest.mark.parametrize(
    ("world", "most", "expected"),
    [(1, 16, [1]), (2, 16, [1, 2]), (6, 16, [1, 2, 6]), (12, 4, [1, 2, 4]), (8, 16, [1, 2, 4, 8]), (7, 16, [1, 7])],
)
def test_the_counts_of_one_plan_divide_each_other(world: int, most: int, expected: list[int]) -> None:
    assert possible_owner_counts(world, most) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("aaaa", 4), ("aabb", 2), ("aaab", 1), ("aaabbb", 3), ("aaaabb", 2), ("aabbbb", 2), ("abab", 1), ("a", 1)],
)
def test_neighbours_share_a_node(nodes: str, expected: int) -> None:
    assert count_ranks_per_node(nodes) == expected


LONE = [(4096, 16384)]
OWNERS = {
    "many small ones": ([(768, 768), (768, 3072), (3072, 768)] * 12, 8, 8, {}, [1] * 36),
    **{f"a lone large one on {world} ranks": (LONE, world, world, {}, [world]) for world in (2, 4, 8)},
    "what does not divide": ([(4096, 16384), (4099, 16384)], 4, 4, {"most": 4}, [4, 1]),
    "of a checkpoint": ([(768, 768)], 4, 4, {"saved_counts": {shape_key(768, 768): 2}}, [2]),
    "of a checkpoint, where they do not fit": ([(768, 768)], 3, 3, {"saved_counts": {shape_key(768, 768): 2}}, [1]),
    # Only ranks of one node share a matrix unless the user says so; with nodes of six, four would be on two nodes.
    "nodes of two": (LONE, 8, 2, {}, [2]),
    "nodes of one": (LONE, 8, 1, {}, [1]),
    "nodes of two, as the user says": (LONE, 8, 2, {"most": 8}, [8]),
    "one, as the user says": (LONE, 8, 8, {"most": 1}, [1]),
    "nodes of six": ([(6144, 24576)], 12, 6, {}, [6]),
    # Six and four would not divide each other, and ranks would wait for each other.
    "beside a checkpoint": ([(768, 768), (6144, 24576)], 12, 6, {"saved_counts": {shape_key(768, 768): 4}}, [4, 2]),
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("case", OWNERS)
def test_how_many_owners_a_matrix_has(case: str, device_type: str) -> None:
    shapes, world, near, options, expected = OWNERS[case]
    assert counts(shapes, world, cost_of(device_type, near), **options) == expected


@pytest.mark.parametrize("rule", [{"normuon": True}, {"muon_eq": "rows"}, {"muon_plus": True}], ids=str)
def test_what_needs_whole_matrices_leaves_each_to_one_owner(rule: dict[str, Any]) -> None:
    assert parse({}).most_owners is None
    assert counts(LONE, 8, cost_of("cuda", 8), most=parse(rule).most_owners) == [1]


def test_large_matrices_are_sliced_for_their_memory_on_an_accelerator_only() -> None:
    shapes = [(28672, 8192)] * 64
    assert {*counts(shapes, 8, cost_of("cuda", 8))} == {4} and MAX_WHOLE_BYTES < 2 * 28672 * 8192 * 3
    assert {*counts(shapes, 8, cost_of("cpu", 8))} == {1}


@pytest.mark.parametrize("world", [64, 1024])
def test_the_busiest_rank_has_little_more_than_the_mean(world: int) -> None:
    """The shapes of Llama 8B. What owners repeat counts, and the mean is that of one owner each."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
    cost, items = cost_of("cuda", 8), placed(shapes, world)
    found = choose_owner_counts(items, world, cost, {}, None)
    first, _ = assign_owners(items, world, cost, found)
    loads = [0.0] * world
    for item, owner, count in zip(items, first, found, strict=True):
        for rank in range(owner, owner + count):
            loads[rank] += cost.of_owner(*item.shape, count).flops
    assert max(loads) <= 1.3 * sum(cost.flops(*shape) for shape in shapes) / world
