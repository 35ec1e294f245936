# SPDX-License-Identifier: Apache-2.0
"""Rules beyond plain Muon, under ZeRO: against the oracle that shares no code, and the same bits however sharded."""

import pytest
import torch

from helpers.distributed import run
from helpers.oracles import change_error
from helpers.parity import SHAPES, STEPS, assert_parity, oracle
from helpers.startup_log import records
from helpers.training import train, train_on_gradients, with_params

CAUTIOUS = with_params(cautious_weight_decay=True, weight_decay=1.0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("model", ["gpt", "wide"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cautious_decay_equals_the_oracle(stage: int, world: int, model: str) -> None:
    """With fused projections, accumulation and CPU offload; plain decay is another training."""
    decay = {"weight_decay": 1.0, "adam_weight_decay": 1.0}
    reference, plain = oracle(model, 1.0, **decay, cautious=True), oracle(model, 1.0, **decay)
    matrices = [name for name, second in reference.second_moment.items() if not second.any()]
    assert all(
        change_error(plain.initial[name], plain.weights[name], reference.weights[name]) > 0.01 for name in matrices
    )
    settings = {"stage": stage, "offload": stage > 0, "accumulation": 2}
    for weights in run(train, world, model=model, steps=STEPS, optimizer=CAUTIOUS, **settings):
        assert_parity(weights, reference)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cautious_decay_makes_the_same_bits_whatever_the_sharding(stage: int) -> None:
    def weights(world: int, stage: int) -> dict[str, torch.Tensor]:
        settings = {"shapes": SHAPES, "steps": 3, "clip": 0.0, "optimizer": CAUTIOUS}
        return run(train_on_gradients, world, stage=stage, **settings)[0]

    base = weights(1, 0)
    for world in (1, 2, 4):
        found = weights(world, stage)
        assert all(torch.equal(found[name], base[name]) for name in base), world


def test_the_log_states_cautious_decay_and_warns_where_there_is_no_decay() -> None:
    for decay, warned in ((0.1, False), (0.0, True)):
        log = run(records, 1, optimizer=with_params(cautious_weight_decay=True, weight_decay=decay))[0]
        assert any("; cautious weight decay" in text for _, text in log)
        assert any(level == "WARNING" and "has no effect" in text for level, text in log) is warned
    assert not any("cautious" in text for _, text in run(records, 1)[0])
