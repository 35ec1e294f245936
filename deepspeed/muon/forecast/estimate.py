# SPDX-License-Identifier: Apache-2.0
"""A forecast in numbers: totals, bytes and operations per rank, and milliseconds on a stated machine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.muon.forecast.layout import Half, Layout, StepCost, StepPart, lay_out, step_cost
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.scale import scale_factor
from deepspeed.muon.plan.cost import cost_model

#: Bytes read and written per element by torch's fused AdamW: gradient, parameter and two moments; all but the first
#: are written.
ADAM_PASS_BYTES = 28
#: The same for what a bf16 momentum takes beyond an fp32 one: reading it up 6, random bits 108, rounding 62. At most,
#: since the temporaries are chunks that a cache may hold.
ROUNDING_PASS_BYTES = 176


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one rank can do; the defaults are those of one H100 on a fabric of 400 Gbit/s per rank.

    ``message_us``: of each message that a rank sends in an all-to-all. ``run_us``: of the host per run of a shard, for
    the launches of its elementwise passes. Both are assumed, not measured.
    """

    tflops: float = 400.0
    memory_gbs: float = 3000.0
    network_gbs: float = 50.0
    latency_us: float = 50.0
    message_us: float = 1.0
    run_us: float = 30.0
    host_memory_gbs: float = 40.0


def estimate(
    halves: Sequence[Half],
    layout: Layout,
    schedule: Schedule,
    itemsize: int,
    device_type: str,
    machine: Machine,
    offload: bool,
) -> tuple[dict[str, Any], list[StepCost]]:
    """Everything that the command prints but the table.

    Args:
        schedule: of Newton-Schulz.
        itemsize: bytes of one element of Newton-Schulz and its exchange.
        device_type: ``cpu``, or an accelerator's.
        offload: whether the shards are in the host's memory.

    Returns:
        Sections ``totals``, ``per_rank``, ``step_ms``, ``planning_seconds``, and the Muon parts they come from.
    """
    began = time.perf_counter()
    parts = lay_out(halves, layout)
    works = [
        step_cost(part, cost_model(part.half.ns_method, schedule, itemsize, device_type))
        for part in parts
        if part.half.use_muon
    ]
    seconds = time.perf_counter() - began
    facts = {
        "totals": {"muon": _totals(halves, True), "adamw": _totals(halves, False)},
        "per_rank": _per_rank(parts, works, layout.world_size),
        "step_ms": _milliseconds(parts, works, itemsize, machine, offload),
        "planning_seconds": round(seconds, 3),
    }
    return facts, works


def _totals(halves: Sequence[Half], use_muon: bool) -> dict[str, int]:
    specs = [spec for half in halves if half.use_muon is use_muon for spec in half.specs]
    return {
        "tensors": len(specs),
        "parameters": sum(spec.numel for spec in specs),
        "matrices": sum(len(spec.blocks) for spec in specs),
    }


def _per_rank(parts: Sequence[StepPart], works: Sequence[StepCost], world_size: int) -> dict[str, Any]:
    state = sum(part.state_bytes for part in parts)
    sent = _by_rank([work.sent_bytes for work in works], world_size)
    work = _by_rank([work.flops for work in works], world_size)
    mean = sum(work) / world_size
    # Parts are stepped one after the other, so each waits for its own busiest rank.
    waited_for = sum(max(work.flops) for work in works)
    return {
        "state_bytes": {"mean": state, "max": state},
        "sent_bytes": {
            "mean": sum(sent) / world_size,
            "max": max(sent),
            "least_mean": sum(work.least_bytes for work in works),
        },
        "newton_schulz_gflop": {
            "mean": mean / 1e9,
            "max": max(work) / 1e9,
            "heaviest_matrix": max((work.heaviest for work in works), default=0.0) / 1e9,
        },
        "imbalance": waited_for / mean if mean else 1.0,
        "parts": len(works),
        "rounds": sum(work.rounds for work in works),
        "collectives": sum(work.collectives for work in works),
    }


def _by_rank(lists: Sequence[Sequence[float]], world_size: int) -> list[float]:
    """Sums by rank; a part that every rank has whole counts for each."""
    sums = [0.0] * world_size
    for values in lists:
        spread = values if len(values) == world_size else list(values) * world_size
        sums = [a + b for a, b in zip(sums, spread, strict=True)]
    return sums


def _milliseconds(
    parts: Sequence[StepPart], works: Sequence[StepCost], itemsize: int, machine: Machine, offload: bool
) -> dict[str, float]:
    """The elementwise pass, then per part Newton-Schulz and exchange, which run at the same time.

    The first round's way there and the last one's way back overlap with nothing, so of the shorter of the two one
    round's share adds to the longer.
    """
    rate = machine.host_memory_gbs if offload else machine.memory_gbs
    elementwise = sum(part.numel * pass_bytes(part.half, itemsize) for part in parts) / (rate * 1e6)
    elementwise += sum(work.runs for work in works) * machine.run_us / 1e3
    compute = [max(work.flops) / (machine.tflops * 1e9) for work in works]
    travel = [_travel(work, machine) for work in works]
    together = sum(max(c, t) + min(c, t) / max(1, w.rounds) for c, t, w in zip(compute, travel, works, strict=True))
    return {
        "elementwise": elementwise,
        "newton_schulz": sum(compute),
        "exchange": sum(travel),
        "total": elementwise + together,
    }


def _travel(work: StepCost, machine: Machine) -> float:
    most = max(work.sent_bytes)
    if not most:
        return 0.0
    waits = work.collectives * machine.latency_us + work.messages * machine.message_us
    return most / (machine.network_gbs * 1e6) + waits / 1e3


def pass_bytes(half: Half, itemsize: int) -> int:
    """Bytes read and written per element of a shard in one step, beside Newton-Schulz and the exchange.

    Muon: momentum 12, look-ahead 12, cast in and out 8 and twice the itemsize, decay 8, update 12.
    """
    if not half.use_muon:
        return ADAM_PASS_BYTES
    rounding = ROUNDING_PASS_BYTES * (half.momentum_dtype == "bf16")
    return rounding + 12 + 12 * half.nesterov + 8 + 2 * itemsize + 8 * half.decays + 12


def stock_clipping(halves: Sequence[Half], gradient_clipping: float) -> dict[str, float]:
    """What stock DeepSpeed's clipping does to its updates, which it orthogonalizes before it clips.

    The norm of an orthogonalized update is the root of the sum of ``scale^2 min(rows, cols)`` over the matrices, with
    stock's scale ``original``.

    Returns:
        ``gradient_clipping``, ``update_norm``, and ``divided_by``: 1 where nothing is clipped.
    """
    blocks = [block for half in halves for spec in half.specs for block in spec.blocks]
    squares = (scale_factor("original", b.rows, b.cols) ** 2 * min(b.rows, b.cols) for b in blocks)
    norm = math.sqrt(sum(squares))
    factor = max(1.0, norm / gradient_clipping) if gradient_clipping > 0 else 1.0
    return {"gradient_clipping": gradient_clipping, "update_norm": norm, "divided_by": factor}


def assumptions(machine: Machine, device_type: str, ns_dtype: str, offload: bool) -> list[str]:
    """What the milliseconds rest on, one sentence each."""
    where = "the host's memory, where ZeRO offloads the shards," if offload else "memory"
    rate = machine.host_memory_gbs if offload else machine.memory_gbs
    balance = "a CPU on gloo" if device_type == "cpu" else "an accelerator on its fabric"
    return [
        f"Newton-Schulz in {ns_dtype} at {machine.tflops:g} TFLOP/s, every matrix shape alike",
        f"the elementwise pass moves {rate:g} GB/s through {where} and is not overlapped with anything",
        f"a rank sends {machine.network_gbs:g} GB/s and receives as much at the same time; "
        f"a collective takes {machine.latency_us:g} us besides, and {machine.message_us:g} us for each message",
        f"a run of a shard takes {machine.run_us:g} us of the host, for the launches of its elementwise pass",
        "of each group or sub-group Newton-Schulz and exchange overlap but for one round's share of the shorter; "
        "one waits for the busiest rank",
        f"owners are balanced for {balance}; one user group of all trainable parameters",
        "not counted: ZeRO's own gradient reduction, parameter gathering, casts and norm",
    ]
