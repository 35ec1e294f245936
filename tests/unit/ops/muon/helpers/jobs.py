# SPDX-License-Identifier: Apache-2.0
"""Random jobs like users': ZeRO's stages with pipelines, tensor parallelism, experts and CPU offload."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from deepspeed.muon.config.types import Cut
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.matrices.block import Block, cut, matrices
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.matrices.tp_sharding import Sharding
from deepspeed.muon.plan.bucket import Bucket
from deepspeed.muon.plan.checker import conflict, lost_elements, violation
from deepspeed.muon.plan.owners import is_sliceable, possible_owner_counts
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.plan.plan import GlobalPlan, Plan, global_plan
from deepspeed.muon.plan.program import Collective, Group, NewtonSchulz, Open, Program, Send, collectives_of, program_of
from helpers.plans import COST, places
from helpers.simulation import simulate

SHAPES = [(8, 4), (4, 8), (6, 5), (3, 3), (16, 12), (12, 16), (8, 8)]
#: ZeRO's stages; stage 2 shards as stage 1 does. bf16: ``BF16_Optimizer``, whose flat tensor has no inner padding.
STAGES = ("0", "1", "3", "bf16")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the ranks of a job are arranged: the pipeline's stages outermost, tensor parallelism innermost."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.pipeline * self.data * self.tensor

    def rank(self, stage: int, data: int, lane: int) -> int:
        """Return the number of a rank in the job."""
        return (stage * self.data + data) * self.tensor + lane


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition: its ranks, as numbers in the job, and for each of them shards, plan, its view of it, and program.

    ``copied``: whether several ranks of a tensor-parallel group have the same matrix.
    ``limit``: the most elements of a bucket. ``staged``: whether shards are in host memory.
    """

    ranks: tuple[int, ...]
    shards: list[list[Shard]]
    plan: list[GlobalPlan]
    views: list[Plan]
    programs: list[Program]
    copied: bool
    limit: int
    staged: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all partitions of a job have in common."""

    stage: str
    staged: bool
    device_type: str
    bucket_bytes: int
    #: The most owners that one matrix may have.
    most_owners: int


def newton_schulz(dtype: str = "bf16") -> NewtonSchulz:
    """Return a NewtonSchulz with the Gram method for matrices with fewer rows than columns, else the standard one."""
    method = {True: "gram", False: "standard"}
    return NewtonSchulz(
        schedule=schedule("simple"), method=lambda rows, cols: method[rows < cols], dtype=dtype, device_type="cpu"
    )


def random_job(seed: int, most_ranks: int = 12) -> tuple[Grid, list[Part]]:
    """Return the partitions of a job, in the order in which a rank steps them."""
    random = Random(seed)
    sizes = [range(1, 4), range(1, most_ranks + 1), range(1, 4)]
    grids = [Grid(pipeline=p, data=d, tensor=t) for p, d, t in itertools.product(*sizes) if p * d * t <= most_ranks]
    grid = random.choice(grids)
    stage = random.choice(STAGES)
    staged = stage != "0" and random.random() < 0.3
    settings = Settings(
        stage=stage,
        staged=staged,
        device_type="cuda" if staged else random.choice(["cpu", "cuda"]),
        bucket_bytes=random.choice([1, 60, 200, 1000, 2**20, random.randint(2, 400)]),
        most_owners=random.choice([1, 1, 2, 4, 12]),
    )
    return grid, list(_parts(random, grid, settings))


def _parts(random: Random, grid: Grid, settings: Settings) -> Iterator[Part]:
    """Yield the partitions of all pipeline stages, which have different models."""
    expert_ranks = random.choice([n for n in range(1, grid.data + 1) if grid.data % n == 0])
    for stage in range(grid.pipeline):
        name = f"stage{stage}"
        dense = [_spec(random, f"{name}.w{i}", grid.tensor) for i in range(random.randint(0, 8))]
        if settings.stage in ("1", "bf16") and random.random() < 0.3:
            random.shuffle(dense)  # round_robin_gradients
        groups = _cut(random, dense) if settings.stage == "3" else [dense]
        for specs in groups:
            yield from _dense(random, grid, stage, specs, settings)
        if expert_ranks > 1:
            experts = [_spec(random, f"{name}.experts{i}", tensor=1) for i in range(random.randint(1, 4))]
            yield from _experts(random, grid, stage, experts, expert_ranks, settings)


def _cut(random: Random, specs: list[MatrixSpec]) -> list[list[MatrixSpec]]:
    """Divide the parameters into sub-groups; some may be empty."""
    at = random.randint(0, len(specs))
    return [specs[:at], specs[at:]] if random.random() < 0.5 else [specs]


def _dense(random: Random, grid: Grid, stage: int, specs: Sequence[MatrixSpec], settings: Settings) -> Iterator[Part]:
    """Yield the partitions of matrices that all ranks of a pipeline stage share."""
    padding = random.choice([0, 0, 3])
    if settings.stage == "0" and grid.tensor > 1:  # each tensor-parallel group plans its own
        placements = [
            [Placement(0, max(1, size), 0, 1, t, grid.tensor) for size in _sizes(specs, t)] for t in range(grid.tensor)
        ]
        for data in range(grid.data):
            ranks = tuple(grid.rank(stage, data, t) for t in range(grid.tensor))
            yield _part(random, ranks, specs, placements, settings)
        return
    ranks = tuple(grid.rank(stage, d, t) for d in range(grid.data) for t in range(grid.tensor))
    placements = [
        _placements(_sizes(specs, t), grid.data, t, grid.tensor, padding, settings) for t in range(grid.tensor)
    ]
    yield _part(random, ranks, specs, placements, settings)


def _experts(
    random: Random, grid: Grid, stage: int, specs: Sequence[MatrixSpec], expert_ranks: int, settings: Settings
) -> Iterator[Part]:
    """Yield the partitions of experts, one for each set of ranks with the same experts."""
    for first, lane in itertools.product(range(expert_ranks), range(grid.tensor)):
        named = [replace(spec, name=f"{spec.name}.{first}") for spec in specs]
        ranks = tuple(grid.rank(stage, data, lane) for data in range(first, grid.data, expert_ranks))
        yield _part(random, ranks, named, [_placements(_sizes(named, 0), len(ranks), 0, 1, 0, settings)], settings)


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
    random: Random,
    ranks: tuple[int, ...],
    specs: Sequence[MatrixSpec],
    placements: Sequence[Sequence[Placement]],
    settings: Settings,
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
    blocks = [block for spec in specs for block in spec.blocks]
    allowed = possible_owner_counts(len(ranks), settings.most_owners)
    counts = [random.choice([n for n in allowed if n == 1 or is_sliceable(block, n)]) for block in blocks]
    plans = [global_plan(shards, len(ranks), cost, settings.bucket_bytes, counts) for shards in lanes]
    of_rank = [plans[index % len(plans)] for index in range(len(ranks))]
    views = [plan.view(index) for index, plan in enumerate(of_rank)]
    return Part(
        ranks=ranks,
        shards=[lanes[index % len(lanes)] for index in range(len(ranks))],
        plan=of_rank,
        views=views,
        programs=[program_of(view, "bf16", settings.staged, newton_schulz()) for view in views],
        copied=len(placements) > 1 and any(spec.sharding is None for spec in specs),
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


def check_part(part: Part) -> None:
    """Assert that the programs of a partition are valid, and that memory and traffic are what the plan promises."""
    assert len({plan.of_all.digest for plan in part.views}) == 1
    assert violation(part.programs) is None
    plan, world = part.plan[0], len(part.ranks)
    if not part.copied:
        assert lost_elements(part.views) is None
    simulate(part.views, part.programs, part.shards)
    largest = max((item.block.numel for _, item in plan.owned), default=0)
    for view, program in zip(part.views, part.programs, strict=True):
        opened = [operation for operation in program if isinstance(operation, Open)]
        most = 4 if plan.copies > 1 else min(3, plan.slots(view.travels(part.staged)))
        assert len({operation.storage for operation in opened}) <= most
        for bucket in view.buckets:
            _check_copies(bucket)
            assert bucket.matrix_elements <= max(part.limit // plan.copies, largest)
            results = sum(bucket.send_counts) + bucket.own_results if bucket.only_results else 0
            assert results <= max(part.limit, plan.copies, *bucket.send_counts, bucket.own_results)
        calls = [one for operation in program if isinstance(operation, Send) for one in operation.collectives]
        sent = sum(sum(one.sent) - one.sent[view.rank] for one in calls if one.sent)
        own = sum(one.numel for one in calls if one.root == view.rank)
        assert sent + own * (world - 1) == view.sent_elements


def _check_copies(bucket: Bucket) -> None:
    """Assert that few copies fill the buffers, and that few calls update the shards, each run and element once."""
    assert len([segment for segment in bucket.segments if not segment.in_place]) <= 1
    assert len(bucket.segments) <= 1 + sum(run.in_place for run in bucket.runs)
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


def check_job(grid: Grid, parts: Sequence[Part]) -> None:
    """Assert that all partitions of a job are valid, and that the collectives of all ranks merge into one order."""
    calls: list[list[Collective]] = [[] for _ in range(grid.world_size)]
    for number, part in enumerate(parts):
        check_part(part)
        for rank, program in zip(part.ranks, part.programs, strict=True):
            for call in collectives_of(program):
                members = tuple(part.ranks[index] for index in call.group.ranks)
                calls[rank].append(replace(call, group=Group(members, f"part {number}")))
    assert conflict(calls) is None
