# SPDX-License-Identifier: Apache-2.0
"""Matrices cut by tensor parallelism: their parts and plans against plain indexing."""

import itertools
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from deepspeed.muon.matrices.block import Block, Cut, cut, matrices
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.matrices.tp_sharding import Sharding
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.plan.plan import make_plan
from helpers.plans import COST, all_to_all, places, spread


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """1 to 3 ranks, of which some may hold nothing; one or two parts of the axis, each cut over the ranks."""
    axis, ranks = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    widths = draw(st.lists(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks), min_size=1, max_size=2))
    widths[0][draw(st.integers(0, ranks - 1))] += 2
    other = draw(st.integers(2, 6))
    size = sum(map(sum, widths))
    starts = list(itertools.accumulate(map(sum, widths), initial=0))
    ranges = tuple(
        tuple((start + sum(part[:r]), part[r]) for start, part in zip(starts, widths, strict=False))
        for r in range(ranks)
    )
    return Sharding((size, other) if axis == 0 else (other, size), axis, ranges)


def cuts(draw: st.DrawFn, shape: tuple[int, int]) -> tuple[Block, ...]:
    """The whole, or ranges of rows or columns, or two ranges of rows in groups."""
    (whole,) = matrices(shape)
    axis = draw(st.integers(0, 1))
    at = draw(st.integers(1, shape[axis] - 1))
    options = [Cut(()), Cut((at, shape[axis] - at), axis)]
    if shape[0] % 4 == 0:
        options.append(Cut((1, 1), 0, shape[0] // 2))
    return cut(whole, draw(st.sampled_from(options)))


def indices(block: Block) -> Tensor:
    """The elements of the parameter that a block is, [rows, cols]."""
    return torch.tensor([[block.element(i * block.cols + j) for j in range(block.cols)] for i in range(block.rows)])


def shard_of(sharding: Sharding, whole: Tensor, rank: int) -> Tensor:
    """What a rank holds, by slicing."""
    parts = [whole.narrow(sharding.axis, start, size) for start, size in sharding.ranges[rank]]
    return torch.cat(parts, dim=sharding.axis).contiguous()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sharding=shardings())
def test_parts_against_slices(data: st.DataObject, sharding: Sharding) -> None:
    whole = torch.arange(sharding.shape[0] * sharding.shape[1]).view(sharding.shape)
    for block in cuts(data.draw, sharding.shape):
        found = torch.full((block.rows, block.cols), -1)
        for rank in range(len(sharding.ranges)):
            shard = shard_of(sharding, whole, rank).view(-1)
            for part, at in sharding.parts(block, rank):
                row, column = divmod(at, block.cols)
                window = found[row : row + part.rows, column : column + part.cols]
                assert window.shape == (part.rows, part.cols) and (window == -1).all()
                window.copy_(shard[indices(part)])
        assert torch.equal(found, whole.view(-1)[indices(block)])


class Rank:
    """One rank of data-parallel times tensor-parallel ranks: its part of the flat group, and its view of the plan."""

    def __init__(self, rank: int, specs: list[MatrixSpec], tp: int, dp: int, stage: int) -> None:
        self.lane, self.part = rank % tp, rank // tp
        tp_placements = [layout(specs, t, tp, dp, stage) for t in range(tp)]
        self.shards = [
            Shard(spec, 0, tp_placements[self.lane][i], tuple(lane[i] for lane in tp_placements))
            for i, spec in enumerate(specs)
        ]


def numel(spec: MatrixSpec, lane: int) -> int:
    """Elements of a tensor-parallel rank's parameter."""
    return spec.sharding.size(lane) * spec.sharding.shape[1 - spec.sharding.axis]


def layout(specs: list[MatrixSpec], lane: int, tp: int, dp: int, stage: int) -> list[Placement]:
    """Stages 1 and 2: one flat tensor in equal parts; stage 3: every parameter in equal parts."""
    sizes = [numel(spec, lane) for spec in specs]
    if stage == 3:
        parts = [-(-size // dp) for size in sizes]
        return [Placement(0, part, sum(parts[:i]), 1, lane, tp) for i, part in enumerate(parts)]
    span = -(-sum(sizes) // dp)
    return [Placement(sum(sizes[:i]), span, 0, 1, lane, tp) for i in range(len(sizes))]


def tensor_of(rank: Rank, number: int, wholes: list[Tensor]) -> list[Any]:
    """What this rank's flat tensor holds: (parameter, element of the whole)."""
    held: dict[int, Any] = {}
    for index, shard in enumerate(rank.shards):
        values = shard_of(shard.spec.sharding, wholes[index], rank.lane).view(-1).tolist()
        low, high = shard.placement.held(number, 0, len(values))
        held |= {shard.placement.position(e): (index, values[e]) for e in range(low, high)}
    return [held.get(i) for i in range(max(held, default=-1) + 1)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dp=st.integers(1, 3), stage=st.sampled_from([2, 3]), limit=st.sampled_from([16, 200, 10**6]))
def test_owners_see_whole_matrices(data: st.DataObject, dp: int, stage: int, limit: int) -> None:
    """Numbered elements carried through the plans of all ranks, there and back."""
    first = data.draw(shardings())
    tp = len(first.ranges)
    found = [first, *(s for s in data.draw(st.lists(shardings(), max_size=3)) if len(s.ranges) == tp)]
    specs = [MatrixSpec(f"w{i}", (0,), True, "", cuts(data.draw, s.shape), sharding=s) for i, s in enumerate(found)]
    wholes = [torch.arange(s.shape[0] * s.shape[1]).view(s.shape) for s in found]
    ranks = [Rank(r, specs, tp, dp, stage) for r in range(dp * tp)]
    plans = [make_plan(rank.shards, r, dp * tp, COST, limit) for r, rank in enumerate(ranks)]
    assert len({plan.digest for plan in plans}) == 1
    tensors = [tensor_of(rank, r, wholes) for r, rank in enumerate(ranks)]
    returned: list[list[Any]] = [[None] * len(tensor) for tensor in tensors]
    seen = []
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        outboxes, held = [], []
        for bucket, tensor in zip(buckets, tensors, strict=True):
            boxes = {False: [None] * sum(bucket.send_counts), True: [None] * bucket.matrix_elements}
            for run in bucket.runs:
                for place, at in places(run):
                    boxes[run.in_place][at] = tensor[place]
            outboxes.append(boxes[False])
            held.append(boxes[True])
        sent, received = [b.send_counts for b in buckets], [b.receive_counts for b in buckets]
        inboxes = all_to_all(tuple(outboxes), sent, received)
        for bucket, inbox, matrix in zip(buckets, inboxes, held, strict=True):
            for copy in bucket.received:
                for at, place in spread(copy):
                    assert matrix[at] is None
                    matrix[at] = inbox[place]
            assert None not in matrix
            for b in bucket.batches:
                size = b.rows * b.cols
                seen += [matrix[b.start + k * size : b.start + (k + 1) * size] for k in range(b.count)]
        back = all_to_all(tuple(inboxes), received, sent)
        for bucket, box, matrix, result in zip(buckets, back, held, returned, strict=True):
            for run in bucket.runs:
                for place, at in places(run):
                    result[place] = (matrix if run.in_place else box)[at]
    assert returned == tensors
    runs = [run for plan in plans for bucket in plan.buckets for run in bucket.runs]
    draws = [(run.draws[0], run.draws[1] + k) for run in runs for k in range(run.copy.numel)]
    assert len(set(draws)) == len(draws)  # no two elements are rounded by one number
    wanted = [
        [(i, e) for e in wholes[i].view(-1)[indices(block)].view(-1).tolist()]
        for i, spec in enumerate(specs)
        for block in spec.blocks
    ]
    assert sorted(seen) == sorted(wanted)
