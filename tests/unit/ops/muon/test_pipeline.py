# SPDX-License-Identifier: Apache-2.0
"""Pipelines of DeepSpeed's with ZeRO-1: each rank holds the parameters of one stage."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from distributed import run
from oracles import route, train_oracle
from pipelines import MODELS, Whole, train_pipeline
from test_parity import HALVES, assert_parity
from training import ORACLE

STEPS = 5
#: What is not for Muon, by beginning of the name: embeddings, positions, and the head, which comes last.
ADAM = {"tied": ["tied_modules", "1."], "untied": ["0.", "1.", "5."], "late": ["0.", "1.", "5."], "mlp": ["8."]}


def oracle(name: str, clip: float = 1.0, dtype: str = "fp32") -> Any:
    net = Whole(name).to(HALVES[dtype])
    return train_oracle(net, net.batch, STEPS, route(net, ADAM[name]), replace(ORACLE, clip=clip))


def assert_equal(ranks: list[dict[str, Tensor]], reference: Any, dtype: str = "fp32") -> None:
    """Every rank's weights are the oracle's, and together they are all of them."""
    assert set().union(*ranks) == reference.weights.keys()
    for weights in ranks:
        own = replace(reference, weights={name: reference.weights[name] for name in weights})
        assert_parity(weights, own, dtype)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_oracle(name: str, world: int) -> None:
    ranks = run(train_pipeline, world, name=name, stages=2, steps=STEPS)
    assert_equal(ranks, oracle(name))
    assert ranks[0].keys() != ranks[-1].keys()
