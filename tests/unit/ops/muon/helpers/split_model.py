# SPDX-License-Identifier: Apache-2.0
"""A model whose parameters are several matrices, the config that splits them, and its oracle."""

from typing import Any

import torch

from helpers.models import Fused
from helpers.oracles import Part, route, train_oracle
from helpers.parity import STEPS
from helpers.training import ORACLE, PARAMS

SPLIT = {
    "qkv": [7, 5, 4],
    "c_attn": {"sizes": [5, 4, 3], "axis": 1},
    "grouped": {"sizes": [4, 2, 2], "groups": 3},
}
OPTIMIZER = {"type": "Muon", "params": PARAMS | {"muon_split": SPLIT, "muon_conv": "flatten"}}


def parts() -> dict[str, list[Part]]:
    """Return parameter name -> its matrices, by plain indexing."""
    index = {name: torch.arange(param.numel()).view(param.shape) for name, param in Fused().named_parameters()}
    grouped = index["grouped.weight"].view(3, 8, 12)
    return {
        "conv.weight": [index["conv.weight"].view(5, 18)],
        "qkv.weight": list(index["qkv.weight"].split([7, 5, 4])),
        "c_attn.weight": list(index["c_attn.weight"].split([5, 4, 3], dim=1)),
        "grouped.weight": [part.reshape(-1, 12) for part in grouped.split([4, 2, 2], dim=1)],
        "experts.down": list(index["experts.down"]),
    }


def reference(steps: int = STEPS) -> Any:
    """Train the oracle; return its result."""
    net = Fused()
    routing = route(net, ["lm_head"]) | dict.fromkeys(parts(), "muon")
    return train_oracle(net, net.batch, steps, routing, ORACLE, parts=parts())
