# SPDX-License-Identifier: Apache-2.0
"""Programs of random jobs break no rule, and the checker finds every broken program.

No rank hangs, every element travels once each way, and every matrix is orthogonalized once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deepspeed.muon.plan.checker import conflict, lost_elements, violation
from deepspeed.muon.plan.owners import is_sliceable
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.plan.plan import Plan, global_plan
from deepspeed.muon.plan.program import Apply, Collective, Compute, Group, Open, Program, Send, Wait, program_of
from helpers.jobs import check_job, newton_schulz, random_job
from helpers.plans import COST, part_layout, specs


def check_jobs(seeds: range, most_ranks: int) -> None:
    for seed in seeds:
        grid, parts = random_job(seed, most_ranks)
        try:
            check_job(grid, parts)
        except AssertionError as error:
            raise AssertionError(f"the job of seed {seed} with at most {most_ranks} ranks, {grid}: {error}") from error


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_jobs_break_no_rule(first: int) -> None:
    check_jobs(range(first, first + 100), most_ranks=12)


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("first", range(1000, 21_000, 2000))
def test_many_jobs_break_no_rule(first: int) -> None:
    """On up to 64 ranks."""
    check_jobs(range(first, first + 1000), most_ranks=12)
    check_jobs(range(first + 1000, first + 2000), most_ranks=64)


SHAPES = [(8, 4), (4, 8), (16, 12), (6, 5), (8, 4), (16, 12), (4, 8), (8, 4)] * 2
#: Shapes, ZeRO stage, ranks, bytes of a bucket, and owners of each matrix that can be cut among so many.
SHARDED, SHARED, SLICED = (SHAPES, 3, 4, 60, 1), (SHAPES, 0, 4, 200, 1), (SHAPES, 3, 4, 200, 2)
every_job = pytest.mark.parametrize("job", [SHARDED, SHARED, SLICED], ids=["stage 3", "stage 0", "owners"])


def plans_of(shapes: list[tuple[int, int]], stage: int, world: int, bucket_bytes: int, owners: int) -> list[Plan]:
    items = specs(shapes)
    replicated = [Shard(spec, i, Placement(0, spec.numel, 0, world)) for i, spec in enumerate(items)]
    shards = part_layout(items, world)[0] if stage else replicated
    counts = [owners if is_sliceable(block, owners) else 1 for shard in shards for block in shard.spec.blocks]
    plan = global_plan(shards, world, COST, bucket_bytes, counts)
    return [plan.view(rank) for rank in range(world)]


def programs_of(*args: Any) -> list[Program]:
    return [program_of(plan, "bf16", False, newton_schulz()) for plan in plans_of(*args)]


# ---- what one rank does otherwise -------------------------------------------------------------------------------


def faults(programs: list[Program], place: int, *instead: Any) -> str | None:
    """The violation where rank 1 does other operations in one place of its program."""
    changed = (*programs[1][:place], *instead, *programs[1][place + 1 :])
    return violation([programs[0], changed, *programs[2:]])


@every_job
def test_an_operation_that_is_missing_or_twice_is_found(job: tuple) -> None:
    programs = programs_of(*job)
    assert violation(programs) is None and len(programs[1]) > 20
    for place, operation in enumerate(programs[1]):
        for instead in ((), (operation, operation)):
            assert faults(programs, place, *instead) is not None, operation


@every_job
def test_a_call_that_is_missing_or_twice_or_of_another_size_or_dtype_is_found(job: tuple) -> None:
    programs, found = programs_of(*job), 0
    for place, operation in enumerate(programs[1]):
        calls = getattr(operation, "collectives", ())
        for index, call in enumerate(calls):
            size = {"sent": (call.sent[0] + 1, *call.sent[1:])} if call.sent else {"numel": call.numel + 1}
            for instead in ((), (call, call), (replace(call, **size),), (replace(call, dtype="int8"),)):
                other = replace(operation, collectives=calls[:index] + instead + calls[index + 1 :])
                assert faults(programs, place, other) is not None, call
                found += 1
    assert found >= 4 * 7


def swapped(program: list[Any]) -> None:
    """Two operations issue each other's collectives."""
    first, second = [i for i, operation in enumerate(program) if isinstance(operation, Send) and operation.collectives][
        :2
    ]
    one, other = program[first], program[second]
    program[first] = replace(one, collectives=other.collectives)
    program[second] = replace(other, collectives=one.collectives)


def one_storage(program: list[Any]) -> None:
    program[:] = [replace(one, storage=0) if isinstance(one, Open) else one for one in program]


def opened_early(program: list[Any]) -> None:
    """A storage is taken before the last way back of its bucket has ended."""
    applied = next(i for i, operation in enumerate(program) if isinstance(operation, Apply))
    storage = next(o.storage for o in program if isinstance(o, Open) and o.bucket == program[applied].bucket)
    later = next(i for i, o in enumerate(program) if i > applied and isinstance(o, Open) and o.storage == storage)
    program.insert(applied - 1, program.pop(later))


def overwritten(program: list[Any]) -> None:
    """The last results of a round are sent from a storage that the next round has taken."""
    rounds = [o for o in program if isinstance(o, Open) and o.own == o.bucket]
    again = next(o for o in rounds[1:] if o.storage == rounds[0].storage)
    last = max(o.bucket for o in program if isinstance(o, Open) and o.own == rounds[0].bucket)
    program.remove(again)
    program.insert(next(i for i, o in enumerate(program) if isinstance(o, Wait) and o.back and o.bucket == last), again)


@pytest.mark.parametrize("job", [SHARDED, SHARED], ids=["stage 3", "stage 0"])
@pytest.mark.parametrize("broken", [swapped, one_storage, opened_early, overwritten], ids=lambda one: one.__name__)
def test_a_broken_order_is_found(broken: Callable[[list[Any]], None], job: tuple) -> None:
    first, *others = programs_of(*job)
    broken(program := list(first))
    assert violation([tuple(program), *others]) is not None


def test_results_that_leave_before_they_are_computed_are_found() -> None:
    first, *others = programs_of(*SHARED)
    program, own = list(first), first[1].bucket
    computed = next(i for i, o in enumerate(program) if isinstance(o, Compute) and o.bucket == own)
    late = [operation for operation in program[computed:] if operation.bucket == own]
    program = [operation for operation in program if operation not in late]
    sent = next(i for i, o in enumerate(program) if isinstance(o, Send) and o.bucket > own and o.back)
    program[sent + 1 : sent + 1] = late
    assert "before they are computed" in str(violation([tuple(program), *others]))


@every_job
def test_an_element_that_is_lost_or_twice_is_found(job: tuple) -> None:
    """Every run of one rank, and everything that arrives, left out or done twice."""
    plans, found = plans_of(*job), 0
    assert plans[0].of_all.copies == (1 if job[1] else 4)
    for number, bucket in enumerate(plans[1].buckets):
        for name in ("runs", "received"):
            whole = getattr(bucket, name)
            for index in range(len(whole)):
                for part in (whole[:index] + whole[index + 1 :], (*whole, whole[index])):
                    changed = list(plans[1].buckets)
                    changed[number] = replace(bucket, **{name: part})
                    assert lost_elements([plans[0], replace(plans[1], buckets=tuple(changed)), *plans[2:]]) is not None
                    found += 1
    assert found >= 30


# ---- the order of all calls -------------------------------------------------------------------------------------


def calls_of(*orders: str) -> list[list[Collective]]:
    """By rank the groups in which it calls, such as "01 12"."""
    return [[Collective("all_reduce", Group(tuple(map(int, ranks))), "fp32", 8) for ranks in o.split()] for o in orders]


#: Every rank of the world makes each group, as torch splits the world's communicator on NCCL.
MAKES = [Collective(f"new_group of ranks {first} to {first + 1}", Group(range(4))) for first in (0, 2)]


@pytest.mark.parametrize(
    ("calls", "texts"),
    [
        (calls_of("01 02", "01 12", "12 02"), ["None"]),
        (calls_of("01 012 01", "012 01", "012"), ["waits in"]),
        (  # though no two ranks share two groups, and each communicator has its calls in order
            calls_of("01 02", "12 01", "02 12"),
            [
                "rank 0 waits in all_reduce of 8 fp32 elements among ranks 0 to 1; rank 1 waits in",
                "rank 2 waits in all_reduce of 8 fp32 elements among ranks 0, 2",
            ],
        ),
        (calls_of("01", "01", "01"), ["rank 2 calls"]),
        (calls_of("01 01", "01"), ["rank 1 makes no further call"]),
        ([MAKES] * 4, ["None"]),
        ([MAKES[:1], MAKES[:1], MAKES[1:], MAKES[1:]], ["rank 2 calls new_group of ranks 2 to 3"]),
    ],
    ids=["in order", "two groups", "a circle", "a foreign group", "a rank stops", "groups", "groups of members only"],
)
def test_calls_that_wait_for_each_other_are_found(calls: list[list[Collective]], texts: list[str]) -> None:
    assert all(text in str(conflict(calls)) for text in texts)
