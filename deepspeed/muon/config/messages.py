# SPDX-License-Identifier: Apache-2.0
"""Messages about wrong keys and values of ``optimizer.params``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

#: A string that counts as a number. YAML reads 1e-5 as a string, so configs contain such strings.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: Advice for keys that belong elsewhere or are not supported.
ADVICE = {
    "max_grad_norm": "clip with the top-level key gradient_clipping instead",
    "fp32_optimizer_states": "only true is supported; remove the key",
    "amsgrad": "AMSGrad is not supported; set it to false or remove the key",
    "maximize": "the optimizer only minimizes; remove the key, and change the sign of the loss",
    "differentiable": "a step is not differentiable; set it to false or remove the key",
    "decoupled_weight_decay": 'for Adam with L2 instead of AdamW write "adam_w_mode": false',
    "muon_lr_scale": "set muon_lr to the learning rate for Muon's parameters instead",
    "use_muon": "set param.use_muon on parameters instead, or use the keys muon_include and muon_exclude",
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
#: Key of another Muon implementation -> our key for the same setting.
PEERS = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
_TRAINER, _BOTH = "only Hugging Face's Trainer fills in", "only Hugging Face's Trainer and accelerate fill in"
#: Key whose value ``"auto"`` a framework replaces -> text that says which framework does.
FILLED_BY = {"lr": _BOTH, "betas": _TRAINER, "eps": _TRAINER, "weight_decay": _BOTH}


#: A misspelt word may be this many letters longer or shorter than the word meant. Words of very different lengths share
#: letters by chance.
MOST_MISSING = 2


def did_you_mean(word: str, known: Iterable[str], otherwise: str, quote: str = "", cutoff: float = 0.6) -> str:
    """Return "did you mean X?", where X is the most similar word in ``known``; ``otherwise`` if no word is similar.

    ``quote``: character before and after X. ``cutoff``: the least similarity, from 0 to 1.
    """
    near = nearest(word, known, cutoff)
    return f"did you mean {quote}{near}{quote}?" if near else otherwise


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the word in ``known`` that is most similar to ``word``; ``None`` if no similarity reaches ``cutoff``.

    Similarity is from 0 to 1. With a ``cutoff`` above 0, known words that are much longer or shorter are ignored unless
    they begin with ``word``.
    """
    near = [
        name
        for name in known
        if not cutoff or abs(len(name) - len(word)) <= MOST_MISSING or (len(word) > 2 and name.startswith(word))
    ]
    return next(iter(difflib.get_close_matches(word, near, n=1, cutoff=cutoff)), None)


def listed(choices: Sequence[Any]) -> str:
    """Return ``choices`` joined into a text: "a, b or c" for ``["a", "b", "c"]``."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def allowed(field: FieldInfo) -> str:
    """Return a text that names the allowed values of a config field, for docs/configuration.md and error messages."""
    kinds = get_args(field.annotation)
    notes = [*field.metadata, *(note for kind in kinds for note in getattr(kind, "__metadata__", ()))]
    return next((note for note in notes if isinstance(note, str)), "") or listed(kinds)


def expected(item: Mapping[str, Any], value: Any, values: str = "") -> str:
    """Return "expected <values>", with a hint if ``value`` looks like a misspelt choice or a quoted number or flag.

    ``item``: an entry of ``pydantic.ValidationError.errors()``. ``values``: a text that names the allowed values; if
    it is empty, the choices in pydantic's message are used.
    """
    words = re.findall(r"[^\s',]+", str(item.get("ctx", {}).get("expected", "")))
    choices = [word for word in dict.fromkeys(words) if word != "or"]
    if not (values or choices):
        return own_words(item)
    values, hint = values or listed(choices), ""
    if isinstance(value, str):
        hint = did_you_mean(value, choices, "", quote="'") or _of_string(value, values)
    return f"expected {values}; {hint}" if hint else f"expected {values}"


def own_words(item: Mapping[str, Any]) -> str:
    """Return the message in ``item``, an entry of ``pydantic.ValidationError.errors()``, without "Value error, "."""
    return str(item["msg"]).removeprefix("Value error, ")


def unknown_inside(key: Any, known: Collection[str]) -> str:
    """Return the error message about a wrong ``key`` in a nested JSON object that has the keys ``known``."""
    return f"unknown key {key!r}, " + did_you_mean(str(key), known, f"known keys: {', '.join(known)}")


def explain(
    item: Mapping[str, Any], params: Mapping[str, Any], model: type[BaseModel], known: Sequence[str], where: str
) -> str:
    """Return one line about a wrong setting: its key and value, and what is allowed or which key was probably meant.

    Args:
        item: an entry of ``pydantic.ValidationError.errors()``; for an unknown key, ``loc`` and ``type`` are enough.
        params: the keys and values that the user wrote.
        model: the pydantic class that validated them.
        known: the valid keys.
        where: prefix of the key in the message, such as ``optimizer.params.``.
    """
    if not item["loc"]:
        return f"{where}{own_words(item)}"
    key, *inner = item["loc"]
    value, lowered = params.get(key), str(key).lower()  # a key in YAML may be a number
    if key in ADVICE:
        text = ADVICE[key]
    elif item["type"] == "not_here":
        return f"{where}{key}: set it for all groups, in optimizer.params; a parameter group may set {', '.join(known)}"
    elif key not in known:
        near = did_you_mean(lowered, known, f"known keys: {', '.join(known)}", cutoff=0.5)
        peer = PEERS.get(lowered)
        text = "unknown key, " + (f"did you mean {peer}?" if peer in known else near)
    else:
        text = _special(key, value) or _wrong_value(item, value, model.model_fields[key], inner)
    return f"{where}{key}: got {value!r}; {text}"


def _wrong_value(item: Mapping[str, Any], value: Any, field: FieldInfo, inner: Sequence[Any]) -> str:
    values, part = allowed(field), ""
    section = next((kind for kind in get_args(field.annotation) if hasattr(kind, "model_fields")), None)
    if section and inner:
        key = inner[0]
        if key not in section.model_fields:
            return unknown_inside(key, section.model_fields)
        value = value[key]
        values, part = f"{allowed(section.model_fields[key])}, not {value!r}", f"{key}: "
    elif len(inner) == 1 and isinstance(value, Mapping):
        part = f"{str(inner[0])!r}: "
    return part + (own_words(item) if item["type"] == "value_error" else expected(item, value, values))


def _of_string(value: str, values: str) -> str:
    """Return advice if ``value`` is a flag in quotes, or a number that does not match :data:`DECIMAL`; otherwise "".

    ``values``: text that names the allowed values.
    """
    if value.lower() in ("true", "false") and values == "true or false":
        return f"write {value.lower()} without quotes"
    is_number = re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", re.sub(r"[\s_]", "", value.lower()))
    if "number" in values and is_number and not DECIMAL.fullmatch(value):
        return "a number in quotes must be written like 1e-5, without spaces and underscores"
    return ""


def _special(key: str, value: Any) -> str:
    """Return advice if ``key: value`` is a frequent mistake, such as ``wire_dtype: fp16``; otherwise ""."""
    text = str(value).lower()
    if key == "wire_dtype" and text in ("fp16", "float16", "half"):
        return "fp16 is not supported, because gradients underflow in it; use bf16 or fp32"
    if key == "adjust_lr_fn" and text == "spectral":
        return 'Megatron\'s spectral is "match_rms_adamw" with rms_scale set to its muon_extra_scale_factor'
    if text == "auto" and key in (*FILLED_BY, "muon_lr", "adam_lr"):
        who = FILLED_BY.get(key, "no framework fills in")
        return f"{who} this 'auto'; write a value or remove the key"
    return ""
