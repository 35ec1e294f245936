# SPDX-License-Identifier: Apache-2.0
"""The real loop of a step, with phases and an exchange of a test's own."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.step import PartitionStep


def run_loop(plan: Plan, exchange: Any, **phases: Callable[..., None]) -> None:
    """Run :meth:`PartitionStep.run`; ``phases``: `prepare`, `apply`: of values, buffers; `orthogonalize`: buffers."""
    step = PartitionStep.__new__(PartitionStep)
    step.__dict__ |= {"plan": plan, "exchange": exchange, "_is_int8": False}
    step.__dict__ |= {f"_{name}": phase for name, phase in phases.items()}
    step.run(SimpleNamespace(open_buckets={}, phase=nullcontext))  # type: ignore[arg-type]
