# SPDX-License-Identifier: Apache-2.0
"""The plan: balance, bounds of buckets and traffic, few copies. What travels where: test_jobs.py."""

import itertools
import math
from dataclasses import replace

import pytest

from deepspeed.muon.plan.placement import PlacedBlock, Placement, Shard
from deepspeed.muon.plan.plan import bucket_limit
from helpers.plans import COST, flat_layout, make_plan, part_layout, specs


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("by_part", [True, False])
def test_one_copy_fills_the_send_buffer_from_host_memory(by_part: bool, world_size: int) -> None:
    """And one fills each of a rank's own matrices."""
    items = specs([(8, 4), (4, 8), (6, 5), (8, 4)])
    shards, _ = part_layout(items, world_size) if by_part else flat_layout(items, world_size, gap=2)
    for rank, bucket_bytes in itertools.product(range(world_size), (60, 200, 2**20)):
        for bucket in make_plan(shards, rank, world_size, COST, bucket_bytes).buckets:
            assert len([segment for segment in bucket.segments if not segment.in_place]) <= 1
            assert len(bucket.segments) <= 1 + len({run.matrix for run in bucket.runs if run.in_place})


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_equal_parts_travel_in_few_copies(world_size: int) -> None:
    """Of each batch one copy from the ranks before the owner and one from those behind it."""
    shards, _ = part_layout(specs([(16, 8), (8, 16), (8, 8)] * 16), world_size)
    for rank in range(world_size):
        for bucket in make_plan(shards, rank, world_size, COST, bucket_bytes=2048).buckets:
            assert len(bucket.received) <= 2 * len(bucket.batches)


def test_parts_that_are_not_equal_have_copies_of_their_own() -> None:
    """The last of three ranks holds seven elements of each matrix of 25, the others nine."""
    shards, _ = part_layout(specs([(5, 5)] * 9), 3)
    plans = [make_plan(shards, rank, 3, COST, bucket_bytes=2**20) for rank in range(3)]
    n = [plans[0].of_all.owners.count(rank) for rank in range(3)]
    found = [[(copy.times, copy.rows, copy.cols) for copy in plan.buckets[0].received] for plan in plans]
    assert found == [[(1, n[0], 9), (1, n[0], 7)], [(1, n[1], 9), (1, n[1], 7)], [(2, n[2], 9)]]


def test_buckets_are_bounded() -> None:
    shards, _ = part_layout(specs([(16, 16)] * 40 + [(64, 64)]), 4)
    for rank in range(4):
        for bucket in make_plan(shards, rank, 4, COST, bucket_bytes=2048).buckets:
            assert bucket.matrix_elements <= 1024 or bucket.names.count("p40")


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


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("layers", [1, 20])
def test_buckets_are_bounded_whatever_the_model(layers: int, device_type: str, world_size: int) -> None:
    """8 MiB of one owner on CPUs, 128 MiB elsewhere, or one matrix."""
    bound = 8 * MIB if device_type == "cpu" else 128 * MIB
    shapes = [(512, 512), (512, 512), (2048, 512), (512, 2048), (64, 64), (8192, 8192)] * layers
    shards, _ = part_layout(specs(shapes), world_size)
    plans = [make_plan(shards, r, world_size, replace(COST, device_type=device_type)) for r in range(world_size)]
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        assert 2 * bucket.matrix_elements <= bound or sum(batch.count for batch in bucket.batches) == 1


def test_a_small_model_is_cut_into_about_eight_rounds() -> None:
    """On several ranks the first way there and the last way back hide behind nothing."""
    items = specs([(512, 512), (512, 1024)] * 22)  # 33 MiB in bf16
    assert 8 <= len(make_plan(part_layout(items, 2)[0], 0, 2, COST).buckets) <= 10
    assert len(make_plan(part_layout(items, 1)[0], 0, 1, COST).buckets) == 5


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


def test_several_matrices_in_a_bucket_need_a_receive_buffer() -> None:
    """The parts of one rank lie one after the other as they arrive."""
    shards, _ = part_layout(specs([(12, 30)] * 8), 4)
    for rank in range(4):
        (bucket,) = make_plan(shards, rank, 4, COST).buckets
        assert bucket.received_at is None and bucket.buffer_sizes == (720, 540, 540)


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


def test_equal_shapes_form_one_batch() -> None:
    shards, _ = part_layout(specs([(8, 4), (4, 8)] * 6), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    assert sorted((b.rows, b.cols, b.count) for b in bucket.batches) == [(4, 8, 6), (8, 4, 6)]


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_owners_are_balanced(world_size: int) -> None:
    """Longest first: no owner above 4/3 of the best possible (Graham 1969)."""
    shapes = [(64, 64), (256, 64), (64, 256), (192, 64)] * 24
    shards, _ = part_layout(specs(shapes), world_size)
    loads = make_plan(shards, 0, world_size, replace(COST, flops_per_byte=0.0)).of_all.loads
    assert max(loads) <= 4 / 3 * max(sum(loads) / world_size, *(COST.flops(*s) for s in shapes))


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_3_traffic_bound(world_size: int) -> None:
    """4 N (W - 1) / W^2 bytes as the mean; no rank above 1.1x that or four bytes per element of the largest."""
    shapes = [(512, 512), (2048, 512), (512, 2048)] * 8
    shards, _ = part_layout(specs(shapes), world_size)
    sent = [make_plan(shards, rank, world_size, COST).sent_elements * 2 for rank in range(world_size)]
    numel = sum(rows * cols for rows, cols in shapes)
    mean = 4 * numel * (world_size - 1) / world_size**2
    assert sum(sent) / world_size <= mean * 1.0001
    assert max(sent) <= max(1.1 * mean, 4 * max(r * c for r, c in shapes))


def test_a_matrix_moves_only_where_that_shortens_the_step() -> None:
    """A lone matrix: another owner would take as long, after the bytes."""
    (spec,) = specs([(64, 64)])
    shards = [Shard(spec, 0, Placement(0, spec.numel, 0))]
    assert make_plan(shards, 0, 2, COST).of_all.owners == [0]


def test_matrices_stay_with_their_holders_where_bytes_are_dear() -> None:
    shapes = [(8, 8)] * 6 + [(32, 32)]
    shards, _ = flat_layout(specs(shapes), 2)
    dear = make_plan(shards, 0, 2, replace(COST, flops_per_byte=1e12))
    assert dear.of_all.moved_elements == 0
    holders = [shard.placement.ranks(0, shard.spec.numel) for shard in shards]
    assert all(owner in ranks for owner, ranks in zip(dear.of_all.owners, holders, strict=True))
    free = make_plan(shards, 0, 2, replace(COST, flops_per_byte=0.0))
    assert max(free.of_all.loads) <= max(make_plan(shards, 0, 2, replace(COST, flops_per_byte=0.0)).of_all.loads)
    assert free.of_all.moved_elements > 0


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
