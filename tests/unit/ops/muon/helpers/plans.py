# SPDX-License-Identifier: Apache-2.0
"""Specs, layouts, and element positions of a plan's runs, all by plain indexing."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.muon.cli.forecast import GroupSpec
from deepspeed.muon.exchange.bucket import GridCopy, ShardRun
from deepspeed.muon.exchange.memory import BatchSize, Demand, PartitionDemand
from deepspeed.muon.exchange.placed_params import Shard
from deepspeed.muon.exchange.plan import CostModel, Plan, plan_shards
from deepspeed.muon.layout import Block, MatrixSpec, Placement


def make_plan(shards: Sequence[Shard], rank: int, *args: Any, **kwargs: Any) -> Plan:
    """Plan one partition from the view of ``rank``; the other arguments are those of ``plan_shards``."""
    return plan_shards(shards, *args, **kwargs, rank=rank)


def demand_of(plan: Plan, method: Callable[[int, int], str]) -> PartitionDemand:
    """Return the memory demand of a plan's rank, counted run by run."""
    demands = []
    for bucket in plan.buckets:
        copies = [run.copy for run in bucket.runs]
        longest = max((copy.numel for copy in copies), default=0)
        grid = max((copy.numel for copy in copies if copy.rows > 1), default=0)
        batches = tuple(BatchSize(batch.rows, batch.cols, batch.count) for batch in bucket.batches)
        demands.append(Demand(sum(bucket.buffer_sizes), longest, grid, batches))
    return PartitionDemand(demands, plan.slots(plan.travels(staged=False)), method)


def counted_cost(ns_method: str, *how: Any) -> CostModel:
    """Return the cost model of a forecast; ``how``: other arguments of ``GroupSpec.cost_model``."""
    return GroupSpec(use_muon=True, specs=(), ns_method=ns_method).cost_model(*how)


COST = CostModel(lambda rows, cols: 20.0 * min(rows, cols) ** 2 * max(rows, cols), 200.0, 2, "cpu")
"""A matrix costs 20 x larger side x smaller side^2 operations."""


def whole(rows: int, cols: int) -> tuple[Block, ...]:
    return (Block(0, rows, cols, cols),)


def columns(rows: int, cols: int) -> tuple[Block, ...]:
    """Return two blocks that divide a parameter's columns, so that neither is contiguous."""
    half = cols // 2
    return (Block(0, rows, half, cols), Block(half, rows, cols - half, cols))


def specs(shapes: list[tuple[int, int]], split: bool = False) -> list[MatrixSpec]:
    cut = columns if split else whole
    return [MatrixSpec(f"p{i}", s, True, "test", cut(*s) if s[1] > 1 else whole(*s)) for i, s in enumerate(shapes)]


def flat_layout(items: list[MatrixSpec], world_size: int, gap: int = 0) -> tuple[list[Shard], int]:
    """Return (shards, size of a partition) of stages 1 and 2; `gap`: elements of padding after each parameter."""
    offsets = list(itertools.accumulate((spec.numel + gap for spec in items), initial=0))
    span = math.ceil(offsets[-1] / world_size)
    return [Shard(s, 0, Placement(o, span, 0)) for s, o in zip(items, offsets, strict=False)], span


def part_layout(items: list[MatrixSpec], world_size: int) -> tuple[list[Shard], int]:
    """Return (shards, size of a rank's tensor) of stage 3: each parameter divided over all ranks."""
    shards, base = [], 0
    for spec in items:
        part = math.ceil(spec.numel / world_size)
        shards.append(Shard(spec, 0, Placement(0, part, base)))
        base += part
    return shards, base


def places(run: ShardRun) -> list[tuple[int, int]]:
    """Return (position in the tensor, position in the buffer) of every element of a run."""
    return spread(run.copy)


def spread(copy: GridCopy) -> list[tuple[int, int]]:
    """Return (position on the grids, position in the buffer) of every element of a copy."""
    numbers = itertools.product(range(copy.times), range(copy.rows), range(copy.cols))
    return [
        (copy.start + n * copy.start_step + r * copy.pitch + c, copy.at + n * copy.at_step + r * copy.cols + c)
        for n, r, c in numbers
    ]


def all_to_all(outboxes: list, sent: list, received: list) -> list[list]:
    """Simulate `torch.distributed.all_to_all_single` on lists; assert that the counts of sender and receiver agree."""
    inboxes: list[list] = [[] for _ in outboxes]
    for source, (outbox, counts) in enumerate(zip(outboxes, sent, strict=True)):
        starts = list(itertools.accumulate(counts, initial=0))
        for target, count in enumerate(counts):
            assert received[target][source] == count
            inboxes[target] += outbox[starts[target] : starts[target] + count]
    return inboxes
