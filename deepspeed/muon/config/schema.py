# SPDX-License-Identifier: Apache-2.0
"""The settings in ``optimizer.params`` of a ds_config whose optimizer type is Muon: values, keys, published recipes.

``docs/configuration.md`` is generated from the fields and their docstrings.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepspeed.muon.config.messages import did_you_mean, explain, unknown_inside
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.layout import Cut
from deepspeed.muon.math import newton_schulz
from deepspeed.muon.math.rules import OPTIONS, Rule, Schedules, is_on, rules_of

#: A string that counts as a number. YAML reads 1e-5 as a string, so configs contain such strings.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: Other spelling of a dtype -> ours.
DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _as_number(value: Any) -> Any:
    """Return a string such as "1e-5" as a number, and a number unchanged.

    Raise ValueError for a bool. For other strings return :data:`_REFUSED`, for which pydantic raises an error.
    """
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
    """Return a list or tuple unchanged, and for anything else :data:`_REFUSED`, for which pydantic raises an error.

    Pydantic alone would accept other types, such as sets, which have no order.
    """
    return value if isinstance(value, (list, tuple)) else _REFUSED


def _as_flag(value: Any) -> Any:
    """Return a bool unchanged, and for anything else :data:`_REFUSED`, for which pydantic raises an error.

    Pydantic alone would accept other values, such as 0, 1, "yes" and "off".
    """
    return value if isinstance(value, bool) else _REFUSED


def _canonical_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.").lower()
    return DTYPE_ALIASES.get(name, name if isinstance(value, str) else value)


def _known_schedule(value: Any) -> Any:
    if isinstance(value, str):
        if value not in newton_schulz.NAMED:
            hint = did_you_mean(value, newton_schulz.NAMED, f"known names: {', '.join(newton_schulz.NAMED)}", quote="'")
            raise ValueError(f"no built-in coefficients have this name; {hint}")
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


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def _as_cut(value: Any) -> Cut:
    """Return the :class:`Cut` for a value of ``muon_split``: "whole", a list of sizes, or {sizes, axis, groups}.

    Raise ValueError for other values.
    """
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
SCHEDULES = f"{', '.join(newton_schulz.NAMED)}, a triple (a, b, c), or a list of triples, one per step"
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
#: Learning-rate keys that stock DeepSpeed's Muon has, but AdamW does not. A config with one of them gets the scale of
#: updates that stock DeepSpeed uses, ``original``.
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
    """Return whether ``key: value``, such as ``foreach: true``, is a setting of torch's AdamW that changes no result.

    Such settings are accepted and ignored.
    """
    return any(value is harmless for harmless in HARMLESS.get(key, ()))


class Preset(NamedTuple):
    """A published recipe.

    ``settings``: keys of ``optimizer.params`` and their values. ``source``: the publication and its date. ``routers``:
    what the recipe does with the routers of experts. ``left_out``: other differences between the recipe and a run with
    these settings.
    """

    settings: dict[str, Any]
    source: str
    routers: str
    left_out: str = ""


_ON_MUON = "on Muon there, with AdamW here; `muon_include` with the name of your routers follows the recipe"
# fmt: off
_MOONLIGHT = {
    "lr": 4.2e-4, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw",
    "ns_coefficients": "simple", "ns_steps": 5, "betas": (0.9, 0.95), "eps": 1e-8,
}
_KIMI_K2 = _MOONLIGHT | {"lr": 2e-4, "qk_clip": {"tau": 100, "alpha": 0.5}}
_DEEPSEEK_V4 = {key: value for key, value in _MOONLIGHT.items() if key != "ns_steps"} | {
    "lr": 2.7e-4, "rms_scale": 0.18, "ns_coefficients": "deepseek_v4", "eps": 1e-20,
}
_GLM5 = _MOONLIGHT | {"lr": 2.5e-4, "per_head_muon": True}
_NANOCHAT = {
    "muon_lr": 0.02, "adam_lr": 0.008, "muon_weight_decay": 0.28, "adam_weight_decay": 0.0,
    "cautious_weight_decay": True, "momentum": 0.97, "momentum_start": 0.85, "momentum_warmup_steps": 400,
    "nesterov": True, "normuon": True, "normuon_beta2": 0.9, "muon_eq": "rows", "muon_plus": True,
    "adjust_lr_fn": "original", "ns_coefficients": "polar_express", "betas": (0.8, 0.96), "eps": 1e-10,
}
# fmt: on
_V4 = "arXiv 2606.19348, sections 2.4 and 4.2.2, June 2026; the rate is that of V4-Flash"
_GLM = "arXiv 2602.15763 (Muon Split), February 2026; the other values are those of GLM-4.5, arXiv 2508.06471"
PRESETS = {
    "moonlight": Preset(_MOONLIGHT, "arXiv 2502.16982, sections 2 and 3, February 2025", _ON_MUON),
    "kimi_k2": Preset(_KIMI_K2, "arXiv 2507.20534, sections 2.1 and 2.5, July 2025", _ON_MUON),
    "deepseek_v4": Preset(_DEEPSEEK_V4, _V4, _ON_MUON),
    "glm5": Preset(_GLM5, _GLM, _ON_MUON),
    "nanochat": Preset(
        _NANOCHAT,
        "github.com/karpathy/nanochat, commit 92d63d4, 3 July 2026",
        "none: its model is dense",
        "There, weight decay falls to zero (here: set `muon_weight_decay_steps` to the length of the run), momentum "
        "falls to 0.90 at the end, AdamW has six rates, of which this is the output head's, and NorMuon's mean lies "
        "along the longer side, here along the outputs",
    ),
}

#: Key that a user sets -> keys whose values from the preset are then ignored.
_SUPERSEDED = REPLACES | OPTIONS | {"adjust_lr_fn": ("rms_scale",), "ns_coefficients": ("ns_steps",)}


def filled_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``params`` together with the values of its preset for keys that ``params`` does not override.

    For example, ``lr`` in ``params`` overrides the preset's ``muon_lr``. A null in ``params`` overrides, too.
    """
    name = params.get("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        return dict(params)
    superseded = {key for general in params for key in _SUPERSEDED.get(general, ())}
    return {key: value for key, value in preset.settings.items() if key not in superseded} | dict(params)


@contextmanager
def naming_preset_keys(preset: str, keys: Collection[str]) -> Iterator[None]:
    """Extend the message of a MuonConfigError raised in the ``with`` block: name the keys in it that a preset has set.

    This helps users who never wrote these keys. ``preset``: the preset's name. ``keys``: all keys that it has set.
    """
    try:
        yield
    except MuonConfigError as error:
        text = str(error)
        named = sorted(key for key in keys if re.search(rf"\b{key}\b", text))
        if not named:
            raise
        hint = f"preset {preset} has set {', '.join(named)}; set a key to null to remove it"
        raise MuonConfigError(f"{text} ({hint})") from None


class MuonConfig(BaseModel):
    """The settings of the optimizer: the keys of ``optimizer.params`` in ds_config. Unknown keys are refused.

    Keys that stock DeepSpeed's Muon has, too, have the same defaults. "Muon half" means the parameters that Muon
    updates, "AdamW half" all other parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    preset: Literal["none", "moonlight", "kimi_k2", "deepseek_v4", "glm5", "nanochat"] = "none"
    """A published recipe, which fills in the keys that you leave out: [presets](#presets)"""
    lr: Rate | None = None
    """Learning rate of both halves"""
    muon_lr: Rate | None = None
    """Learning rate of the Muon half; default `lr`, otherwise 0.02"""
    adam_lr: Rate | None = None
    """Learning rate of the AdamW half; default `lr`, otherwise 3e-4"""
    momentum: Fraction = 0.95
    """Beta of the momentum buffer, an exponential average of gradients"""
    momentum_start: Fraction | None = None
    """Beta of the first step; it changes linearly to `momentum`: [schedules](update-rules.md#schedules)"""
    momentum_warmup_steps: Count = 300
    """Number of steps from `momentum_start` to `momentum`"""
    momentum_dtype: MomentumDtype = "fp32"
    """Dtype that stores the momentum: [smaller momentum](checkpoints.md#momentum-in-one-or-two-bytes)"""
    nesterov: Flag = True
    """Orthogonalize Nesterov's look-ahead instead of the momentum buffer"""
    weight_decay: Rate = 0.0
    """Decoupled weight decay of both halves: a step multiplies weights by 1 - lr x this"""
    muon_weight_decay: Rate | None = None
    """Weight decay of the Muon half; default `weight_decay`"""
    muon_weight_decay_steps: Count | None = None
    """Number of steps in which Muon's weight decay falls linearly to zero; default: it is constant"""
    adam_weight_decay: Rate | None = None
    """Weight decay of the AdamW half; default `weight_decay`"""
    cautious_weight_decay: Flag = False
    """A Muon weight decays only where its update does not move it away from zero"""
    normuon: Flag = False
    """Divide each output of the orthogonalized update by its running RMS: [NorMuon](update-rules.md#normuon)"""
    normuon_beta2: Fraction = 0.95
    """Decay of NorMuon's running mean square"""
    muon_eq: Literal["none", "rows", "columns"] = "none"
    """Before Newton-Schulz, make norms of rows (outputs) or columns equal: [MuonEq](update-rules.md#muoneq-and-muon)"""
    muon_plus: Flag = False
    """Give each update the norm of an orthogonal matrix: [Muon+](update-rules.md#muoneq-and-muon)"""
    qk_clip: Clip | None = None
    """Scale back attention heads whose logits exceed `tau`: [QK-clip](update-rules.md#qk-clip)"""
    muon_include: Patterns = ()
    """Matrices with a matching name go to Muon, even those that go to AdamW by default"""
    muon_exclude: Patterns = ()
    """Parameters with a matching name go to AdamW; overrides `muon_include`"""
    muon_split: Cuts = {}
    """Cut parameters with a matching name into matrices of [these sizes](update-rules.md#sizes-of-your-own)"""
    muon_fused: Literal["split", "whole"] = "split"
    """Fused weights, such as queries, keys and values, are several matrices or one"""
    muon_conv: Literal["adamw", "flatten"] = "adamw"
    """Convolutions go to AdamW, or to Muon as matrices [out, in x kernel]"""
    muon_lora: Literal["none", "B", "both"] = "none"
    """Which factors of low-rank adapters go to Muon; the others go to AdamW"""
    adjust_lr_fn: Scale = "auto"
    """How the update is scaled for each shape: [the scale of an update](#the-scale-of-an-update)"""
    rms_scale: Factor = 0.2
    """RMS of an update per unit of learning rate, under `match_rms_adamw`"""
    ns_method: Literal["auto", "standard", "gram"] = "auto"
    """Newton-Schulz on the matrix or on its Gram matrix; `auto`: the faster for each shape"""
    ns_steps: Steps | None = None
    """Newton-Schulz iterations; default 5, or as many as the coefficients have"""
    ns_coefficients: Coefficients = "simple"
    """`simple`, `polar_express` (5 steps), `deepseek_v4` (10 steps), [a, b, c], or a list of such triples"""
    ns_dtype: NsDtype = "auto"
    """Dtype of the products; `auto`: fp16 on accelerators, [bf16 or fp32 on CPUs](evidence/choice.md)"""
    wire_dtype: WireDtype = "auto"
    """Dtype in which ranks send matrices; `auto`: fp32 if you set `ns_dtype` to fp32, otherwise bf16"""
    bucket_bytes: Bytes | None = None
    """Maximum bytes of matrices sent to one owner at a time; default by device: [memory](plan.md#memory)"""
    kernels: Literal["auto", "torch"] = "auto"
    """`auto` takes the fastest kernels that every rank has, `torch` plain PyTorch"""
    betas: Fractions = (0.9, 0.95)
    """AdamW's decay rates"""
    eps: Rate = 1e-10
    """AdamW's epsilon"""
    bias_correction: Flag = True
    """Correct AdamW's moments for their start at zero; Muon has none to correct"""
    adam_w_mode: Flag = True
    """`true`: AdamW, with decoupled decay; `false`: Adam with L2"""
    torch_adam: Flag = False
    """Accepted because stock has it; the AdamW half is torch's AdamW anyway"""
    fp32_optimizer_states: Yes = True
    """AdamW's states are fp32"""
    per_head_muon: Flag = False
    """Each attention head is a matrix; `muon_split` overrides it"""
    tp_mode: Literal["whole", "shard"] = "whole"
    """Orthogonalize matrices split by tensor parallelism whole, or each shard by itself, which is another update"""
    import_momentum: Literal["first_moment", "zero"] = "first_moment"
    """What Muon's momentum starts from when AdamW's state is imported"""
    monitor_interval: Interval = 10
    """Number of steps between records in DeepSpeed's monitor, if one is enabled; 0: no records"""

    @model_validator(mode="after")
    def _check_pairs(self) -> MuonConfig:
        try:
            newton_schulz.schedule(self.ns_coefficients, self.ns_steps)
        except ValueError as error:
            raise ValueError(f"ns_steps: {error}") from None
        if self._is_scale_unclear():
            raise ValueError(
                'momentum: it is unclear what lr was tuned for; set adjust_lr_fn too: "original" if the '
                'config was written for stock DeepSpeed\'s Muon or lr was tuned for it, "match_rms_adamw" if lr comes '
                "from AdamW"
            )
        if "rms_scale" in self.model_fields_set and self.scale != "match_rms_adamw":
            raise ValueError(
                f"rms_scale: has an effect only with adjust_lr_fn match_rms_adamw, not with {self.scale}; "
                "remove one of the two"
            )
        for key, options in OPTIONS.items():
            for option in options:
                if option in self.model_fields_set and not is_on(self, key):
                    raise ValueError(f"{option}: has an effect only with {key}; set {key} too or remove {option}")
        return self

    @property
    def schedule(self) -> newton_schulz.Schedule:
        """Return the Newton-Schulz coefficients: a triple (a, b, c) for each Newton-Schulz iteration."""
        return newton_schulz.schedule(self.ns_coefficients, self.ns_steps)

    @property
    def wire(self) -> str:
        """Return the dtype in which ranks send matrices to each other: ``wire_dtype`` with ``auto`` resolved."""
        if self.wire_dtype != "auto":
            return self.wire_dtype
        # Not the dtype that `auto` chooses for ns_dtype: the bits that a rank sends would depend on the machine.
        return "fp32" if self.ns_dtype == "fp32" else "bf16"

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the update rules that this config turns on. They change matrices before or after Newton-Schulz."""
        return rules_of(self)

    @property
    def schedules(self) -> Schedules:
        """Return the schedules of Muon's momentum and weight decay over the steps of a run."""
        return Schedules(**{field.name: getattr(self, field.name) for field in fields(Schedules)})

    @property
    def preset_values(self) -> dict[str, Any]:
        """Return {key: value} for the preset's settings that the user has not overridden; empty without a preset."""
        if self.preset == "none":
            return {}
        values = PRESETS[self.preset].settings
        published = MuonConfig(**values)
        return {key: value for key, value in values.items() if getattr(self, key) == getattr(published, key)}

    @property
    def preset_summary(self) -> str:
        """Return a text for the log: the preset's name, and its values that the user has not overridden."""
        set_by_it = ", ".join(f"{key} {json.dumps(value)}" for key, value in self.preset_values.items())
        return f"preset {self.preset} sets {set_by_it or 'nothing'}"

    @property
    def beyond_muon(self) -> list[str]:
        """Return up to three texts for the log, on what is in use and plain Muon lacks; QK-clip is not included.

        They name the update rules, the schedules, and cautious weight decay.
        """
        decay = "cautious weight decay" if self.cautious_weight_decay else ""
        return [text for text in (", ".join(map(str, self.rules)), str(self.schedules), decay) if text]

    @property
    def scale(self) -> str:
        """Return how updates are scaled by the matrix's shape: ``adjust_lr_fn``, with ``auto`` resolved.

        For example, ``match_rms_adamw``.
        """
        return self._resolve_scale()[0]

    @property
    def scale_reason(self) -> str:
        """Return a text for the log that says why :attr:`scale` was chosen."""
        return self._resolve_scale()[1]

    def _resolve_scale(self) -> tuple[str, str]:
        if self.adjust_lr_fn != "auto":
            return self.adjust_lr_fn, "as the config says"
        if "rms_scale" in self.model_fields_set:
            return "match_rms_adamw", "because rms_scale is set"
        if self.stock_tuning:
            verb = "is" if len(self.stock_tuning) == 1 else "are"
            return "original", f"because {' and '.join(self.stock_tuning)} {verb} set, as for stock DeepSpeed's Muon"
        if self.lr is None:
            return "original", "because no learning rate is set, so the defaults of stock DeepSpeed's Muon apply"
        return "match_rms_adamw", "the default"

    def _is_scale_unclear(self) -> bool:
        """Return whether it is unclear if ``lr`` was tuned for AdamW or for stock DeepSpeed's Muon.

        It is if the user sets ``lr`` and ``momentum``, leaves ``adjust_lr_fn`` at ``auto``, and sets none of
        ``rms_scale``, ``muon_lr`` and ``adam_lr``.
        """
        is_users = "momentum" in self.model_fields_set and "momentum" not in self.preset_values
        decides = self.adjust_lr_fn != "auto" or "rms_scale" in self.model_fields_set or bool(self.stock_tuning)
        return is_users and self.lr is not None and not decides

    @property
    def stock_tuning(self) -> list[str]:
        """Return which of ``muon_lr`` and ``adam_lr``, keys of stock DeepSpeed's Muon, the user has set."""
        return [key for key in STOCK_TUNING_KEYS if key in self.model_fields_set and key not in self.preset_values]

    @property
    def sets_learning_rate(self) -> bool:
        """Return whether the config sets ``lr``, ``muon_lr`` or ``adam_lr``."""
        return any(rate is not None for rate in (self.lr, self.muon_lr, self.adam_lr))

    @property
    def reference_lr(self) -> float:
        """Return the learning rate that a scheduler sees: the first nonzero one of ``lr``, Muon's and AdamW's rate.

        0 if all are 0.
        """
        candidates = (self.lr, self.muon_group()["lr"], self.adam_group()["lr"])
        return next((lr for lr in candidates if lr), 0.0)

    def for_group(self, overrides: Mapping[str, Any], where: str) -> MuonConfig:
        """Return the settings of a parameter group: this config with the group's keys and values, ``overrides``.

        ``where``: prefix of error messages, which names the group.

        Raises:
            MuonConfigError: a key that is not in :data:`GROUP_KEYS`, or a wrong value.
        """
        overrides = {key: value for key, value in overrides.items() if value is not None}
        replaced = {key for general in overrides for key in REPLACES.get(general, ())} - overrides.keys()
        inherited = {key: getattr(self, key) for key in self.model_fields_set - replaced}
        if self.sets_learning_rate and "adjust_lr_fn" not in overrides:
            inherited["adjust_lr_fn"] = self.scale
        inherited.pop("rms_scale", None)  # one value for all groups
        inherited.pop("preset", None)  # its values are among the others
        return parse(overrides, where, inherited)

    def muon_group(self) -> dict[str, Any]:
        """Return the settings, such as ``lr`` and ``momentum``, to store in a parameter group that Muon updates."""
        return {
            "lr": _first(self.muon_lr, self.lr, DEFAULT_MUON_LR),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": _first(self.muon_weight_decay, self.weight_decay),
            "ns_method": self.ns_method,
            "adjust_lr_fn": self.scale,
        }

    def adam_group(self) -> dict[str, Any]:
        """Return the settings, such as ``lr`` and ``betas``, to store in a parameter group that AdamW updates."""
        return {
            "lr": _first(self.adam_lr, self.lr, DEFAULT_ADAM_LR),
            "betas": self.betas,
            "eps": self.eps,
            "bias_correction": self.bias_correction,
            "weight_decay": _first(self.adam_weight_decay, self.weight_decay),
            "fused": True,
        }

    def digest(self) -> str:
        """Return a hash of all settings, 16 hexadecimal digits. Ranks compare it to check that settings are equal."""
        return hashlib.sha256(f"{self.scale} {self.model_dump_json(exclude={'adjust_lr_fn'})}".encode()).hexdigest()[
            :16
        ]


def _first(*candidates: Any) -> Any:
    return next(value for value in candidates if value is not None)


def parse(
    params: Mapping[str, Any] | None, where: str = "optimizer.params.", inherited: Mapping[str, Any] | None = None
) -> MuonConfig:
    """Check ``optimizer.params``, fill in the values of its preset, and return the config.

    Args:
        params: {key: value}. Keys set to null and AdamW's keys without effect (:func:`is_harmless`) are ignored.
        where: prefix of keys in error messages.
        inherited: the config's own settings, if ``params`` are the overrides of one parameter group. ``params`` may
            then have only keys in :data:`GROUP_KEYS`.

    Raises:
        MuonConfigError: lists each wrong key, its value and what is allowed; for an unknown key, the most similar one.
    """
    written = {
        key: value
        for key, value in filled_in(params or {}).items()
        if value is not None and not is_harmless(key, value)
    }
    known = tuple(MuonConfig.model_fields) if inherited is None else GROUP_KEYS
    errors: list[dict[str, Any]] = [{"loc": (key,)} for key in written if key not in known]
    try:
        config = MuonConfig(**dict(inherited or {}) | {key: value for key, value in written.items() if key in known})
    except ValidationError as error:
        errors += [dict(item) for item in error.errors()]
    if errors:
        lines = dict.fromkeys(explain(item, written, MuonConfig.model_fields, known, where) for item in errors)
        params = params or {}
        with naming_preset_keys(params.get("preset", ""), filled_in(params).keys() - params.keys()):
            raise MuonConfigError("\n".join(lines)) from None
    return config
