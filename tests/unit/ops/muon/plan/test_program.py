# SPDX-License-Identifier: Apache-2.0
"""The checker finds every broken program. Programs that break no rule: test_jobs.py."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.muon.plan.checker import conflict, lost_elements, violation
from deepspeed.muon.plan.owners import is_sliceable
from deepspeed.muon.plan.placement import PlacedBlock, Placement, Shard
from deepspeed.muon.plan.plan import Plan, global_plan
from deepspeed.muon.plan.program import (
    Apply,
    Collective,
    Compute,
    Group,
    Look,
    NewtonSchulz,
    Open,
    Program,
    Send,
    Wait,
    collectives_of,
    program_of,
)
from helpers.jobs import newton_schulz
from helpers.plans import COST, flat_layout, part_layout, specs


def plans_of(
    shapes: list[tuple[int, int]],
    stage: int,
    world: int,
    bucket_bytes: int,
    device_type: str,
    split: bool,
    owners: int = 1,
) -> list[Plan]:
    """`owners`: of every matrix that can be cut among so many, where these fit the ranks."""
    items = specs(shapes, split)
    if stage == 0:
        shards = [Shard(spec, i, Placement(0, spec.numel, 0, world)) for i, spec in enumerate(items)]
    else:
        shards, _ = (part_layout if stage == 3 else flat_layout)(items, world)
    cost = replace(COST, device_type=device_type)
    blocks = [block for shard in shards for block in shard.spec.blocks]
    counts = [owners if world % owners == 0 and is_sliceable(block, owners) else 1 for block in blocks]
    plan = global_plan(shards, world, cost, bucket_bytes, counts)
    return [plan.view(rank) for rank in range(world)]


def programs_of(*args: Any, staged: bool = False, how: NewtonSchulz | None = None) -> list[Program]:
    return [program_of(plan, "bf16", staged, how or newton_schulz()) for plan in plans_of(*args)]


def sizes_of(shapes: list[tuple[int, int]], split: bool) -> dict[str, int]:
    items = [PlacedBlock(Shard(s, 0, Placement(0, 1, 0)), block) for s in specs(shapes, split) for block in s.blocks]
    return {item.matrix: item.block.numel for item in items}


def sent_by(program: Program) -> list[Collective]:
    return [one for operation in program if isinstance(operation, Send) for one in operation.collectives]


SHAPES = [(8, 4), (4, 8), (16, 12), (6, 5), (8, 4), (16, 12), (4, 8), (8, 4)]
SHARDED = (SHAPES * 2, 3, 4, 60, "cpu", False)
SHARED = (SHAPES * 2, 0, 4, 200, "cpu", False)
SLICED = (SHAPES * 2, 3, 4, 200, "cpu", False, 2)
Break = Callable[[list[Program]], None]


def sends(program: Program) -> list[int]:
    """Places of the operations that issue collectives."""
    return [i for i, operation in enumerate(program) if isinstance(operation, Send) and operation.collectives]


def without_collectives(programs: list[Program]) -> None:
    """A rank that owns and holds nothing, and does not take part."""
    programs[2] = tuple(
        dataclasses.replace(operation, collectives=()) if isinstance(operation, Send) else operation
        for operation in programs[2]
    )


def swapped(programs: list[Program]) -> None:
    program = list(programs[1])
    first, second = sends(programs[1])[:2]
    one, other = program[first], program[second]
    program[first] = dataclasses.replace(one, collectives=other.collectives)
    program[second] = dataclasses.replace(other, collectives=one.collectives)
    programs[1] = tuple(program)


def other_sizes(programs: list[Program]) -> None:
    """As where a rank's number of threads decides them."""
    program, place = list(programs[3]), sends(programs[3])[0]
    one = program[place].collectives[0]
    if one.sent:
        one = dataclasses.replace(one, sent=(one.sent[0] + 1, *one.sent[1:]))
    else:
        one = dataclasses.replace(one, numel=one.numel + 1)
    program[place] = dataclasses.replace(program[place], collectives=(one, *program[place].collectives[1:]))
    programs[3] = tuple(program)


def another_plan(programs: list[Program]) -> None:
    """One rank has the plan of another checkpoint."""
    stage = 3 if any(one.sent for one in sent_by(programs[0])) else 0
    programs[1] = programs_of(SHAPES * 2, stage, 4, 2**20, "cpu", False)[1]


def one_storage(programs: list[Program]) -> None:
    programs[0] = tuple(
        dataclasses.replace(operation, storage=0) if isinstance(operation, Open) else operation
        for operation in programs[0]
    )


def opened_early(programs: list[Program]) -> None:
    """A storage is taken before the last way back of its bucket has ended."""
    program = list(programs[0])
    applied = next(i for i, operation in enumerate(program) if isinstance(operation, Apply))
    storage = next(o.storage for o in program if isinstance(o, Open) and o.bucket == program[applied].bucket)
    later = next(i for i, o in enumerate(program) if i > applied and isinstance(o, Open) and o.storage == storage)
    program.insert(applied - 1, program.pop(later))
    programs[0] = tuple(program)


def never_awaited(programs: list[Program]) -> None:
    place = next(i for i, operation in enumerate(programs[0]) if isinstance(operation, Wait) and operation.back)
    programs[0] = programs[0][:place] + programs[0][place + 1 :]


def ends_early(programs: list[Program]) -> None:
    programs[0] = programs[0][:-1]


def test_results_that_leave_before_they_are_computed_are_found() -> None:
    programs = programs_of(*SHARED)
    program, own = list(programs[0]), programs[0][1].bucket
    computed = next(i for i, o in enumerate(program) if isinstance(o, Compute) and o.bucket == own)
    late = [operation for operation in program[computed:] if operation.bucket == own]
    program = [operation for operation in program if operation not in late]
    sent = next(i for i, o in enumerate(program) if isinstance(o, Send) and o.bucket > own and o.back)
    programs[0] = (*program[: sent + 1], *late, *program[sent + 1 :])
    assert "before they are computed" in str(violation(programs))


def overwritten(programs: list[Program]) -> None:
    """The last results of a round are sent from a storage that the next round has taken."""
    program = list(programs[0])
    rounds = [o for o in program if isinstance(o, Open) and o.own == o.bucket]
    again = next(o for o in rounds[1:] if o.storage == rounds[0].storage)
    last = max(o.bucket for o in program if isinstance(o, Open) and o.own == rounds[0].bucket)
    program.remove(again)
    first = next(i for i, o in enumerate(program) if isinstance(o, Wait) and o.back and o.bucket == last)
    program.insert(first, again)
    programs[0] = tuple(program)


def between_others(programs: list[Program]) -> None:
    """One rank takes another method of Newton-Schulz for a matrix that it owns with others."""
    changed = programs_of(*SLICED, how=dataclasses.replace(newton_schulz(), method=lambda rows, cols: "standard"))
    programs[2] = changed[2]


def other_batches(programs: list[Program]) -> None:
    """One rank orthogonalizes fewer matrices at a time, as where its number of threads decides that."""
    is_large = any(call.kind == "all_gather" and call.numel > 2 for call in collectives_of(programs[2]))
    assert is_large
    program = []
    for operation in programs[2]:
        if isinstance(operation, Compute) and operation.collectives:
            first = operation.collectives[0]
            halves = (dataclasses.replace(first, numel=2),) * (first.numel // 2)
            operation = dataclasses.replace(operation, collectives=halves + operation.collectives[1:])
        program.append(operation)
    programs[2] = tuple(program)


def no_flags(programs: list[Program]) -> None:
    """One rank does not ask for gradients."""
    programs[3] = (Look(()), *programs[3][1:])


def other_precision(programs: list[Program]) -> None:
    """One rank forms its products in another dtype."""
    programs[1] = programs_of(*SLICED, how=newton_schulz("fp32"))[1]


@pytest.mark.parametrize("broken", [between_others, other_batches, no_flags, other_precision], ids=lambda b: b.__name__)
def test_broken_calls_of_owners_are_found(broken: Break) -> None:
    programs = programs_of(*SLICED)
    assert violation(programs) is None
    broken(programs)
    assert violation(programs) is not None


def test_every_call_of_owners_matters() -> None:
    """One that is left out, made twice, or made with other sizes by one rank is found."""
    programs, found = programs_of(*SLICED), 0
    for place, operation in enumerate(programs[1]):
        calls = operation.collectives if isinstance(operation, Compute) else ()
        for index, call in enumerate(calls):
            larger = dataclasses.replace(call, numel=call.numel + 1)
            for instead in ((), (call, call), (larger,)):
                changed = dataclasses.replace(operation, collectives=calls[:index] + instead + calls[index + 1 :])
                other = (*programs[1][:place], changed, *programs[1][place + 1 :])
                assert violation([programs[0], other, *programs[2:]]) is not None, call
                found += 1
    assert found > 100


def calls_of(*orders: str) -> list[list[Collective]]:
    """By rank the groups in which it calls, such as "01 12"."""
    return [[Collective("all_reduce", Group(tuple(map(int, ranks))), "fp32", 8) for ranks in o.split()] for o in orders]


def test_calls_that_wait_for_each_other_are_found() -> None:
    """Also where no two ranks share two groups, and where each communicator has its calls in order."""
    assert conflict(calls_of("01 012 01", "012 01", "012")) is not None
    assert conflict(calls_of("01 02", "01 12", "12 02")) is None
    text = str(conflict(calls_of("01 02", "12 01", "02 12")))
    assert text.startswith("rank 0 waits in all_reduce of 8 fp32 elements among ranks 0 to 1; rank 1 waits in"), text
    assert "rank 2 waits in all_reduce of 8 fp32 elements among ranks 0, 2" in text


def test_groups_that_only_their_members_make_are_found() -> None:
    """Every rank of the world makes each group, as torch splits the world's communicator on NCCL."""
    world = Group(range(4))
    makes = [Collective(f"new_group of ranks {first} to {first + 1}", world) for first in (0, 2)]
    assert conflict([makes] * 4) is None
    assert "rank 2 calls new_group of ranks 2 to 3" in str(conflict([makes[:1], makes[:1], makes[1:], makes[1:]]))


def test_a_rank_that_calls_in_a_foreign_group_is_found() -> None:
    assert "rank 2 calls" in str(conflict(calls_of("01", "01", "01")))


def test_a_rank_that_stops_is_found() -> None:
    assert "rank 1 makes no further call" in str(conflict(calls_of("01 01", "01")))


BREAKS = [
    without_collectives,
    swapped,
    other_sizes,
    another_plan,
    one_storage,
    opened_early,
    never_awaited,
    ends_early,
    overwritten,
]


@pytest.mark.parametrize("job", [SHARDED, SHARED], ids=["stage 3", "stage 0"])
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_broken_programs_are_found(broken: Break, job: tuple) -> None:
    programs = programs_of(*job)
    assert violation(programs) is None
    broken(programs)
    assert violation(programs) is not None


@pytest.mark.parametrize("job", [SHARDED, SHARED], ids=["stage 3", "stage 0"])
def test_an_operation_that_is_missing_or_twice_is_found(job: tuple) -> None:
    programs, found = programs_of(*job), 0
    for place, operation in enumerate(programs[1]):
        rest = programs[1][:place] + programs[1][place + 1 :]
        for other in (rest, (*programs[1][: place + 1], operation, *programs[1][place + 1 :])):
            assert violation([programs[0], other, *programs[2:]]) is not None, operation
            found += 1
    assert found == 2 * len(programs[1]) > 40


def test_a_message_names_ranks_and_sizes() -> None:
    programs = programs_of(*SHARDED)
    other_sizes(programs)
    assert violation(programs) == (
        "rank 3 sends 49 elements to rank 0, which receives 48, in all_to_all of 145 bf16 elements among ranks 0 to 3"
    )


@pytest.mark.parametrize("job", [SHARDED, SHARED, SLICED], ids=["stage 3", "stage 0", "owners"])
def test_an_element_that_is_lost_or_twice_is_found(job: tuple) -> None:
    """Every run of one rank, and everything that arrives, left out or done twice."""
    plans, found = plans_of(*job), 0
    assert {item.matrix: item.block.numel for item in plans[0].of_all.items} == sizes_of(job[0], job[5])
    assert plans[0].of_all.copies == (4 if job[1] == 0 else 1)
    for number, bucket in enumerate(plans[1].buckets):
        for name in ("runs", "received"):
            whole = getattr(bucket, name)
            for index in range(len(whole)):
                for part in (whole[:index] + whole[index + 1 :], (*whole, whole[index])):
                    changed = list(plans[1].buckets)
                    changed[number] = dataclasses.replace(bucket, **{name: part})
                    views = [plans[0], dataclasses.replace(plans[1], buckets=tuple(changed)), *plans[2:]]
                    assert lost_elements(views) is not None
                    found += 1
    assert found >= 30


# ---- the page ---------------------------------------------------------------------------------------------------


def timeline(programs: list[Program]) -> str:
    """A line for each operation, a column for each rank."""
    columns = [[line(operation, rank) for operation in program] for rank, program in enumerate(programs)]
    rows = [[f"rank {rank}" for rank in range(len(programs))], *map(list, zip(*columns, strict=True))]
    widths = [max(map(len, column)) + 4 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def line(operation: Any, rank: int) -> str:
    name = type(operation).__name__.lower()
    if isinstance(operation, Look):
        return f"{name:12}{operation.collectives[0].kind} {operation.collectives[0].numel}"
    if isinstance(operation, (Send, Wait)):
        name += " back" if operation.back else ""
    name += f" {operation.bucket}"
    if isinstance(operation, Open):
        return f"{name:12}storage {operation.storage}, {operation.numel} elements"
    if isinstance(operation, Send):
        (call,) = operation.collectives
        return f"{name:12}to the other {call.sent[1 - rank]}, from it {call.received[1 - rank]}"
    return name


def test_the_page_shows_a_program() -> None:
    page = (Path(__file__).parents[5] / "docs" / "reference" / "design.md").read_text()
    shown = timeline(programs_of([(8, 4), (8, 6), (6, 4), (8, 4)], 3, 2, 100, "cpu", False))
    assert shown in page, f"\n{shown}"
