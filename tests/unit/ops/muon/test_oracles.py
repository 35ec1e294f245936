# SPDX-License-Identifier: Apache-2.0
"""The reference's data and gradients, against AdamW in unmodified DeepSpeed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.models import MODELS, full_weights, train_engine
from helpers.oracles import OracleConfig, change_error, route, train_oracle
from helpers.training import ds_config

STEPS = 4
ADAM = OracleConfig(adam_lr=0.01, adam_weight_decay=0.1, betas=(0.8, 0.95), clip=1.0)


def train_deepspeed(model: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Full weights and losses after STEPS steps of AdamW in DeepSpeed, float32."""
    import deepspeed

    net = MODELS[model]()
    params = {"lr": ADAM.adam_lr, "weight_decay": ADAM.adam_weight_decay, "betas": ADAM.betas, "torch_adam": True}
    config = ds_config(stage, accumulation=4, clip=ADAM.clip, optimizer={"type": "AdamW", "params": params})
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    losses = train_engine(engine, STEPS)
    weights = full_weights(net)
    engine.destroy()
    return weights, losses


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["mlp", "frozen", "unused", "gpt_tied"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adam_matches_deepspeed(stage: int, name: str) -> None:
    """Batches, averaging over ranks and micro-steps and clipping are those of DeepSpeed."""
    model = MODELS[name]()
    routing = dict.fromkeys(route(model), "adam")
    oracle = train_oracle(model, model.batch, STEPS, routing, ADAM)
    unclipped = train_oracle(model, model.batch, STEPS, routing, replace(ADAM, clip=0.0)).weights
    assert max(change_error(oracle.initial[name], unclipped[name], oracle.weights[name]) for name in routing) > 0.01
    results = run(train_deepspeed, 2, model=name, stage=stage)
    for weights, _ in results:
        for key, reference in oracle.weights.items():
            assert change_error(oracle.initial[key], weights[key], reference) <= 1e-4, key
    losses = torch.tensor([losses for _, losses in results]).view(2, STEPS, 4).mean((0, 2))
    torch.testing.assert_close(losses.double(), torch.tensor(oracle.losses, dtype=torch.float64), rtol=1e-5, atol=0)
