# SPDX-License-Identifier: Apache-2.0
"""Forecast what a step costs: bytes and operations of each rank, milliseconds at given rates."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.memory import Memory, PartitionDemand, Peak, peak
from deepspeed.muon.exchange.plan import without_collector
from deepspeed.muon.forecast.layout import GroupSpec, Layout, StepCost, StepPart, lay_out, step_cost
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops
from deepspeed.muon.math.rules import scale_factor

#: Bytes that NCCL takes for all-to-all on each of so many GPUs.
NCCL_BYTES, RANKS_OF_A_NODE = 3.28e9, 8


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The plan of one optimizer step for all ranks, and its costs.

    ``parts``: the parameter groups or, at stage 3, their sub-groups, in the order in which ZeRO updates them.
    ``costs``: one for each part that Muon updates. ``peak``: scratch memory of the rank that needs most.
    ``planning_seconds``: how long planning took.
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
        memory: the dtype of Newton-Schulz, the dtype of sent matrices, and the type of the device.
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
    """Return the scratch memory of the rank that needs most."""
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
    """Return about how many bytes NCCL keeps on a rank for the exchange; 0 without all-to-alls or accelerators.

    NVIDIA/nccl#1685: on eight H100s the first all-to-all takes memory from 1.06 to 4.34 GB. Nobody has reported how it
    grows with ranks in other nodes, which are left out.
    """
    peers = min(found.world_size, RANKS_OF_A_NODE) - 1
    has_all_to_alls = found.layout.stage > 0 and any(cost.collectives for cost in found.costs)
    return NCCL_BYTES * peers / (RANKS_OF_A_NODE - 1) if has_all_to_alls and device_type == "cuda" else 0.0


def per_rank(found: Estimate) -> dict[str, Any]:
    """Return the object ``per_rank`` of ``ds_muon plan --json``: the mean and maximum over ranks of a step's costs."""
    costs, world_size = found.costs, found.world_size
    shards = sum(part.state_bytes for part in found.parts)
    state = [shards + moments for moments in _sums_per_rank([cost.moment_bytes for cost in costs], world_size)]
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
        "buckets": sum(len(cost.plan.buckets) for cost in costs),
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
    """Return what Muon costs in a step, in floating-point operations of the busiest rank.

    Of a symmetric product, only what kernels compute counts. Bytes and collectives count as the operations that the
    device could do in the same time, according to the planner's :class:`deepspeed.muon.exchange.plan.CostModel`. The
    exchange and Newton-Schulz overlap, except for one bucket's share of the shorter of the two.

    Args:
        schedule: coefficients of Newton-Schulz.
        memory: the argument that :func:`estimate` was called with.

    Returns:
        {"newton_schulz": operations of Newton-Schulz, "communication": operations that take as long as the
        communication that Newton-Schulz does not hide}
    """
    newton_schulz = communication = 0.0
    for cost in found.costs:
        compute, latency = _busiest_rank(cost, schedule, memory), cost.model.latency_as_flops * cost.collectives
        exchange = cost.model.flops_per_byte * max(cost.sent_bytes) + latency
        total = max(compute, exchange) + min(compute, exchange) / max(1, len(cost.plan.buckets))
        newton_schulz, communication = newton_schulz + compute, communication + total - compute
    return {"newton_schulz": newton_schulz, "communication": communication}


def _busiest_rank(cost: StepCost, schedule: Schedule, memory: Memory) -> float:
    """Return the operations of Newton-Schulz on the rank with most to do."""
    method, by_rank = cost.part.group.method(schedule, memory.dtype), [0.0] * cost.part.world_size
    computed = 0.5 if memory.has_native_products else 1.0  # the C++ kernels compute one triangle
    for owner, item in zip(cost.plan.owners, cost.plan.items, strict=True):
        rows, cols = item.shape
        by_rank[owner] += flops(rows, cols, schedule, method(rows, cols), memory.dtype, computed)
    return max(by_rank)


def share_of_step(muon: float, per_token: float, tokens: int) -> float:
    """Return Muon's share (0 to 1) of a step with ``tokens`` tokens per rank, accumulation included.

    ``muon``: the cost of Muon's update. ``per_token``: the cost of forward and backward for one token, in the same
    unit.
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
