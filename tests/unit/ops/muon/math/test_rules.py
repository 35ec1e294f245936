# SPDX-License-Identifier: Apache-2.0
"""Rules for whole matrices, scales and schedules, against their definitions in fp64."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.config.schema import parse
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.math.rules import (
    SCALES,
    MuonEq,
    Schedules,
    equalize,
    normuon,
    scale_factor,
    snap_norm,
    state_shapes,
    update_rms,
)
from helpers.kernels import randn, relative, threads
from helpers.rules import OF_MATRICES, RULES

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 7), (130, 7)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", OF_MATRICES)
def test_rules_equal_their_definitions(rule: str, shape: tuple[int, int], axis: int, dtype: torch.dtype) -> None:
    """Over three steps; `axis` 1: the outputs lie in columns."""
    params, oracle = RULES[rule]
    rules, turn = parse(params).rules, ((1, 0) if axis else (0, 1))
    state, memory = {name: torch.zeros(size) for name, size in state_shapes(rules, shape, axis).items()}, {}
    for step in range(3):
        matrix = randn(*shape, seed=step, dtype=dtype)
        wanted = matrix.double().permute(turn)
        for each in rules:
            each.before(matrix, axis, state, Workspace())
        wanted = oracle.get("before", lambda x: x)(wanted)
        assert relative(matrix, wanted.permute(turn)) < TOLERANCES[dtype]
        for each in rules:
            each.after(matrix, axis, state, Workspace())
        wanted = oracle.get("after", lambda x, memory: x)(wanted, memory)
        assert relative(matrix, wanted.permute(turn)) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("power", [-130, -100, 0, 100, 125])
def test_magnitudes_do_not_matter(power: int, dtype: torch.dtype) -> None:
    """Squares would leave the range of fp32; so would those of one row beside another of its own magnitude."""
    rule, matrix = MuonEq("rows"), randn(6, 10, dtype=dtype)
    wanted = matrix.clone()
    rule.before(wanted, 0, {}, Workspace())
    matrix[::2] = torch.ldexp(matrix[::2].double(), torch.tensor(power)).to(dtype)
    rule.before(matrix, 0, {}, Workspace())
    assert relative(matrix, wanted.double()) < (0.2 if power == -130 else TOLERANCES[dtype])


def test_zeros_stay_zeros() -> None:
    matrix = randn(6, 10)
    matrix[2] = 0
    for axis in (0, 1):
        equalize(matrix, axis, Workspace())
    assert not matrix[2].any() and matrix.isfinite().all()
    moment = torch.zeros(6)
    normuon(matrix, 0, moment, 0.9, Workspace())
    assert not matrix[2].any() and matrix.isfinite().all()
    kept, matrix = moment.clone(), torch.zeros(6, 10)  # of a parameter without a gradient in a step
    snap_norm(matrix, Workspace())
    normuon(matrix, 0, moment, 0.9, Workspace())
    assert moment.equal(kept) and kept.any() and not matrix.any()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_number_of_threads_does_not_matter(axis: int) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            matrix, moment = randn(700, 900), torch.zeros((700, 900)[axis])
            equalize(matrix, axis, Workspace())
            normuon(matrix, axis, moment, 0.95, Workspace())
            found.append((matrix, moment))
    assert all(matrix.equal(found[0][0]) and moment.equal(found[0][1]) for matrix, moment in found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rule_takes_every_shape(dtype: str, momentum_dtype: str) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"normuon": True, "cautious_weight_decay": True},
        {"muon_eq": "rows", "muon_plus": True, "normuon": True},
        {"muon_eq": "columns", "normuon": True, "ns_method": "gram"},
    ]
    for params in rules:
        shapes = list(itertools.product((1, 2, 7, 9, 17), repeat=2))
        net = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
        for param in net:
            param.use_muon = True  # type: ignore[attr-defined]
        section = {"lr": 0.1, "weight_decay": 0.1, "ns_dtype": dtype, "momentum_dtype": momentum_dtype} | params
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **section)
        for step in range(2):
            for param in net:
                param.grad = randn(*param.shape, seed=step)
            optimizer.step()
        for param in net:
            assert param.isfinite().all() and not torch.equal(param, torch.ones_like(param)), (params, param.shape)


# ---- scales and schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "original", "rms", "spectral"),
    [
        (64, 64, 1.0, 1.6, 1.0),
        (64, 256, 1.0, 3.2, 0.5),
        (256, 64, 2.0, 3.2, 2.0),
        (100, 1, 10.0, 2.0, 10.0),
        (1, 100, 1.0, 2.0, 0.1),
        (225, 100, 1.5, 3.0, 1.5),
        (100, 225, 1.0, 3.0, 2 / 3),
    ],
)
def test_scales(rows: int, cols: int, original: float, rms: float, spectral: float) -> None:
    expected = {"original": original, "match_rms_adamw": rms, "spectral_unclamped": spectral, "none": 1.0}
    assert {name: scale_factor(name, rows, cols) for name in SCALES} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("shape", [(24, 24), (24, 60), (60, 24), (2, 50)])
def test_update_rms(name: str, shape: tuple[int, int]) -> None:
    """A matrix whose singular values are all one, scaled, has the RMS that is promised."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    scaled = scale_factor(name, *shape) * (u @ vh)
    assert scaled.square().mean().sqrt().item() == pytest.approx(update_rms(name, *shape), rel=1e-12)
    assert name != "match_rms_adamw" or update_rms(name, *shape) == pytest.approx(0.2, rel=1e-12)


GROUP = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.2}


def test_momentum_goes_linearly_to_that_of_the_group() -> None:
    for done, momentum in {0: 0.85, 1: 0.875, 2: 0.9, 3: 0.925, 4: 0.95, 5: 0.95, 10**9: 0.95}.items():
        found = Schedules(momentum_start=0.85, momentum_warmup_steps=4).settings_at(GROUP, done)
        assert found == GROUP | {"momentum": pytest.approx(momentum)}
    found = Schedules(momentum_start=0.99, momentum_warmup_steps=2).settings_at(GROUP | {"momentum": 0.9}, 1)
    assert found["momentum"] == pytest.approx(0.945), "it may fall"


def test_weight_decay_goes_linearly_to_zero() -> None:
    for done, decay in {0: 0.2, 1: 0.15, 2: 0.1, 3: 0.05, 4: 0.0, 5: 0.0, 99: 0.0}.items():
        found = Schedules(muon_weight_decay_steps=4).settings_at(GROUP, done)
        assert found == GROUP | {"weight_decay": pytest.approx(decay)}


def test_without_schedules_a_group_keeps_its_values() -> None:
    assert Schedules().settings_at(GROUP, 7) == GROUP and not str(Schedules())
