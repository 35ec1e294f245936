# SPDX-License-Identifier: Apache-2.0
"""No rank waits for a collective that another rank never calls, and no bucket is written over another one."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.step import PartitionStep
from helpers.jobs import random_job

PHASES = ["open", "prepare", "send", "wait", "orthogonalize", "send_back", "wait_back", "apply"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_order_of_a_step(first: int) -> None:
    for part in (part for seed in range(first, first + 100) for part in random_job(seed)):
        slots = {view.slots(view.travels(part.staged)) for view in part.views}
        assert len(slots) == 1
        for buckets in zip(*(view.buckets for view in part.views), strict=True):
            assert len({(bucket.travels, bucket.gathered_part) for bucket in buckets}) == 1
            sent = [bucket.send_counts for bucket in buckets]
            assert sent == [*zip(*(bucket.receive_counts for bucket in buckets), strict=True)]
        for view in part.views:
            check_loop(view, part.staged, *slots)


def check_loop(plan: Plan, is_staged: bool, slots: int) -> None:
    """Assert that the loop takes each bucket through its phases in order, with at most one bucket in each slot."""
    seen: list[list[str]] = [[] for _ in plan.buckets]
    numbers, held = [*range(len(plan.buckets))], dict[int, int]()  # slot -> the bucket in it
    (_, (_, allocated)), *calls = calls_of(plan, is_staged)
    assert allocated == slots
    for phase, args in calls:
        number = args[1] if phase == "open" else args[-1]
        if phase == "open":
            assert number == numbers.pop(0) and args[2:] == (number % slots,) * 2 and args[3] not in held
            held[args[3]] = number
        seen[number].append(phase)
        if phase == "apply":
            assert held.pop(number % slots) == number
    assert seen == [PHASES] * len(plan.buckets) and not held


def calls_of(plan: Plan, is_staged: bool) -> list[tuple[str, Any]]:
    """Return (phase, arguments) for each call of a step; the buffers of a bucket are its number."""
    log = Mock(is_staged=is_staged)
    log.allocate.side_effect = lambda _, slots: [*range(slots)]
    log.open.side_effect = lambda _, number, memory, slot: number
    step: Any = PartitionStep.__new__(PartitionStep)
    step.plan, step.exchange, step._is_int8 = plan, log, False
    step._prepare, step._orthogonalize, step._apply = log.prepare, log.orthogonalize, log.apply
    step.run(SimpleNamespace(open_buckets={}, phase=nullcontext))
    return [(name, args) for name, args, _ in log.mock_calls]
