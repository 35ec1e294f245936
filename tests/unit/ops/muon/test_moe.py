# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own MoE layers: experts on different ranks train as if they were all in one place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run
from expert_models import WithExperts, global_name, spread_model
from models import train_engine
from oracles import change_error, route, train_oracle
from training import ORACLE, PARAMS, ds_config, fp32_weights, make_engine
from dataclasses import replace

STEPS = 5

def named(weights, rank):
    return {global_name(name, rank): value for name, value in weights.items()}

def train_experts(steps: int = STEPS, **config: Any) -> dict[str, Tensor]:
    import torch.distributed as dist
    engine = make_engine(spread_model(), ds_config(**config))
    train_engine(engine, steps)
    weights = fp32_weights(engine)
    engine.destroy()
    return named(weights, dist.get_rank())

def reference(steps=STEPS, clip=1.0):
    net = WithExperts(spread=False)
    routing = route(net, ["lm_head", "layer.deepspeed_moe.gate"])
    return train_oracle(net, net.batch, steps, routing, replace(ORACLE, clip=clip))

@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training(stage, world):
    clip = 0.0 if stage == 0 else 1.0
    expected = reference(clip=clip)
    found = run(train_experts, world, stage=stage, clip=clip)
    for rank, weights in enumerate(found):
        for name, w in weights.items():
            e = change_error(expected.initial[name], w, expected.weights[name])
            print(rank, name, e)
            assert e <= 1e-3, (rank, name, e)
