# SPDX-License-Identifier: Apache-2.0
"""Rules beyond plain Muon, under ZeRO: against the oracle that shares no code, and the same bits however sharded."""

from typing import Any

import pytest
import torch

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import MODELS
from helpers.oracles import change_error
from helpers.parity import SHAPES, STEPS, assert_parity, oracle
from helpers.rules import RULES
from helpers.startup_log import records
from helpers.training import train, train_on_gradients, with_params


@pytest.mark.sample(12)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_training_equals_the_oracle(rule: str, stage: int, world: int) -> None:
    """With fused projections, accumulation and CPU offload."""
    params, settings = RULES[rule]
    reference = oracle("gpt", 1.0, **settings)
    case = {"stage": stage, "offload": stage > 0, "accumulation": 2, "optimizer": with_params(**params)}
    for weights in run(train, world, model="gpt", steps=STEPS, **case):
        assert_parity(weights, reference)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_another_training(rule: str) -> None:
    """So that the test above can fail."""
    _, settings = RULES[rule]
    of_rules = ("before", "after", "cautious", "orthogonalize", "varying")
    without = {key: value for key, value in settings.items() if key not in of_rules}
    found, plain = oracle("gpt", 1.0, **settings), oracle("gpt", 1.0, **without)
    matrices = [name for name, second in found.second_moment.items() if not second.any()]
    differences = [change_error(plain.initial[n], plain.weights[n], found.weights[n]) for n in matrices]
    assert min(differences) > 0.01


@pytest.mark.sample(6)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_whatever_the_sharding(rule: str, stage: int) -> None:
    def weights(world: int, stage: int) -> dict[str, torch.Tensor]:
        settings = {"shapes": SHAPES, "steps": 3, "clip": 0.0, "optimizer": with_params(**RULES[rule][0])}
        return run(train_on_gradients, world, stage=stage, **settings)[0]

    base = weights(1, 0)
    for world in (1, 2, 4):
        found = weights(world, stage)
        assert all(torch.equal(found[name], base[name]) for name in base), world


def test_the_log_names_the_rules() -> None:
    log = run(records, 1, optimizer=with_params(normuon=True, muon_eq="rows"))[0]
    assert any("; MuonEq (rows), NorMuon (beta2 0.95)" in text for _, text in log)
    assert not any("NorMuon" in text for _, text in run(records, 1)[0])


@pytest.mark.parametrize("key", [{"normuon": True}, {"muon_eq": "columns"}, {"muon_plus": "rows"}], ids=str)
def test_a_stack_whose_outputs_are_unknown_is_refused(key: dict[str, Any]) -> None:
    net = MODELS["fused"]()
    with pytest.raises(
        MuonConfigError, match=r"outputs is unknown for 1 stacks of matrices, first experts\.down; name them"
    ):
        MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, **key)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, muon_exclude="experts", **key)
    assert optimizer.rules and MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3)


def test_the_log_states_cautious_decay_and_warns_where_there_is_no_decay() -> None:
    for decay, warned in ((0.1, False), (0.0, True)):
        log = run(records, 1, optimizer=with_params(cautious_weight_decay=True, weight_decay=decay))[0]
        assert any("; cautious weight decay" in text for _, text in log)
        assert any(level == "WARNING" and "has no effect" in text for level, text in log) is warned
    assert not any("cautious" in text for _, text in run(records, 1)[0])
