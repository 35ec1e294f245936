# SPDX-License-Identifier: Apache-2.0
"""Blocks of a parameter against brute force, and cuts against `torch.split`."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.block import Block, Piece, cut, matrices


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int]:
    """A matrix inside a parameter, and the parameter's number of elements."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["rows", "columns", "any", "bands"]))
    top, left = (draw(st.integers(0, size - 1)) for size in (height, width))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    if kind == "rows":
        left, cols = 0, width
    if kind == "columns":
        top, rows = 0, height
    if kind == "bands":
        bands = draw(st.integers(1, 4))
        return Block(top * width + left, rows * bands, cols, width, bands, height * width), bands * height * width
    return Block(top * width + left, rows, cols, width), height * width


def places(block: Block) -> list[int]:
    """Where the block's elements lie in the parameter, row by row, from the definition."""
    n = block.rows // block.bands
    return [
        block.offset + i // n * block.gap + i % n * block.stride + j
        for i in range(block.rows)
        for j in range(block.cols)
    ]


def elements(piece: Piece) -> list[tuple[int, int]]:
    """(place in the parameter, place in the block) of every element."""
    grid = [(r, c) for r in range(piece.rows) for c in range(piece.cols)]
    return [(piece.element + r * piece.stride + c, piece.at + r * piece.cols + c) for r, c in grid]


@settings(max_examples=500, deadline=None)
@given(blocks(), st.data())
def test_pieces_against_brute_force(case: tuple[Block, int], data: st.DataObject) -> None:
    block, numel = case
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    pieces = list(block.pieces(start, stop))
    listed = [pair for piece in pieces for pair in elements(piece)]
    expected = {element: at for at, element in enumerate(places(block)) if start <= element < stop}
    assert dict(listed) == expected
    assert len(listed) == len(dict(listed)), "no element twice"
    assert [at for _, at in listed] == sorted(at for _, at in listed)
    assert [block.element(at) for at in range(block.numel)] == places(block)
    assert block.stop == max(places(block)) + 1 <= numel
    assert block.before(start) == sum(place < start for place in places(block))


def test_pieces_are_as_few_as_can_be() -> None:
    """Whole rows are one piece, however many there are."""
    assert list(Block(7, 4, 6, 6).pieces(0, 10**6)) == [Piece(7, 0, 1, 24, 24, 24)]
    block = Block(3, 3, 2, 5)
    assert list(block.pieces(0, 15)) == [(3, 0, 3, 2, 5, 2)]
    assert list(block.pieces(4, 14)) == [(4, 1, 1, 1, 1, 1), (8, 2, 1, 2, 2, 2), (13, 4, 1, 1, 1, 1)]
    assert len(list(Block(3, 1000, 2, 5).pieces(4, 4989))) == 3


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (Cut((2, 3, 1)), lambda x: x.split([2, 3, 1])),
        (Cut((2, 3), axis=1), lambda x: x.split([2, 3], dim=1)),
        (Cut((2, 1), groups=2), lambda x: [p.reshape(-1, 5) for p in x.view(2, 3, 5).split([2, 1], dim=1)]),
    ],
)
def test_a_cut_is_what_torch_gives(by: Cut, expected: Callable[[Tensor], Sequence[Tensor]]) -> None:
    wanted, found = expected(torch.arange(30).view(6, 5)), cut(matrices((6, 5))[0], by)
    assert [places(block) for block in found] == [part.flatten().tolist() for part in wanted]
    assert [(block.rows, block.cols) for block in found] == [tuple(part.shape) for part in wanted]
