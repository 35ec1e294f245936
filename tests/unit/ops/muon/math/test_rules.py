# SPDX-License-Identifier: Apache-2.0
"""Rules for whole matrices against their definitions, row by row in fp64."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.math.rules import Rules, equalize, normuon
from helpers.kernels import threads
from helpers.rules import OF_MATRICES, RULES

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 7)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def matrix_of(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", OF_MATRICES)
def test_rules_equal_their_definitions(rule: str, shape: tuple[int, int], axis: int, dtype: torch.dtype) -> None:
    """Over three steps; `axis` 1: the outputs lie in columns."""
    params, oracle = RULES[rule]
    rules, turn = Rules(**params), ((1, 0) if axis else (0, 1))
    moments, memory = [torch.zeros(shape[axis])] if rules.normuon else [], {}
    for step in range(3):
        matrix = matrix_of(shape, dtype, step)
        wanted = matrix.double().permute(turn)
        rules.apply_before(matrix[None], axis, Workspace())
        wanted = oracle.get("before", lambda x: x)(wanted)
        assert error(matrix, wanted.permute(turn)) < TOLERANCES[dtype]
        rules.apply_after(matrix[None], axis, moments, Workspace())
        wanted = oracle.get("after", lambda x, memory: x)(wanted, memory)
        assert error(matrix, wanted.permute(turn)) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("power", [-130, -100, 0, 100, 125])
def test_magnitudes_do_not_matter(power: int, dtype: torch.dtype) -> None:
    """Squares would leave the range of fp32; so would those of one row beside another of its own magnitude."""
    rules, matrix = Rules(muon_eq="rows"), matrix_of((6, 10), dtype)
    wanted = matrix.clone()
    rules.apply_before(wanted[None], 0, Workspace())
    matrix[::2] = torch.ldexp(matrix[::2].double(), torch.tensor(power)).to(dtype)
    rules.apply_before(matrix[None], 0, Workspace())
    assert error(matrix, wanted.double()) < (0.2 if power == -130 else TOLERANCES[dtype])


def test_zeros_stay_zeros() -> None:
    matrix = matrix_of((6, 10), torch.float32)
    matrix[2] = 0
    for axis in (0, 1):
        equalize(matrix, [axis], Workspace())
    assert not matrix[2].any() and matrix.isfinite().all()
    moment = torch.zeros(6)
    normuon(matrix, 0, moment, 0.9, Workspace())
    assert not matrix[2].any() and matrix.isfinite().all()
    kept, matrix = moment.clone(), torch.zeros(6, 10)  # of a parameter without a gradient in a step
    normuon(matrix, 0, moment, 0.9, Workspace())
    assert moment.equal(kept) and kept.any() and not matrix.any()


def test_normuon_keeps_the_norm_and_makes_rows_alike() -> None:
    matrix = matrix_of((8, 64), torch.float32) * torch.arange(1, 9).unsqueeze(1)
    before, moment = matrix.norm(), torch.zeros(8)
    normuon(matrix, 0, moment, 0.95, Workspace())
    torch.testing.assert_close(matrix.norm(), before)
    torch.testing.assert_close(matrix.norm(dim=1), (before / 8**0.5).expand(8))


@pytest.mark.parametrize("axis", [0, 1])
def test_the_number_of_threads_does_not_matter(axis: int) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            matrix, moment = matrix_of((700, 900), torch.float32), torch.zeros((700, 900)[axis])
            equalize(matrix, [axis], Workspace())
            normuon(matrix, axis, moment, 0.95, Workspace())
            found.append((matrix, moment))
    assert all(matrix.equal(found[0][0]) and moment.equal(found[0][1]) for matrix, moment in found)


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rule_takes_every_shape(dtype: str, momentum_dtype: str) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"normuon": True, "cautious_weight_decay": True},
        {"muon_eq": "rows", "muon_plus": "columns_rows"},
        {"muon_eq": "columns", "normuon": True, "ns_normalization": "aol", "ns_method": "gram"},
    ]
    for params in rules[: 3 if dtype == "fp16" else 4]:  # AOL is refused in fp16
        shapes = list(itertools.product((1, 2, 7, 9, 17), repeat=2))
        net = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
        for param in net:
            param.use_muon = True  # type: ignore[attr-defined]
        section = {"lr": 0.1, "weight_decay": 0.1, "ns_dtype": dtype, "momentum_dtype": momentum_dtype} | params
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **section)
        for step in range(2):
            for param in net:
                generator = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        for param in net:
            assert param.isfinite().all() and not torch.equal(param, torch.ones_like(param)), (params, param.shape)
