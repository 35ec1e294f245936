# SPDX-License-Identifier: Apache-2.0
"""Blocks of a parameter: their sizes, and the runs of elements that a slice of the parameter holds of them."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.muon.routing import Block, MatrixSpec
from foreign_models import (
    linear,
    module,
    routes,
)


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


# ---- runs -----------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int]:
    """A rectangle of a parameter, and the parameter's number of elements."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["rows", "columns", "any"]))
    top, left = (draw(st.integers(0, size - 1)) for size in (height, width))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    if kind == "rows":
        left, cols = 0, width
    if kind == "columns":
        top, rows = 0, height
    return Block(top * width + left, rows, cols, width), height * width


def brute_force(block: Block, start: int, stop: int) -> dict[int, int]:
    """Element of the parameter -> element of the block, inside start .. stop."""
    place = {
        block.offset + i * block.stride + j: i * block.cols + j for i in range(block.rows) for j in range(block.cols)
    }
    return {element: at for element, at in place.items() if start <= element < stop}


@settings(max_examples=500, deadline=None)
@given(blocks(), st.data())
def test_runs_against_brute_force(case: tuple[Block, int], data: st.DataObject) -> None:
    block, numel = case
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    runs = list(block.runs(start, stop))
    listed = [(element + k, at + k) for element, at, length in runs for k in range(length)]
    assert dict(listed) == brute_force(block, start, stop)
    assert len(listed) == len(dict(listed)), "no element twice"
    assert all(length > 0 for *_, length in runs)
    assert runs == sorted(runs)


@settings(max_examples=200, deadline=None)
@given(blocks(), st.data())
def test_runs_of_consecutive_ranges_cover_the_block_once(case: tuple[Block, int], data: st.DataObject) -> None:
    """Partitions of the ranks: their runs together are the block."""
    block, numel = case
    span = data.draw(st.integers(1, numel))
    listed = [
        at + k
        for start in range(0, numel, span)
        for _, at, length in block.runs(start, min(start + span, numel))
        for k in range(length)
    ]
    assert listed == list(range(block.numel))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 20))
def test_runs_of_whole_rows_are_one(rows: int, cols: int, offset: int) -> None:
    block = Block(offset, rows, cols, cols)
    assert list(block.runs(0, 10**6)) == [(offset, 0, rows * cols)]
    assert list(block.runs(offset, offset)) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (17, 100), (5, 5), (6, 8)])
def test_runs_outside_the_block_are_none(start: int, stop: int) -> None:
    """Columns 3 .. 5 of rows 0 .. 2 of a matrix of 5 columns: elements 3, 4, 8, 9, 13, 14."""
    assert list(Block(3, 3, 2, 5).runs(start, stop)) == []


def test_runs_of_columns_by_hand() -> None:
    block = Block(3, 3, 2, 5)
    assert list(block.runs(0, 15)) == [(3, 0, 2), (8, 2, 2), (13, 4, 2)]
    assert list(block.runs(4, 14)) == [(4, 1, 1), (8, 2, 2), (13, 4, 1)]


def test_a_block_is_what_slicing_gives() -> None:
    matrix = torch.arange(6 * 7)
    columns = Block(2, 6, 3, 7)
    piece = torch.full((columns.numel,), -1)
    for element, at, length in columns.runs(0, 42):
        piece[at : at + length] = matrix[element : element + length]
    expected: Tensor = matrix.view(6, 7)[:, 2:5]
    assert torch.equal(piece.view(6, 3), expected)
