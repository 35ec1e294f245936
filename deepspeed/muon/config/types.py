# SPDX-License-Identifier: Apache-2.0
"""The types of values in ``optimizer.params``, how a field is described, and which keys belong together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deepspeed.muon.config.messages import DECIMAL, did_you_mean, unknown_inside
from deepspeed.muon.math import coefficients

#: Other projects' names of the scales. Dion: rms_norm, spectral_norm; Megatron: shape_scaling, unit_rms_norm.
SCALE_ALIASES = {
    "rms_norm": "match_rms_adamw",
    "shape_scaling": "original",
    "spectral_norm": "spectral_unclamped",
    "unit_rms_norm": "spectral_unclamped",
}


#: Other spellings of dtypes.
DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _as_number(value: Any) -> Any:
    """Return a number, or a string that spells one in plain decimals, as a number.

    Python and pydantic read more than that: 1.0e_8 as 1e8, and strings with blanks, words and digits of other scripts.
    """
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    if not isinstance(value, (str, bytes, bytearray)):
        return value
    if not isinstance(value, str) or not DECIMAL.fullmatch(value):
        return _REFUSED
    return int(value) if value.isdecimal() else float(value)


#: No type accepts it, so that the message about the key says what is allowed.
_REFUSED = object()


def _as_sequence(value: Any) -> Any:
    """Refuse what pydantic would take for a list, such as a set, which has no order."""
    return value if isinstance(value, (list, tuple)) else _REFUSED


def _as_flag(value: Any) -> Any:
    """Return true or false; pydantic takes 0, 1, "yes" and "off" too, and Python calls "false" true."""
    return value if isinstance(value, bool) else _REFUSED


def _canonical_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.").lower()
    return DTYPE_ALIASES.get(name, name if isinstance(value, str) else value)


def _known_schedule(value: Any) -> Any:
    if isinstance(value, str):
        if value not in coefficients.NAMED:
            hint = did_you_mean(value, coefficients.NAMED, f"known names: {', '.join(coefficients.NAMED)}", quote="'")
            raise ValueError(f"no schedule of that name; {hint}")
        return value
    triples = [value] if _is_triple(value) else value  # one needs no outer list, as in torch.optim.Muon
    if not isinstance(triples, (list, tuple)) or not triples or not all(map(_is_triple, triples)):
        raise ValueError("expected a name or a list of triples of finite numbers (a, b, c), a not zero")
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


@dataclass(frozen=True)
class Cut:
    """How a matrix is cut: into ``sizes`` along ``axis``, repeated for each of ``groups``. No sizes: not at all.

    Raises:
        ValueError: columns in groups.
    """

    sizes: tuple[int, ...]
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if self.axis == 1 and self.groups > 1:
            raise ValueError("only rows, axis 0, can have groups: columns in groups are not contiguous")

    def __str__(self) -> str:
        if not self.sizes:
            return "left whole"
        count = len(self.sizes)
        period = next(k for k in range(1, count + 1) if self.sizes[:k] * (count // k) == self.sizes)
        times = f"{count // period} x " if period < count else ""
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{times}{' + '.join(map(str, self.sizes[:period]))} {('rows', 'columns')[self.axis]}{groups}"


def _as_cut(value: Any) -> Cut:
    """Return the cut that a list of sizes of rows, or an object with sizes, axis and groups, describes."""
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
        raise ValueError(f"expected whole, or sizes, a list of whole numbers above 0, not {sizes!r}")
    if type(axis) is not int or axis not in (0, 1):
        raise ValueError(f"expected axis 0 (rows) or 1 (columns), not {axis!r}")
    if type(groups) is not int or groups < 1:
        raise ValueError(f"expected groups, a whole number above 0, not {groups!r}")
    return Cut(tuple(sizes), axis, groups)


def _canonical_scale(value: Any) -> Any:
    return SCALE_ALIASES.get(value, value) if isinstance(value, str) else value


# The text in a type says which values are allowed; choices need none.
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
Tuning = Annotated[Literal["shipped", "measured"], "shipped or measured"]
Yes = Annotated[Literal[True], BeforeValidator(_as_flag), "true"]
SCHEDULES = f"{', '.join(coefficients.NAMED)}, a triple (a, b, c), or a list of triples, one per step"
Coefficients = Annotated[Any, AfterValidator(_known_schedule), SCHEDULES]
Pattern = Annotated[str, AfterValidator(_compiles)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_as_list), "a regular expression or a list of them"]
CUTS = "an object: regular expression -> sizes, or an object of sizes, axis and groups"
Cuts = Annotated[
    dict[Annotated[Pattern, BeforeValidator(str)], Annotated[Any, AfterValidator(_as_cut)]], CUTS
]  # YAML reads a key of digits as a number
Scale = Annotated[
    Literal["auto", "original", "match_rms_adamw", "spectral_unclamped", "none"], BeforeValidator(_canonical_scale)
]

MomentumDtype = Annotated[Literal["fp32", "bf16", "int8"], BeforeValidator(_canonical_dtype)]
NsDtype = Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_canonical_dtype)]
WireDtype = Annotated[Literal["auto", "bf16", "fp32"], BeforeValidator(_canonical_dtype)]


class ClipOptions(BaseModel):
    """The value of ``qk_clip``: the threshold of a logit, and how the factor is shared.

    ``alpha``: queries take this power of the factor, keys the rest. ``logits``: how the largest logit is found, see
    :func:`deepspeed.muon.math.logits.largest`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tau: Factor = 100.0
    alpha: Annotated[Number, Field(ge=0, le=1), "a number from 0 to 1"] = 0.5
    logits: Literal["auto", "exact", "sampled", "bound"] = "auto"


Clip = Annotated[ClipOptions, "an object with any of tau, alpha and logits"]


OURS, STOCK, TORCH_MUON, KERAS = "deepspeed-muon", "stock DeepSpeed", "`torch.optim.Muon`", "keras"


def field(default: Any, source: str = OURS, unit: str = "") -> Any:
    """Return a pydantic field with its texts for docs/configuration.md; the docstring below it is the description."""
    return Field(default, json_schema_extra={"source": source, "unit": unit})


#: Stock's learning rates where the section sets none.
DEFAULT_MUON_LR, DEFAULT_ADAM_LR = 0.02, 3e-4
#: Keys whose values are tuned for stock's Muon and its scale, ``original``. A section with ``lr`` and none of these has
#: AdamW's learning rate.
STOCK_TUNING_KEYS = ("muon_lr", "adam_lr", "momentum")
#: Keys of a parameter group that replace others of the config, and which.
REPLACES = {"lr": ("muon_lr", "adam_lr"), "weight_decay": ("muon_weight_decay", "adam_weight_decay")}
_ALONE = ("momentum", "nesterov", "ns_method", "adjust_lr_fn", "betas", "eps", "bias_correction")
#: Keys that a parameter group may set.
GROUP_KEYS = (*REPLACES, *chain(*REPLACES.values()), *_ALONE)
#: Keys of AdamW without effect on Muon's results, and the values with which they have none on AdamW's either.
HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fused", "foreach", "capturable", "set_grad_none"), (True, False)),
    **dict.fromkeys(("amsgrad", "maximize", "differentiable"), (False,)),
    "decoupled_weight_decay": (True,),
}


def is_harmless(key: str, value: Any) -> bool:
    """Return whether a setting of AdamW changes nothing, so that it may stand in a config or in a parameter group."""
    return any(value is harmless for harmless in HARMLESS.get(key, ()))
