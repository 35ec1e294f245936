# SPDX-License-Identifier: Apache-2.0
"""Random ds_configs: which keys of each are wrong by the documentation's rules, and how each must train."""

import itertools
import json
import re
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed.muon.math.newton_schulz import NAMED
from helpers import wrong_configs
from helpers.oracles import OracleConfig, newton_schulz_fp64, route, train_oracle
from helpers.rules import muon_plus, normuon, unit_columns, unit_rows
from helpers.training import BF16_MASTERS

SIMPLE = [3.4445, -4.7750, 2.0315]
CUBIC = [1.5, -0.5, 0.0]
#: Key of `optimizer.params` -> allowed values; `None` leaves the key out.
VALID: dict[str, list[Any]] = {
    "lr": [1e-3, 0.02, 0.1, 0, "1e-2"],
    "muon_lr": [1e-3, 0.02, 0.3],
    "adam_lr": [1e-3, 0.02],
    "momentum": [0.0, 0.9, 0.95, 0.99],
    "momentum_start": [0.5, 0.0],
    "momentum_warmup_steps": [1, 2, 300],
    "momentum_dtype": ["fp32", "bf16", "int8"],
    "nesterov": [True, False],
    "weight_decay": [0.0, 0.1, 1],
    "muon_weight_decay": [0.0, 0.3],
    "muon_weight_decay_steps": [1, 2, 100],
    "adam_weight_decay": [0.0, 0.3],
    "cautious_weight_decay": [True, True, False],
    "normuon": [True, True, False],
    "normuon_beta2": [0.5, 0.95],
    "muon_eq": ["none", "rows", "columns"],
    "muon_plus": [True, False],
    "muon_include": [[], "layers", [r"layers\.0", "weight"]],
    "muon_exclude": [[], r"layers\.1", ["layers.0.weight", "bias"], ".*"],
    "adjust_lr_fn": ["auto", "original", "match_rms_adamw", "spectral_unclamped", "none"],
    "rms_scale": [0.2, 0.4, 1],
    "ns_method": ["auto", "standard", "gram"],
    "ns_steps": [1, 3, 5, 6],
    "ns_coefficients": [*NAMED, SIMPLE, CUBIC, [SIMPLE] * 3, [SIMPLE, CUBIC]],
    "ns_dtype": ["auto", "bf16", "bfloat16", "fp16", "fp32", "fp32", "fp32"],
    "wire_dtype": ["auto", "auto", "bf16", "fp32"],
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
    "amsgrad": [False],
}
WRONG: dict[str, list[Any]] = {key: [0.1] for key in wrong_configs.KEYS.split()} | {
    key: values for key, values in wrong_configs.VALUES.items() if key not in ("normuon_beta2", "momentum_warmup_steps")
}
"""Without those keys that are right beside others."""
ZERO: dict[str, list[Any]] = {
    "overlap_comm": [True, False],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, False],
    "round_robin_gradients": [True, False],
    "compute_grad_norm": [True, False],
    "sub_group_size": [1, 50, 10**9],
    "reduce_bucket_size": [40, 1000, 5 * 10**8],
    "stage3_param_persistence_threshold": [0, 20, 10**5],
    "stage3_max_live_parameters": [0, 10**9],
    "stage3_max_reuse_distance": [0, 10**9],
    "stage3_prefetch_bucket_size": [0, 100, 5 * 10**7],
}
#: ZeRO settings that are refused with Muon, and their names in the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
    ({"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
    ({"zenflow": {}}, "zenflow"),
    ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights"),
    ({"stage": 3, "zero_quantized_gradients": True}, "zero_quantized_gradients"),
    ({"mics_shard_size": 1}, "mics_shard_size"),
]
#: Settings that stock DeepSpeed itself refuses.
STOCKS: list[dict[str, Any]] = [
    {"sub_group_size": "big"},
    {"reduce_bucket_size": -1},
    {"overlap_com": True},
    {"stage": 4},
    {"offload_optimizer": {"device": "gpu"}},
    {"offload_param": "cpu"},
]
TRIPLES = {name: len(triples) for name, triples in NAMED.items() if len(triples) > 1}
Case = dict[str, Any]
"""`config`, what goes into a ds_config; `wrong`, keys of which the message must name one; `stock`, if stock refuses."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case: one in three has a wrong value or key, one in eight a refused setting."""
    keys = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=8, unique=True))
    params = {key: draw(st.sampled_from([*VALID[key], None])) for key in keys}
    wrong = [key for key in draw(st.lists(st.sampled_from(sorted(WRONG)), max_size=2)) if draw(st.integers(0, 2)) == 0]
    params |= {key: draw(st.sampled_from(WRONG[key])) for key in wrong}
    zero = {"stage": draw(st.integers(0, 3))}
    zero |= {key: draw(st.sampled_from(ZERO[key])) for key in draw(st.lists(st.sampled_from(sorted(ZERO)), max_size=4))}
    if draw(st.booleans()):
        zero["offload_optimizer"] = draw(offloads())
    if params.get("momentum_dtype") in ("bf16", "int8") and draw(st.integers(0, 3)) == 3:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/tmp"}
        wrong.append("optimizer.params.momentum_dtype")
    if zero["stage"] == 3 and draw(st.integers(0, 3)) == 0:
        zero["offload_param"] = {"device": draw(st.sampled_from(["none", "cpu"]))}
    config = {"params": params, "zero": zero, **draw(tops())}
    if config["dtype"] == "bf16" and draw(st.integers(0, 2)) == 0:
        config["bf16"] = BF16_MASTERS["bf16"]
    stock = draw(st.integers(0, 15)) == 15
    if stock:
        zero |= draw(st.sampled_from(STOCKS))
    elif draw(st.integers(0, 7)) == 7:
        section, name = draw(st.sampled_from(REFUSED))
        zero |= section
        wrong.append(name)
    return {"config": config, "wrong": sorted({*wrong, *contradictions(config)}), "stock": stock}


def offloads() -> st.SearchStrategy[dict[str, Any]]:
    extras = {"pin_memory": st.booleans(), "ratio": st.just(1.0), "fast_init": st.booleans()}
    return st.fixed_dictionaries({"device": st.sampled_from(["none", "cpu"])}, optional=extras)


def tops() -> st.SearchStrategy[dict[str, Any]]:
    """Return top-level keys of a ds_config: precision, accumulation, clipping, and keys that change nothing."""
    needed = {
        "dtype": st.sampled_from(["fp32", "fp32", "fp32", "bf16", "bf16", "fp16"]),
        "accumulation": st.sampled_from([1, 2, 4]),
        "clip": st.sampled_from([0.0, 1.0, 0.01]),
    }
    autocasts = st.fixed_dictionaries({"enabled": st.booleans(), "dtype": st.sampled_from(["float16", "bfloat16"])})
    extras = {
        "prescale_gradients": st.booleans(),
        "data_types": st.just({"grad_accum_dtype": "fp32"}),
        "gradient_allreduce_op": st.sampled_from(["mean", "sum"]),
        "torch_autocast": autocasts,
        "type": st.sampled_from(["muon", "Muon", "MUON", "MuonWithAuxAdam"]),
    }
    return st.fixed_dictionaries(needed, optional=extras)


def contradictions(config: dict[str, Any]) -> list[str]:
    """Return the keys that are valid by themselves but contradict others."""
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
    others = {"original", "spectral_unclamped", "none"}
    if "rms_scale" in params and params.get("adjust_lr_fn") in others:
        found.append("rms_scale")
    is_scale_clear = "rms_scale" in params or params.get("adjust_lr_fn", "auto") != "auto" or STOCK_MUON & params.keys()
    if "lr" in params and "momentum" in params and not is_scale_clear:
        found.append("momentum")
    if "momentum_warmup_steps" in params and "momentum_start" not in params:
        found.append("momentum_warmup_steps")
    if "bf16" in config:
        offloads = config["zero"].get("offload_optimizer", {}).get("device", "none") != "none"
        found += ["bf16.bf16_master_weights_and_grads"] * offloads
        found += ["data_types.grad_accum_dtype"] * (config["zero"]["stage"] == 1 and "data_types" in config)
        found += ["optimizer.params.momentum_dtype"] * (params.get("momentum_dtype") == "fp32")
    autocast = config.get("torch_autocast", {})
    offload = config["zero"].get("offload_optimizer", {}).get("device", "none")
    is_bf16_optimizer = config["zero"]["stage"] == 1 and "data_types" in config and offload == "none"
    if (config["zero"]["stage"] == 0 or is_bf16_optimizer) and config["dtype"] == "bf16" and autocast.get("enabled"):
        found += ["torch_autocast.dtype"] * (autocast["dtype"] == "float16")
    if "normuon_beta2" in params and not flag(params.get("normuon", False)):
        found.append("normuon_beta2")
    return found


def sample(count: int) -> list[Case]:
    """Return `count` distinct cases; the same ones in every run."""
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


STOCK_MUON = {"muon_lr", "adam_lr"}


def keys_given(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config["params"].items() if value is not None}


def scale_of(params: dict[str, Any]) -> str:
    """Return `adjust_lr_fn`, resolved as docs/configuration.md says."""
    name = params.get("adjust_lr_fn", "auto")
    if name != "auto":
        return name
    is_adamws = "lr" in params and not STOCK_MUON & params.keys()
    return "match_rms_adamw" if "rms_scale" in params or is_adamws else "original"


def triples(params: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Return the coefficients of Newton-Schulz, one triple (a, b, c) per step."""
    value = params.get("ns_coefficients", "simple")
    value = NAMED[value] if isinstance(value, str) else value
    schedule = list(value) if isinstance(value[0], (list, tuple)) else [value]
    if len(schedule) == 1:
        schedule = schedule * params.get("ns_steps", 5)
    return [tuple(triple) for triple in schedule]


def flag(value: Any) -> bool:
    return value is True


def oracle_config(config: dict[str, Any], ranks: int) -> OracleConfig:
    """Return the oracle's settings; `rms_scale` / 0.2 becomes a factor of the orthogonalized matrix."""
    params = keys_given(config)
    lr = params.get("lr")
    muon_lr = float(params.get("muon_lr", 0.02 if lr is None else lr))
    decay = params.get("weight_decay", 0.0)
    schedule = triples(params)
    factor = params.get("rms_scale", 0.2) / 0.2 if scale_of(params) == "match_rms_adamw" else 1.0
    before = {"rows": unit_rows, "columns": unit_columns}.get(params.get("muon_eq"), lambda matrix: matrix)

    momentum, first = params.get("momentum", 0.95), params.get("momentum_start")
    steps, decay_steps = params.get("momentum_warmup_steps", 300), params.get("muon_weight_decay_steps")

    def varying(step: int) -> dict[str, float]:
        share = 1.0 if first is None else min(1.0, step / steps)
        left = 1.0 if decay_steps is None else max(0.0, 1 - step / decay_steps)
        return {
            "momentum": momentum * share + (first or 0.0) * (1 - share),
            "weight_decay": left * params.get("muon_weight_decay", decay),
        }

    def after(matrix: Tensor, memory: dict[str, Tensor]) -> Tensor:
        if flag(params.get("muon_plus", False)):
            matrix = muon_plus(matrix, memory)
        if flag(params.get("normuon", False)):
            matrix = normuon(matrix, memory, params.get("normuon_beta2", 0.95))
        return matrix * factor

    return OracleConfig(
        lr=muon_lr,
        momentum=momentum,
        nesterov=flag(params.get("nesterov", True)),
        weight_decay=params.get("muon_weight_decay", decay),
        cautious=params.get("cautious_weight_decay", False),
        scale=scale_of(params),
        orthogonalize=lambda matrix: newton_schulz_fp64(matrix, schedule),
        varying=varying,
        before=before,
        after=after,
        adam_lr=float(params.get("adam_lr", 3e-4 if lr is None else lr)),
        betas=tuple(params.get("betas", (0.9, 0.95))),
        eps=params.get("eps", 1e-10),
        adam_weight_decay=params.get("adam_weight_decay", decay),
        decoupled=params.get("adam_w_mode", True),
        clip=config["clip"],
        gradient_factor=ranks if config.get("gradient_allreduce_op") == "sum" else 1,
    )


def train(model: nn.Module, steps: int, config: dict[str, Any], ranks: int) -> dict[str, Tensor]:
    """Train `steps` global batches, each spread over `ranks` ranks; return name -> weight in fp64."""
    patterns = keys_given(config).get("muon_exclude", [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    excluded = [name for name, _ in model.named_parameters() if any(re.search(each, name) for each in patterns)]
    return train_oracle(model, model.batch, steps, route(model, excluded), oracle_config(config, ranks)).weights


def is_half(config: dict[str, Any]) -> bool:
    """Return whether a run may compute anything in half precision, on any machine."""
    given = keys_given(config)
    in_fp32 = given.get("ns_dtype", "auto") == "fp32" and given.get("wire_dtype", "auto") != "bf16"
    return config["dtype"] != "fp32" or config.get("torch_autocast", {}).get("enabled", False) or not in_fp32


def difference(name: str, config: dict[str, Any], initial: Tensor, weight: Tensor, expected: Tensor) -> str:
    """Return what is wrong with a weight, or "".

    The error may be 0.2 % of the change in fp32, 3 % with a momentum in bf16, 30 % in int8; half precision: parity.py.
    """
    change, wanted = (end.double() - initial.double() for end in (weight, expected))
    unit = 2.0**-7 if "bf16" in config else 1e-6  # what rounding changes alone
    floor = unit * float(initial.double().norm())
    error = float((change - wanted).norm())
    limits = {"bf16": 0.03, "int8": 0.3}
    if not is_half(config):
        limit = limits.get(keys_given(config).get("momentum_dtype"), 2e-3) * float(wanted.norm()) + floor
        return "" if error <= limit else f"{name}: error {error:.2e}, change {float(wanted.norm()):.2e}"
    cosine = float((change * wanted).sum() / (change.norm() * wanted.norm()).clamp(min=1e-300))
    ratio = float(change.norm() / wanted.norm().clamp(min=1e-300))
    if error <= floor or (cosine >= 0.9 and 0.85 <= ratio <= 1.15):
        return ""
    return f"{name}: cosine {cosine:.3f}, size {ratio:.3f}"
