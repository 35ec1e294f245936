# SPDX-License-Identifier: Apache-2.0
"""The types of values in ``optimizer.params``, how a field is described, and which keys belong together."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from deepspeed.muon.math import coefficients
from deepspeed.muon.matrices.block import Cut

#: Other projects' names of the scales. Dion: rms_norm, spectral_norm; Megatron: shape_scaling, unit_rms_norm.
SCALE_ALIASES = {
    "rms_norm": "match_rms_adamw",
    "shape_scaling": "original",
    "spectral_norm": "spectral_unclamped",
    "unit_rms_norm": "spectral_unclamped",
}


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


def _as_triples(value: Any) -> Any:
    """A single triple needs no outer list, as in ``torch.optim.Muon``."""
    if isinstance(value, (list, tuple)) and len(value) == 3 and all(isinstance(x, (int, float)) for x in value):
        return [value]
    return value


def _known_schedule(value: Any) -> Any:
    if isinstance(value, str):
        if value not in coefficients.NAMED:
            near = difflib.get_close_matches(value, coefficients.NAMED, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(coefficients.NAMED)}"
            raise ValueError(f"no schedule of that name; {hint}")
    elif not isinstance(value, (list, tuple)) or not value or not all(map(_is_triple, value)):
        raise ValueError("expected a name or a list of triples of finite numbers (a, b, c), a not zero")
    return value


def _is_triple(value: Any) -> bool:
    numbers = isinstance(value, (list, tuple)) and len(value) == 3 and all(type(x) in (int, float) for x in value)
    return numbers and all(map(math.isfinite, value)) and value[0] != 0


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _as_cuts(value: Any) -> dict[str, Cut]:
    if not isinstance(value, Mapping):
        raise ValueError("expected an object: regular expression -> sizes")
    return {_compiles(str(pattern)): _as_cut(str(pattern), given) for pattern, given in value.items()}


def _as_cut(pattern: str, given: Any) -> Cut:
    """From a list of sizes of rows, or an object with sizes, axis and groups."""
    if isinstance(given, Cut):
        return given
    if given == "whole":
        return Cut(())
    known = {field.name for field in fields(Cut)}
    given = dict(given) if isinstance(given, Mapping) else {"sizes": given}
    for key in given.keys() - known:
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "known keys: sizes, axis, groups"
        raise ValueError(f"{pattern!r}: unknown key {key!r}, {hint}")
    sizes, axis, groups = given.get("sizes"), given.get("axis", 0), given.get("groups", 1)
    if not isinstance(sizes, (list, tuple)) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(f"{pattern!r}: expected whole, or sizes, a list of whole numbers above 0, not {sizes!r}")
    if type(axis) is not int or axis not in (0, 1):
        raise ValueError(f"{pattern!r}: expected axis 0 (rows) or 1 (columns), not {axis!r}")
    if type(groups) is not int or groups < 1:
        raise ValueError(f"{pattern!r}: expected groups, a whole number above 0, not {groups!r}")
    try:
        return Cut(tuple(sizes), axis, groups)
    except ValueError as error:
        raise ValueError(f"{pattern!r}: {error}") from None


def _canonical_scale(value: Any) -> Any:
    return SCALE_ALIASES.get(value, value) if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_not_a_flag), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Factor = Annotated[Number, Field(gt=0)]
Steps = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=1, le=50)]
Interval = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=0)]
Coefficients = Annotated[Any, BeforeValidator(_as_triples), AfterValidator(_known_schedule)]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], BeforeValidator(_as_list)]
Cuts = Annotated[Any, AfterValidator(_as_cuts)]
Method = Literal["auto", "standard", "gram"]
Scale = Annotated[
    Literal["auto", "original", "match_rms_adamw", "spectral_unclamped", "none"], BeforeValidator(_canonical_scale)
]

OURS = "deepspeed-muon"
STOCK = "stock DeepSpeed"
TORCH_MUON = "`torch.optim.Muon`"
KERAS = "keras"

RATE = "a number, 0 or more"
FRACTION = "a number from 0 to below 1"
FLAG = "true or false"
PATTERNS = "a regular expression or a list of them"


def field(default: Any, description: str, allowed: str, unit: str = "", source: str = OURS) -> Any:
    """A pydantic field with its texts for docs/configuration.md and for error messages."""
    return Field(
        default, description=description, json_schema_extra={"allowed": allowed, "unit": unit, "source": source}
    )


#: Stock's learning rates where the section sets none.
DEFAULT_MUON_LR, DEFAULT_ADAM_LR = 0.02, 3e-4
#: Keys whose values are tuned for stock's Muon and its scale, ``original``. A section with ``lr`` and none of these has
#: AdamW's learning rate.
STOCK_TUNING_KEYS = ("muon_lr", "adam_lr", "momentum")
#: Keys that a parameter group may set. A key on the left replaces the config's keys on the right.
GROUP_KEYS: dict[str, tuple[str, ...]] = {
    "lr": ("muon_lr", "adam_lr"),
    "muon_lr": (),
    "adam_lr": (),
    "momentum": (),
    "nesterov": (),
    "weight_decay": ("muon_weight_decay", "adam_weight_decay"),
    "muon_weight_decay": (),
    "adam_weight_decay": (),
    "ns_method": (),
    "adjust_lr_fn": (),
    "betas": (),
    "eps": (),
}
