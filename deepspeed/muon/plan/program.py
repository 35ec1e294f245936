# SPDX-License-Identifier: Apache-2.0
"""The program of a step: a list of what one rank does with the buckets of one partition, in order.

Each operation holds everything that decides its collectives (kind, ranks, sizes) and the memory in use at that time.
The exchange carries the operations out and decides nothing, so that :mod:`deepspeed.muon.plan.checker` can prove the
programs of all ranks without running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from deepspeed.muon.kernels.workspace import batch_limit
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, SPLIT_FROM, product_order
from deepspeed.muon.plan.bucket import Batch, Bucket
from deepspeed.muon.plan.memory import SUM_ELEMENTS
from deepspeed.muon.plan.plan import Plan

# ---- what a rank calls --------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """The ranks that call a collective. ``name`` distinguishes process groups that consist of the same ranks."""

    ranks: Sequence[int]
    name: str = ""

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) > 1 and list(self.ranks) == list(range(first, last + 1)):
            return f"ranks {first} to {last}"
        return f"ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Collective:
    """One call of a collective by one rank.

    Args:
        kind: name of the collective, such as ``all_reduce``.
        group: the ranks that call the collective.
        dtype: dtype of the elements, such as ``fp32``.
        numel: number of elements that each rank contributes, or that the root sends to each; equal on all ranks. 0 if
            the sizes are in ``sent`` and ``received``.
        root: index in the group of the rank that sends to, or receives from, all others; ``None`` without such a rank.
        sent, received: elements sent to and received from each rank of the group, if they may differ, as in an
            all-to-all; otherwise empty.
        caller: the line of code that makes the call; empty if unknown.
    """

    kind: str
    group: Group
    dtype: str = ""
    numel: int = 0
    root: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    caller: str = field(default="", compare=False)

    def __str__(self) -> str:
        numel = sum(self.sent) if self.sent else self.numel
        what = f"{self.kind} of {numel:,} {self.dtype} elements" if self.dtype else self.kind
        root = "" if self.root is None else f" from rank {self.group.ranks[self.root]}"
        return f"{what}{root} among {self.group}" + (f" ({self.caller})" if self.caller else "")


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """The settings of Newton-Schulz that decide what several owners of one matrix send to each other.

    ``schedule``: the coefficients, one triple for each step. ``method``: (rows, columns) of a matrix -> method, such as
    ``gram``. ``dtype``: dtype of the matrix products, a key of :data:`deepspeed.muon.math.newton_schulz.DTYPES`.
    ``device_type``: where Newton-Schulz runs, such as ``cpu``.
    """

    schedule: Schedule
    method: Callable[[int, int], str]
    dtype: str
    device_type: str


# ---- what a rank does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The first operation of a step, which finds the matrices whose gradient is missing or zero on all ranks.

    ``collectives``: one all-reduce of a flag for each matrix; empty if no rank needs to ask the others.
    """

    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Open:
    """The operation that gives a bucket its memory.

    ``storage``: index of the memory (:meth:`deepspeed.muon.plan.plan.GlobalPlan.storages`). ``numel``: number of
    elements that the bucket needs. ``own``: index of the bucket that contains the results of this rank: ``bucket``
    itself or, if it only sends results (ZeRO stage 0), the earlier bucket that computes them.
    """

    bucket: int
    storage: int
    numel: int
    own: int


@dataclass(frozen=True)
class Prepare:
    """The operation that updates this rank's momentum and writes the input of Newton-Schulz into a bucket."""

    bucket: int


@dataclass(frozen=True)
class Send:
    """The operation that starts sending a bucket to the owners or, if ``back``, the results back from the owners.

    Under CPU offload it also starts copies between host and accelerator. ``collectives``: empty if no rank sends.
    """

    bucket: int
    back: bool
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Wait:
    """The operation that waits for the end of the :class:`Send` with the same ``bucket`` and ``back``."""

    bucket: int
    back: bool


@dataclass(frozen=True)
class Compute:
    """The operation that orthogonalizes the matrices that this rank owns in a bucket.

    ``collectives``: what this rank calls with other owners of these matrices, one after another; may be empty.
    """

    bucket: int
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Apply:
    """The operation that updates the weights in this rank's shard with the results of a bucket."""

    bucket: int


Operation = Open | Prepare | Send | Wait | Compute | Apply
Program = tuple[Look | Operation, ...]


def program_of(plan: Plan, wire: str, staged: bool, newton_schulz: NewtonSchulz) -> Program:
    """Return one rank's operations in a step for a parameter group (or sub-group of ZeRO stage 3), in order.

    A step with three buckets has this form if all three may be in use at the same time. A transfer that one line starts
    ends during the next line::

        prepare 0, send 0
        prepare 1, send 1       compute 0, send 0 back
        prepare 2, send 2       compute 1, send 1 back      apply 0
                                compute 2, send 2 back      apply 1
                                                            apply 2

    ``plan``: the buckets as the rank sees them. ``wire``: dtype of what is sent to the owners and back, such as
    ``bf16``. ``staged``: whether shards are copied between host memory and accelerator (CPU offload).
    """
    everyone, flags = Group(range(plan.of_all.world_size)), plan.of_all.gradient_flag_count
    look = (Collective("all_reduce", everyone, "int32", flags),) if flags else ()
    return Look(look), *_operations(plan, wire, staged, newton_schulz)


def collectives_of(program: Program) -> Iterator[Collective]:
    """Yield all collectives of ``program``, one rank's operations in a step, in the order of the calls."""
    return chain.from_iterable(op.collectives for op in program if isinstance(op, (Look, Send, Compute)))


def _operations(plan: Plan, wire: str, staged: bool, newton_schulz: NewtonSchulz) -> Iterator[Operation]:
    travels, count = plan.travels(staged), len(plan.buckets)
    slots, storages = plan.of_all.slots(travels), plan.of_all.storages(travels)
    # At stage 0, where nothing is sent to the owners, compute and apply come a line earlier than in `program_of`.
    to_compute = int(slots > 1 and plan.of_all.copies == 1)
    to_apply = to_compute + int(slots > 1)
    applies_first = slots <= to_apply
    own = 0
    for turn in range(count + to_apply):
        if applies_first:
            yield from _apply(turn - to_apply, count)
        if turn < count:
            # A bucket of results sends the matrices of the latest bucket that had any.
            own = own if plan.buckets[turn].only_results else turn
            yield Open(turn, storages[turn], sum(plan.buckets[turn].buffer_sizes), own)
            yield Prepare(turn)
            yield Send(turn, False, _send_collectives(plan.buckets[turn], plan, wire, back=False))
        if 0 <= turn - to_compute < count:
            number, batches = turn - to_compute, plan.buckets[turn - to_compute].batches
            yield Wait(number, False)
            between = (between_owners(batch, plan.rank, newton_schulz) for batch in batches)
            yield Compute(number, tuple(chain.from_iterable(between)))
            yield Send(number, True, _send_collectives(plan.buckets[number], plan, wire, back=True))
        # With a free slot, the results of an earlier bucket arrive while this one is orthogonalized.
        if not applies_first:
            yield from _apply(turn - to_apply, count)


def _apply(bucket: int, count: int) -> Iterator[Operation]:
    if 0 <= bucket < count:
        yield Wait(bucket, True)
        yield Apply(bucket)


def _send_collectives(bucket: Bucket, plan: Plan, wire: str, back: bool) -> tuple[Collective, ...]:
    """Return the collectives of a :class:`Send`; empty if no rank sends anything."""
    if not bucket.travels or (bucket.only_results and not back):
        return ()
    group = Group(range(plan.of_all.world_size))
    # Broadcasts: an all-gather would need results of equal size, and gloo's copies them twice.
    if bucket.only_results:
        numels = list(bucket.send_counts)
        numels[plan.rank] = bucket.own_results
        return tuple(Collective("broadcast", group, wire, n, root) for root, n in enumerate(numels) if n)
    sent, received = bucket.send_counts, bucket.receive_counts
    if back:
        sent, received = received, sent
    return (Collective("all_to_all", group, wire, sent=sent, received=received),)


# ---- what the owners of one matrix call ---------------------------------------------------------------------------


def between_owners(batch: Batch, rank: int, how: NewtonSchulz) -> Iterator[Collective]:
    """Yield the collectives that several owners of a batch's matrices call with each other; nothing for one owner.

    :mod:`deepspeed.muon.exchange.owner_set` makes exactly these calls. ``rank``: any of the owners.
    """
    if batch.owners == 1:
        return
    rows, cols = batch.shape
    first = rank // batch.owners * batch.owners
    group, small = Group(range(first, first + batch.owners)), min(rows, cols)
    has_diagonals, splits_products = how.dtype != "fp32", batch.owners >= SPLIT_FROM
    products = [*product_order(how.schedule, how.method(rows, cols), how.dtype)]
    # threads=1: owners on machines with different numbers of threads must split a batch alike.
    limit = batch_limit(batch.rows * batch.cols, small, DTYPES[how.dtype].itemsize, how.device_type != "cpu", threads=1)
    for count in _part_sizes(batch.count, limit):
        yield Collective("all_gather", group, "fp32", 2 * count)  # per matrix: exponent and norm of the owner's slice
        for kind in products:
            # The Gram matrix of a matrix is the sum of its slices' Gram matrices.
            if kind == "square":
                for numel in _part_sizes(count * small * small, SUM_ELEMENTS):
                    yield Collective("all_reduce", group, "fp32", numel)
                if has_diagonals:
                    yield Collective("all_reduce", group, "fp32", count * small)
            # Each owner has computed some rows of the product of two small matrices.
            elif kind == "product" and splits_products:
                for _ in range(count):
                    yield Collective("all_gather", group, how.dtype, small * small // batch.owners)
                    if has_diagonals:
                        yield Collective("all_gather", group, "fp32", small // batch.owners)


def _part_sizes(total: int, most: int) -> Iterator[int]:
    """Yield the sizes of parts of at most ``most`` that ``total`` is split into; example: ``(7, 3) -> 3, 3, 1``."""
    for start in range(0, total, most):
        yield min(most, total - start)
