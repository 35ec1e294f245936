# SPDX-License-Identifier: Apache-2.0
"""Parameters that are several matrices: training one equals training its matrices as parameters of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import MODELS, Fused, train_engine
from helpers.oracles import Part, change_error, route, train_oracle
from helpers.parity import STEPS, assert_parity
from helpers.split_model import OPTIMIZER, parts, reference
from helpers.training import ORACLE, PARAMS, ds_config, fp32_weights, make_engine, train, train_around_a_checkpoint


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_of_separate_matrices(stage: int, world: int) -> None:
    expected = reference()
    for weights in run(train, world, model="fused", steps=STEPS, stage=stage, optimizer=OPTIMIZER):
        assert_parity(weights, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_offload_and_accumulation(stage: int) -> None:
    settings = {"stage": stage, "offload": True, "accumulation": 2, "optimizer": OPTIMIZER}
    for weights in run(train, 2, model="fused", steps=STEPS, **settings):
        assert_parity(weights, reference())


def head_parts() -> dict[str, list[Part]]:
    """One matrix for each head of the fused queries, keys and values of TinyGpt: 6 rows each."""
    named = {name: param for name, param in MODELS["gpt"]().named_parameters() if "qkv" in name}
    return {name: list(torch.arange(param.numel()).view(param.shape).split(6)) for name, param in named.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_per_head(stage: int, world: int) -> None:
    net = MODELS["gpt"]()
    routing = route(net, ["tokens", "positions", "lm_head"])
    expected = train_oracle(net, net.batch, STEPS, routing, ORACLE, parts=head_parts())
    optimizer = {"type": "Muon", "params": PARAMS | {"per_head_muon": True}}
    for weights in run(train, world, model="gpt", steps=STEPS, stage=stage, optimizer=optimizer):
        assert_parity(weights, expected)


def test_the_whole_matrix_is_something_else() -> None:
    """Without the split the same model trains differently, so the tests above can fail."""
    whole = OPTIMIZER | {"params": PARAMS | {"muon_conv": "flatten"}}
    weights, expected = run(train, 1, model="fused", steps=STEPS, stage=1, optimizer=whole)[0], reference()
    for name in ("qkv.weight", "c_attn.weight", "grouped.weight"):
        assert change_error(expected.initial[name], weights[name], expected.weights[name]) > 0.05, name


def momenta(stage: int, params: dict[str, Any]) -> dict[str, Tensor]:
    """Momentum by name after three steps."""
    from deepspeed.utils import safe_get_full_optimizer_state

    net = MODELS["fused"]()
    engine = make_engine(net, ds_config(stage=stage, optimizer={"type": "Muon", "params": params}))
    train_engine(engine, 3)
    named = ((name, param) for name, param in net.named_parameters() if name in parts())
    found = {name: safe_get_full_optimizer_state(param, "momentum_buffer") for name, param in named}
    engine.destroy()
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_rounding_is_independent_of_the_ranks(stage: int) -> None:
    """A momentum in bf16 is rounded by the element of the matrix, wherever it lies."""
    params = OPTIMIZER["params"] | {"momentum_dtype": "bf16", "lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0}
    first, second = (run(momenta, world, stage=stage, params=params)[0] for world in (2, 4))
    for name, value in first.items():
        assert value.abs().max() > 0
        # The gradients' mean over the ranks differs in its last bit.
        assert torch.isclose(value, second[name], rtol=2**-7, atol=0).float().mean() > 0.99, name


def test_blocks_of_one_parameter_are_rounded_each_by_its_own_numbers() -> None:
    """Equal gradients in two blocks: equal draws would make the same errors in both."""
    net = nn.Sequential(nn.Linear(64, 8, bias=False))
    optimizer = MuonWithAuxAdam(
        net.parameters(), model=net, lr=0.1, momentum_dtype="bf16", muon_split={"0.weight": [4, 4]}
    )
    half = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    net[0].weight.grad = torch.cat([half, half])
    optimizer.step()
    first, second = optimizer.state[net[0].weight]["momentum_buffer"].float().view(2, 4, 64)
    assert torch.isclose(first, second, rtol=2**-7, atol=0).all()
    assert 0.1 < (first == second).float().mean() < 0.9


def go_on(stage: int, folder: str, load: bool) -> dict[str, Tensor]:
    """Three steps, saved after the first or loaded from there."""
    engine = make_engine(Fused(seed=int(load)), ds_config(stage=stage, optimizer=OPTIMIZER))
    train_around_a_checkpoint(engine, folder, load)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_exact(stage: int, world: int, tmp_path: Path) -> None:
    expected, found = (run(go_on, world, stage=stage, folder=str(tmp_path), load=load)[0] for load in (False, True))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
