# SPDX-License-Identifier: Apache-2.0
"""The program of a step: what one rank does with the buckets of one partition, in order.

Whatever decides a collective stands in an operation: its kind, its sizes, and what is in memory beside it. The exchange
carries the operations out and decides nothing, so that :mod:`deepspeed.muon.plan.checker` can prove the programs of all
ranks without running them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed.muon.plan.plan import Bucket, Plan


@dataclass(frozen=True)
class AllToAll:
    """Elements that a rank sends to each rank of the group, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Broadcast:
    """Elements that ``root``, an index in the group, sends to all."""

    root: int
    numel: int


@dataclass(frozen=True)
class Open:
    """Give a bucket ``numel`` elements of a storage, by number. ``own``: the bucket whose matrices it sends."""

    bucket: int
    storage: int
    numel: int
    own: int


@dataclass(frozen=True)
class Prepare:
    """Write the momentum's look-ahead of this rank's runs into the bucket."""

    bucket: int


@dataclass(frozen=True)
class Send:
    """Start the collectives of one way, to the owners or ``back``; none where nothing travels.

    Under CPU offload the copies between host and accelerator belong to it.
    """

    bucket: int
    back: bool
    collectives: tuple[AllToAll | Broadcast, ...]


@dataclass(frozen=True)
class Wait:
    """What follows comes after the last :class:`Send` of the bucket; ``back`` says which."""

    bucket: int
    back: bool


@dataclass(frozen=True)
class Compute:
    """Orthogonalize the bucket's matrices."""

    bucket: int


@dataclass(frozen=True)
class Apply:
    """Update the shards by the bucket's results."""

    bucket: int


Operation = Open | Prepare | Send | Wait | Compute | Apply
Program = tuple[Operation, ...]


def program_of(plan: Plan, staged: bool) -> Program:
    """Return what the rank of a plan does in a step; ``staged``: with copies between host and accelerator.

    Where anything is sent or staged, a line is one turn of the loop, and what is sent arrives during the next::

        prepare 0, send 0
        prepare 1, send 1       compute 0, send 0 back
        prepare 2, send 2       compute 1, send 1 back      apply 0
                                compute 2, send 2 back      apply 1
                                                            apply 2

    With one slot less, each line begins with its apply. Where only results travel, there is no way there: all three
    phases are one line earlier in relation to prepare.
    """
    return tuple(_operations(plan, staged))


def _operations(plan: Plan, staged: bool) -> Iterator[Operation]:
    slots, storages, count = plan.slots(staged), plan.storages(staged), len(plan.buckets)
    to_compute = int(slots > 1 and not plan.is_replicated)
    to_apply = to_compute + int(slots > 1)
    applies_first = slots <= to_apply
    own = 0
    for turn in range(count + to_apply):
        if applies_first:
            yield from _apply(turn - to_apply, count)
        if turn < count:
            own = own if plan.buckets[turn].only_results else turn
            yield Open(turn, storages[turn], sum(plan.buckets[turn].buffer_sizes), own)
            yield Prepare(turn)
            yield Send(turn, False, _collectives(plan.buckets[turn], plan.rank, back=False))
        if 0 <= turn - to_compute < count:
            yield from _compute(turn - to_compute, plan)
        if not applies_first:
            yield from _apply(turn - to_apply, count)


def _compute(bucket: int, plan: Plan) -> Iterator[Operation]:
    yield Wait(bucket, False)
    yield Compute(bucket)
    yield Send(bucket, True, _collectives(plan.buckets[bucket], plan.rank, back=True))


def _apply(bucket: int, count: int) -> Iterator[Operation]:
    if 0 <= bucket < count:
        yield Wait(bucket, True)
        yield Apply(bucket)


def _collectives(bucket: Bucket, rank: int, back: bool) -> tuple[AllToAll | Broadcast, ...]:
    """Return those of one way.

    Results that every rank gets take one broadcast per owner. An all-gather would need equal parts, and gloo's copies
    them twice.
    """
    if not bucket.travels or (bucket.only_results and not back):
        return ()
    if bucket.only_results:
        numels = list(bucket.send_counts)
        numels[rank] = bucket.own_results
        return tuple(Broadcast(root, numel) for root, numel in enumerate(numels) if numel)
    there = AllToAll(bucket.send_counts, bucket.receive_counts)
    return (AllToAll(there.received, there.sent) if back else there,)
