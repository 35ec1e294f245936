# SPDX-License-Identifier: Apache-2.0
"""The settings in ``optimizer.params`` of a ds_config whose optimizer type is Muon.

``docs/configuration.md`` is generated from the fields and their docstrings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from deepspeed.muon.config import types
from deepspeed.muon.config.messages import explain
from deepspeed.muon.config.presets import PRESETS, filled_in, naming_preset_keys
from deepspeed.muon.config.types import GROUP_KEYS, REPLACES, STOCK_TUNING_KEYS
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.math import coefficients
from deepspeed.muon.math.rules import OPTIONS, Rule, Schedules, is_on, rules_of


class MuonConfig(BaseModel):
    """The settings of the optimizer: the keys of ``optimizer.params`` in ds_config. Unknown keys are refused.

    Keys that stock DeepSpeed has, too, have the same defaults. "Muon half" means the parameters that Muon updates,
    "AdamW half" all other parameters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)

    preset: Literal["none", "moonlight", "kimi_k2", "deepseek_v4", "glm5", "nanochat"] = "none"
    """A published recipe, which fills in the keys that you leave out: [presets](#presets)"""
    lr: types.Rate | None = None
    """Learning rate of both halves"""
    muon_lr: types.Rate | None = None
    """Learning rate of the Muon half; default `lr`, otherwise 0.02"""
    adam_lr: types.Rate | None = None
    """Learning rate of the AdamW half; default `lr`, otherwise 3e-4"""
    momentum: types.Fraction = 0.95
    """Beta of the momentum buffer, an exponential average of gradients"""
    momentum_start: types.Fraction | None = None
    """Beta of the first step; it changes linearly to `momentum`: [schedules](update-rules.md#schedules)"""
    momentum_warmup_steps: types.Count = 300
    """Number of steps from `momentum_start` to `momentum`"""
    momentum_dtype: types.MomentumDtype = "fp32"
    """Half the memory or a quarter: [smaller momentum](checkpoints.md#momentum-in-one-or-two-bytes)"""
    nesterov: types.Flag = True
    """Orthogonalize Nesterov's look-ahead instead of the momentum buffer"""
    weight_decay: types.Rate = 0.0
    """Decoupled weight decay of both halves: a step multiplies weights by 1 - lr x this"""
    muon_weight_decay: types.Rate | None = None
    """Weight decay of the Muon half; default `weight_decay`"""
    muon_weight_decay_steps: types.Count | None = None
    """Number of steps in which Muon's weight decay falls linearly to zero; default: it is constant"""
    adam_weight_decay: types.Rate | None = None
    """Weight decay of the AdamW half; default `weight_decay`"""
    cautious_weight_decay: types.Flag = False
    """A Muon weight decays only where its update does not move it away from zero"""
    normuon: types.Flag = False
    """Divide each output of the orthogonalized update by its running RMS: [NorMuon](update-rules.md#normuon)"""
    normuon_beta2: types.Fraction = 0.95
    """Decay of NorMuon's running mean square"""
    muon_eq: Literal["none", "rows", "columns"] = "none"
    """Equal norms of rows (outputs) or columns before Newton-Schulz: [MuonEq](update-rules.md#muoneq-and-muon)"""
    muon_plus: types.Flag = False
    """Give each update the norm of an orthogonal matrix: [Muon+](update-rules.md#muoneq-and-muon)"""
    qk_clip: types.Clip | None = None
    """Scale back attention heads whose logits exceed `tau`: [QK-clip](update-rules.md#qk-clip)"""
    muon_include: types.Patterns = ()
    """Matrices with a matching name go to Muon, even if the rules say AdamW"""
    muon_exclude: types.Patterns = ()
    """Parameters with a matching name go to AdamW; overrides `muon_include`"""
    muon_split: types.Cuts = {}
    """Cut parameters with a matching name into matrices of [these sizes](update-rules.md#sizes-of-your-own)"""
    muon_fused: Literal["split", "whole"] = "split"
    """Fused weights, such as queries, keys and values, are several matrices or one"""
    muon_conv: Literal["adamw", "flatten"] = "adamw"
    """Convolutions go to AdamW, or to Muon as matrices [out, in x kernel]"""
    muon_lora: Literal["none", "B", "both"] = "none"
    """Which factors of low-rank adapters go to Muon; the others go to AdamW"""
    adjust_lr_fn: types.Scale = "auto"
    """How the update is scaled for each shape: [the scale of an update](#the-scale-of-an-update)"""
    rms_scale: types.Factor = 0.2
    """RMS of an update per unit of learning rate, under `match_rms_adamw`"""
    ns_method: Literal["auto", "standard", "gram"] = "auto"
    """Newton-Schulz on the matrix or on its Gram matrix; `auto`: the faster for each shape"""
    ns_steps: types.Steps | None = None
    """Newton-Schulz iterations; default 5, or as many as the coefficients have"""
    ns_coefficients: types.Coefficients = "simple"
    """`simple`, `polar_express` (5 steps), `deepseek_v4` (10 steps), [a, b, c], or a list of such triples"""
    ns_dtype: types.NsDtype = "auto"
    """Dtype of the products; `auto`: fp16 on accelerators, [bf16 or fp32 on CPUs](evidence/choice.md)"""
    wire_dtype: types.WireDtype = "auto"
    """Dtype in which ranks send matrices; `auto`: fp32 if you set `ns_dtype` to fp32, otherwise bf16"""
    bucket_bytes: types.Bytes | None = None
    """Maximum bytes of matrices sent to one owner at a time; default by device: [memory](plan.md#memory)"""
    kernels: Literal["auto", "torch"] = "auto"
    """`auto` takes the fastest kernels that every rank has, `torch` plain PyTorch"""
    betas: types.Fractions = (0.9, 0.95)
    """AdamW's decay rates"""
    eps: types.Rate = 1e-10
    """AdamW's epsilon"""
    bias_correction: types.Flag = True
    """Correct AdamW's moments for their start at zero; Muon has none to correct"""
    adam_w_mode: types.Flag = True
    """`true`: AdamW, with decoupled decay; `false`: Adam with L2"""
    torch_adam: types.Flag = False
    """Accepted because stock has it; the AdamW half is torch's AdamW anyway"""
    fp32_optimizer_states: types.Yes = True
    """AdamW's states are fp32"""
    per_head_muon: types.Flag = False
    """Each attention head is a matrix; `muon_split` overrides it"""
    tp_mode: Literal["whole", "shard"] = "whole"
    """Orthogonalize matrices split by tensor parallelism whole, or each shard by itself, which is another update"""
    import_momentum: Literal["first_moment", "zero"] = "first_moment"
    """What Muon's momentum starts from when AdamW's state is imported"""
    monitor_interval: types.Interval = 10
    """Number of steps between records in DeepSpeed's monitor, if one is enabled; 0: no records"""

    @model_validator(mode="after")
    def _check_pairs(self) -> MuonConfig:
        try:
            coefficients.schedule(self.ns_coefficients, self.ns_steps)
        except ValueError as error:
            raise ValueError(f"ns_steps: {error}") from None
        if self._is_scale_unclear():
            raise ValueError(
                'momentum: with lr alone, what lr was tuned for is unclear; set adjust_lr_fn too: "original" if the '
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
    def schedule(self) -> coefficients.Schedule:
        """Return the Newton-Schulz coefficients: a triple (a, b, c) for each Newton-Schulz iteration."""
        return coefficients.schedule(self.ns_coefficients, self.ns_steps)

    @property
    def wire(self) -> str:
        """Return the dtype in which ranks send matrices to each other: ``wire_dtype`` with ``auto`` resolved."""
        if self.wire_dtype != "auto":
            return self.wire_dtype
        # Not the dtype that `auto` chooses for ns_dtype: the bits that a rank sends would depend on the machine.
        return "fp32" if self.ns_dtype == "fp32" else "bf16"

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Return the update rules that are on, which act on a matrix before and after Newton-Schulz."""
        return rules_of(self)

    @property
    def schedules(self) -> Schedules:
        """Return how Muon's momentum and weight decay change with the step."""
        return Schedules(**{field.name: getattr(self, field.name) for field in fields(Schedules)})

    @property
    def preset_values(self) -> dict[str, Any]:
        """Return {key: value} for the preset's settings that the user has not overridden; empty without a preset."""
        if self.preset == "none":
            return {}
        values = PRESETS[self.preset].values
        published = MuonConfig(**values)
        return {key: value for key, value in values.items() if getattr(self, key) == getattr(published, key)}

    @property
    def preset_summary(self) -> str:
        """Return a text for the log that lists the values of the preset that the user has not overridden."""
        set_by_it = ", ".join(f"{key} {json.dumps(value)}" for key, value in self.preset_values.items())
        return f"preset {self.preset} sets {set_by_it or 'nothing'}"

    @property
    def beyond_muon(self) -> list[str]:
        """Return texts for the log, one for each option in use that plain Muon does not have, except QK-clip."""
        decay = "cautious weight decay" if self.cautious_weight_decay else ""
        return [text for text in (", ".join(map(str, self.rules)), str(self.schedules), decay) if text]

    @property
    def scale(self) -> str:
        """Return how the update is scaled by the matrix's shape: ``adjust_lr_fn`` with ``auto`` resolved."""
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
            return "original", "because no learning rate is set, so the defaults of stock DeepSpeed's Muon act"
        return "match_rms_adamw", "the default"

    def _is_scale_unclear(self) -> bool:
        """Return whether ``lr`` may be AdamW's or stock's: ``momentum`` is set with it, and nothing tells the scale."""
        is_users = "momentum" in self.model_fields_set and "momentum" not in self.preset_values
        decides = self.adjust_lr_fn != "auto" or "rms_scale" in self.model_fields_set or bool(self.stock_tuning)
        return is_users and self.lr is not None and not decides

    @property
    def stock_tuning(self) -> list[str]:
        """Return which of ``muon_lr`` and ``adam_lr`` the user has set, as for stock DeepSpeed's Muon."""
        return [key for key in STOCK_TUNING_KEYS if key in self.model_fields_set and key not in self.preset_values]

    @property
    def sets_learning_rate(self) -> bool:
        """Return whether the config sets ``lr``, ``muon_lr`` or ``adam_lr``."""
        return any(rate is not None for rate in (self.lr, self.muon_lr, self.adam_lr))

    @property
    def reference_lr(self) -> float:
        """Return the learning rate that a scheduler sees: the first of ``lr``, Muon's and AdamW's that is not 0."""
        candidates = (self.lr, self.muon_group()["lr"], self.adam_group()["lr"])
        return next((lr for lr in candidates if lr), 0.0)

    def for_group(self, own: Mapping[str, Any], where: str) -> MuonConfig:
        """Return the settings of a parameter group: this config, overridden by ``own``, the group's keys and values.

        ``where``: prefix of error messages, which names the group.

        Raises:
            MuonConfigError: a key that is not in :data:`GROUP_KEYS`, or a wrong value.
        """
        own = {key: value for key, value in own.items() if value is not None}
        replaced = {key for general in own for key in REPLACES.get(general, ())} - own.keys()
        base = {key: getattr(self, key) for key in self.model_fields_set - replaced}
        if self.sets_learning_rate and "adjust_lr_fn" not in own:
            base["adjust_lr_fn"] = self.scale
        base.pop("rms_scale", None)  # one value for all groups
        base.pop("preset", None)  # its values are among the others
        return parse(own, where, base)

    def muon_group(self) -> dict[str, Any]:
        """Return the settings to store in a parameter group that Muon updates."""
        return {
            "lr": _first(self.muon_lr, self.lr, types.DEFAULT_MUON_LR),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": _first(self.muon_weight_decay, self.weight_decay),
            "ns_method": self.ns_method,
            "adjust_lr_fn": self.scale,
        }

    def adam_group(self) -> dict[str, Any]:
        """Return the settings to store in a parameter group that AdamW updates."""
        return {
            "lr": _first(self.adam_lr, self.lr, types.DEFAULT_ADAM_LR),
            "betas": self.betas,
            "eps": self.eps,
            "bias_correction": self.bias_correction,
            "weight_decay": _first(self.adam_weight_decay, self.weight_decay),
            "fused": True,
        }

    def digest(self) -> str:
        """Return a hash of all settings. Ranks compare it to check that their settings are equal."""
        return hashlib.sha256(f"{self.scale} {self.model_dump_json(exclude={'adjust_lr_fn'})}".encode()).hexdigest()[
            :16
        ]


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def parse(
    params: Mapping[str, Any] | None, where: str = "optimizer.params.", base: Mapping[str, Any] | None = None
) -> MuonConfig:
    """Check ``optimizer.params``, fill in the values of its preset, and return the config.

    Args:
        params: {key: value}. Keys set to null and AdamW's keys without effect (:func:`types.is_harmless`) are ignored.
        where: prefix of keys in error messages.
        base: the config's own settings, if ``params`` are the overrides of one parameter group. ``params`` may then
            have only keys in :data:`GROUP_KEYS`.

    Raises:
        MuonConfigError: lists each wrong key, its value and what is allowed; for an unknown key, the most similar one.
    """
    written = {
        key: value
        for key, value in filled_in(params or {}).items()
        if value is not None and not types.is_harmless(key, value)
    }
    known = tuple(MuonConfig.model_fields) if base is None else GROUP_KEYS
    errors: list[dict[str, Any]] = [{"loc": (key,)} for key in written if key not in known]
    try:
        config = MuonConfig(**dict(base or {}) | {key: value for key, value in written.items() if key in known})
    except ValidationError as error:
        errors += [dict(item) for item in error.errors()]
    if errors:
        lines = dict.fromkeys(explain(item, written, MuonConfig.model_fields, known, where) for item in errors)
        params = params or {}
        with naming_preset_keys(params.get("preset", ""), filled_in(params).keys() - params.keys()):
            raise MuonConfigError("\n".join(lines)) from None
    return config
