# SPDX-License-Identifier: Apache-2.0
"""Pipelines of DeepSpeed's with ZeRO-1: each rank holds the parameters of one stage."""

from typing import Any

import pytest

from helpers.distributed import run
from helpers.parity import STEPS
from helpers.pipelines import MODELS, assert_equal, oracle, train_pipeline
from helpers.training import FP32_GRADIENTS


@pytest.mark.sample(3)
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


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "BF16_Optimizer": {"dtype": "bf16", **FP32_GRADIENTS},
    "bf16 without ZeRO": {"dtype": "bf16", "stage": 0},
    "without ZeRO": {"stage": 0},
    "fp16": {"dtype": "fp16"},
    "fp16 without ZeRO": {"dtype": "fp16", "stage": 0},
    "offload": {"offload": True},
    "round robin": {"zero": {"round_robin_gradients": True, "contiguous_gradients": False}},
    "little clipping": {"clip": 0.01},
    "checkpointing": {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16 autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["tied", "late"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_precision_and_settings(setting: str, name: str) -> None:
    config = SETTINGS[setting]
    ranks = run(train_pipeline, 4, name=name, steps=STEPS, **config)
    dtype = config.get("dtype", "fp32")
    expected = oracle(name, config.get("clip", 1.0), dtype)
    assert_equal(ranks, expected, "bf16" if "autocast" in setting else dtype)
