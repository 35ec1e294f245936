# SPDX-License-Identifier: Apache-2.0
"""The plan: balance, bounds of buckets and traffic, few copies, and what travels where. The order: test_order."""

import itertools
import math
from dataclasses import replace

import pytest

from deepspeed.muon.exchange.bucket import MAX_SPAN, Bucket
from deepspeed.muon.exchange.placed_params import PlacedBlock, Shard
from deepspeed.muon.exchange.plan import _candidates, bucket_limit
from deepspeed.muon.layout import Block, MatrixSpec, Placement, Sharding
from helpers.jobs import Part, random_job
from helpers.plans import COST, flat_layout, make_plan, part_layout, places, specs, whole
from helpers.simulation import simulate


def test_parts_that_are_not_equal_have_copies_of_their_own() -> None:
    """The last of three ranks holds seven elements of each matrix of 25, the others nine."""
    shards, _ = part_layout(specs([(5, 5)] * 9), 3)
    plans = [make_plan(shards, rank, 3, COST, bucket_bytes=2**20) for rank in range(3)]
    n = [plans[0].owners.count(rank) for rank in range(3)]
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
    assert plan.slots(plan.travels(staged=False)) == plan.slots(True) == slots
    alone = make_plan(part_layout(items, 1)[0], 0, 1, cost, bucket_bytes)
    assert [alone.slots(alone.travels(staged)) for staged in (False, True)] == [1, slots]


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_owners_are_balanced(world_size: int) -> None:
    """Longest first: no owner above 4/3 of the best possible (Graham 1969)."""
    shapes = [(64, 64), (256, 64), (64, 256), (192, 64)] * 24
    shards, _ = part_layout(specs(shapes), world_size)
    loads = make_plan(shards, 0, world_size, replace(COST, flops_per_byte=0.0)).loads
    assert max(loads) <= 4 / 3 * max(sum(loads) / world_size, *(COST.flops(*s) for s in shapes))


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_matrix_that_moves_is_counted_once(world_size: int) -> None:
    """Where the first ranks hold all that is dear, so that some of it moves."""
    shapes, cost = [(256, 256)] * 4 + [(4096, 8)] * 32, replace(COST, flops_per_byte=0.0)
    plan = make_plan(flat_layout(specs(shapes), world_size)[0], 0, world_size, cost)
    assert sum(plan.loads) == pytest.approx(sum(cost.flops(*shape) for shape in shapes))


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
    assert dear.moved_elements == 0
    holders = [shard.placement.ranks(0, shard.spec.numel) for shard in shards]
    assert all(owner in ranks for owner, ranks in zip(dear.owners, holders, strict=True))
    assert make_plan(shards, 0, 2, replace(COST, flops_per_byte=0.0)).moved_elements > 0
    # A lone matrix: another owner would take as long, after the bytes.
    (spec,) = specs([(64, 64)])
    assert make_plan([Shard(spec, 0, Placement(0, spec.numel, 0))], 0, 2, COST).owners == [0]


def test_a_candidate_lacks_what_it_does_not_hold() -> None:
    """Heads of a fused weight lie apart, so of the ranks between the first and the last holder some hold nothing."""
    block = Block(offset=40, rows=8, cols=10, stride=10, bands=4, gap=100)
    spec = MatrixSpec("qkv", (48, 10), True, "test", blocks=(block,))
    item = Shard(spec, 0, Placement(0, 24, 0)).items[0]
    held = [item.spread.held_elements(rank) for rank in item.spread.holders]
    assert len(held) > 8 and 0 in held and sum(held) == block.numel
    for rank, elements in zip(item.spread.holders, held, strict=True):
        assert _candidates(item, rank, {})[rank] == block.numel - elements


def test_columns_that_tensor_parallelism_split_are_updated_without_a_copy() -> None:
    """In its shard a rank's columns of all rows are contiguous, though they are not in the matrix."""
    sharding = Sharding((8, 12), 1, (((0, 6),), ((6, 6),)))
    spec = MatrixSpec("proj", (8, 6), True, "test", whole(8, 12), sharding=sharding)
    lanes = (Placement(0, 48, 0, 1, 0, 1), Placement(0, 48, 0, 1, 1, 1))
    (bucket,) = make_plan([Shard(spec, 0, lanes[0], lanes)], 0, 2, COST).buckets
    assert [(run.copy.rows, run.copy.cols) for run in bucket.runs] == [(1, 48)]


def test_planning_is_linear_in_matrices_and_ranks() -> None:
    """One rank of 1024 lists its own runs and its own matrices, not every rank's."""
    shards, _ = part_layout(specs([(64, 64)] * 512), 1024)
    plan = make_plan(shards, 3, 1024, COST)
    assert sum(len(bucket.runs) for bucket in plan.buckets) == 512
    assert sum(len(bucket.received) for bucket in plan.buckets) <= 1024


def test_the_digest_tells_layouts_apart() -> None:
    base, _ = part_layout(specs([(4, 4), (4, 6)]), 2)
    other, _ = part_layout(specs([(4, 4), (6, 4)]), 2)
    assert make_plan(base, 0, 2, COST).digest == make_plan(base, 1, 2, COST).digest
    assert make_plan(base, 0, 2, COST).digest != make_plan(other, 0, 2, COST).digest


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


# ---- runs that are updated by one call; each once: check_copies ---------------------------------------------------


def test_a_span_is_no_longer_than_its_limit_unless_a_run_is() -> None:
    shards, _ = flat_layout(specs([(256, 256)] * 2 + [(128, 256)] * 5), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    spans = [span for call in bucket.run_groups(lambda rows, cols: 1.0) for span in bucket.spans(call, staged=False)]
    assert [span.numel for span in spans] == [MAX_SPAN] * 4 + [MAX_SPAN // 2]


# ---- what travels where --------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_every_element_goes_to_its_owner_and_back(first: int) -> None:
    check_jobs(range(first, first + 100), most_ranks=12)


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("first", range(1000, 21_000, 2000))
def test_every_element_of_many_jobs_goes_to_its_owner_and_back(first: int) -> None:
    """On up to 64 ranks."""
    check_jobs(range(first, first + 1000), most_ranks=12)
    check_jobs(range(first + 1000, first + 2000), most_ranks=64)


def check_jobs(seeds: range, most_ranks: int) -> None:
    for seed in seeds:
        try:
            for part in random_job(seed, most_ranks):
                simulate(part.views, part.shards)
                check_sizes(part)
        except AssertionError as error:
            raise AssertionError(f"the job of seed {seed} with at most {most_ranks} ranks: {error}") from error


def check_sizes(part: Part) -> None:
    """Assert that buckets are no larger than they may be, and that ranks send what the plan states."""
    plan, world = part.views[0], len(part.views)
    assert len({view.digest for view in part.views}) == 1
    largest = max((item.block.numel for item in plan.items), default=0)
    for view in part.views:
        sent = 0
        for bucket in view.buckets:
            check_copies(bucket)
            own_part = bucket.gathered_part or bucket.matrix_elements
            assert own_part <= max(part.limit // plan.copies, largest)
            to_owners, to_shards = bucket.send_counts, bucket.receive_counts
            sent += sum(to_owners) - to_owners[view.rank] + sum(to_shards) - to_shards[view.rank]
            sent += bucket.gathered_part * (world - 1)
        assert view.sent_elements == sent


def check_copies(bucket: Bucket) -> None:
    """Assert that few copies fill the buffers, and that few calls update the shards, each run and element once."""
    assert len(bucket.staged_spans[False]) <= 1
    assert len(bucket.staged_spans[True]) <= sum(run.in_place for run in bucket.runs)
    scale = lambda rows, cols: max(1.0, rows / cols)  # noqa: E731
    kinds = [(run.tensor, run.in_place, scale(*run.shape), run.copy.rows > 1 and run) for run in bucket.runs]
    calls = bucket.run_groups(scale)
    assert sorted(index for call in calls for index in call) == list(range(len(bucket.runs)))
    assert len(calls) == len(set(kinds)), (
        "a call is of one tensor, buffer and scale; runs of several rows have their own"
    )
    for call, staged in itertools.product(calls, (False, True)):
        assert len({kinds[index] for index in call}) == 1
        spans, wanted = bucket.spans(call, staged), []
        for run, host in ((bucket.runs[index], bucket.host_places[index]) for index in call):
            moved = host - run.copy.at if staged else 0
            wanted += [(place, at + moved) for place, at in places(run) if run.copy.rows == 1]
        assert [(start + i, at + i) for start, at, numel in spans for i in range(numel)] == wanted
        for before, after in itertools.pairwise(spans):
            assert (before.start + before.numel, before.at + before.numel) != (after.start, after.at)
