# SPDX-License-Identifier: Apache-2.0
"""Why settings stay refused: with AdamW, DeepSpeed does not train them either where the tests run, on CPUs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from helpers.distributed import run
from helpers.experts import spread_model
from helpers.models import Mlp, train_engine
from helpers.refusals import CPU
from helpers.training import ds_config
from helpers.universal import convert

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU DeepSpeed may train these")

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
ON_CPU, OWN_ADAM = "not been implemented on CPU backend", "DeepSpeedCPUAdam"
FP16 = {"enabled": True, "fp16_master_weights_and_grads": True}
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
#: settings and a pattern of DeepSpeed's error
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "qwZ": ({"stage": 3, "zero": {"zero_quantized_weights": True}}, ON_CPU),
    "qgZ": ({"stage": 3, "zero": {"zero_quantized_gradients": True}}, ON_CPU),
    "SuperOffload": (
        {"stage": 3, "zero": {"offload_optimizer": CPU | {"super_offload": True}}},
        "only supports NVIDIA CUDA GPUs",
    ),
    "ratio": ({"stage": 3, "zero": {"offload_optimizer": CPU | {"ratio": 0.5}}}, f"Only Supports {OWN_ADAM}"),
    "fp16 masters": ({"stage": 2, "fp16": FP16}, OWN_ADAM),
    "bf16 masters, fp32 states": ({"stage": 2, "bf16": BF16}, OWN_ADAM),
    "bf16 masters, offload": ({"stage": 2, "bf16": BF16 | {"bf16_optimizer_states": True}, "offload": True}, OWN_ADAM),
    "MiCS": ({"stage": 3, "zero": {"mics_shard_size": 1}}, "mics_shard_size"),
    "autocast": (
        {"stage": 0, "dtype": "bf16", "torch_autocast": {"enabled": True, "dtype": "float16"}},
        "No inf checks were recorded",
    ),
    "DeepCompile": ({"stage": 2, "compile": {"deepcompile": True}}, r"Error building extension 'dc'|dc\.so"),
}


def train_with_adamw(**settings: Any) -> str | None:
    """DeepSpeed's error."""
    config = ds_config(**settings) | {"optimizer": ADAMW}
    try:
        engine = deepspeed.initialize(model=Mlp(), config=config)[0]
        if config.get("compile", {}).get("deepcompile"):
            engine.compile()
        train_engine(engine, 1)
    except Exception as error:
        return str(error)
    return None


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_adamw_fails_too(name: str) -> None:
    settings, words = CASES[name]
    for error in run(train_with_adamw, 2, **settings):
        assert error is not None, "DeepSpeed has learned it: then Muon may"
        assert re.search(words, error), error


def save_moe(folder: str) -> None:
    engine = deepspeed.initialize(model=spread_model(), config=ds_config() | {"optimizer": ADAMW})[0]
    engine.save_checkpoint(folder, tag="saved")


def test_the_converter_does_not_know_moe_layers(tmp_path: Path) -> None:
    run(save_moe, 2, folder=str(tmp_path))
    with pytest.raises(AssertionError, match="universal_checkpoint_info state is missing"):
        convert(tmp_path)
