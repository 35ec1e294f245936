# SPDX-License-Identifier: Apache-2.0
"""The program of a step: what one rank does with the buckets of one partition, in order.

Whatever decides a collective stands in an operation: its kind, its ranks, its sizes, and what is in memory beside it.
The exchange carries the operations out and decides nothing, so that :mod:`deepspeed.muon.plan.checker` can prove the
programs of all ranks without running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from deepspeed.muon.plan.bucket import Batch, Bucket
from deepspeed.muon.plan.collective import Collective, Group
from deepspeed.muon.plan.plan import Plan


@dataclass(frozen=True)
class Look:
    """Find the matrices that have no gradient; ``collectives``: one, unless every rank sees that for itself."""

    collectives: tuple[Collective, ...]


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
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Wait:
    """What follows comes after the last :class:`Send` of the bucket; ``back`` says which."""

    bucket: int
    back: bool


@dataclass(frozen=True)
class Compute:
    """Orthogonalize the bucket's matrices. The ranks that own one together call ``collectives`` meanwhile, and wait for
    each before the next.
    """

    bucket: int
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Apply:
    """Update the shards by the bucket's results."""

    bucket: int


Operation = Open | Prepare | Send | Wait | Compute | Apply
Program = tuple[Look | Operation, ...]
#: What a rank calls while it orthogonalizes the matrices of a batch.
Between = Callable[[Batch, int], Iterable[Collective]]


def program_of(plan: Plan, wire: str, staged: bool, between: Between) -> Program:
    """Return what the rank of a plan does in a step.

    Where anything is sent or staged, a line is one turn of the loop, and what is sent arrives during the next::

        prepare 0, send 0
        prepare 1, send 1       compute 0, send 0 back
        prepare 2, send 2       compute 1, send 1 back      apply 0
                                compute 2, send 2 back      apply 1
                                                            apply 2

    With one slot less, each line begins with its apply. Where only results travel, there is no way there: all three
    phases are one line earlier in relation to prepare.

    Args:
        wire: dtype of what is sent to owners and back.
        staged: with copies between host and accelerator.
        between: :func:`deepspeed.muon.plan.between_owners.between_owners` of a batch and a rank.
    """
    look = (Collective("all_reduce", _everyone(plan), "int32", plan.gradient_flags),) if plan.gradient_flags else ()
    return Look(look), *_operations(plan, wire, staged, between)


def collectives_of(program: Program) -> Iterator[Collective]:
    """Yield the collectives of a program in order."""
    return chain.from_iterable(op.collectives for op in program if isinstance(op, (Look, Send, Compute)))


def _operations(plan: Plan, wire: str, staged: bool, between: Between) -> Iterator[Operation]:
    slots, storages, count = plan.slots(staged), plan.storages(staged), len(plan.buckets)
    to_compute = int(slots > 1 and not plan.is_replicated)
    to_apply = to_compute + int(slots > 1)
    applies_first = slots <= to_apply
    own = 0
    for turn in range(count + to_apply):
        if applies_first:
            yield from _apply(turn - to_apply, count)
        if turn < count:
            # Results are sent from where their owner orthogonalized them, in an earlier bucket.
            own = own if plan.buckets[turn].only_results else turn
            yield Open(turn, storages[turn], sum(plan.buckets[turn].buffer_sizes), own)
            yield Prepare(turn)
            yield Send(turn, False, _sent(plan.buckets[turn], plan, wire, back=False))
        if 0 <= turn - to_compute < count:
            yield from _compute(turn - to_compute, plan, wire, between)
        # With a slot to spare, the results of an earlier bucket arrive while this one is orthogonalized.
        if not applies_first:
            yield from _apply(turn - to_apply, count)


def _compute(number: int, plan: Plan, wire: str, between: Between) -> Iterator[Operation]:
    bucket = plan.buckets[number]
    yield Wait(number, False)
    yield Compute(number, tuple(chain.from_iterable(between(batch, plan.rank) for batch in bucket.batches)))
    yield Send(number, True, _sent(bucket, plan, wire, back=True))


def _apply(bucket: int, count: int) -> Iterator[Operation]:
    if 0 <= bucket < count:
        yield Wait(bucket, True)
        yield Apply(bucket)


def _sent(bucket: Bucket, plan: Plan, wire: str, back: bool) -> tuple[Collective, ...]:
    """Return the collectives of one way.

    Results that every rank gets take one broadcast per owner. An all-gather would need equal parts, and gloo's copies
    them twice.
    """
    if not bucket.travels or (bucket.only_results and not back):
        return ()
    group = _everyone(plan)
    if bucket.only_results:
        numels = list(bucket.send_counts)
        numels[plan.rank] = bucket.own_results
        return tuple(Collective("broadcast", group, wire, n, root) for root, n in enumerate(numels) if n)
    sent, received = bucket.send_counts, bucket.receive_counts
    if back:
        sent, received = received, sent
    return (Collective("all_to_all", group, wire, sent=sent, received=received),)


def _everyone(plan: Plan) -> Group:
    return Group(range(plan.world_size))
