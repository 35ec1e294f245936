# SPDX-License-Identifier: Apache-2.0
"""Matrices cut by tensor parallelism: their parts against plain indexing."""

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.block import Block, cut, matrices
from deepspeed.muon.matrices.tp_sharding import Sharding


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
