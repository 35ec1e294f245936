# SPDX-License-Identifier: Apache-2.0
"""How many owners a matrix has."""

from typing import Any

import pytest

from deepspeed.muon.config.schema import parse
from deepspeed.muon.math.choice import shape_key
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.owners import MAX_WHOLE_BYTES, assign, counts_for, counts_of, neighbours
from deepspeed.muon.plan.placement import PlacedBlock
from helpers.plans import counted_cost, part_layout, specs


def cost_of(device_type: str, near: int) -> CostModel:
    return counted_cost("auto", schedule("simple"), "bf16", 2, device_type, near)


def placed(shapes: list[tuple[int, int]], world_size: int) -> list[PlacedBlock]:
    shards, _ = part_layout(specs(shapes), world_size)
    return [PlacedBlock(shard, block) for shard in shards for block in shard.spec.blocks]


def counts(shapes: list[tuple[int, int]], world: int, cost: CostModel, most: int | None = None, **given: int) -> list:
    return counts_of(placed(shapes, world), world, cost, given, most)


@pytest.mark.parametrize(
    ("world", "most", "expected"),
    [(1, 16, [1]), (2, 16, [1, 2]), (6, 16, [1, 2, 6]), (12, 4, [1, 2, 4]), (8, 16, [1, 2, 4, 8]), (7, 16, [1, 7])],
)
def test_the_counts_of_one_plan_divide_each_other(world: int, most: int, expected: list[int]) -> None:
    assert counts_for(world, most) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("aaaa", 4), ("aabb", 2), ("aaab", 1), ("aaabbb", 3), ("aaaabb", 2), ("aabbbb", 2), ("abab", 1), ("a", 1)],
)
def test_neighbours_share_a_node(nodes: str, expected: int) -> None:
    assert neighbours(nodes) == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_many_small_matrices_have_one_owner_each(device_type: str) -> None:
    shapes = [(768, 768), (768, 3072), (3072, 768)] * 12
    assert {*counts(shapes, 8, cost_of(device_type, 8))} == {1}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_lone_large_matrix_is_shared_by_all(device_type: str, world: int) -> None:
    assert counts([(4096, 16384)], world, cost_of(device_type, world)) == [world]


def test_only_ranks_of_one_node_share_a_matrix_unless_the_user_says_so() -> None:
    assert counts([(4096, 16384)], 8, cost_of("cuda", 2)) == [2]
    assert counts([(4096, 16384)], 8, cost_of("cuda", 1)) == [1]
    assert counts([(4096, 16384)], 8, cost_of("cuda", 2), most=8) == [8]
    assert counts([(4096, 16384)], 8, cost_of("cuda", 8), most=1) == [1]


@pytest.mark.parametrize("rule", [{"normuon": True}, {"muon_eq": "rows"}, {"ns_normalization": "aol"}], ids=str)
def test_what_needs_whole_matrices_leaves_each_to_one_owner(rule: dict[str, Any]) -> None:
    assert parse({}).most_owners is None
    assert counts([(4096, 16384)], 8, cost_of("cuda", 8), most=parse(rule).most_owners) == [1]


def test_sets_of_owners_end_where_nodes_end() -> None:
    """With nodes of six, four owners would be on two nodes."""
    assert counts([(6144, 24576)], 12, cost_of("cuda", 6)) == [6]


def test_counts_of_a_checkpoint_and_others_divide_each_other() -> None:
    """Six and four would not, and ranks would wait for each other."""
    found = counts([(768, 768), (6144, 24576)], 12, cost_of("cuda", 6), **{shape_key(768, 768): 4})
    assert found == [4, 2]


def test_large_matrices_are_sliced_for_their_memory_on_an_accelerator_only() -> None:
    shapes = [(28672, 8192)] * 64
    assert {*counts(shapes, 8, cost_of("cuda", 8))} == {4} and MAX_WHOLE_BYTES < 2 * 28672 * 8192 * 3
    assert {*counts(shapes, 8, cost_of("cpu", 8))} == {1}


def test_what_does_not_divide_stays_whole() -> None:
    assert counts([(4096, 16384), (4099, 16384)], 4, cost_of("cuda", 4), most=4) == [4, 1]


def test_a_checkpoint_keeps_its_counts_where_they_fit() -> None:
    given = {shape_key(768, 768): 2}
    assert counts([(768, 768)], 4, cost_of("cpu", 4), **given) == [2]
    assert counts([(768, 768)], 3, cost_of("cpu", 3), **given) == [1]


@pytest.mark.parametrize("world", [64, 1024])
def test_the_busiest_rank_has_little_more_than_the_mean(world: int) -> None:
    """The shapes of Llama 8B. What owners repeat counts, and the mean is that of one owner each."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32
    cost, items = cost_of("cuda", 8), placed(shapes, world)
    found = counts_of(items, world, cost, {}, None)
    first, _ = assign(items, world, cost, found)
    loads = [0.0] * world
    for item, owner, count in zip(items, first, found, strict=True):
        for rank in range(owner, owner + count):
            loads[rank] += cost.of_owner(*item.shape, count).flops
    assert max(loads) <= 1.3 * sum(cost.flops(*shape) for shape in shapes) / world
