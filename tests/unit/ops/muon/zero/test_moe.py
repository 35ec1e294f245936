# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own MoE layers: experts on several ranks train as if they were all in one place."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.experts import WithExperts, global_name, spread_model
from helpers.models import train_engine
from helpers.oracles import OracleResult, change_error, route, train_oracle
from helpers.training import ORACLE, PARAMS, ds_config, fp32_weights, make_engine

STEPS = 5
TO_ADAM = ["lm_head", "layer.deepspeed_moe.gate"]


def given_groups(net: nn.Module, how: str) -> dict[str, Any]:
    """Ways to hand the parameters to `deepspeed.initialize`."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    if how == "one group":
        return {"model_parameters": net.parameters()}
    if how == "unnamed groups":
        decayed = [[p for p in net.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
        return {"model_parameters": [{"params": params} for params in decayed]}
    if how == "client":
        return {"optimizer": MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)}
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    return {"model_parameters": groups}


def train_spread(steps: int = STEPS, how: str = "one group", width: int = 11, **config: Any) -> dict[str, Any]:
    """Weights under the twin's names, and how many matrices of experts each rank computes for all that have them."""
    net = spread_model(width)
    settings = ds_config(**config)
    if how == "client":
        settings.pop("optimizer")
    engine = make_engine(net, settings, **given_groups(net, how))
    train_engine(engine, steps)
    weights = {global_name(name, dist.get_rank()): value for name, value in fp32_weights(engine).items()}
    groups = engine.basic_optimizer.param_groups
    shared = [p for p in engine.basic_optimizer.partitions if groups[p.index].get("moe") and p.is_replicated]
    engine.destroy()
    return {"weights": weights, "sharing": [partition.world_size for partition in shared]}


def reference(clip: float = 1.0, width: int = 11) -> OracleResult:
    """The oracle's training of the twin."""
    net = WithExperts(spread=False, width=width)
    return train_oracle(net, net.batch, STEPS, route(net, TO_ADAM), replace(ORACLE, clip=clip))


def assert_equal(found: list[dict[str, Any]], expected: OracleResult) -> None:
    """1e-3 of the change, on every rank for the experts that it has."""
    seen = set()
    for rank, result in enumerate(found):
        for name, weight in result["weights"].items():
            assert change_error(expected.initial[name], weight, expected.weights[name]) <= 1e-3, (rank, name)
        seen |= result["weights"].keys()
    assert seen == expected.weights.keys()


@pytest.mark.parametrize("how", ["unnamed groups", "client", "stock's groups"])
def test_however_the_parameters_are_given(how: str) -> None:
    assert_equal(run(train_spread, 4, stage=2, how=how), reference())


def test_ranks_that_have_the_same_experts_share_the_work_at_stage_0() -> None:
    found = run(train_spread, 4, stage=0, clip=0.0, width=96)
    assert [result["sharing"] for result in found] == [[2]] * 4
    assert_equal(found, reference(0.0, width=96))
