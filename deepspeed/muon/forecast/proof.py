# SPDX-License-Identifier: Apache-2.0
"""Runs the checker over the programs of all ranks of a forecast."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.forecast.estimate import Estimate
from deepspeed.muon.plan.checker import lost_elements, violation
from deepspeed.muon.plan.memory import Memory
from deepspeed.muon.plan.plan import without_collector
from deepspeed.muon.plan.program import NewtonSchulz, program_of


@dataclass(frozen=True)
class Proof:
    """What was checked.

    ``operations``: of the programs of all ranks. ``fault``: the first rule that they break, ``None`` if none.
    """

    operations: int
    ranks: int
    fault: str | None
    seconds: float


@without_collector()
def prove(found: Estimate, config: MuonConfig, memory: Memory) -> Proof:
    """Check a step of all parts of a forecast, which are stepped one after the other.

    Args:
        memory: as for the forecast.
    """
    began, operations = time.perf_counter(), 0
    for cost in found.costs:
        half = cost.part.half
        newton_schulz = NewtonSchulz(
            schedule=config.schedule,
            method=half.method(config.schedule, memory.dtype),
            dtype=memory.dtype,
            device_type=memory.device_type,
        )
        views = [cost.plan.view(rank) for rank in range(cost.plan.world_size)]
        programs = [program_of(view, memory.wire, memory.staged, newton_schulz) for view in views]
        # A part that every rank updates whole has one program, which each of them runs.
        operations += sum(map(len, programs)) * (found.world_size // cost.plan.world_size)
        sizes = {item.matrix: item.block.numel for item in cost.plan.items}
        if fault := violation(programs) or lost_elements(views, sizes, cost.plan.copies):
            return Proof(operations, found.world_size, fault, time.perf_counter() - began)
    return Proof(operations, found.world_size, None, time.perf_counter() - began)
