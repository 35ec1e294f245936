# SPDX-License-Identifier: Apache-2.0
"""Runs that are updated together, and the count of kernels."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.muon.plan.bucket import MAX_SPAN
from helpers.plans import COST, flat_layout, make_plan, part_layout, places, specs

SHAPES = st.lists(st.sampled_from([(8, 4), (4, 8), (6, 5), (3, 3)]), min_size=1, max_size=12)


def scale(rows: int, cols: int) -> float:
    return max(1.0, rows / cols)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 6), st.booleans(), st.booleans())
def test_calls_hold_each_run_once_and_only_what_is_alike(
    shapes: list[tuple[int, int]], world: int, by_part: bool, split: bool
) -> None:
    shards, _ = (part_layout if by_part else flat_layout)(specs(shapes, split), world)
    for bucket in make_plan(shards, world - 1, world, COST, bucket_bytes=256).buckets:
        calls = bucket.run_groups(scale)
        assert sorted(index for call in calls for index in call) == list(range(len(bucket.runs)))
        kinds = []
        for call in calls:
            runs = [bucket.runs[index] for index in call]
            kinds += {(run.tensor, run.in_place, scale(*run.shape)) for run in runs}
            assert len(call) == 1 or all(run.copy.rows == 1 for run in runs)
        assert len(kinds) == len(calls), "a call is of one tensor, one buffer and one scale"
        contiguous = [(run.tensor, run.in_place, scale(*run.shape)) for run in bucket.runs if run.copy.rows == 1]
        assert len(calls) == len(set(contiguous)) + len(bucket.runs) - len(contiguous)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 6), st.booleans(), st.booleans(), st.booleans())
def test_spans_are_the_elements_of_their_runs(
    shapes: list[tuple[int, int]], world: int, by_part: bool, split: bool, staged: bool
) -> None:
    """In the shard and in the buffer, each once; neighbours are one span."""
    shards, _ = (part_layout if by_part else flat_layout)(specs(shapes, split), world)
    for bucket in make_plan(shards, world - 1, world, COST, bucket_bytes=256).buckets:
        for call in bucket.run_groups(scale):
            spans = bucket.spans(call, staged)
            if bucket.runs[call[0]].copy.rows > 1:
                assert spans == []
                continue
            wanted = []
            for index in call:
                run = bucket.runs[index]
                moved = bucket.host_places[index] - run.copy.at if staged else 0
                wanted += [(place, at + moved) for place, at in places(run)]
            assert [(start + i, at + i) for start, at, numel in spans for i in range(numel)] == wanted
            for before, after in itertools.pairwise(spans):
                assert (before.start + before.numel, before.at + before.numel) != (after.start, after.at)


def test_matrices_that_lie_as_in_their_bucket_are_one_span() -> None:
    shards, _ = flat_layout(specs([(8, 8)] * 50), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    (call,) = bucket.run_groups(scale)
    assert bucket.spans(call, staged=False) == [(0, 0, 50 * 64)]


def test_a_span_is_no_longer_than_its_limit_unless_a_run_is() -> None:
    shards, _ = flat_layout(specs([(256, 256)] * 2 + [(128, 256)] * 5), 1)
    (bucket,) = make_plan(shards, 0, 1, COST).buckets
    spans = [span for call in bucket.run_groups(scale) for span in bucket.spans(call, staged=False)]
    assert [span.numel for span in spans] == [MAX_SPAN] * 4 + [MAX_SPAN // 2]


@pytest.mark.parametrize("together", [False, True])
def test_launches_at_stage_3(together: bool) -> None:
    """Three matrices of each of two owners: one scale, own and others' runs, and one copy per batch and way."""
    from benchmarks.launches import Launches, launches_of

    shards, _ = part_layout(specs([(8, 8)] * 6), 2)
    (bucket,) = make_plan(shards, 0, 2, COST).buckets
    runs = 2 if together else 6
    assert launches_of([bucket], scale, together) == Launches(prepare=runs, unpack=1, pack=1, apply=runs)
