# SPDX-License-Identifier: Apache-2.0
"""Random jobs like users': ZeRO's stages with tensor parallelism, experts and CPU offload."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from deepspeed.muon.exchange.placed_params import Shard
from deepspeed.muon.exchange.plan import Plan, plan_shards
from deepspeed.muon.layout import Block, Cut, MatrixSpec, Placement, Sharding, cut, matrices
from helpers.plans import COST

SHAPES = [(8, 4), (4, 8), (6, 5), (3, 3), (16, 12), (12, 16), (8, 8)]
#: ZeRO's stages; stage 2 shards as stage 1 does. bf16: ``BF16_Optimizer``, whose flat tensor has no inner padding.
STAGES = ("0", "1", "3", "bf16")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition: for each of its ranks the shards, and its view of the plan.

    ``limit``: the most elements of a bucket. ``staged``: whether shards are in host memory.
    """

    shards: list[list[Shard]]
    views: list[Plan]
    limit: int
    staged: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    stage: str
    #: Number of data-parallel ranks, and of tensor-parallel ranks.
    data: int
    tensor: int
    staged: bool
    device_type: str
    bucket_bytes: int


def random_job(seed: int, most_ranks: int = 12) -> list[Part]:
    """Return the partitions of a job, in the order in which a rank steps them."""
    random = Random(seed)
    sizes = itertools.product(range(1, most_ranks + 1), range(1, 4))
    data, tensor = random.choice([(data, tensor) for data, tensor in sizes if data * tensor <= most_ranks])
    stage = random.choice(STAGES)
    staged = stage != "0" and random.random() < 0.3
    settings = Settings(
        stage=stage,
        data=data,
        tensor=tensor,
        staged=staged,
        device_type="cuda" if staged else random.choice(["cpu", "cuda"]),
        bucket_bytes=random.choice([1, 60, 200, 1000, 2**20, random.randint(2, 400)]),
    )
    return list(_parts(random, settings))


def _parts(random: Random, settings: Settings) -> Iterator[Part]:
    expert_ranks = random.choice([n for n in range(1, settings.data + 1) if settings.data % n == 0])
    dense = [_spec(random, f"w{i}", settings.tensor) for i in range(random.randint(0, 8))]
    if settings.stage in ("1", "bf16") and random.random() < 0.3:
        random.shuffle(dense)  # round_robin_gradients
    for specs in _cut(random, dense) if settings.stage == "3" else [dense]:
        yield _dense(random, specs, settings)
    if expert_ranks > 1:  # one of the sets of ranks with the same experts
        experts = [_spec(random, f"experts{i}", tensor=1) for i in range(random.randint(1, 4))]
        ranks = settings.data // expert_ranks
        yield _part(ranks, experts, [_placements(_sizes(experts, 0), ranks, 0, 1, 0, settings)], settings)


def _cut(random: Random, specs: list[MatrixSpec]) -> list[list[MatrixSpec]]:
    """Divide the parameters into sub-groups; some may be empty."""
    at = random.randint(0, len(specs))
    return [specs[:at], specs[at:]] if random.random() < 0.5 else [specs]


def _dense(random: Random, specs: Sequence[MatrixSpec], settings: Settings) -> Part:
    """Return the partition of matrices that all ranks share."""
    padding, tensor = random.choice([0, 0, 3]), settings.tensor
    if settings.stage == "0" and tensor > 1:  # each tensor-parallel group plans its own
        placements = [[Placement(0, max(1, size), 0, 1, t, tensor) for size in _sizes(specs, t)] for t in range(tensor)]
        return _part(tensor, specs, placements, settings)
    placements = [_placements(_sizes(specs, t), settings.data, t, tensor, padding, settings) for t in range(tensor)]
    return _part(settings.data * tensor, specs, placements, settings)


def _sizes(specs: Sequence[MatrixSpec], lane: int) -> list[int]:
    """Return the number of elements of each parameter on tensor-parallel rank ``lane``."""
    cuts = [spec.sharding for spec in specs]
    return [
        cut.size(lane) * cut.shape[1 - cut.axis] if cut else spec.numel for spec, cut in zip(specs, cuts, strict=True)
    ]


def _placements(
    sizes: Sequence[int], ranks: int, lane: int, step: int, padding: int, settings: Settings
) -> list[Placement]:
    """Return the placements of one tensor-parallel rank's parameters on its data-parallel ranks."""
    if settings.stage == "0":
        return [Placement(0, size, 0, ranks) for size in sizes]
    if settings.stage == "3":
        parts = [max(1, math.ceil(size / ranks)) for size in sizes]
        starts = list(itertools.accumulate(parts, initial=0))
        return [Placement(0, part, start, 1, lane, step) for part, start in zip(parts, starts, strict=False)]
    gap = padding if settings.stage == "1" else 0
    starts = list(itertools.accumulate((size + gap for size in sizes), initial=0))
    span = max(2, math.ceil(starts[-1] / ranks / 2) * 2)  # a multiple of DeepSpeed's alignment
    return [Placement(start, span, 0, 1, lane, step) for start in starts[:-1]]


def _part(
    ranks: int, specs: Sequence[MatrixSpec], placements: Sequence[Sequence[Placement]], settings: Settings
) -> Part:
    """Return the planned partition; ``placements``: for each tensor-parallel rank, those of its parameters."""
    lanes = []
    for mine in placements:
        everyones = [
            tuple(of_lane[i] for of_lane in placements) if len(placements) > 1 else () for i in range(len(specs))
        ]
        tensors = range(len(specs)) if settings.stage == "0" else [0] * len(specs)
        lanes.append([Shard(*each) for each in zip(specs, tensors, mine, everyones, strict=True)])
    cost = replace(COST, device_type=settings.device_type)
    # Each rank plans by itself.
    shards = [lanes[rank % len(lanes)] for rank in range(ranks)]
    views = [plan_shards(own, ranks, cost, settings.bucket_bytes, rank) for rank, own in enumerate(shards)]
    return Part(
        shards=shards,
        views=views,
        staged=settings.staged,
        limit=max(1, settings.bucket_bytes // COST.bytes_per_element),
    )


def _spec(random: Random, name: str, tensor: int) -> MatrixSpec:
    """Return a parameter, whole or in blocks; tensor parallelism splits it by rows or columns, or copies it."""
    if tensor == 1 or random.random() < 0.2:
        shape = random.choice([random.choice(SHAPES), (random.randint(1, 9), random.randint(1, 9))])
        return MatrixSpec(name, shape, True, "test", _blocks(random, shape))
    sharding = _sharding(random, tensor)
    return MatrixSpec(name, (0,), True, "test", _blocks(random, sharding.shape), sharding=sharding)


def _sharding(random: Random, ranks: int) -> Sharding:
    """Return a sharding of one or two parts of an axis, each split over the ranks; some ranks may hold nothing."""
    axis, parts, lone = random.randint(0, 1), random.randint(1, 2), random.randrange(ranks)
    kind = random.choice(["even", "even", "uneven", "one rank"])
    if kind == "uneven":
        widths = [[random.choice([0, 0, 2, 3]) for _ in range(ranks)] for _ in range(parts)]
        widths[0][lone] += 2
    else:
        widths = [[4 * (kind == "even" or rank == lone) for rank in range(ranks)] for _ in range(parts)]
    size, other = sum(map(sum, widths)), random.choice([2, 4, 5, 8])
    starts = itertools.accumulate(map(sum, widths), initial=0)
    pairs = list(zip(starts, widths, strict=False))
    ranges = tuple(tuple((start + sum(part[:r]), part[r]) for start, part in pairs) for r in range(ranks))
    return Sharding((size, other) if axis == 0 else (other, size), axis, ranges)


def _blocks(random: Random, shape: Sequence[int]) -> tuple[Block, ...]:
    """Return blocks: the whole, ranges of rows or of columns, or two interleaved ranges of rows in groups."""
    (whole,), axis = matrices(shape), random.randint(0, 1)
    options = [Cut(()), Cut(())]
    if shape[axis] > 1:
        at = random.randint(1, shape[axis] - 1)
        options.append(Cut((at, shape[axis] - at), axis))
    if shape[0] % 4 == 0:
        options.append(Cut((1, 1), 0, shape[0] // 2))
    return cut(whole, random.choice(options))
