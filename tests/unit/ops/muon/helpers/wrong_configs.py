# SPDX-License-Identifier: Apache-2.0
"""Wrong configurations, and the message of each: the cases of docs/reference/wrong-configurations.md."""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn

from helpers.foreign_models import Adapted
from helpers.models import Mlp
from helpers.refusals import CPU, NVME
from helpers.training import ds_config

#: Misspelt and removed keys of optimizer.params, and keys of other projects.
KEYS = "mometum muon-lr LR bucket_size schedule_free learning_rate wd backend_steps use_muon ns_tuning"
#: Key of optimizer.params -> wrong values.
VALUES: dict[str, list[Any]] = {
    "amsgrad": [True],
    "decoupled_weight_decay": [False],
    "foreach": ["yes"],
    "lr": ["fast", "auto", [0.1], True, -1e-3, math.nan, "inf", "1e-3 "],
    "muon_lr": ["auto"],
    "momentum": [1.0],
    "momentum_dtype": ["fp16"],
    "nesterov": ["False", 1],
    "adam_weight_decay": [-0.1],
    "betas": [0.9, [0.9, 1.0], ["0.9", "0,95"]],
    "eps": ["1.0e_8"],
    "ns_steps": [0, 2.5, "five"],
    "ns_method": ["grams"],
    "ns_dtype": ["fp8"],
    "ns_coefficients": ["simpel", "you", 3, [[1, 2]]],
    "wire_dtype": ["fp16"],
    "kernels": ["tourch"],
    "bucket_bytes": ["128MB"],
    "adjust_lr_fn": ["match_rms_adam"],
    "rms_scale": [0],
    "normuon_beta2": [0.9],
    "momentum_warmup_steps": [300],
    "muon_weight_decay_steps": [0],
    "preset": ["kimi"],
    "qk_clip": [True, {"thau": 50}, {"tau": 0}, {"logits": "sample"}],
    "muon_eq": ["row"],
    "muon_plus": ["columns_rows"],
    "per_head_muon": [True],
    "muon_split": [
        ["qkv"],
        *({"qkv": sizes} for sizes in ("rows", [3, -1], {"size": [3]}, {"sizes": [1], "axis": 2}, [64, 64, 64])),
        {"qkv": {"sizes": [1], "groups": 2, "axis": 1}},
        {"(": [1]},
        {"layers.0": [3, 4]},
    ],
    "muon_fused": ["spilt"],
    "fp32_optimizer_states": [False],
    "monitor_interval": [-1],
    "muon_include": ["router"],
    "muon_exclude": [["layers", "atention"]],
}
WRONG = {"momentumm": 0.9, "ns_steps": 0}
#: Wrong keys and values of optimizer.params.
PARAMS: list[dict[str, Any]] = [
    *({key: 0.1} for key in KEYS.split()),
    *({key: value} for key, values in VALUES.items() for value in values),
    dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    WRONG | {"lr": -1, "per_head_muon": 2, "betas": [2, 3], "max_grad_norm": 1.0},
    {"ns_coefficients": "polar_express", "ns_steps": 4},
    {"rms_scale": 0.3, "adjust_lr_fn": "original"},
    {"lr": 1e-3, "momentum": 0.95},
    {"preset": "moonlight", "momentun": 0.9},
    {"preset": "nanochat", "rms_scale": 0.2},
    {"ns_normalization": "aol"},
    {"owners_per_matrix": 2},
]


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


FP16_MASTERS = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
BF16_STATES = {"bf16": BF16_MASTERS["bf16"] | {"bf16_optimizer_states": True}}
FP16_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
#: Sections of ds_config that Muon does not support.
SECTIONS: list[dict[str, Any]] = [
    zero(2, offload_optimizer=NVME),
    zero(3, offload_optimizer={"device": "nvme"}),
    zero(3, offload_optimizer=CPU | {"ratio": 0.5}),
    zero(3, offload_optimizer=CPU | {"ratio": 0.0}),
    zero(3, offload_optimizer=CPU | {"super_offload": True}),
    zero(2, offload_param=NVME),
    zero(3, offload_param={"device": "nvme"}),
    zero(3, zero_quantized_weights=True),
    zero(3, zero_quantized_gradients=True),
    zero(2, zenflow={}),
    FP16_MASTERS,
    BF16_MASTERS,
    BF16_STATES | zero(2, offload_optimizer=CPU),
    BF16_STATES | zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}},
    {"bf16": {"enabled": True}} | zero(0) | FP16_AUTOCAST,
    FP16_MASTERS | zero(2, zenflow={}, offload_optimizer=NVME),
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2, 0.3]}}},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_max_mom": 1.0}}},
    {"gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": {"max_grad_norm": 1.0}}},
    {"optimizer": {"type": "MuonWithAuxAdam", "params": WRONG}},
    {"checkpoint": {"muon_changed_model": "mach"}},
    {"checkpoint": {"muon_changed_models": "match"}},
]
#: Parameter groups.
GROUPS: list[dict[str, Any]] = [
    {"momentun": 0.9},
    {"momentum": 1.5},
    {"ns_steps": 3},
    {"ns_tuning": "shipped"},
    {"wd": 0.1},
]


def tagged() -> nn.Module:
    net = Mlp()
    net.layers[0].bias.use_muon = True
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bias.use_muon = True": tagged,
    "a model that trains LoRA factors alone": lambda: nn.ModuleList(Adapted("lora_A", "lora_B") for _ in range(2)),
}


def _attempt(model: Callable[[], nn.Module], config: dict[str, Any], group: dict[str, Any]) -> tuple[str, list[str]]:
    """Call `deepspeed.initialize`; return its message, and what was begun before the error."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    import deepspeed
    from deepspeed.muon import MuonWithAuxAdam

    engine = ("__init__", *(f"_configure_{kind}_optimizer" for kind in ("zero", "bf16", "fp16")))
    with ExitStack() as stack:
        spies = {}
        for owner, name in (*((DeepSpeedEngine, name) for name in engine), (MuonWithAuxAdam, "bind")):
            spy = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
            spies[name] = stack.enter_context(spy)
        net = model()
        given: Any = [{"params": list(net.parameters()), **group}] if group else list(net.parameters())
        try:
            deepspeed.initialize(model=net, config=config, model_parameters=given)[0].destroy()
            message = "accepted"
        except ValueError as error:
            message = f"{type(error).__name__}: {error}"
        return message, [name for name, spy in spies.items() if spy.called]


def attempt_all() -> list[tuple[str, str, list[str]]]:
    """Try every case in this process; return (what was written, message, what was begun before it) of each."""
    muon: dict[str, Any] = {"type": "Muon", "params": {}}
    plain = ds_config(optimizer=muon)
    cases: list[tuple[str, Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = [
        *((json.dumps(params), Mlp, plain | {"optimizer": muon | {"params": params}}, {}) for params in PARAMS),
        *((json.dumps(section), Mlp, plain | section, {}) for section in SECTIONS),
        *((f"a parameter group with {json.dumps(group)}", Mlp, plain, group) for group in GROUPS),
    ]
    small = plain | {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    cases += [(title, model, small, {}) for title, model in MODELS.items()]
    results = []
    for title, model, config, group in cases:
        torch.manual_seed(0)
        results.append((title, *_attempt(model, config, group)))
    return results


def table(results: list[tuple[str, str, list[str]]]) -> str:
    lines = ["| written | message |", "|---|---|"]
    for title, message, _ in results:
        cells = (f"`{title}`" if "{" in title else title, "<br>".join(message.splitlines()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
