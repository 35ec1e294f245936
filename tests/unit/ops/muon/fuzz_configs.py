# SPDX-License-Identifier: Apache-2.0
"""Random ds_configs, each with the keys that are wrong in it by the documentation's own rules."""

import itertools
import json
import math
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SIMPLE = [3.4445, -4.7750, 2.0315]
CUBIC = [1.5, -0.5, 0.0]
#: Values of `optimizer.params` that are allowed, and some next to them that are not. `None` is the default of any key.
VALID: dict[str, list[Any]] = {
    "lr": [1e-3, 0.02, 0.1, 0, "1e-2"],
    "muon_lr": [1e-3, 0.02, 0.3],
    "adam_lr": [1e-3, 0.02],
    "momentum": [0.0, 0.9, 0.95, 0.99],
    "momentum_dtype": ["fp32", "bf16"],
    "nesterov": [True, False, "true", 0],
    "weight_decay": [0.0, 0.1, 1],
    "muon_weight_decay": [0.0, 0.3],
    "adam_weight_decay": [0.0, 0.3],
    "muon_include": [[], "layers", [r"layers\.0", "weight"]],
    "muon_exclude": [[], r"layers\.1", ["layers.0.weight", "bias"], ".*"],
    "adjust_lr_fn": ["auto", "original", "match_rms_adamw", "spectral_unclamped", "none", "rms_norm", "shape_scaling"],
    "rms_scale": [0.2, 0.4, 1],
    "ns_method": ["auto", "standard", "gram"],
    "ns_tuning": ["shipped", "measured"],
    "ns_steps": [1, 3, 5, 6],
    "ns_coefficients": ["simple", "you", "polar_express", SIMPLE, CUBIC, [SIMPLE] * 3, [SIMPLE, CUBIC]],
    "ns_dtype": ["auto", "bf16", "fp32", "fp32"],
    "kernels": ["auto", "torch"],
    "betas": [[0.9, 0.95], (0.8, 0.99), [0, 0.5]],
    "eps": [1e-8, 1e-10, 1e-4],
    "adam_w_mode": [True, False],
    "torch_adam": [True, False],
    "fp32_optimizer_states": [True],
    "per_head_muon": [False],
    "muon_split": [{}, {}],
    "muon_fused": ["split", "whole"],
    "muon_conv": ["adamw", "flatten"],
    "muon_lora": ["none", "B", "both"],
    "tp_mode": ["whole", "shard"],
    "import_momentum": ["first_moment", "zero"],
    "monitor_interval": [0, 1, 10],
}
WRONG: dict[str, list[Any]] = {
    "lr": [-1e-3, math.nan, math.inf, True, "fast", "auto", [1e-3], {}],
    "muon_lr": [-0.1, "auto", False],
    "adam_lr": ["0.1.2", [0.1], -math.inf],
    "momentum": [1.0, 1, -0.1, "high", [0.9]],
    "momentum_dtype": ["fp16", "BF16", "float32", 2, True, ["bf16"]],
    "nesterov": ["maybe", 2, [], 0.5],
    "weight_decay": [-0.1, "none", True],
    "muon_weight_decay": [-1, "auto"],
    "adam_weight_decay": [math.nan, {}],
    "muon_include": ["nowhere", "(", 3, ["layers", "no such name"], [r"bias"]],
    "muon_exclude": ["nowhere", ["["], {"layers": 1}, True],
    "adjust_lr_fn": ["Original", "spectral", "match_rms", 1, True],
    "rms_scale": [0, -1, "0.2x", True],
    "ns_method": ["grams", "", 1, True],
    "ns_tuning": ["measure", "auto", True, 10],
    "ns_steps": [0, 51, 2.5, "five", True, [5]],
    "ns_coefficients": ["simpel", [], [1, 2], [[0, 1, 1]], [["a", 1, 1]], 5, {"a": 1}, [math.nan, 1, 1]],
    "ns_dtype": ["fp16", "bfloat16", 16],
    "kernels": ["native", True],
    "betas": [0.9, [0.9], [0.9, 1.0], [0.9, -0.1], [0.9, 0.95, 0.99], "0.9", [True, 0.9]],
    "eps": [-1e-8, "small", math.inf],
    "adam_w_mode": [2, "perhaps", []],
    "torch_adam": ["y e s", 3.5],
    "fp32_optimizer_states": [False, "no"],
    "per_head_muon": [True, 1, 2],
    "muon_split": [{"nowhere": [1]}, {"weight": [1]}, {"weight": 3}, ["layers"], {"(": [1]}, "layers", True],
    "muon_fused": ["Split", "none", True, {"qkv": [1]}],
    "muon_conv": ["flat", True, 2],
    "muon_lora": ["A", "b", True],
    "tp_mode": ["shards", False],
    "import_momentum": ["first", 0, True],
    "monitor_interval": [-1, 1.5, True, "often"],
    # keys that do not exist
    "learning_rate": [0.1],
    "LR": [0.1],
    "Momentum": [0.9],
    "mometum": [0.9],
    "mu": [0.95],
    "beta1": [0.9],
    "muon-lr": [0.1],
    "ns_step": [5],
    "wd": [0.1],
    "use_muon": [True],
    "max_grad_norm": [1.0],
    "amsgrad": [False],
    "momentum_type": ["bf16"],
    "": [1],
}
ZERO: dict[str, list[Any]] = {
    "overlap_comm": [True, False],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, False],
    "round_robin_gradients": [True, False],
    "sub_group_size": [1, 50, 10**9],
    "reduce_bucket_size": [40, 1000, 5 * 10**8],
    "stage3_param_persistence_threshold": [0, 20, 10**5],
    "stage3_max_live_parameters": [0, 10**9],
    "stage3_max_reuse_distance": [0, 10**9],
    "stage3_prefetch_bucket_size": [0, 100, 5 * 10**7],
}
#: Settings of ZeRO that are refused together with Muon, and what the message calls them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
    ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
    ({"zenflow": {}}, "zenflow"),
    ({"elastic_checkpoint": True}, "elastic_checkpoint"),
    ({"compute_grad_norm": False}, "compute_grad_norm"),
    ({"zero_quantized_weights": True}, "zero_quantized_weights"),
    ({"zero_quantized_gradients": True}, "zero_quantized_gradients"),
    ({"mics_shard_size": 1}, "mics_shard_size"),
]
#: What stock DeepSpeed refuses itself.
STOCKS: list[dict[str, Any]] = [
    {"sub_group_size": "big"},
    {"reduce_bucket_size": -1},
    {"overlap_com": True},
    {"stage": 4},
    {"offload_optimizer": {"device": "gpu"}},
    {"offload_param": "cpu"},
]
TRIPLES = {"you": 5, "polar_express": 5}
Case = dict[str, Any]
"""`config`, what goes into a ds_config; `wrong`, keys of which the message must name one; `stock`, if stock refuses."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly right: one in three has a wrong value or key, one in eight a refused setting."""
    keys = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=8, unique=True))
    params = {key: draw(st.sampled_from([*VALID[key], None])) for key in keys}
    wrong = [key for key in draw(st.lists(st.sampled_from(sorted(WRONG)), max_size=2)) if draw(st.integers(0, 2)) == 0]
    params |= {key: draw(st.sampled_from(WRONG[key])) for key in wrong}
    zero = {"stage": draw(st.integers(0, 3))}
    zero |= {key: draw(st.sampled_from(ZERO[key])) for key in draw(st.lists(st.sampled_from(sorted(ZERO)), max_size=4))}
    if draw(st.booleans()):
        zero["offload_optimizer"] = draw(offloads())
    if params.get("momentum_dtype") == "bf16" and draw(st.integers(0, 3)) == 3:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/tmp"}
        wrong.append("optimizer.params.momentum_dtype")
    if zero["stage"] == 3 and draw(st.integers(0, 3)) == 0:
        zero["offload_param"] = {"device": draw(st.sampled_from(["none", "cpu"]))}
    config = {"params": params, "zero": zero, **draw(tops())}
    stock = draw(st.integers(0, 15)) == 15
    if stock:
        zero |= draw(st.sampled_from(STOCKS))
    elif draw(st.integers(0, 7)) == 7:
        section, name = draw(st.sampled_from(REFUSED))
        zero |= section
        wrong.append(name)
    return {"config": config, "wrong": sorted({*wrong, *contradictions(config)}), "stock": stock}


def offloads() -> st.SearchStrategy[dict[str, Any]]:
    """The section `offload_optimizer` as it is allowed."""
    extras = {"pin_memory": st.booleans(), "ratio": st.just(1.0), "fast_init": st.booleans()}
    return st.fixed_dictionaries({"device": st.sampled_from(["none", "cpu"])}, optional=extras)


def tops() -> st.SearchStrategy[dict[str, Any]]:
    """Keys at the top of a ds_config: precision, accumulation, clipping, and those that change nothing."""
    needed = {
        "dtype": st.sampled_from(["fp32", "fp32", "fp32", "bf16", "bf16", "fp16"]),
        "accumulation": st.sampled_from([1, 2, 4]),
        "clip": st.sampled_from([0.0, 1.0, 0.01]),
    }
    extras = {
        "prescale_gradients": st.booleans(),
        "data_types": st.just({"grad_accum_dtype": "fp32"}),
        "type": st.sampled_from(["muon", "Muon", "MUON", "MuonWithAuxAdam"]),
    }
    return st.fixed_dictionaries(needed, optional=extras)


def contradictions(config: dict[str, Any]) -> list[str]:
    """Keys that are right alone and wrong beside others."""
    params = {key: value for key, value in config["params"].items() if value is not None}
    found = []
    coefficients, steps = params.get("ns_coefficients", "simple"), params.get("ns_steps")
    if isinstance(coefficients, str):
        length = TRIPLES.get(coefficients, 1)
    else:
        length = (
            len(coefficients) if isinstance(coefficients, list) and isinstance(next(iter(coefficients), 0), list) else 1
        )
    if steps is not None and length != 1 and steps != length:
        found.append("ns_steps")
    others = {"original", "spectral_unclamped", "none", "shape_scaling"}
    if "rms_scale" in params and params.get("adjust_lr_fn") in others:
        found.append("rms_scale")
    if config["dtype"] == "fp16" and config["zero"]["stage"] == 0:
        found.append("fp16.enabled")
    return found


def sample(count: int) -> list[Case]:
    """`count` distinct cases; the same ones in every run."""
    found: dict[str, Case] = {}
    for number in itertools.count():
        if len(found) >= count:
            return list(found.values())[:count]

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases())
        def collect(case: Case) -> None:
            found.setdefault(json.dumps(case), case)

        collect()
    return []


def smaller(case: Case) -> list[Case]:
    """The case without one of its keys, for each; what is wrong is found out anew."""
    results = []
    for section in ("params", "zero"):
        for key in case["config"][section]:
            if key != "stage":
                config = case["config"] | {section: {k: v for k, v in case["config"][section].items() if k != key}}
                left = [name for name in case["wrong"] if key not in (name, name.split(".")[0])]
                results.append(case | {"config": config, "wrong": left})
    return results
