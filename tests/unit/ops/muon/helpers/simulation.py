# SPDX-License-Identifier: Apache-2.0
"""Simulate a step of all ranks, bucket by bucket, on lists of labelled elements.

An element is (parameter, index in the whole parameter). The label shows where an element comes from, independently of
the plan that moves it; orthogonalizing changes the label.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.muon.exchange.bucket import Bucket
from deepspeed.muon.exchange.placed_params import Shard
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.layout import Block
from helpers.plans import all_to_all, places, spread

#: The elements of a tensor or buffer; ``None`` for padding or what is not written yet.
Elements = list[Any]


def simulate(plans: Sequence[Plan], shards: Sequence[Sequence[Shard]]) -> None:
    """Assert that owners orthogonalize each matrix once, whole and in order, and that its results return.

    Args:
        shards: for each rank, its shards.
    """
    ranks = [Rank(plan, tensors_of(of_rank, plan.rank)) for plan, of_rank in zip(plans, shards, strict=True)]
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        for rank, bucket in zip(ranks, buckets, strict=True):
            rank.prepare(bucket)
        _send(ranks, back=False)
        for rank in ranks:
            rank.orthogonalize()
        _send(ranks, back=True)
        for rank in ranks:
            rank.apply()
    for rank in ranks:
        assert rank.returned == [[one and ("new", *one) for one in tensor] for tensor in rank.tensors]
    _check_that_matrices_are_whole(ranks, shards)
    _check_the_draws(ranks)


class Rank:
    """The memory of one rank: its tensors, and the buffers of the bucket at hand."""

    def __init__(self, plan: Plan, tensors: list[Elements]) -> None:
        self.plan, self.tensors = plan, tensors
        self.returned: list[Elements] = [[None] * len(tensor) for tensor in tensors]
        self.seen: list[Elements] = []
        self.draws: dict[Any, tuple[str, int]] = {}

    def prepare(self, bucket: Bucket) -> None:
        """Open the buffers of a bucket, and write this rank's elements into them."""
        self.bucket = bucket
        self.matrices, self.outbox, self.inbox = ([None] * numel for numel in bucket.buffer_sizes)
        for run in bucket.runs:
            box = self.box(run.in_place)
            for index, (place, at) in enumerate(places(run)):
                element = self.tensors[run.tensor][place]
                assert element is not None, "padding would travel"
                assert self.draws.setdefault(element, draw(run, index)) == draw(run, index)
                assert box[at] is None, "written twice"
                box[at] = element
        check_host_memory(bucket, self.tensors, self.outbox, self.matrices)

    def box(self, in_place: bool) -> Elements:
        """Return the buffer of a run: the bucket's matrices if ``in_place``, else what is sent."""
        return self.matrices if in_place else self.outbox

    def received(self) -> Elements:
        """Return what has arrived: a part of the bucket's matrices, or a buffer of its own."""
        start = self.bucket.direct_receive_start
        return self.inbox if start is None else self.matrices[start:][: sum(self.bucket.receive_counts)]

    def receive(self, elements: Elements) -> None:
        """Write what arrives at the owner, without overwriting other elements."""
        start = self.bucket.direct_receive_start
        if start is None:
            self.inbox[:] = elements
        else:
            pairs = zip(self.received(), elements, strict=True)
            assert all(old in (None, new) for old, new in pairs), "over other elements"
            self.matrices[start : start + len(elements)] = elements

    def orthogonalize(self) -> None:
        """Put what has arrived in place, note the matrices that this rank owns, and change their labels."""
        for copy in self.bucket.receive_copies:
            for at, place in spread(copy):
                assert self.matrices[at] in (None, self.inbox[place]), "two elements in one place"
                self.matrices[at] = self.inbox[place]
        end = self.plan.rank * self.bucket.gathered_part
        for batch in self.bucket.batches:
            assert batch.start == end, "batches follow each other"
            size = batch.rows * batch.cols
            end += batch.count * size
            for start in range(batch.start, end, size):
                matrix = self.matrices[start : start + size]
                self.seen.append(matrix)
                self.matrices[start : start + size] = [("new", *element) for element in matrix]
        assert self.bucket.gathered_part or end == len(self.matrices)
        for copy in self.bucket.receive_copies:
            for at, place in spread(copy):
                self.inbox[place] = self.matrices[at]

    def apply(self) -> None:
        """Write the results to the places in the tensors from which :meth:`prepare` has read."""
        for run in self.bucket.runs:
            box = self.box(run.in_place)
            for place, at in places(run):
                assert self.returned[run.tensor][place] is None, "updated twice"
                self.returned[run.tensor][place] = box[at]


def draw(run: Any, index: int) -> tuple[str, int]:
    """Return the label of the random number for element ``index`` of a run."""
    return run.draws[0], run.draws[1] + index


def _send(ranks: list[Rank], back: bool) -> None:
    """Carry out the collective of a bucket on all ranks."""
    part = ranks[0].bucket.gathered_part
    if part:
        if back:
            gathered = [one for rank in ranks for one in rank.matrices[rank.plan.rank * part :][:part]]
            for rank in ranks:
                rank.matrices[:] = gathered
        return
    if not ranks[0].bucket.travels:
        assert not any(rank.outbox for rank in ranks)
        return
    sent, received = [rank.bucket.send_counts for rank in ranks], [rank.bucket.receive_counts for rank in ranks]
    if back:
        arrived = all_to_all([rank.received() for rank in ranks], received, sent)
        for rank, elements in zip(ranks, arrived, strict=True):
            assert len(elements) == len(rank.outbox)
            rank.outbox[:] = elements
    else:
        for rank, elements in zip(ranks, all_to_all([rank.outbox for rank in ranks], sent, received), strict=True):
            rank.receive(elements)


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
    """Assert that the owners have seen each matrix once."""
    specs = {shard.spec.name: shard.spec for of_rank in shards for shard in of_rank}
    wanted = [[(spec.name, index) for index in elements_of(block)] for spec in specs.values() for block in spec.blocks]
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
    for in_place, spans in bucket.staged_spans.items():
        for start, at, numel in spans:
            copied[in_place][start : start + numel] = host[at : at + numel]
    assert (copied[False], copied[True]) == (outbox, matrices)
