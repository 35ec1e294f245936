# SPDX-License-Identifier: Apache-2.0
"""Wrong configurations, and the message of each: the cases of docs/reference/wrong-configurations.md."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.foreign_models import Adapted
from helpers.models import Mlp
from helpers.training import ds_config

#: Wrong values and keys of optimizer.params.
PARAMS: list[dict[str, Any]] = [
    {"mometum": 0.9},
    {"beta": [0.9, 0.95]},
    {"weigth_decay": 0.1},
    {"muon-lr": 0.1},
    {"LR": 0.1},
    {"learning_rate": 0.1},
    {"muon_learning_rate": 0.1, "adam_learning_rate": 0.1},
    {"ns_step": 5},
    {"nestrov": True},
    {"adjust_lr": "original"},
    {"muon_momentum": 0.95},
    {"mu": 0.95},
    {"rms_rate": 0.2},
    {"adam_betas": [0.9, 0.95]},
    {"momentum_beta": 0.95},
    {"muon_lr_scale": 10},
    {"aux_adam_lr": 3e-4},
    {"amsgrad": True},
    {"maximize": True},
    {"use_muon": True},
    {"bias_correction": "false"},
    {"foreach": "yes"},
    {"schedule_free": True},
    {"lr": "fast"},
    {"lr": "auto"},
    {"muon_lr": "auto"},
    {"lr": [0.1]},
    {"lr": True},
    {"lr": -1e-3},
    {"lr": float("nan")},
    {"momentum": 1.0},
    {"momentum": -0.1},
    {"momentum_dtype": "fp16"},
    {"nesterov": "maybe"},
    {"nesterov": "False"},
    {"nesterov": 1},
    {"weight_decay": -0.1},
    {"adam_weight_decay": "none"},
    {"betas": 0.9},
    {"betas": [0.9, 1.0]},
    {"betas": [0.9, 0.95, 0.99]},
    {"betas": ["0.9", "0,95"]},
    {"eps": -1e-8},
    {"eps": "1.0e_8"},
    {"lr": "1e-3 "},
    {"lr": "inf"},
    {"ns_steps": 0},
    {"ns_steps": 2.5},
    {"ns_steps": 500},
    {"ns_method": "grams"},
    {"ns_tuning": "measure"},
    {"ns_steps": "1_0"},
    {"ns_dtype": "fp8"},
    {"ns_dtype": "bfloat"},
    {"wire_dtype": "fp16"},
    {"wire_dtype": "float16"},
    {"kernels": "tourch"},
    {"bucket_bytes": "128MB"},
    {"bucket_bytes": 0},
    {"bucket_bytes": True},
    {"bucket_size": 2**27},
    {"ns_coefficients": "simpel"},
    {"ns_coefficients": [[1, 2]]},
    {"ns_coefficients": "you", "ns_steps": 4},
    {"adjust_lr_fn": "match_rms_adam"},
    {"adjust_lr_fn": "spectral"},
    {"rms_scale": 0},
    {"rms_scale": 0.3, "adjust_lr_fn": "original"},
    {"normuon_beta2": 0.9},
    {"momentum_warmup_steps": 300},
    {"muon_weight_decay_steps": 0},
    {"preset": "kimi"},
    {"preset": "moonlight", "momentun": 0.9},
    {"preset": "nanochat", "rms_scale": 0.2},
    {"ns_normalization": "AOL"},
    {"ns_normalization": "aol", "ns_dtype": "fp16"},
    {"qk_clip": True},
    {"qk_clip": {"thau": 50}},
    {"qk_clip": {"tau": 0}},
    {"qk_clip": {"alpha": 1.5}},
    {"qk_clip": {"logits": "sample"}},
    {"normuon": True, "muon_plus": "rows"},
    {"normuon": True, "owners_per_matrix": 2},
    {"normoun": True},
    {"muon_eq": "row"},
    {"per_head_muon": True},
    {"per_head_muon": 4},
    {"muon_split": {"layers.0": [3, 4]}},
    {"muon_split": {"qkv": [64, 64, 64]}},
    {"muon_split": {"layers.0": {"size": [3, 4]}}},
    {"muon_split": ["qkv"]},
    {"muon_fused": "spilt"},
    {"muon_split_qkv": True},
    {"muon_conv": "flat"},
    {"muon_lora": "A"},
    {"tp_mode": "sharded"},
    {"fp32_optimizer_states": False},
    {"adam_w_mode": 2},
    {"import_momentum": "exp_avg"},
    {"monitor_interval": -1},
    {"muon_include": "(up"},
    {"muon_include": "router"},
    {"muon_exclude": ["layers", "atention"]},
]
CPU = {"device": "cpu"}
#: Sections of ds_config that Muon does not support.
SECTIONS: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": CPU | {"ratio": 0.5}}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": CPU | {"super_offload": True}}},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
    {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    {"zero_optimization": {"stage": 2, "zenflow": {}}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2, 0.3]}}},
    {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_max_mom": 1.0}}},
    {"gradient_clipping": 0.0, "optimizer": {"type": "Muon", "params": {"max_grad_norm": 1.0}}},
]
#: Parameter groups.
GROUPS: list[dict[str, Any]] = [
    {"momentun": 0.9},
    {"momentum": 1.5},
    {"ns_steps": 3},
    {"maximize": True},
    {"wd": 0.1},
    {"lr": "1e_3"},
]


def tagged() -> nn.Module:
    """Return a model with a vector that is tagged for Muon."""
    net = Mlp()
    net.layers[0].bias.use_muon = True
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bias.use_muon = True": tagged,
    "a model that trains LoRA factors alone": lambda: nn.ModuleList(Adapted("lora_A", "lora_B") for _ in range(2)),
}


def _attempt(reached: list[str], model: Callable[[], nn.Module], config: dict[str, Any], group: dict[str, Any]) -> str:
    """Call `deepspeed.initialize`; return its message. Append to `reached` what was allocated before the error."""
    import pytest
    from deepspeed.runtime.engine import DeepSpeedEngine

    import deepspeed
    from deepspeed.muon import MuonWithAuxAdam

    def note(original: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            reached.append(original.__name__)
            return original(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (DeepSpeedEngine, "_configure_zero_optimizer"),
            (DeepSpeedEngine, "_configure_bf16_optimizer"),
            (DeepSpeedEngine, "_configure_fp16_optimizer"),
            (MuonWithAuxAdam, "bind"),
        ):
            patch.setattr(owner, name, note(getattr(owner, name)))
        net = model()
        given: Any = [{"params": list(net.parameters()), **group}] if group else list(net.parameters())
        try:
            deepspeed.initialize(model=net, config=config, model_parameters=given)[0].destroy()
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


def attempt_all() -> list[tuple[str, str, list[str]]]:
    """Try every case in this process; return (what was written, message, what was allocated before it) of each."""
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
        reached: list[str] = []
        results.append((title, _attempt(reached, model, config, group), reached))
    return results


def table(results: list[tuple[str, str, list[str]]]) -> str:
    """Return the cases as a Markdown table."""
    lines = ["| written | message |", "|---|---|"]
    for title, message, _ in results:
        cells = (f"`{title}`" if "{" in title else title, "<br>".join(message.splitlines()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
