# SPDX-License-Identifier: Apache-2.0
"""The settings under which training is compared with the oracle, and the comparison."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helpers.models import MODELS, fused_parts
from helpers.oracles import OracleResult, change_error, route, train_oracle
from helpers.training import ORACLE

STEPS = 5
"""Of most comparisons."""
HALVES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FP16_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
SHAPES = [(24, 40), (40, 24), (32, 32), (33, 65), (24, 40)]
"""Of the matrices that take given gradients."""
#: (stage, precision, offload) of every cell of the first table of docs/evidence/support.md that is not refused.
CELLS = [
    (stage, precision, offload)
    for stage in (0, 1, 2, 3)
    for offload in ("none", "optimizer", "both")
    for precision in ("fp32", "bf16", "fp16", "autocast", "fp16 autocast")
    if stage or offload == "none"
    if stage == 3 or offload != "both"
]


def oracle(model: str, clip: float, **settings: Any) -> OracleResult:
    """Train the oracle from the initial weights of a model."""
    net = MODELS[model]()
    adam = ("tokens", "positions", "lm_head") if model.startswith("gpt") else ()
    config = replace(ORACLE, clip=clip, **settings)
    return train_oracle(net, net.batch, STEPS, route(net, adam), config, parts=fused_parts(net))


def assert_parity(weights: dict[str, Tensor], reference: OracleResult) -> None:
    """Assert that weights in fp32 equal the oracle's to 1e-3 of the change."""
    for key, expected in reference.weights.items():
        assert change_error(reference.initial[key], weights[key], expected) <= 1e-3, key
