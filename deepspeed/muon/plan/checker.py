# SPDX-License-Identifier: Apache-2.0
"""Proves, without running them, that the programs of all ranks of a group cannot hang or overwrite what is in use.

The rules are those of NCCL, which is stricter than gloo: each rank issues the same collectives in the same order with
sizes that match. As a :class:`Send` never blocks, a rank that waits only for what it has sent before can then always go
on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from deepspeed.muon.plan.program import (
    AllToAll,
    Apply,
    Broadcast,
    Compute,
    Open,
    Operation,
    Prepare,
    Program,
    Send,
    Wait,
)


def violation(programs: Sequence[Program]) -> str | None:
    """Return the first rule that the programs break, with ranks and operations; ``None`` where they break none.

    Args:
        programs: of all ranks of a group, in order.
    """
    for rank, program in enumerate(programs):
        for text in _broken_order(program):
            return f"rank {rank}: {text}"
    collectives = [[one for op in program if isinstance(op, Send) for one in op.collectives] for program in programs]
    for number, alike in enumerate(zip_longest(*collectives)):
        if mismatch := _mismatch(alike):
            return f"collective {number}: {mismatch}"
    return None


def _mismatch(alike: Sequence[AllToAll | Broadcast | None]) -> str | None:
    """Return what is wrong with one collective, by rank."""
    if None in alike:
        who = [rank for rank, one in enumerate(alike) if one is None]
        return f"ranks {who} issue none, the others {next(filter(None, alike))}"
    if len({type(one) for one in alike}) > 1:
        return f"the ranks issue {', '.join(type(one).__name__ for one in alike)}"
    if any(isinstance(one, Broadcast) for one in alike):
        return None if len(set(alike)) == 1 else f"the ranks issue {', '.join(map(str, alike))}"
    for rank, one in enumerate(alike):
        assert isinstance(one, AllToAll)
        if not len(one.sent) == len(one.received) == len(alike):
            return f"rank {rank} has sizes for {len(one.sent)} ranks of {len(alike)}"
        for other, numel in enumerate(one.sent):
            expected = alike[other].received[rank]  # type: ignore[union-attr]
            if numel != expected:
                return f"rank {rank} sends {numel} elements to rank {other}, which receives {expected}"
    return None


#: What a bucket goes through, in this order.
LIFE = (Open, Prepare, (Send, False), (Wait, False), Compute, (Send, True), (Wait, True), Apply)


def _broken_order(program: Program) -> Iterator[str]:
    """Yield what one rank does too early, too late or not at all."""
    done: dict[int, int] = {}
    opened: dict[int, Open] = {}
    users: dict[int, int] = {}  # the last bucket of each storage
    for operation in program:
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
