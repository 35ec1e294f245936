# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers beside tensor parallelism and in pipelines train as if all of the model were in one place."""

from dataclasses import replace

import pytest

from helpers.distributed import run
from helpers.experts import WithExperts
from helpers.experts_beside import beside_autoep, cut_experts, stock_on_sequences
from helpers.oracles import change_error, train_oracle
from helpers.training import ORACLE

#: Ranks, model-parallel ranks and stages.
MPU, PIPELINE, BOTH = {"size": 2}, {"stages": 2}, {"size": 2, "stages": 2}


@pytest.mark.full
def test_experts_that_are_cut_are_refused() -> None:
    name = "1.layer.deepspeed_moe.experts.deepspeed_experts.0.up.weight"
    for kind, text, _ in run(cut_experts, 4):
        assert kind == "UnsupportedError"
        assert f"tensor parallelism splits 4 matrices of experts (first: {name})" in text


STOCK = {
    "mpu": "AutoEP does not currently support tensor model parallelism from mpu",
    "sequence": "AutoEP does not currently support tensor model parallelism from mpu",
    "pipeline": "AutoEP: no MoE layers detected",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", STOCK)
def test_stock_refuses_autoep_beside_other_parallelism(kind: str) -> None:
    for name, text, _ in run(beside_autoep, 4, kind=kind):
        assert name == "ValueError" and STOCK[kind] in text


@pytest.mark.full
def test_stock_mixes_up_tokens_where_ranks_share_sequences() -> None:
    """The reason of the refusal: experts see other tokens, so that AdamW's first step has other signs."""
    net = WithExperts(spread=False)
    routing = dict.fromkeys(dict(net.named_parameters()), "adam")
    expected = train_oracle(net, net.batch, 1, routing, replace(ORACLE, clip=0.0, adam_weight_decay=0.01))
    for weights in run(stock_on_sequences, 4):
        errors = {n: change_error(expected.initial[n], w, expected.weights[n]) for n, w in weights.items()}
        assert max(error for name, error in errors.items() if "experts" in name) > 0.2, errors
