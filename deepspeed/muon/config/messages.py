# SPDX-License-Identifier: Apache-2.0
"""Messages about wrong keys and values of ``optimizer.params``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

#: Advice for keys that belong elsewhere or are not supported.
ADVICE = {
    "max_grad_norm": "clip with the top-level key gradient_clipping instead",
    "fp32_optimizer_states": "only true is supported; remove the key",
    "amsgrad": "AMSGrad is not supported; remove the key",
    "use_muon": "set it on parameters, param.use_muon = True, or use muon_include and muon_exclude",
}
#: Other projects' names, and the key here.
PEERS = {
    "adam_betas": "betas",
    "adamw_betas": "betas",
    "adam_eps": "eps",
    "adamw_lr": "adam_lr",
    "adjust_lr": "adjust_lr_fn",
    "beta1": "betas",
    "beta2": "betas",
    "consistent_rms": "rms_scale",
    "learning_rate": "lr",
    "mu": "momentum",
    "muon_beta": "momentum",
    "muon_extra_scale_factor": "rms_scale",
    "muon_momentum": "momentum",
    "muon_num_ns_steps": "ns_steps",
    "muon_scale_mode": "adjust_lr_fn",
    "muon_split_qkv": "muon_fused",
    "newton_schulz_steps": "ns_steps",
    "rms_rate": "rms_scale",
    "wd": "weight_decay",
}
#: Keys whose ``"auto"`` something else may fill in, and what does.
FILLED_BY = {
    "lr": "only Hugging Face's Trainer and accelerate fill in",
    "betas": "only Hugging Face's Trainer fills in",
    "eps": "only Hugging Face's Trainer fills in",
    "weight_decay": "only Hugging Face's Trainer and accelerate fill in",
}


def explain(
    item: Mapping[str, Any], params: Mapping[str, Any], known: Sequence[str], where: str, allowed: Mapping[str, str]
) -> str:
    """One line with the key, its value, what is allowed and the nearest valid spelling.

    Args:
        item: an error from ``pydantic.ValidationError.errors``.
        params: the keys and values that were given.
        known: the keys that exist.
        where: what stands before the key.
        allowed: by key, the allowed values.
    """
    if not item["loc"]:
        return f"{where}{_own_message(item)}"
    key = str(item["loc"][0])
    value = params.get(key)
    if key in ADVICE:
        return f"{where}{key}: got {value!r}; {ADVICE[key]}"
    if item["type"] == "extra_forbidden":
        return f"{where}{key}: got {value!r}; unknown key, {_nearest_key(key, known)}"
    if item["type"] == "not_here":
        return f"{where}{key}: set it in optimizer.params, for all groups; a group may set {', '.join(known)}"
    return f"{where}{key}: got {value!r}; {_special(key, value) or _expected(item, value, allowed[key])}"


def _own_message(item: Mapping[str, Any]) -> str:
    return str(item["msg"]).removeprefix("Value error, ")


def _nearest_key(key: str, known: Sequence[str]) -> str:
    peer = PEERS.get(key.lower())
    near = [peer] if peer in known else difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"


def _special(key: str, value: Any) -> str:
    """Advice for particular values; empty for all others."""
    text = str(value).lower()
    if key == "ns_dtype" and text in ("fp16", "float16", "half"):
        return "fp16 is refused, because gradients underflow in it; use bf16 or fp32"
    if key == "adjust_lr_fn" and text == "spectral":
        return 'Megatron\'s spectral is "match_rms_adamw" with rms_scale set to its muon_extra_scale_factor'
    if text == "auto" and key in (*FILLED_BY, "muon_lr", "adam_lr"):
        who = FILLED_BY.get(key, "nothing fills in")
        return f"{who} this 'auto'; write a value or remove the key"
    return ""


def _expected(item: Mapping[str, Any], value: Any, allowed: str) -> str:
    """The message of our own validator, else what is allowed."""
    return _own_message(item) if item["type"] == "value_error" else f"expected {allowed}{_nearest_choice(item, value)}"


def _nearest_choice(item: Mapping[str, Any], value: Any) -> str:
    choices = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
