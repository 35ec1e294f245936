# SPDX-License-Identifier: Apache-2.0
"""Many runs in one launch have the bits of many launches: under Triton's interpreter, against one launch per run."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.workspace import Workspace
from helpers.kernels import Interpret, interpreted_table, needs_triton, randn

Places = list[tuple[int, int, int]]


def places_of(lengths: list[int], gap: int, seed: int = 0) -> Places:
    """Runs of these lengths with gaps between them, in another order in the other tensor."""
    starts = list(itertools.accumulate((length + gap for length in lengths), initial=gap))[:-1]
    order, places, at = random.Random(seed).sample(range(len(lengths)), len(lengths)), [], 0
    for index in order:
        places.append((starts[index], at, lengths[index]))
        at += lengths[index]
    return places


LENGTHS = {"odd": [1, 5000, 77, 2048, 2049], "aligned": [16, 4096, 2064]}


@needs_triton
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=9), st.integers(0, 40))
def test_tiles_hold_each_element_once(lengths: list[int], gap: int) -> None:
    from deepspeed.muon.kernels.triton_elementwise import BLOCK, tiles

    places = places_of(lengths, gap)
    table, aligned = tiles(places, torch.device("cpu"))
    wanted = [(here + k, there + k) for here, there, length in places for k in range(length)]
    found = [(here + k, there + k) for here, there, length in table.tolist() for k in range(length)]
    assert found == wanted and 1 <= int(table[:, 2].min()) <= int(table[:, 2].max()) <= BLOCK
    assert aligned == all(number % 16 == 0 for place in places for number in place)


def step(lengths: list[int], gap: int, grad_dtype: torch.dtype, weight_decay: float, nesterov: bool) -> None:
    """Both passes, together and run by run; what lies between the runs keeps its value. Cautious with Nesterov."""
    kernels, places, size = interpreted_table(), places_of(lengths, gap), sum(lengths) + gap * (len(lengths) + 1)
    assert kernels.runs is not None and kernels.runs.fits(randn(3))
    given = [randn(size), randn(size, seed=1), randn(size, seed=2, dtype=grad_dtype), randn(sum(lengths), seed=3)]
    ours, alone, twin = ([tensor.clone() for tensor in given] for _ in range(3))
    for runs, (buffer, param, grad, out) in ((kernels.runs, ours), (reference.RUNS, twin)):
        tiles = runs.tiles(places, buffer.device)
        runs.advance(buffer, grad, out, tiles, 0.9, nesterov)
        runs.apply_(param, out, tiles, 0.1, 0.7, weight_decay, nesterov)
    buffer, param, grad, out = alone
    for here, there, length in places:
        part, result = slice(here, here + length), out[there : there + length]
        kernels.advance(buffer[part], grad[part], result, 0.9, nesterov, Workspace())
        kernels.apply_(param[part], result, 0.1, 0.7, weight_decay, nesterov, Workspace())
    for mine, one_by_one, expected in zip(ours, alone, twin, strict=True):
        assert mine.equal(one_by_one)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert not ours[0].equal(given[0]) and not ours[1].equal(given[1])


@needs_triton
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_bits_are_those_of_single_runs(interpret: Interpret, kind: str, nesterov: bool) -> None:
    gap, dtype = (0 if kind == "aligned" else 3), torch.float32 if nesterov else torch.float16
    interpret(step, lengths=LENGTHS[kind], gap=gap, grad_dtype=dtype, weight_decay=0.1 * nesterov, nesterov=nesterov)


def taken(dtype: torch.dtype) -> bool:
    runs = interpreted_table().runs
    return runs is not None and runs.fits(randn(4, dtype=dtype))


@needs_triton
def test_the_momentum_is_fp32(interpret: Interpret) -> None:
    assert interpret(taken, dtype=torch.float32) and not interpret(taken, dtype=torch.bfloat16)
