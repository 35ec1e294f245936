# SPDX-License-Identifier: Apache-2.0
"""What a config of fuzz_configs.py must do: the documentation's rules, and training by the oracle's formulas."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.muon.math.coefficients import NAMED
from oracles import OracleConfig, adam_update, clipped, gradients_of, muon_update, newton_schulz_fp64

STOCK_MUON = {"muon_lr", "adam_lr", "momentum", "nesterov", "ns_method", "per_head_muon"}
PEERS = {"rms_norm": "match_rms_adamw", "shape_scaling": "original"}


def given(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that have a value."""
    return {key: value for key, value in config["params"].items() if value is not None}


def scale_of(params: dict[str, Any]) -> str:
    """`adjust_lr_fn` as docs/configuration.md resolves it."""
    name = params.get("adjust_lr_fn", "auto")
    if name != "auto":
        return PEERS.get(name, name)
    is_adamws = "lr" in params and not STOCK_MUON & params.keys()
    return "match_rms_adamw" if "rms_scale" in params or is_adamws else "original"


def triples(params: dict[str, Any]) -> list[tuple[float, float, float]]:
    """One triple per step."""
    value = params.get("ns_coefficients", "simple")
    value = NAMED[value] if isinstance(value, str) else value
    schedule = list(value) if isinstance(value[0], (list, tuple)) else [value]
    if len(schedule) == 1:
        schedule = schedule * params.get("ns_steps", 5)
    return [tuple(triple) for triple in schedule]


def flag(value: Any) -> bool:
    return value in (True, "true")


def oracle_config(config: dict[str, Any]) -> OracleConfig:
    """The oracle's settings; `rms_scale` over the oracle's 0.2 is a factor of the orthogonalized matrix."""
    params = given(config)
    lr = params.get("lr")
    muon_lr = float(params.get("muon_lr", 0.02 if lr is None else lr))
    decay = params.get("weight_decay", 0.0)
    schedule = triples(params)
    factor = params.get("rms_scale", 0.2) / 0.2 if scale_of(params) == "match_rms_adamw" else 1.0
    return OracleConfig(
        lr=muon_lr,
        momentum=params.get("momentum", 0.95),
        nesterov=flag(params.get("nesterov", True)),
        weight_decay=params.get("muon_weight_decay", decay),
        scale=scale_of(params),
        orthogonalize=lambda matrix: newton_schulz_fp64(matrix, schedule) * factor,
        adam_lr=float(params.get("adam_lr", 3e-4 if lr is None else lr)),
        betas=tuple(params.get("betas", (0.9, 0.95))),
        eps=params.get("eps", 1e-10),
        adam_weight_decay=params.get("adam_weight_decay", decay),
        clip=config["clip"],
    )


def goes_to_muon(name: str, param: nn.Parameter, params: dict[str, Any]) -> bool:
    """Matrices of linear layers, but for the exclusions."""
    patterns = params.get("muon_exclude", [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return param.ndim == 2 and not any(re.search(pattern, name) for pattern in patterns)


def train(model: nn.Module, steps: int, config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights in fp64 after `steps` global batches."""
    model, cfg, params = model.double(), oracle_config(config), given(config)
    decoupled = params.get("adam_w_mode", True)
    weights = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step in range(steps):
        gradients, _ = clipped(gradients_of(model(*model.batch(step)), weights), cfg.clip)
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = gradients[name]
                if goes_to_muon(name, weight, params):
                    muon_update(weight, gradient, moments[name][0], cfg.lr, cfg)
                    continue
                if not decoupled:
                    gradient = gradient + cfg.adam_weight_decay * weight
                    weight /= 1 - cfg.adam_lr * cfg.adam_weight_decay  # undone by adam_update
                adam_update(weight, gradient, *moments[name], step + 1, cfg.adam_lr, cfg)
    return {name: weight.detach() for name, weight in weights.items()}


def is_half(config: dict[str, Any]) -> bool:
    """Whether the run computes anything in half precision, on this machine or on another."""
    return config["dtype"] != "fp32" or given(config).get("ns_dtype", "auto") != "fp32"


def difference(name: str, config: dict[str, Any], initial: Tensor, weight: Tensor, expected: Tensor) -> str:
    """What is wrong with a weight, or nothing.

    In fp32 an error of 0.2 % of the change, of 3 % with a rounded momentum. Half precision as in test_parity.py.
    """
    change, wanted = (end.double() - initial.double() for end in (weight, expected))
    floor = 1e-6 * float(initial.double().norm())
    error = float((change - wanted).norm())
    rounded = given(config).get("momentum_dtype") == "bf16"
    if not is_half(config):
        limit = (0.03 if rounded else 2e-3) * float(wanted.norm()) + floor
        return "" if error <= limit else f"{name}: error {error:.2e}, change {float(wanted.norm()):.2e}"
    cosine = float((change * wanted).sum() / (change.norm() * wanted.norm()).clamp(min=1e-300))
    ratio = float(change.norm() / wanted.norm().clamp(min=1e-300))
    if error <= floor or (cosine >= 0.9 and 0.85 <= ratio <= 1.15):
        return ""
    return f"{name}: cosine {cosine:.3f}, size {ratio:.3f}"
