# SPDX-License-Identifier: Apache-2.0
"""Simulate the programs of all ranks on lists of labelled elements, one operation of every rank at a time.

An element is (parameter, index in the whole parameter). The label shows where an element comes from, independently of
the plan that moves it; orthogonalizing changes the label.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.muon.matrices.block import Block
from deepspeed.muon.plan.bucket import Bucket
from deepspeed.muon.plan.placement import Shard
from deepspeed.muon.plan.plan import Plan
from deepspeed.muon.plan.program import Apply, Collective, Compute, Open, Prepare, Program, Send
from helpers.plans import all_to_all, places, spread

#: The elements of a tensor or buffer; ``None`` for padding or what is not written yet.
Elements = list[Any]


def simulate(plans: Sequence[Plan], programs: Sequence[Program], shards: Sequence[Sequence[Shard]]) -> None:
    """Assert that owners orthogonalize each matrix or slice once, whole and in order, and that its results return.

    Args:
        shards: for each rank, its shards.
    """
    ranks = [Rank(plan, tensors_of(of_rank, plan.rank)) for plan, of_rank in zip(plans, shards, strict=True)]
    for operations in zip(*(program[1:] for program in programs), strict=True):
        (kind,) = {type(operation) for operation in operations}
        for rank, operation in zip(ranks, operations, strict=True):
            rank.do(operation)
        if kind is Send:
            _travel(ranks, operations)
    for rank in ranks:
        assert rank.returned == [[one and ("new", *one) for one in tensor] for tensor in rank.tensors]
    _check_that_matrices_are_whole(ranks, shards)
    _check_the_draws(ranks)


@dataclass
class Buffers:
    """The buffers of a bucket, in one of the storages."""

    bucket: int
    matrices: Elements
    outbox: Elements
    inbox: Elements


class Rank:
    """The memory of one rank."""

    def __init__(self, plan: Plan, tensors: list[Elements]) -> None:
        self.plan, self.tensors = plan, tensors
        self.returned: list[Elements] = [[None] * len(tensor) for tensor in tensors]
        self.storages: dict[int, Buffers] = {}
        self.own: dict[int, int] = {}
        self.seen: list[Elements] = []
        self.draws: dict[Any, tuple[str, int]] = {}

    def do(self, operation: Any) -> None:
        """Carry out an operation, except its collectives."""
        bucket = self.plan.buckets[operation.bucket]
        match operation:
            case Open():
                assert operation.numel == sum(bucket.buffer_sizes)
                buffers = (Elements([None] * numel) for numel in bucket.buffer_sizes)
                self.storages[operation.storage] = Buffers(operation.bucket, *buffers)
                self.own[operation.bucket] = operation.own
            case Prepare():
                self._prepare(bucket, operation.bucket)
            case Compute():
                self._compute(bucket, operation.bucket)
            case Apply():
                for run in bucket.runs:
                    box = self.box(operation.bucket, run.in_place)
                    for place, at in places(run):
                        assert self.returned[run.tensor][place] is None, "updated twice"
                        self.returned[run.tensor][place] = box[at]

    def buffers(self, bucket: int) -> Buffers:
        """Return the buffers of a bucket; fail if another bucket has taken its storage."""
        (found,) = [each for each in self.storages.values() if each.bucket == bucket]
        return found

    def box(self, bucket: int, in_place: bool) -> Elements:
        """Return the buffer from which a run reads: the bucket's matrices if ``in_place``, else what it sends."""
        return self.buffers(self.own[bucket]).matrices if in_place else self.buffers(bucket).outbox

    def received(self, number: int) -> Elements:
        """Return what a bucket has received: a part of its matrices or a buffer of its own."""
        bucket, buffers = self.plan.buckets[number], self.buffers(number)
        if bucket.direct_receive_start is None:
            return buffers.inbox
        return buffers.matrices[bucket.direct_receive_start :][: sum(bucket.receive_counts)]

    def receive(self, number: int, elements: Elements) -> None:
        """Write received elements into a bucket, without overwriting others."""
        bucket, buffers = self.plan.buckets[number], self.buffers(number)
        if bucket.direct_receive_start is None:
            buffers.inbox[:] = elements
        else:
            before = self.received(number)
            assert all(old in (None, new) for old, new in zip(before, elements, strict=True)), "over other elements"
            buffers.matrices[bucket.direct_receive_start : bucket.direct_receive_start + len(elements)] = elements

    def _prepare(self, bucket: Bucket, number: int) -> None:
        for run in bucket.runs:
            box = self.box(number, run.in_place)
            for index, (place, at) in enumerate(places(run)):
                element = self.tensors[run.tensor][place]
                assert element is not None, "padding would travel"
                assert self.draws.setdefault(element, draw(run, index)) == draw(run, index)
                if not bucket.only_results:
                    assert box[at] is None, "written twice"
                    box[at] = element
        if not bucket.only_results:
            check_host_memory(bucket, self.tensors, self.box(number, False), self.box(number, True))

    def _compute(self, bucket: Bucket, number: int) -> None:
        if bucket.only_results:
            return
        matrices, inbox = self.buffers(number).matrices, self.buffers(number).inbox
        for copy in bucket.receive_copies:
            for at, place in spread(copy):
                assert matrices[at] in (None, inbox[place]), "two elements in one place"
                matrices[at] = inbox[place]
        assert None not in matrices
        for batch in bucket.batches:
            for start in range(
                batch.start, batch.start + batch.count * batch.rows * batch.cols, batch.rows * batch.cols
            ):
                self.seen.append(matrices[start : start + batch.rows * batch.cols])
        matrices[:] = [("new", *element) for element in matrices]
        for copy in bucket.receive_copies:
            for at, place in spread(copy):
                inbox[place] = matrices[at]


def draw(run: Any, index: int) -> tuple[str, int]:
    """Return the label of the random number for element ``index`` of a run."""
    return run.draws[0], run.draws[1] + index


def _travel(ranks: list[Rank], operations: Sequence[Send]) -> None:
    """Carry out the same collective on all ranks; ``operations``: by rank."""
    number, back = operations[0].bucket, operations[0].back
    calls = [operation.collectives for operation in operations]
    if not any(calls):
        assert ranks[0].plan.buckets[number].only_results or not any(rank.box(number, False) for rank in ranks)
    elif calls[0][0].kind == "all_to_all":
        sent, received = [one.sent for (one,) in calls], [one.received for (one,) in calls]
        boxes = [rank.received(number) if back else rank.box(number, False) for rank in ranks]
        arrived = all_to_all(tuple(boxes), sent, received)
        for rank, elements in zip(ranks, arrived, strict=True):
            if back:
                assert len(rank.box(number, False)) == len(elements)
                rank.buffers(number).outbox[:] = elements
            else:
                rank.receive(number, elements)
    else:
        _broadcast(ranks, calls, number)


def _broadcast(ranks: list[Rank], calls: Sequence[Sequence[Collective]], number: int) -> None:
    """Give every rank the results of each owner, in the order of the broadcasts."""
    arriving: list[Elements] = [[] for _ in ranks]
    for of_all in zip(*calls, strict=True):
        results = ranks[of_all[0].root].box(number, True)[: of_all[0].numel]
        assert len(results) == of_all[0].numel
        for index, elements in enumerate(arriving):
            elements += results if index != of_all[0].root else []
    for rank, elements in zip(ranks, arriving, strict=True):
        assert len(rank.box(number, False)) == len(elements)
        rank.buffers(number).outbox[:] = elements


def tensors_of(shards: Sequence[Shard], rank: int) -> list[Elements]:
    """Return this rank's tensors, filled with the labels of their elements."""
    found: dict[int, dict[int, Any]] = {}
    for shard in shards:
        placement, elements = shard.placement, elements_on(shard)
        tensor = found.setdefault(shard.tensor, {})
        for index in range(*placement.held_range(rank, 0, len(elements))):
            assert placement.position(index) not in tensor
            tensor[placement.position(index)] = (shard.spec.name, elements[index])
    return [
        [found.get(tensor, {}).get(place) for place in range(max(found.get(tensor, {}), default=-1) + 1)]
        for tensor in range(max(found, default=-1) + 1)
    ]


def elements_on(shard: Shard) -> Sequence[int]:
    """Return the indices in the whole parameter of the elements that a tensor-parallel rank has."""
    sharding = shard.spec.sharding
    if sharding is None:
        return range(shard.spec.numel)
    whole = torch.arange(sharding.shape[0] * sharding.shape[1]).view(sharding.shape)
    lane = shard.placement.first
    parts = [whole.narrow(sharding.axis, start, size) for start, size in sharding.ranges[lane]]
    return torch.cat(parts, dim=sharding.axis).flatten().tolist()


def elements_of(block: Block) -> list[int]:
    """Return the indices in its parameter of a block's elements, row by row."""
    rows = block.rows // block.bands
    return [
        block.offset + row // rows * block.gap + row % rows * block.stride + col
        for row, col in itertools.product(range(block.rows), range(block.cols))
    ]


def _check_that_matrices_are_whole(ranks: list[Rank], shards: Sequence[Sequence[Shard]]) -> None:
    """Assert that each matrix was seen once, or each of its slices: columns, or rows if those are more."""
    counts = iter(ranks[0].plan.of_all.counts)
    wanted = []
    for spec in {shard.spec.name: shard.spec for of_rank in shards for shard in of_rank}.values():
        for block in spec.blocks:
            count, axis = next(counts), int(block.rows <= block.cols)
            size = (block.rows, block.cols)[axis] // count
            for k in range(count):
                part = replace(block, offset=block.offset + k * size, cols=size)
                if axis == 0 and count > 1:
                    part = replace(block, offset=block.offset + k * size * block.stride, rows=size)
                wanted.append([(spec.name, element) for element in elements_of(part if count > 1 else block)])
    assert sorted(one for rank in ranks for one in rank.seen) == sorted(wanted)


def _check_the_draws(ranks: list[Rank]) -> None:
    """Assert that each element has its own random number, the same on all ranks that have the element."""
    draws: dict[Any, tuple[str, int]] = {}
    for rank in ranks:
        for element, name in rank.draws.items():
            assert draws.setdefault(element, name) == name
    assert len(set(draws.values())) == len(draws)


def check_host_memory(bucket: Bucket, tensors: list[Elements], outbox: Elements, matrices: Elements) -> None:
    """Assert that copies through host memory fill the buffers as copies on the device do."""
    host: Elements = [None] * bucket.host_elements
    for run, first in zip(bucket.runs, bucket.host_places, strict=True):
        for place, at in places(run):
            host[first + at - run.copy.at] = tensors[run.tensor][place]
    copied: dict[bool, Elements] = {False: [None] * len(outbox), True: [None] * len(matrices)}
    for part in bucket.segments:
        copied[part.in_place][part.device : part.device + part.numel] = host[part.host : part.host + part.numel]
    assert (copied[False], copied[True]) == (outbox, matrices)
