# SPDX-License-Identifier: Apache-2.0
"""Pipelines of DeepSpeed's with ZeRO-1: each rank holds the parameters of one stage."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from distributed import run
from models import fused_parts
from oracles import route, train_oracle
from pipelines import MODELS, Whole, train_pipeline
from test_parity import HALVES, assert_parity
from training import ORACLE

STEPS = 5
#: What is not for Muon, by beginning of the name: embeddings, positions, and the head, which comes last.
ADAM = {"tied": ["tied_modules", "1."], "untied": ["0.", "1.", "5."], "late": ["0.", "1.", "5."], "mlp": ["8."]}


def oracle(name: str, clip: float = 1.0, dtype: str = "fp32") -> Any:
    net = Whole(name).to(HALVES[dtype])
    config = replace(ORACLE, clip=clip)
    return train_oracle(net, net.batch, STEPS, route(net, ADAM[name]), config, parts=fused_parts(net))


def assert_equal(ranks: list[tuple[dict[str, Tensor], list[float]]], reference: Any, dtype: str = "fp32") -> None:
    """Every rank's weights are the oracle's, together they are all of them, and the norms are those of all stages."""
    assert set().union(*(weights for weights, _ in ranks)) == reference.weights.keys()
    for weights, norms in ranks:
        own = replace(reference, weights={name: reference.weights[name] for name in weights})
        assert_parity(weights, own, dtype)
        assert norms == pytest.approx(reference.norms, rel=1e-3 if dtype == "fp32" else 0.1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_oracle(name: str, world: int) -> None:
    ranks = run(train_pipeline, world, name=name, steps=STEPS)
    assert_equal(ranks, oracle(name))
    assert ranks[0][0].keys() != ranks[-1][0].keys()


@pytest.mark.parametrize("name", ["tied", "mlp"])
def test_four_stages(name: str) -> None:
    """All matrices of the tied GPT for Muon are on the second; the last has those of the first again, for AdamW."""
    ranks = run(train_pipeline, 4, name=name, stages=4, steps=STEPS)
    assert_equal(ranks, oracle(name))


FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "BF16_Optimizer": {"dtype": "bf16", **FP32_GRADIENTS},
    "bf16 without ZeRO": {"dtype": "bf16", "stage": 0},
    "fp16": {"dtype": "fp16"},
    "offload": {"offload": True},
    "round robin": {"zero": {"round_robin_gradients": True, "contiguous_gradients": False}},
    "little clipping": {"clip": 0.01},
    "checkpointing": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("name", ["tied", "late"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_precision_and_settings(setting: str, name: str) -> None:
    config = SETTINGS[setting]
    ranks = run(train_pipeline, 4, name=name, steps=STEPS, **config)
    dtype = config.get("dtype", "fp32")
    expected = oracle(name, config.get("clip", 1.0), dtype)
    assert_equal(ranks, expected, "bf16" if setting == "autocast" else dtype)
