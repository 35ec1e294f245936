# SPDX-License-Identifier: Apache-2.0
"""Forecast what a step costs: bytes and floating-point operations of each rank, and Muon's share of its time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.bucket import OwnedBlocks
from deepspeed.muon.exchange.memory import Demand, Memory, PartitionDemand, Peak, demands_of, peak
from deepspeed.muon.exchange.placed_params import PlacedBlock, Shard, whole_shards
from deepspeed.muon.exchange.plan import CostModel, Plan, cost_model, plan_partition, without_collector
from deepspeed.muon.kernels.rounding import block_count
from deepspeed.muon.layout import MatrixSpec, Placement, Spread
from deepspeed.muon.math.newton_schulz import DTYPES, Schedule, exact_method, flops, method_of
from deepspeed.muon.math.rules import Rule, scale_factor, state_shapes
from deepspeed.muon.model.param_groups import check_options, split_groups
from deepspeed.muon.model.routing import route
from deepspeed.muon.qk_clip.query_keys import attention_layers
from deepspeed.muon.step import NewtonSchulz
from deepspeed.muon.zero.read_config import Layout, Settings
from deepspeed.muon.zero.wrappers import stage3, stage12

#: Bytes that NCCL takes for all-to-all on each GPU of a node, and the number of GPUs of that node.
NCCL_BYTES, RANKS_OF_A_NODE = 3.28e9, 8


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The plan of one optimizer step for all ranks, and its costs.

    ``groups``, ``layout``: the arguments of :func:`estimate`. ``parts``: the parameter groups or, at stage 3, their
    sub-groups, in the order in which ZeRO updates them. ``costs``: the :class:`StepCost` of each part that Muon
    updates. ``peak``: scratch memory of the rank that needs most. ``planning_seconds``: how long planning took.
    """

    groups: Sequence[GroupSpec]
    layout: Layout
    parts: Sequence[StepPart]
    costs: Sequence[StepCost]
    peak: Peak
    planning_seconds: float

    @property
    def world_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.layout.world_size


@without_collector()
def estimate(groups: Sequence[GroupSpec], layout: Layout, config: MuonConfig, memory: Memory) -> Estimate:
    """Plan an optimizer step for all ranks, and return the plan with its costs. Needs no GPU and no process group.

    If ``ns_method`` is ``auto``, the Newton-Schulz method with fewer floating-point operations is assumed.

    Args:
        groups: the optimizer's parameter groups, from :func:`group_specs`.
        layout: how ZeRO splits the parameter groups over ranks.
        memory: the dtype of Newton-Schulz, the dtype of sent matrices, the type of the device, and CPU offload.
    """
    began = time.perf_counter()
    parts = lay_out(groups, layout)
    muon = [part for part in parts if part.group.use_muon]
    costs = []
    for part in muon:
        cost = part.group.cost_model(
            schedule=config.schedule,
            dtype=memory.dtype,
            wire_bytes=memory.wire_bytes,
            device_type=memory.device_type,
        )
        costs.append(step_cost(part, cost, config.bucket_bytes, memory.staged))
    largest = _largest(costs, config.schedule, layout.world_size, memory)
    return Estimate(groups, layout, parts, costs, largest, time.perf_counter() - began)


def _largest(costs: Sequence[StepCost], schedule: Schedule, world_size: int, memory: Memory) -> Peak:
    """Return the scratch memory of the rank that needs most for a step.

    ``costs``: those of all parts of the step that Muon updates. ``world_size``: number of data-parallel ranks.
    """
    costs = [cost for cost in costs if cost.demands]
    methods = [cost.part.group.method(schedule, memory.dtype) for cost in costs]
    # If each rank does all the work of a part, `demands` has one list for all ranks.
    by_rank = {tuple(tuple(cost.demands[rank % len(cost.demands)]) for cost in costs) for rank in range(world_size)}
    slots = [cost.slots for cost in costs]
    peaks = (peak(map(PartitionDemand, demands, slots, methods), memory) for demands in by_rank)
    return max(peaks, key=lambda found: found.total)


def totals(groups: Sequence[GroupSpec], use_muon: bool) -> dict[str, int]:
    """Return {"tensors": count, "parameters": elements, "matrices": count} of all Muon groups or all AdamW groups."""
    specs = [spec for group in groups if group.use_muon is use_muon for spec in group.specs]
    return {
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs),
        "matrices": sum(len(spec.blocks) for spec in specs),
    }


def nccl_bytes(found: Estimate, device_type: str) -> float:
    """Return about how many bytes NCCL keeps on a rank for Muon's all-to-alls; 0 without these or without CUDA GPUs.

    NVIDIA/nccl#1685: on eight H100s the first all-to-all takes memory from 1.06 to 4.34 GB. Nobody has reported how it
    grows with ranks on other nodes, so only ranks on the same node are counted.
    """
    peers = min(found.world_size, RANKS_OF_A_NODE) - 1
    has_all_to_alls = found.layout.stage > 0 and any(cost.collectives for cost in found.costs)
    return NCCL_BYTES * peers / (RANKS_OF_A_NODE - 1) if has_all_to_alls and device_type == "cuda" else 0.0


#: Rows of :func:`device_bytes` that take memory only in a step, when there are no activations; rows that take none in a
#: step.
IN_STEP, NOT_IN_STEP = ("fp32_gradients", "scratch"), ("gathered_weights",)


def device_bytes(found: Estimate, settings: Settings, frozen: int, device_type: str) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank needs on its device, with Muon and if AdamW updated everything.

    The result is ``{"muon": {"weights": bytes, "gradients": bytes, ...}, "adamw": ...}``, without activations. Bytes
    are counted as by DeepSpeed's ``estimate_zero2_model_states_mem_needs``, but with the dtypes and buffers of this
    config and the shards of its ZeRO stage. Offloaded tensors count 0.

    ``found``: the result of :func:`estimate`. ``settings``: those of the config. ``frozen``: number of elements in
    frozen parameters.
    """
    buffers, stage = settings.buffers, found.layout.stage
    itemsize, accumulated = DTYPES[buffers.dtype].itemsize, DTYPES[buffers.accumulated_dtype].itemsize
    is_on_device = device_type == "cpu" or not settings.offload
    keeps_weights = device_type == "cpu" or not buffers.offload_param
    trained = sum(totals(found.groups, use_muon)["parameters"] for use_muon in (True, False))
    shard = trained / (found.world_size if stage else 1)
    weights = (trained + frozen) / (found.world_size if stage == 3 else 1)
    # Bytes of the fp32 copy of an element; an fp32 model at stage 0 has none.
    fp32 = 4 * is_on_device * (stage > 0 or buffers.dtype != "fp32")
    updated_at_once = min(shard, found.layout.sub_group_size) if stage == 3 else shard
    rows = {
        "weights": itemsize * weights * keeps_weights,
        "gathered_weights": itemsize * min(buffers.gathered, trained + frozen) if stage == 3 else 0,
        "gradients": accumulated * shard * is_on_device if stage > 1 else itemsize * trained,
        "gradient_buckets": itemsize * buffers.reduced,
        "fp32_weights": fp32 * shard,
        "optimizer_state": ADAM_STATE_BYTES * shard * is_on_device,
        "fp32_gradients": fp32 * updated_at_once,
    }
    if buffers.keeps_whole_gradients:
        rows["gradients"] += accumulated * trained
    muon = {
        "optimizer_state": per_rank(found)["state_bytes"]["max"] * is_on_device,
        "scratch": float(found.peak.total),
        "nccl": nccl_bytes(found, device_type),
    }
    return {"muon": rows | muon, "adamw": rows | {"scratch": 0.0, "nccl": 0.0}}


def needed_bytes(rows: Mapping[str, float]) -> tuple[float, float]:
    """Return (peak, backward): the most bytes that a rank needs at a time, and the bytes that it needs in a backward.

    The peak is in the backward or in the optimizer step. Activations are not counted. ``rows``: {row: bytes} for Muon
    or AdamW, from :func:`device_bytes`.
    """
    step = sum(nbytes for row, nbytes in rows.items() if row not in NOT_IN_STEP)
    backward = sum(nbytes for row, nbytes in rows.items() if row not in IN_STEP)
    return max(step, backward), backward


def per_rank(found: Estimate) -> dict[str, Any]:
    """Return the object ``per_rank`` of ``ds_muon plan --json``: the mean and maximum over ranks of a step's costs."""
    costs, world_size = found.costs, found.world_size
    shards = sum(part.state_bytes for part in found.parts)
    state = [shards + owned for owned in _sums_per_rank([cost.owner_state_bytes for cost in costs], world_size)]
    sent = _sums_per_rank([cost.sent_bytes for cost in costs], world_size)
    flops = _sums_per_rank([cost.flops for cost in costs], world_size)
    mean = sum(flops) / world_size
    # ZeRO updates one part after the other, and each part takes as long as its busiest rank.
    waited_for = sum(max(cost.flops) for cost in costs)
    least, heaviest = sum(cost.least_bytes for cost in costs), max((cost.heaviest for cost in costs), default=0.0)
    return {
        "state_bytes": {"mean": sum(state) / world_size, "max": max(state)},
        "sent_bytes": {"mean": sum(sent) / world_size, "max": max(sent), "least_mean": least},
        "newton_schulz_gflop": {"mean": mean / 1e9, "max": max(flops) / 1e9, "heaviest_matrix": heaviest / 1e9},
        "imbalance": waited_for / mean if mean else 1.0,
        "parts": len(costs),
        "buckets": sum(len(cost.plan.pairs) for cost in costs),
        "collectives": sum(cost.collectives for cost in costs),
        "scratch_bytes": {"max": found.peak.total, **found.peak._asdict()},
    }


def _sums_per_rank(lists: Sequence[Sequence[float]], world_size: int) -> list[float]:
    """Return, for each rank, the sum of its values in ``lists``.

    A list has one value for each rank, or a single value that every rank has.
    """
    spread = (values if len(values) == world_size else [*values] * world_size for values in lists)
    return [sum(column) for column in zip([0.0] * world_size, *spread, strict=True)]


def step_operations(found: Estimate, schedule: Schedule, memory: Memory) -> dict[str, float]:
    """Return what Muon's update costs in a step, in floating-point operations of the busiest rank.

    Of a symmetric product, only the part that the kernels compute is counted. Bytes and collectives count as the
    operations that the device could do in the same time, according to
    :class:`deepspeed.muon.exchange.plan.CostModel`. Communication and Newton-Schulz are assumed to overlap, except for
    1/n of the shorter of the two, where n is the number of buckets in which matrices are exchanged.

    Args:
        found: the result of :func:`estimate`.
        schedule: coefficients of Newton-Schulz.
        memory: the argument with which :func:`estimate` was called.

    Returns:
        {"newton_schulz": operations of Newton-Schulz, "communication": operations that take as long as the
        communication that Newton-Schulz does not hide}
    """
    newton_schulz = communication = 0.0
    for cost in found.costs:
        compute, latency = _busiest_rank(cost, schedule, memory), cost.model.latency_as_flops * cost.collectives
        exchange = cost.model.flops_per_byte * max(cost.sent_bytes) + latency
        total = max(compute, exchange) + min(compute, exchange) / max(1, len(cost.plan.pairs))
        newton_schulz, communication = newton_schulz + compute, communication + total - compute
    return {"newton_schulz": newton_schulz, "communication": communication}


def _busiest_rank(cost: StepCost, schedule: Schedule, memory: Memory) -> float:
    """Return the floating-point operations of Newton-Schulz for one part of a step, on the rank that has most."""
    method, by_rank = cost.part.group.method(schedule, memory.dtype), [0.0] * cost.part.world_size
    computed = 0.5 if memory.has_native_products else 1.0  # the C++ kernels compute one triangle
    for owner, item in zip(cost.plan.owners, cost.plan.items, strict=True):
        rows, cols = item.shape
        by_rank[owner] += flops(rows, cols, schedule, method(rows, cols), memory.dtype, computed)
    return max(by_rank)


def share_of_step(muon: float, per_token: float, tokens: int) -> float:
    """Return Muon's share (0 to 1) of the time of a training step: forward, backward and update.

    ``muon``: the cost of Muon's update. ``per_token``: the cost of forward and backward for one token, in the same
    unit. ``tokens``: tokens of all micro-batches of the step on one rank.
    """
    return muon / (muon + per_token * tokens)


def stock_clipping(groups: Sequence[GroupSpec], gradient_clipping: float) -> dict[str, float]:
    """Return by how much gradient clipping shrinks the updates of the Muon in unmodified ("stock") DeepSpeed.

    Stock DeepSpeed clips Muon's orthogonalized updates instead of the gradients. The norm of all updates is the square
    root of the sum of ``scale^2 min(rows, cols)`` over all matrices, where ``adjust_lr_fn: original`` sets the scale.

    Returns:
        {"gradient_clipping": the setting, "update_norm": norm before clipping, "divided_by": factor by which updates
        shrink (1: not clipped)}
    """
    blocks = [block for group in groups for spec in group.specs for block in spec.blocks]
    norm = math.sqrt(sum(scale_factor("original", b.rows, b.cols) ** 2 * min(b.rows, b.cols) for b in blocks))
    factor = max(1.0, norm / gradient_clipping) if gradient_clipping > 0 else 1.0
    return {"gradient_clipping": gradient_clipping, "update_norm": norm, "divided_by": factor}


#: ``momentum_dtype`` -> bytes of Muon's momentum per element.
MUON_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
#: Bytes of AdamW's exp_avg and exp_avg_sq for one element; of ``step`` for one tensor; of the magnitude of one int8
#: block.
ADAM_STATE_BYTES, STEP_BYTES, ABSMAX_BYTES = 8, 4, 4
#: Bytes of an element of the state that update rules keep of whole matrices.
OWNER_STATE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One parameter group of the optimizer, of Muon or of AdamW, with the settings that determine its costs.

    ``specs``: its parameters. ``rules``: variants of Muon in use, such as NorMuon. The others are keys of the config.
    """

    use_muon: bool
    specs: tuple[MatrixSpec, ...]
    ns_method: str = "auto"
    adjust_lr_fn: str = "original"
    rms_scale: float = 0.2
    momentum_dtype: str = "fp32"
    rules: tuple[Rule, ...] = ()

    def method(self, schedule: Schedule, dtype: str) -> Callable[[int, int], str]:
        """Return a function (rows, cols) -> Newton-Schulz method, "standard" or "gram".

        If ``ns_method`` is ``auto``, the function returns the method with fewer floating-point operations for
        ``schedule``, the coefficients of Newton-Schulz, and ``dtype``, the dtype of its matrix products.
        """
        return cache(partial(method_of, ns_method=self.ns_method, schedule=schedule, dtype=dtype))

    def cost_model(self, schedule: Schedule, dtype: str, wire_bytes: int, device_type: str) -> CostModel:
        """Return the costs of the group's matrices, by which these are divided among ranks.

        ``schedule``, ``dtype``: coefficients of Newton-Schulz, and dtype of its matrix products. ``wire_bytes``,
        ``device_type``: as for :func:`deepspeed.muon.exchange.plan.cost_model`.
        """
        how = NewtonSchulz(schedule=schedule, dtype=dtype, method=self.method(schedule, dtype))
        return cost_model(how.flops, wire_bytes, device_type)

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor by which the orthogonalized update of a matrix is multiplied, without the learning rate."""
        return scale_factor(self.adjust_lr_fn, rows, cols, self.rms_scale)


def group_specs(model: nn.Module, config: MuonConfig, dtype: str = "fp32", device_type: str = "cpu") -> list[GroupSpec]:
    """Return the Muon groups and the AdamW groups of an optimizer for all trainable parameters of ``model``.

    ``model`` may be on the meta device. ``dtype``, ``device_type``: of Newton-Schulz, such as ``fp16`` on ``cuda``.

    Raises:
        MuonConfigError: ``config`` does not fit ``model``; for example, a pattern matches no parameter.
        ValueError: a parameter that Muon cannot update has the tag ``use_muon``.
    """
    keeps_diagonals = device_type == "cpu" and config.kernels != "torch"
    specs = route(model, config)
    check_options(model, specs.values(), config, attention_layers(model) if config.qk_clip else None)
    return [
        GroupSpec(
            specs=tuple(specs[param] for param in group["params"]),
            rms_scale=config.rms_scale,
            momentum_dtype=config.momentum_dtype,
            rules=config.rules,
            ns_method=exact_method(group.get("ns_method", "auto"), dtype, keeps_diagonals),
            **{key: group[key] for key in ("use_muon", "adjust_lr_fn") if key in group},
        )
        for group in split_groups(model.parameters(), specs, config).halves
    ]


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
        """Return the matrices of this part, in the order in which a :class:`Plan` numbers them."""
        return [item for shard in self.shards for item in shard.items]


def lay_out(groups: Sequence[GroupSpec], layout: Layout) -> list[StepPart]:
    """Split parameter groups into the parts that ZeRO updates at once, and return the parts in the order of updates.

    ``layout``: ZeRO's stage, the number of ranks, and how ZeRO splits a group over them.
    """
    split = (_parts_at_stage_0, _parts_at_stages_1_and_2, _parts_at_stages_1_and_2, _parts_at_stage_3)[layout.stage]
    return [part for group in groups for part in split(group, layout)]


def _parts_at_stage_0(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    copies = layout.world_size if group.use_muon else 1
    shards = whole_shards(group.specs, copies)
    numel = sum(spec.numel for spec in group.specs)
    yield StepPart(group=group, shards=shards, tensors=len(shards), numel=numel, world_size=copies)


def _parts_at_stages_1_and_2(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    """Yield the group's only :class:`StepPart` at ZeRO stages 1 and 2, where ranks store slices of its flat buffer."""
    numels, ranks = [spec.numel for spec in group.specs], layout.world_size
    flat = stage12.flat_group(numels, ranks, layout.round_robin, layout.alignment)
    yield _part(group, flat.order, flat.placements, flat.span, ranks)


def _parts_at_stage_3(group: GroupSpec, layout: Layout) -> Iterator[StepPart]:
    """Yield a :class:`StepPart` for each sub-group of a parameter group at ZeRO stage 3."""
    sizes = [stage3.part_size(spec.numel, layout.world_size) for spec in group.specs]
    for indices in stage3.sub_groups(sizes, layout.sub_group_size):
        held = [sizes[index] for index in indices]
        yield _part(group, indices, stage3.placements(held), sum(held), layout.world_size)


def _part(
    group: GroupSpec, indices: Sequence[int], placements: Sequence[Placement], numel: int, world_size: int
) -> StepPart:
    """Return the :class:`StepPart` of some parameters of a group, which each rank stores in one flat tensor.

    ``indices``: which parameters of the group. ``placements``: for each of them, which rank stores which elements.
    ``numel``: size of the flat tensor of one rank.
    """
    pairs = zip(indices, placements, strict=True)
    shards = tuple(Shard(group.specs[index], 0, placement) for index, placement in pairs)
    return StepPart(group=group, shards=shards, tensors=1, numel=numel, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What Muon's update of one :class:`StepPart` costs per step.

    Lists have one number for each of ``part.world_size`` ranks, if not stated otherwise. An owner is a rank that
    orthogonalizes a matrix. A bucket is the matrices that ranks exchange in one collective.

    Args:
        plan: the part's plan for all ranks.
        model: the cost model with which the plan was made.
        flops: floating-point operations of Newton-Schulz.
        heaviest: the most floating-point operations that an owner spends on one matrix.
        sent_bytes: bytes that the rank sends, both momentum to owners and results back.
        least_bytes: the mean of ``sent_bytes`` over ranks if each matrix were owned by the rank that stores most of it.
        collectives: number of collectives that send buckets.
        demands: ``demands[rank][bucket]``, the sizes from which the rank's scratch memory is computed.
        slots: number of buckets in memory at a time.
        owner_state_bytes: bytes of the state that update rules keep, which owners store.
    """

    part: StepPart
    plan: Plan
    model: CostModel
    flops: list[float]
    heaviest: float
    sent_bytes: list[int]
    least_bytes: float
    collectives: int
    demands: list[list[Demand]]
    slots: int
    owner_state_bytes: list[int]


def step_cost(part: StepPart, cost: CostModel, bucket_bytes: int | None = None, staged: bool = False) -> StepCost:
    """Plan Muon's update of one part of a step for all ranks, and return its cost.

    Args:
        cost: the model by which matrices are divided among ranks.
        bucket_bytes: the config's ``bucket_bytes``; ``None`` for the default.
        staged: whether shards are in host memory while Newton-Schulz runs on an accelerator.
    """
    plan = plan_partition(part.shards, part.world_size, cost, bucket_bytes)
    if plan.world_size < part.world_size:  # each rank does all the work
        part = replace(part, shards=plan.shards, world_size=1)
    flops, state_bytes, heaviest = [0.0] * part.world_size, [0] * part.world_size, 0.0
    owned = [*zip(plan.owners, plan.items, strict=True)]
    for owner, item in owned:
        operations = cost.flops(*item.shape)
        flops[owner] += operations
        heaviest = max(heaviest, operations)
        shapes = state_shapes(part.group.rules, item.shape, item.axis)
        state_bytes[owner] += OWNER_STATE_BYTES * sum(map(math.prod, shapes.values()))
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
        collectives=len(plan.pairs) * (2 if plan.copies == 1 else 1) if any(traffic.sent) else 0,
        demands=demands_of(plan),
        slots=plan.slots(travels),
        owner_state_bytes=state_bytes,
    )


class _Traffic(NamedTuple):
    """The communication of a step, in elements. The owner of a matrix is the rank that orthogonalizes it.

    ``sent``: for each rank, how many elements it sends to owners and, as an owner, back. ``least``: the sum of ``sent``
    if each matrix were owned by the rank that stores most of it.
    """

    sent: list[int]
    least: int


def _traffic_of_replicas(plan: Plan) -> _Traffic:
    """Return the traffic if each rank stores all matrices, so that owners only send results, to all others."""
    sent = plan.sent_elements  # equal parts, with padding
    return _Traffic([sent] * plan.world_size, sent * plan.world_size)


def _traffic(owned: OwnedBlocks, world_size: int) -> _Traffic:
    """Return the traffic if matrices are sharded, so that ranks send their pieces to owners and get results back.

    ``owned``: all (owner, matrix) pairs of one part of the step.
    """
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
