# SPDX-License-Identifier: Apache-2.0
"""Parameters that are several matrices: training one equals training its matrices as parameters of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.split_model import OPTIMIZER, parts
from helpers.training import ds_config, make_engine


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
