# SPDX-License-Identifier: Apache-2.0
"""Rules beyond plain Muon, under ZeRO: against the oracle that shares no code, and the same bits however sharded."""

import os
import random
from collections import Counter
from typing import Any

import pytest
import torch

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from helpers.distributed import RankError, run
from helpers.logs import logged_at_start
from helpers.models import MODELS
from helpers.parity import SHAPES, STEPS, assert_parity, oracle
from helpers.rules import RULES, combination
from helpers.training import train, train_on_gradients, with_params

#: In the full run; FUZZ=N tries so many.
COMBINATIONS = int(os.environ.get("FUZZ", "60"))


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


@pytest.mark.time_limit(2400)
@pytest.mark.parametrize("count", [4, pytest.param(COMBINATIONS, marks=pytest.mark.full)])
def test_combinations_train_as_the_oracle_or_are_refused_by_name(count: int, record_property: Any) -> None:
    """At random stages and numbers of ranks, with offload and accumulation."""
    draw, outcomes = random.Random(0), Counter[str]()
    for _ in range(count):
        params, settings = combination(draw)
        stage, world = draw.randrange(4), draw.choice([1, 2, 3])
        case = {"stage": stage, "offload": stage > 0, "accumulation": 2, "optimizer": with_params(**params)}
        if key := settings.pop("refused", None):
            with pytest.raises(RankError, match=rf"MuonConfigError: optimizer\.params.*{key}"):
                run(train, world, model="gpt", steps=STEPS, **case)
            outcomes["refused by name"] += 1
            continue
        reference = oracle("gpt", 1.0, **settings)
        for weights in run(train, world, model="gpt", steps=STEPS, **case):
            assert_parity(weights, reference)
        outcomes["trained as the oracle"] += 1
    record_property("summary", f"{count} combinations of rules: {dict(outcomes)}")
    assert outcomes.total() == count and outcomes["trained as the oracle"] > 0.3 * count


def test_the_log_names_the_rules() -> None:
    log = run(logged_at_start, 1, optimizer=with_params(normuon=True, muon_eq="rows"))[0]
    assert any("; MuonEq (rows), NorMuon (beta2 0.95)" in text for _, text in log)
    assert not any("NorMuon" in text for _, text in run(logged_at_start, 1)[0])


@pytest.mark.parametrize("key", [{"normuon": True}, {"muon_eq": "columns"}, {"muon_plus": "rows"}], ids=str)
def test_a_stack_whose_outputs_are_unknown_is_refused(key: dict[str, Any]) -> None:
    net = MODELS["fused"]()
    with pytest.raises(
        MuonConfigError, match=r"are the outputs in 1 stacks of matrices \(first: experts\.down\); list them"
    ):
        MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, **key)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, muon_exclude="experts", **key)
    assert optimizer.config.rules and MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3)


def test_the_log_states_cautious_decay_and_warns_where_there_is_no_decay() -> None:
    for decay, warned in ((0.1, False), (0.0, True)):
        log = run(logged_at_start, 1, optimizer=with_params(cautious_weight_decay=True, weight_decay=decay))[0]
        assert any("; cautious weight decay" in text for _, text in log)
        assert any(level == "WARNING" and "has no effect" in text for level, text in log) is warned
    assert not any("cautious" in text for _, text in run(logged_at_start, 1)[0])
