# SPDX-License-Identifier: Apache-2.0
"""Blocks of a parameter: their sizes, what a slice of the parameter holds of them, and how they are cut."""

import re
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.block import Block, Piece, cut, matrices
from deepspeed.muon.matrices.splitting import MatrixSpec
from helpers.foreign_models import linear, module, routes


def test_specs_and_blocks_are_frozen() -> None:
    spec = routes(module(fc=linear()))["fc.weight"]
    for holder, name in ((spec, "use_muon"), (spec, "reason"), (spec.blocks[0], "rows")):
        with pytest.raises(FrozenInstanceError):
            setattr(holder, name, None)
    assert hash(spec) == hash(MatrixSpec(spec.name, spec.shape, True, spec.reason, (Block(0, 16, 8, 8),)))


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((7,), 7), ((3, 5), 15), ((2, 3, 4), 24), ((0, 3), 0)])
def test_numel(shape: tuple[int, ...], numel: int) -> None:
    assert MatrixSpec("x", shape, False, "").numel == numel
    assert Block(3, 4, 5, 9).numel == 20


# ---- pieces ---------------------------------------------------------------------------------------------


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
    assert all(piece.numel == piece.rows * piece.cols > 0 for piece in pieces)
    assert [at for _, at in listed] == sorted(at for _, at in listed)
    assert block.before(stop) - block.before(start) == len(expected)


@settings(max_examples=300, deadline=None)
@given(blocks())
def test_places(case: tuple[Block, int]) -> None:
    block, numel = case
    assert [block.element(at) for at in range(block.numel)] == places(block)
    assert block.stop == max(places(block)) + 1 <= numel
    assert [block.before(element) for element in range(numel + 1)] == [
        sum(place < element for place in places(block)) for element in range(numel + 1)
    ]


@settings(max_examples=200, deadline=None)
@given(blocks(), st.data())
def test_pieces_of_consecutive_ranges_cover_the_block_once(case: tuple[Block, int], data: st.DataObject) -> None:
    """Partitions of the ranks: their pieces together are the block."""
    block, numel = case
    span = data.draw(st.integers(1, numel))
    cuts = [block.pieces(start, min(start + span, numel)) for start in range(0, numel, span)]
    assert [at for pieces in cuts for piece in pieces for _, at in elements(piece)] == list(range(block.numel))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 20))
def test_whole_rows_are_one_piece(rows: int, cols: int, offset: int) -> None:
    block = Block(offset, rows, cols, cols)
    assert list(block.pieces(0, 10**6)) == [Piece(offset, 0, 1, rows * cols, rows * cols, rows * cols)]
    assert list(block.pieces(offset, offset)) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (17, 100), (5, 5), (6, 8)])
def test_pieces_outside_the_block_are_none(start: int, stop: int) -> None:
    """Columns 3 .. 5 of rows 0 .. 2 of a matrix of 5 columns: elements 3, 4, 8, 9, 13, 14."""
    assert list(Block(3, 3, 2, 5).pieces(start, stop)) == []


def test_pieces_of_columns_by_hand() -> None:
    """Whole rows are one piece, however many there are."""
    block = Block(3, 3, 2, 5)
    assert list(block.pieces(0, 15)) == [(3, 0, 3, 2, 5, 2)]
    assert list(block.pieces(4, 14)) == [(4, 1, 1, 1, 1, 1), (8, 2, 1, 2, 2, 2), (13, 4, 1, 1, 1, 1)]
    assert len(list(Block(3, 1000, 2, 5).pieces(4, 4989))) == 3


# ---- cutting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (Cut((2, 3, 1)), lambda x: x.split([2, 3, 1])),
        (Cut((2, 3), axis=1), lambda x: x.split([2, 3], dim=1)),
        (Cut((2, 1), groups=2), lambda x: [p.reshape(-1, 5) for p in x.view(2, 3, 5).split([2, 1], dim=1)]),
    ],
)
def test_a_cut_is_what_torch_gives(by: Cut, expected: Callable[[Tensor], Sequence[Tensor]]) -> None:
    whole = matrices((6, 5))[0]
    wanted = expected(torch.arange(30).view(6, 5))
    found = cut(whole, by)
    assert [places(block) for block in found] == [part.flatten().tolist() for part in wanted]
    assert [(block.rows, block.cols) for block in found] == [tuple(part.shape) for part in wanted]


def test_a_cut_that_does_not_fit_is_refused() -> None:
    whole = matrices((6, 5))[0]
    with pytest.raises(ValueError, match=re.escape("2 + 3 rows add up to 5, not 6")):
        cut(whole, Cut((2, 3)))
    with pytest.raises(ValueError, match=re.escape("2 + 3 rows in 2 groups add up to 10, not 6")):
        cut(whole, Cut((2, 3), groups=2))
    with pytest.raises(ValueError, match="6 columns add up to 6, not 5"):
        cut(whole, Cut((6,), axis=1))
    with pytest.raises(ValueError, match="groups above 1 need axis 0"):
        cut(matrices((6, 6))[0], Cut((3,), axis=1, groups=2))


def test_stacks() -> None:
    assert matrices((4, 3)) == (Block(0, 4, 3, 3),)
    assert matrices((2, 4, 3)) == (Block(0, 4, 3, 3), Block(12, 4, 3, 3))
    assert len(matrices((2, 5, 4, 3))) == 10
