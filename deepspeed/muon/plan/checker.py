# SPDX-License-Identifier: Apache-2.0
"""Prove, without running them, that the programs of all ranks cannot hang or overwrite a buffer in use.

The collectives of all ranks, on all process groups, must merge into one order, which is stricter than NCCL. Then they
end whatever the speed of each rank, even if a device runs one collective at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from deepspeed.muon.plan.plan import Plan
from deepspeed.muon.plan.program import (
    Apply,
    Collective,
    Compute,
    Group,
    Look,
    Open,
    Operation,
    Prepare,
    Program,
    Send,
    Wait,
    collectives_of,
)

#: Fields that must be equal in the calls of all ranks of one collective.
COMMON = ("kind", "dtype", "numel", "root")


def violation(programs: Sequence[Program]) -> str | None:
    """Return a text that says how the ranks could hang or overwrite a buffer in use; ``None`` if they cannot.

    ``programs``: for each rank, its operations in a step (:func:`deepspeed.muon.plan.program.program_of`).
    """
    for rank, program in enumerate(programs):
        for text in _broken_order(program):
            return f"rank {rank}: {text}"
    return conflict([list(collectives_of(program)) for program in programs])


def lost_elements(views: Sequence[Plan]) -> str | None:
    """Return a text that names a matrix or bucket whose elements do not all reach its owners; ``None`` if all do.

    The check counts elements. ``views``: the :class:`deepspeed.muon.plan.plan.Plan` of each rank.
    """
    found = Counter[str]()
    for view in views:
        for number, bucket in enumerate(view.buckets):
            for run in bucket.runs:
                found[run.matrix] += run.copy.numel
            arriving = sum(copy.numel for copy in bucket.received)
            arriving += sum(run.copy.numel for run in bucket.runs if run.in_place)
            if not bucket.only_results and arriving != bucket.matrix_elements:
                return f"rank {view.rank}, bucket {number}: {arriving} of {bucket.matrix_elements} elements arrive"
    for item in views[0].of_all.items:
        numel = views[0].of_all.copies * item.block.numel
        if found[item.matrix] != numel:
            return f"{item.matrix}: the ranks have {found[item.matrix]} elements of {numel}"
    return None


def conflict(calls: Sequence[Sequence[Collective]]) -> str | None:
    """Return a text that says where the ranks' collectives differ, or cannot merge into one order; ``None`` if neither.

    ``calls``: for each rank, all collectives that it calls, in order.
    """
    done, come = [0] * len(calls), dict[Group, list[int]]()
    arriving = list(range(len(calls)))
    while arriving:
        rank = arriving.pop()
        if done[rank] == len(calls[rank]):
            continue
        call = calls[rank][done[rank]]
        if rank not in call.group.ranks:
            return f"rank {rank} calls {call}, but is not one of these ranks"
        waiting = come.setdefault(call.group, [])
        waiting.append(rank)
        if len(waiting) == len(call.group.ranks):
            if text := _mismatch([calls[each][done[each]] for each in call.group.ranks]):
                return text
            # All ranks of the group have reached the collective: it ends, and each continues with its next call.
            del come[call.group]
            for each in call.group.ranks:
                done[each] += 1
            arriving += call.group.ranks
    return _waiting_ranks(calls, done)


def _mismatch(calls: Sequence[Collective]) -> str | None:
    """Return a text that says how the ranks' calls of one collective differ; ``None`` if they match."""
    first, ranks = calls[0], calls[0].group.ranks
    for rank, call in zip(ranks, calls, strict=True):
        if any(getattr(call, name) != getattr(first, name) for name in COMMON) or bool(call.sent) != bool(first.sent):
            return f"rank {ranks[0]} calls {first}, rank {rank} calls {call}"
        for counts in (call.sent, call.received) if call.sent or call.received else ():
            if len(counts) != len(calls):
                return f"rank {rank} passes sizes for {len(counts)} ranks, not for {len(calls)}, to {call}"
    for rank, call, expected in zip(ranks, calls, zip(*(call.received for call in calls), strict=True), strict=False):
        if call.sent != expected:
            other = next(index for index, numel in enumerate(call.sent) if numel != expected[index])
            text = f"{call.sent[other]} elements to rank {ranks[other]}, which receives {expected[other]}"
            return f"rank {rank} sends {text}, in {call}"
    return None


def _waiting_ranks(calls: Sequence[Sequence[Collective]], done: Sequence[int]) -> str | None:
    """Return a text that says which rank waits for which other rank; ``None`` if all calls have ended.

    ``calls``: for each rank, all collectives that it calls. ``done``: for each rank, how many of them have ended.
    """
    rank = next((rank for rank, count in enumerate(done) if count < len(calls[rank])), None)
    texts, seen = list[str](), set[int]()
    while rank is not None and rank not in seen:
        seen.add(rank)
        if done[rank] == len(calls[rank]):
            texts.append(f"rank {rank} makes no further call")
            break
        call = calls[rank][done[rank]]
        texts.append(f"rank {rank} waits in {call}")
        # It waits for a rank of the group whose next call is in another group, or that has no further call.
        rank = next(r for r in call.group.ranks if done[r] == len(calls[r]) or calls[r][done[r]].group != call.group)
    return "; ".join(texts) if texts else None


#: The operations of a bucket in their order. :class:`Send` and :class:`Wait` come with their ``back``.
LIFE = (Open, Prepare, (Send, False), (Wait, False), Compute, (Send, True), (Wait, True), Apply)


def _broken_order(program: Program) -> Iterator[str]:
    """Yield a text for each operation that is too early, too late or missing in one rank's operations in a step."""
    done: dict[int, int] = {}
    opened: dict[int, Open] = {}
    users: dict[int, int] = {}  # the last bucket of each storage
    if not isinstance(program[0], Look):
        yield "its program does not begin with the look for gradients"
    for operation in program[1:]:
        if isinstance(operation, Look):
            yield "it looks for gradients again"
            continue
        bucket, stage = operation.bucket, _stage(operation)
        if stage != done.get(bucket, -1) + 1:
            yield f"{operation} after {done.get(bucket, -1) + 1} of the {len(LIFE)} operations of its bucket"
        done[bucket] = stage
        if isinstance(operation, Open):
            earlier = users.get(operation.storage)
            if earlier is not None and done[earlier] + 1 < len(LIFE):
                yield f"{operation} takes the storage of bucket {earlier}, which is in use"
            opened[bucket], users[operation.storage] = operation, bucket
        own = opened[bucket].own
        if own not in opened or (stage <= LIFE.index((Wait, True)) and users[opened[own].storage] != own):
            yield f"{operation} needs the matrices of bucket {own}, which have no storage at that time"
        if stage == LIFE.index((Send, True)) and done[own] < LIFE.index(Compute):
            yield f"{operation} sends the matrices of bucket {own} before they are computed"
    for bucket, stage in done.items():
        if stage + 1 < len(LIFE):
            yield f"bucket {bucket} ends after {stage + 1} of its {len(LIFE)} operations"


def _stage(operation: Operation) -> int:
    kind = type(operation)
    return LIFE.index((kind, operation.back) if isinstance(operation, (Send, Wait)) else kind)
