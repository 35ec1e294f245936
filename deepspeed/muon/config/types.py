# SPDX-License-Identifier: Apache-2.0
"""Types of the values in ``optimizer.params``, the function that declares a config field, lists of related keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deepspeed.muon.config.messages import did_you_mean, unknown_inside
from deepspeed.muon.layout.block import Cut
from deepspeed.muon.math import coefficients

#: A string that counts as a number. YAML reads 1e-5 as a string, so configs contain such strings.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: Other spelling of a dtype -> ours.
DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _as_number(value: Any) -> Any:
    """Return a number unchanged, and a string such as "1e-5" as a number; refuse other strings."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    if not isinstance(value, (str, bytes, bytearray)):
        return value
    # pydantic alone would accept more: "1.0e_8" as 1e8, and strings with spaces, words or digits of other scripts.
    if not isinstance(value, str) or not DECIMAL.fullmatch(value):
        return _REFUSED
    return int(value) if value.isdecimal() else float(value)


#: Returned in place of a wrong value. No type accepts it, so pydantic raises an error, from which our message is made.
_REFUSED = object()


def _as_sequence(value: Any) -> Any:
    """Return a list or tuple unchanged; refuse other types that pydantic accepts, such as sets, which have no order."""
    return value if isinstance(value, (list, tuple)) else _REFUSED


def _as_flag(value: Any) -> Any:
    """Return a bool unchanged; refuse other values that pydantic accepts, such as 0, 1, "yes" and "off"."""
    return value if isinstance(value, bool) else _REFUSED


def _canonical_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.").lower()
    return DTYPE_ALIASES.get(name, name if isinstance(value, str) else value)


def _known_schedule(value: Any) -> Any:
    if isinstance(value, str):
        if value not in coefficients.NAMED:
            hint = did_you_mean(value, coefficients.NAMED, f"known names: {', '.join(coefficients.NAMED)}", quote="'")
            raise ValueError(f"unknown name of a schedule; {hint}")
        return value
    triples = [value] if _is_triple(value) else value  # one needs no outer list, as in torch.optim.Muon
    if not isinstance(triples, (list, tuple)) or not triples or not all(map(_is_triple, triples)):
        raise ValueError(
            "expected the name of built-in coefficients, or a list of triples [a, b, c] of finite numbers in "
            "which a is not 0"
        )
    return triples


def _is_triple(value: Any) -> bool:
    numbers = isinstance(value, (list, tuple)) and len(value) == 3 and all(type(x) in (int, float) for x in value)
    return numbers and all(map(math.isfinite, value)) and value[0] != 0


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else _as_sequence(value)


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _as_cut(value: Any) -> Cut:
    """Return the :class:`Cut` for a value of ``muon_split``: "whole", a list of sizes, or {sizes, axis, groups}."""
    if isinstance(value, Cut):
        return value
    if value == "whole":
        return Cut(())
    settings = value if isinstance(value, Mapping) else {"sizes": value}
    known = [field.name for field in fields(Cut)]
    for key in settings.keys() - set(known):
        raise ValueError(unknown_inside(key, known))
    sizes, axis, groups = settings.get("sizes"), settings.get("axis", 0), settings.get("groups", 1)
    if not isinstance(sizes, (list, tuple)) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(
            f'expected "whole" or a list of sizes, such as [1024, 256, 256], each a whole number above 0; got {sizes!r}'
        )
    if type(axis) is not int or axis not in (0, 1):
        raise ValueError(f"axis: expected 0 (rows) or 1 (columns), got {axis!r}")
    if type(groups) is not int or groups < 1:
        raise ValueError(f"groups: expected a whole number above 0, got {groups!r}")
    return Cut(tuple(sizes), axis, groups)


# The text in each type describes the allowed values, for error messages and docs; types with choices need no text.
Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=0), "a number, 0 or more"]
Fraction = Annotated[Number, Field(ge=0, lt=1), "a number from 0 to below 1"]
Fractions = Annotated[tuple[Fraction, Fraction], BeforeValidator(_as_sequence), "two numbers, each from 0 to below 1"]
Factor = Annotated[Number, Field(gt=0), "a number above 0"]
Steps = Annotated[int, BeforeValidator(_as_number), Field(ge=1, le=50), "a whole number from 1 to 50"]
Count = Annotated[int, BeforeValidator(_as_number), Field(ge=1), "a whole number, 1 or more"]
Interval = Annotated[int, BeforeValidator(_as_number), Field(ge=0), "a whole number, 0 or more"]
Bytes = Annotated[int, BeforeValidator(_as_number), Field(ge=1), "a whole number of bytes, 1 or more"]
Flag = Annotated[bool, BeforeValidator(_as_flag), "true or false"]
Yes = Annotated[Literal[True], BeforeValidator(_as_flag), "true"]
SCHEDULES = f"{', '.join(coefficients.NAMED)}, a triple (a, b, c), or a list of triples, one per step"
Coefficients = Annotated[Any, AfterValidator(_known_schedule), SCHEDULES]
Pattern = Annotated[str, AfterValidator(_compiles)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_as_list), "a regular expression or a list of them"]
CUTS = "an object: regular expression -> sizes, or an object of sizes, axis and groups"
Cuts = Annotated[
    dict[Annotated[Pattern, BeforeValidator(str)], Annotated[Any, AfterValidator(_as_cut)]], CUTS
]  # YAML reads a key of digits as a number
Scale = Literal["auto", "original", "match_rms_adamw", "spectral_unclamped", "none"]
MomentumDtype = Annotated[Literal["fp32", "bf16", "int8"], BeforeValidator(_canonical_dtype)]
NsDtype = Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_canonical_dtype)]
WireDtype = Annotated[Literal["auto", "bf16", "fp32"], BeforeValidator(_canonical_dtype)]


class ClipOptions(BaseModel):
    """The settings of QK-clip: the keys of the object ``qk_clip`` in ``optimizer.params``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Heads whose largest logit exceeds this threshold are scaled back to it.
    tau: Factor = 100.0
    #: Query weights are scaled by factor ** alpha, key weights by factor ** (1 - alpha).
    alpha: Annotated[Number, Field(ge=0, le=1), "a number from 0 to 1"] = 0.5
    #: How the largest logit is found, see :func:`deepspeed.muon.qk_clip.logits.largest_logits`.
    logits: Literal["auto", "exact", "sampled", "bound"] = "auto"


Clip = Annotated[ClipOptions, "an object with any of tau, alpha and logits"]


#: The learning rates if the config sets none; stock DeepSpeed's defaults.
DEFAULT_MUON_LR, DEFAULT_ADAM_LR = 0.02, 3e-4
#: Rates that only stock DeepSpeed's Muon has. A config with one of them gets stock's scale of updates, ``original``.
STOCK_TUNING_KEYS = ("muon_lr", "adam_lr")
#: Key that a parameter group sets -> keys of the config that then have no effect in that group.
REPLACES = {"lr": ("muon_lr", "adam_lr"), "weight_decay": ("muon_weight_decay", "adam_weight_decay")}
_ALONE = ("momentum", "nesterov", "ns_method", "adjust_lr_fn", "betas", "eps", "bias_correction")
#: Keys that a parameter group may set.
GROUP_KEYS = (*REPLACES, *chain(*REPLACES.values()), *_ALONE)
#: AdamW's key that has no effect here -> its values that change no result in torch's AdamW either.
HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fused", "foreach", "capturable", "set_grad_none"), (True, False)),
    **dict.fromkeys(("amsgrad", "maximize", "differentiable"), (False,)),
    "decoupled_weight_decay": (True,),
}


def is_harmless(key: str, value: Any) -> bool:
    """Return whether ``key: value`` is a setting of AdamW that changes no result and is therefore accepted."""
    return any(value is harmless for harmless in HARMLESS.get(key, ()))
