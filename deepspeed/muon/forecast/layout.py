# SPDX-License-Identifier: Apache-2.0
"""Compute, without an engine, where parameters lie on any number of ranks, who owns which matrix, and what that costs.

The layouts equal those that the adapters in ``zero/wrappers`` read from a live engine. Owners are chosen by the same
planner as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.bucket import OwnedBlocks
from deepspeed.muon.exchange.memory import Demand, demands_of
from deepspeed.muon.exchange.plan import CostModel, GlobalPlan, cost_model, plan_partition
from deepspeed.muon.kernels.rounding import block_count
from deepspeed.muon.layout.block import Block
from deepspeed.muon.layout.placement import PlacedBlock, Placement, Shard, Spread
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import exact_method, method_of
from deepspeed.muon.math.rules import scale_factor
from deepspeed.muon.model.param_groups import check_options, split_groups
from deepspeed.muon.model.routing import route
from deepspeed.muon.model.splitting import MatrixSpec
from deepspeed.muon.qk_clip.query_keys import attention_layers

#: Stages 1 and 2 pad each flat group to a multiple of this many elements per rank (``nccl_start_alignment_factor``).
FLAT_ALIGNMENT = 2
#: ``momentum_dtype`` -> bytes of Muon's momentum per element.
MUON_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
#: Bytes of AdamW's exp_avg and exp_avg_sq for one element; of ``step`` for one tensor; of the magnitude of one int8
#: block.
ADAM_STATE_BYTES, STEP_BYTES, ABSMAX_BYTES = 8, 4, 4
#: Bytes of NorMuon's second moment per output of a matrix.
MOMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One parameter group of the optimizer, of Muon or of AdamW, with the settings that determine its costs."""

    use_muon: bool
    specs: tuple[MatrixSpec, ...]
    ns_method: str = "auto"
    adjust_lr_fn: str = "original"
    rms_scale: float = 0.2
    momentum_dtype: str = "fp32"
    normuon: bool = False

    def method(self, schedule: Schedule, dtype: str) -> Callable[[int, int], str]:
        """Return a function (rows, cols) -> Newton-Schulz method, "standard" or "gram".

        If ``ns_method`` is ``auto``, the function returns the method with fewer floating-point operations for
        ``schedule``, the coefficients of Newton-Schulz, and ``dtype``, the dtype of its matrix products.
        """
        return cache(partial(method_of, ns_method=self.ns_method, schedule=schedule, dtype=dtype))

    def cost_model(self, schedule: Schedule, dtype: str, wire_bytes: int, device_type: str) -> CostModel:
        """Return the model by which the planner divides the group's matrices among ranks.

        Arguments: as in :func:`deepspeed.muon.exchange.plan.cost_model`.
        """
        return cost_model(self.method(schedule, dtype), schedule, dtype, wire_bytes, device_type)

    def scale(self, block: Block) -> float:
        """Return the factor by which the orthogonalized update of a matrix is multiplied, without the learning rate."""
        return scale_factor(self.adjust_lr_fn, block.rows, block.cols, self.rms_scale)


def group_specs(model: nn.Module, config: MuonConfig, dtype: str = "fp32", device_type: str = "cpu") -> list[GroupSpec]:
    """Return the Muon groups and the AdamW groups of an optimizer for all trainable parameters of ``model``.

    ``model`` may be on the meta device. ``dtype``, ``device_type``: of Newton-Schulz, such as ``fp16`` on ``cuda``.

    Raises:
        MuonConfigError: ``config`` does not fit ``model``; for example, a pattern matches no parameter.
        ValueError: a parameter that Muon cannot update has the tag ``use_muon``.
    """
    specs = route(model, config)
    check_options(model, specs.values(), config, attention_layers(model) if config.qk_clip else None)
    return [
        GroupSpec(
            specs=tuple(specs[param] for param in group["params"]),
            rms_scale=config.rms_scale,
            momentum_dtype=config.momentum_dtype,
            normuon=config.normuon,
            ns_method=exact_method(group.get("ns_method", "auto"), dtype, device_type),
            **{key: group[key] for key in ("use_muon", "adjust_lr_fn") if key in group},
        )
        for group in split_groups(model.parameters(), specs, config).halves
    ]


@dataclass(frozen=True)
class Layout:
    """How ZeRO splits parameter groups at ``stage`` 0 to 3 over ``world_size`` data-parallel ranks.

    Args:
        sub_group_size: elements on one rank after which a sub-group of stage 3 ends.
        round_robin: DeepSpeed's setting ``round_robin_gradients``, for stages 1 and 2.
        alignment: at stages 1 and 2 each parameter starts at a multiple of this many elements.
    """

    stage: int
    world_size: int
    sub_group_size: int = 10**9
    round_robin: bool = False
    alignment: int = 1


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """The parameters that ZeRO updates at once: a parameter group or, at stage 3, one sub-group of it.

    Args:
        shards: where the ranks store each parameter.
        tensors: number of tensors in which one rank stores its shards.
        numel: number of elements in these tensors, with padding.
        world_size: number of ranks that share the optimizer's work; 1 if each rank does all of it.
    """

    group: GroupSpec
    shards: tuple[Shard, ...]
    tensors: int
    numel: int
    world_size: int

    @property
    def state_bytes(self) -> int:
        """Return the bytes of this part's optimizer state on rank 0, which no other rank exceeds."""
        per_element = MUON_STATE_BYTES[self.group.momentum_dtype] if self.group.use_muon else ADAM_STATE_BYTES
        nbytes = self.numel * per_element + self.tensors * STEP_BYTES
        if self.group.use_muon and self.group.momentum_dtype == "int8":
            nbytes += ABSMAX_BYTES * sum(
                block_count(piece.numel) for item in self.items for piece in item.spread.pieces(0)
            )
        return nbytes

    @property
    def items(self) -> list[PlacedBlock]:
        """Return the matrices of this part, in the order in which the planner numbers them."""
        return [item for shard in self.shards for item in shard.items]


def lay_out(groups: Sequence[GroupSpec], layout: Layout) -> list[StepPart]:
    """Split parameter groups into the parts that ZeRO updates at once, and return the parts in the order of updates."""
    split = (_parts_at_stage_0, _parts_at_stages_1_and_2, _parts_at_stages_1_and_2, _parts_at_stage_3)[layout.stage]
    return [part for group in groups for part in split(group, layout)]


def _parts_at_stage_0(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    copies = layout.world_size if group.use_muon else 1
    shards = tuple(Shard(spec, i, Placement(0, spec.numel, 0, copies)) for i, spec in enumerate(group.specs))
    numel = sum(spec.numel for spec in group.specs)
    yield StepPart(group=group, shards=shards, tensors=len(shards), numel=numel, world_size=copies)


def _parts_at_stages_1_and_2(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    """Yield the group's only :class:`StepPart` at ZeRO stages 1 and 2, where ranks store slices of its flat buffer."""
    world_size, order = layout.world_size, group.specs
    if layout.round_robin:
        order = tuple(spec for first in range(world_size) for spec in group.specs[first::world_size])
    offsets, end = [], 0
    for spec in order:
        offsets.append(_round_up(end, layout.alignment))
        end = offsets[-1] + spec.numel
    span = _round_up(end, FLAT_ALIGNMENT * world_size) // world_size
    shards = tuple(Shard(spec, 0, Placement(offset, span, 0)) for spec, offset in zip(order, offsets, strict=True))
    yield StepPart(group=group, shards=shards, tensors=1, numel=span, world_size=world_size)


def _parts_at_stage_3(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    """Yield a :class:`StepPart` for each sub-group of a parameter group at ZeRO stage 3.

    A sub-group ends when it reaches ``layout.sub_group_size`` elements on one rank.
    """
    world_size, limit = layout.world_size, layout.sub_group_size
    shards: list[Shard] = []
    base = 0
    for count, spec in enumerate(group.specs, 1):
        size = _round_up(spec.numel, world_size) // world_size
        shards.append(Shard(spec, 0, Placement(0, size, base)))
        base += size
        if base >= limit or count == len(group.specs):
            yield StepPart(group=group, shards=tuple(shards), tensors=1, numel=base, world_size=world_size)
            shards, base = [], 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What Muon's update of one :class:`StepPart` costs per step.

    Lists have one number for each of ``part.world_size`` ranks, if not stated otherwise. An owner is a rank that
    orthogonalizes a matrix. Owners work on one bucket of matrices after the other.

    Args:
        plan: the part's plan for all ranks.
        model: the cost model of the planner.
        flops: floating-point operations of Newton-Schulz.
        heaviest: the most floating-point operations that an owner spends on one matrix.
        sent_bytes: bytes that the rank sends, both momentum to owners and results back.
        least_bytes: the mean of ``sent_bytes`` over ranks if each matrix were owned by the rank that stores most of it.
        collectives: number of collectives that send buckets.
        demands: ``demands[rank][bucket]``, the sizes from which the rank's scratch memory is computed.
        slots: number of buckets in memory at a time.
        moment_bytes: bytes of NorMuon's second moments, which owners store.
    """

    part: StepPart
    plan: GlobalPlan
    model: CostModel
    flops: list[float]
    heaviest: float
    sent_bytes: list[int]
    least_bytes: float
    collectives: int
    demands: list[list[Demand]]
    slots: int
    moment_bytes: list[int]


def step_cost(part: StepPart, cost: CostModel, bucket_bytes: int | None = None, staged: bool = False) -> StepCost:
    """Plan Muon's update of one part of a step for all ranks, and return its cost.

    Args:
        cost: the model by which matrices are divided among owners.
        bucket_bytes: the attribute of :class:`deepspeed.muon.config.schema.MuonConfig`.
        staged: whether shards are in host memory while Newton-Schulz runs on an accelerator.
    """
    plan = plan_partition(part.shards, part.world_size, cost, bucket_bytes)
    if plan.world_size < part.world_size:  # each rank does all the work
        part = replace(part, shards=plan.shards, world_size=1)
    flops, moment_bytes, heaviest = [0.0] * part.world_size, [0] * part.world_size, 0.0
    owned = [*zip(plan.owners, plan.items, strict=True)]
    for owner, item in owned:
        operations = cost.flops(*item.shape)
        flops[owner] += operations
        heaviest = max(heaviest, operations)
        moment_bytes[owner] += MOMENT_BYTES * item.outputs * part.group.normuon
    traffic = _traffic(owned, part.world_size) if plan.copies == 1 else _traffic_of_replicas(plan)
    travels = staged or any(traffic.sent)
    return StepCost(
        part=part,
        plan=plan,
        model=cost,
        flops=flops,
        heaviest=heaviest,
        sent_bytes=[count * cost.bytes_per_element for count in traffic.sent],
        least_bytes=traffic.least * cost.bytes_per_element / part.world_size,
        collectives=len(plan.buckets) * (2 if plan.copies == 1 else 1) if any(traffic.sent) else 0,
        demands=demands_of(plan),
        slots=plan.slots(travels),
        moment_bytes=moment_bytes,
    )


class _Traffic(NamedTuple):
    """The communication of a step, in elements. A matrix's owners are the ranks that orthogonalize it.

    ``sent``: for each rank, how many elements it sends to owners and, as an owner, back. ``least``: the sum of ``sent``
    if each matrix were owned by the rank that stores most of it.
    """

    sent: list[int]
    least: int


def _traffic_of_replicas(plan: GlobalPlan) -> _Traffic:
    """Return the traffic if each rank stores all matrices, so that owners send results to all others."""
    sent = plan.view(0).sent_elements  # equal parts, with padding
    return _Traffic([sent] * plan.world_size, sent * plan.world_size)


def _traffic(owned: OwnedBlocks, world_size: int) -> _Traffic:
    """Return the traffic if matrices are sharded, so that ranks send their pieces to owners and get results back."""
    sent, least = [0] * world_size, 0
    alike: dict[Spread, tuple[PlacedBlock, list[int]]] = {}
    for owner, item in owned:
        alike.setdefault(item.spread, (item, []))[1].append(owner)
    for item, owners in alike.values():
        held = {rank: item.spread.held_elements(rank) for rank in item.spread.holders}
        least += 2 * len(owners) * (item.block.numel - max(held.values()))
        for owner in owners:
            sent[owner] += item.block.numel - 2 * held.get(owner, 0)
        for rank, elements in held.items():
            sent[rank] += len(owners) * elements
    return _Traffic(sent, least)
