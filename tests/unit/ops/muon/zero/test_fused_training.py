# SPDX-License-Identifier: Apache-2.0
"""What the package cuts by itself trains as its matrices would as parameters of their own.

The oracle's matrices come from plain indexing, by what the models' own forward takes.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from helpers.distributed import run
from helpers.language_models import WIDTH, train
from helpers.models import MODELS
from helpers.oracles import OracleResult, Part, change_error, route, train_oracle
from helpers.rules import RULES
from helpers.training import ORACLE, PARAMS

STEPS = 5


def index_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, the number of each element of a parameter in its shape."""
    return {name: torch.arange(param.numel()).view(param.shape) for name, param in model.named_parameters()}


def fused_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Of Layouts: queries, keys, values; gates, ups; of each expert."""
    parts: dict[str, list[Part]] = {}
    for name, index in index_of(model).items():
        if "c_attn.weight" in name:
            parts[name] = list(index.chunk(3, dim=1))
        elif "query_key_value.weight" in name:
            parts[name] = [heads.reshape(-1, WIDTH) for heads in index.view(3, 3, 4, WIDTH).unbind(1)]
        elif "qkv_proj" in name:
            parts[name] = list(index.split([12, 4, 4]))
        elif "gate_up_proj.weight" in name:
            parts[name] = list(index.chunk(2))
        elif "in_proj_weight" in name:
            parts[name] = list(index.chunk(3))
        elif "experts" in name:
            halves = index.chunk(2, dim=1 if "first" in name else 2) if "gate_up" in name else (index,)
            parts[name] = [matrix for half in halves for matrix in half]
    return parts


@functools.cache
def reference(model: str, parts: Any, lora: str = "none", rule: str = "") -> OracleResult:
    """The oracle's training, with one of RULES."""
    net = MODELS[model]()
    names = [name for name, _ in net.named_parameters()]
    adam = [name for name in names if any(word in name for word in ("embed", "wte", "wpe", "head"))]
    adam += [name for name in names if "lora" in name and lora != "both" and not (lora == "B" and "lora_B" in name)]
    config = replace(ORACLE, **RULES[rule][1]) if rule else ORACLE
    turned = [name for name in names if "c_" in name or "second_experts" in name]
    special = {name: replace(config, output_axis=1) for name in turned} if model == "layouts" else {}
    return train_oracle(net, net.batch, STEPS, route(net, adam), config, special=special, parts=parts(net))


def differing(weights: dict[str, Tensor], expected: OracleResult) -> set[str]:
    """What differs by more than 1e-3 of its change. The keys' share of a bias has no gradient but rounding."""
    return {
        name
        for name, weight in expected.weights.items()
        if name in weights and "c_attn.bias" not in name
        if change_error(expected.initial[name], weights[name], weight) > 1e-3 and not weight.equal(weights[name])
    }


def optimizer(**params: Any) -> dict[str, Any]:
    return {"type": "Muon", "params": PARAMS | params}


def test_whole_fused_projections_are_something_else() -> None:
    """So the test above can fail; what is no stack trains whole as the oracle does without parts."""
    whole = run(train, 1, model="layouts", steps=STEPS, stage=1, optimizer=optimizer(muon_fused="whole"))[0]
    names = fused_parts(MODELS["layouts"]()).keys()
    assert {name for name in names if "experts.down" not in name} <= differing(whole, reference("layouts", fused_parts))

    def experts(model: nn.Module) -> dict[str, list[Part]]:
        return {name: list(index) for name, index in index_of(model).items() if "experts" in name}

    assert differing(whole, reference("layouts", experts)) == set()
