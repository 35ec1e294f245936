# SPDX-License-Identifier: Apache-2.0
"""Messages about wrong keys and values of ``optimizer.params``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Advice for keys that belong elsewhere or are not supported.
ADVICE = {
    "max_grad_norm": "clip with the top-level key gradient_clipping instead",
    "fp32_optimizer_states": "only true is supported; remove the key",
    "amsgrad": "AMSGrad is not supported; set it to false or remove the key",
    "maximize": "the optimizer only minimizes; change the sign of the loss, and set it to false or remove the key",
    "differentiable": "a step is not differentiable; set it to false or remove the key",
    "decoupled_weight_decay": 'for Adam with L2 in the AdamW half write "adam_w_mode": false',
    "muon_lr_scale": "write the rate of the Muon half itself into muon_lr",
    "use_muon": "set it on parameters, param.use_muon = True, or use muon_include and muon_exclude",
    **dict.fromkeys(("fused", "foreach", "capturable", "set_grad_none"), "expected true or false; it has no effect"),
}
_THEIRS = {
    "adam_lr": "adamw_lr adam_learning_rate adamw_learning_rate learning_rate_adam learning_rate_adamw aux_adam_lr "
    "aux_lr aux_adamw_lr lr_adam lr_adamw scalar_lr",
    "adam_weight_decay": "adamw_weight_decay aux_weight_decay adam_wd adamw_wd weight_decay_adam",
    "adjust_lr_fn": "adjust_lr muon_scale_mode",
    "betas": "adam_betas adamw_betas aux_betas beta1 beta2 adam_beta1 adam_beta2",
    "eps": "adam_eps adamw_eps aux_eps epsilon adam_epsilon",
    "lr": "learning_rate",
    "momentum": "mu muon_beta muon_momentum momentum_beta muon_mu",
    "muon_fused": "muon_split_qkv",
    "muon_lr": "muon_learning_rate learning_rate_muon lr_muon matrix_lr",
    "muon_weight_decay": "muon_wd weight_decay_muon",
    "nesterov": "muon_nesterov use_nesterov",
    "ns_steps": "muon_num_ns_steps muon_ns_steps newton_schulz_steps num_ns_steps ns_iters ns_iterations backend_steps",
    "rms_scale": "consistent_rms muon_extra_scale_factor rms_rate",
    "weight_decay": "wd",
}
#: Other projects' names, and the key here.
PEERS = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
_TRAINER, _BOTH = "only Hugging Face's Trainer fills in", "only Hugging Face's Trainer and accelerate fill in"
#: Keys whose ``"auto"`` something else may fill in, and what does.
FILLED_BY = {"lr": _BOTH, "betas": _TRAINER, "eps": _TRAINER, "weight_decay": _BOTH}


#: The most letters by which a misspelt word is longer or shorter than the word meant.
MOST_MISSING = 2


def did_you_mean(given: str, known: Iterable[str], otherwise: str, quote: str = "", cutoff: float = 0.6) -> str:
    """A question with the nearest spelling that is known; ``otherwise`` where none is near."""
    near = nearest(given, known, cutoff)
    return f"did you mean {quote}{near}{quote}?" if near else otherwise


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known spelling that is nearest to what was given; ``None`` where none is near.

    Words of very different lengths share letters by chance, unless one is cut short. A cutoff of 0 takes any.
    """
    near = [
        name
        for name in known
        if not cutoff or abs(len(name) - len(given)) <= MOST_MISSING or (len(given) > 2 and name.startswith(given))
    ]
    return next(iter(difflib.get_close_matches(given, near, n=1, cutoff=cutoff)), None)


def explain(
    item: Mapping[str, Any], params: Mapping[str, Any], known: Sequence[str], where: str, allowed: Mapping[str, str]
) -> str:
    """One line with the key, its value, what is allowed and the nearest valid spelling.

    Args:
        item: an error from ``pydantic.ValidationError.errors``.
        params: what was given; ``known``: the keys that may be given; ``allowed``: by key, the allowed values.
        where: what stands before the key.
    """
    own = str(item.get("msg")).removeprefix("Value error, ")
    if not item["loc"]:
        return f"{where}{own}"
    key = str(item["loc"][0])
    value, peer = params.get(key), PEERS.get(key.lower(), "")
    if key in ADVICE:
        text = ADVICE[key]
    elif item["type"] == "not_here":
        return f"{where}{key}: set it in optimizer.params, for all groups; a group may set {', '.join(known)}"
    elif item["type"] == "extra_forbidden":
        near = did_you_mean(key.lower(), known, f"known keys: {', '.join(known)}", cutoff=0.5)
        text = "unknown key, " + (f"did you mean {peer}?" if peer in known else near)
    elif not (text := _special(key, value)):
        choices = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
        hint = (
            did_you_mean(value, choices, "", quote="'") or _of_string(value, allowed[key])
            if isinstance(value, str)
            else ""
        )
        text = own if item["type"] == "value_error" else "; ".join(filter(None, [f"expected {allowed[key]}", hint]))
    return f"{where}{key}: got {value!r}; {text}"


def _of_string(value: str, allowed: str) -> str:
    """Return advice for a string in place of a flag or a number; empty for all others."""
    if value.lower() in ("true", "false") and allowed == "true or false":
        return f"write {value.lower()} without quotes"
    if "number" in allowed and re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", re.sub(r"[\s_]", "", value.lower())):
        return "a string counts as a number only if it is written like 1e-5, without blanks and underscores"
    return ""


def _special(key: str, value: Any) -> str:
    """Advice for particular values; empty for all others."""
    text = str(value).lower()
    if key == "wire_dtype" and text in ("fp16", "float16", "half"):
        return "fp16 is refused, because gradients underflow in it; use bf16 or fp32"
    if key == "adjust_lr_fn" and text == "spectral":
        return 'Megatron\'s spectral is "match_rms_adamw" with rms_scale set to its muon_extra_scale_factor'
    if text == "auto" and key in (*FILLED_BY, "muon_lr", "adam_lr"):
        who = FILLED_BY.get(key, "nothing fills in")
        return f"{who} this 'auto'; write a value or remove the key"
    return ""
