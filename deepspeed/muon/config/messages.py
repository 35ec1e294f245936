# SPDX-License-Identifier: Apache-2.0
"""Messages about wrong keys and values of ``optimizer.params``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo

#: Name of a setting of AdamW, or of the Muon of DeepSpeed, Moonlight or Keller Jordan -> what to write here.
ELSEWHERE = {
    "adamw_betas": "write betas",
    "adamw_eps": "write eps",
    "adamw_wd": "write adam_weight_decay",
    "amsgrad": "AMSGrad is not supported; set it to false or remove the key",
    "backend_steps": "write ns_steps",
    "decoupled_weight_decay": 'for Adam with L2 instead of AdamW write "adam_w_mode": false',
    "learning_rate": "write lr",
    "max_grad_norm": "clip with the top-level key gradient_clipping instead",
    "use_muon": "set param.use_muon on parameters instead, or use the keys muon_include and muon_exclude",
    "wd": "write weight_decay",
    # Keys of older versions of this package.
    "ns_normalization": "removed in 0.3.0; delete it, and use at least 5 ns_steps",
    "ns_tuning": "removed in 0.3.0, because nothing is left to tune; delete it",
    "owners_per_matrix": "removed in 0.3.0, because one rank now owns each matrix; delete it",
}
#: A key whose value ``"auto"`` a framework replaces -> which framework does.
FILLED_BY = {
    "lr": "Hugging Face's Trainer and accelerate",
    "betas": "Hugging Face's Trainer",
    "eps": "Hugging Face's Trainer",
    "weight_decay": "Hugging Face's Trainer and accelerate",
}


def did_you_mean(word: str, known: Iterable[str], otherwise: str, quote: str = "", cutoff: float = 0.6) -> str:
    """Return "did you mean X?", where X is the most similar word in ``known``; ``otherwise`` if no word is similar.

    ``quote``: character before and after X. ``cutoff``: the least similarity, from 0 to 1.
    """
    near = nearest(word, known, cutoff)
    return f"did you mean {quote}{near}{quote}?" if near else otherwise


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the word in ``known`` that is most similar to ``word``; ``None`` if no similarity reaches ``cutoff``."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def allowed(field: FieldInfo) -> str:
    """Return a text that names the allowed values of a config field, for docs/configuration.md and error messages."""
    kinds = get_args(field.annotation)
    notes = [*field.metadata, *(note for kind in kinds for note in getattr(kind, "__metadata__", ()))]
    return next((note for note in notes if isinstance(note, str)), "") or _join(kinds)


def expected(item: Mapping[str, Any], value: Any, allowed_values: str = "") -> str:
    """Return the text "expected <values>", followed by the most similar choice if ``value`` looks like a misspelt one.

    ``item``: an entry of ``pydantic.ValidationError.errors()``. ``allowed_values``: the text for <values>; if it is
    empty, the choices in pydantic's message are used, or the whole message if it has none.
    """
    words = re.findall(r"[^\s',]+", str(item.get("ctx", {}).get("expected", "")))
    choices = [word for word in dict.fromkeys(words) if word != "or"]
    if not (allowed_values or choices):
        return own_words(item)
    hint = did_you_mean(value, choices, "", quote="'") if isinstance(value, str) else ""
    return f"expected {allowed_values or _join(choices)}" + (f"; {hint}" if hint else "")


def own_words(item: Mapping[str, Any]) -> str:
    """Return the message in ``item``, an entry of ``pydantic.ValidationError.errors()``, without pydantic's prefix."""
    return str(item["msg"]).removeprefix("Value error, ")


def unknown_inside(key: Any, known: Collection[str]) -> str:
    """Return the error message about a wrong ``key`` in a nested JSON object that has the keys ``known``."""
    return f"unknown key {key!r}, " + did_you_mean(str(key), known, f"known keys: {', '.join(known)}")


def explain(
    item: Mapping[str, Any],
    params: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    known: Sequence[str],
    where: str,
) -> str:
    """Return one line about a wrong setting: its key and value, and what is allowed or which key was probably meant.

    Args:
        item: an entry of ``pydantic.ValidationError.errors()``; for an unknown key, only its ``loc`` is needed.
        params: the keys and values that the user wrote.
        fields: {key: field} for all keys of ``optimizer.params``.
        known: the keys that are valid here. A parameter group may set fewer than ``optimizer.params``.
        where: prefix of the key in the message, such as ``optimizer.params.``.
    """
    if not item["loc"]:
        return f"{where}{own_words(item)}"
    key, *inner = item["loc"]
    name, value = str(key).lower(), params.get(key)  # a key in YAML may be a number
    if key in known:
        text = _wrong_value(item, value, key, fields[key], inner)
    elif key in fields:
        return f"{where}{key}: set it for all groups, in optimizer.params; a parameter group may set {', '.join(known)}"
    else:
        near = did_you_mean(name, known, f"known keys: {', '.join(known)}")
        text = ELSEWHERE.get(name) or f"unknown key, {near}"
    return f"{where}{key}: got {value!r}; {text}"


def _wrong_value(item: Mapping[str, Any], value: Any, key: str, field: FieldInfo, inner: Sequence[Any]) -> str:
    if value == "auto" and key in FILLED_BY:
        return f"only {FILLED_BY[key]} can fill in this 'auto'; write a value or remove the key"
    section = next((kind for kind in get_args(field.annotation) if hasattr(kind, "model_fields")), None)
    allowed_values, part = allowed(field), ""
    if section and inner:
        if inner[0] not in section.model_fields:
            return unknown_inside(inner[0], section.model_fields)
        value, part = value[inner[0]], f"{inner[0]}: "
        allowed_values = f"{allowed(section.model_fields[inner[0]])}, not {value!r}"
    elif len(inner) == 1 and isinstance(value, Mapping):
        part = f"{str(inner[0])!r}: "
    return part + (own_words(item) if item["type"] == "value_error" else expected(item, value, allowed_values))


def _join(choices: Sequence[Any]) -> str:
    """Return ``choices`` joined into a text: "a, b or c" for ``["a", "b", "c"]``."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
