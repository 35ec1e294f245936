# SPDX-License-Identifier: Apache-2.0
"""The ``optimizer.params`` section of a ds_config whose optimizer type is Muon."""

from __future__ import annotations

import difflib
import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepspeed.muon import coefficients

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Triple = tuple[float, float, float]

#: Keys that an AdamW section may hold as well. A section with only these was written for AdamW.
ADAMW_KEYS = frozenset({"lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam", "fp32_optimizer_states"})
#: Stock's learning rates where the section sets none.
DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4


class MuonConfigError(ValueError):
    """A value in ``optimizer.params`` that cannot be used; the message names the key and what is allowed."""


class MuonConfig(BaseModel):
    """Every knob of the optimizer. Unknown keys are refused.

    Rates are per step, times are in steps. Defaults are stock DeepSpeed's where stock has the key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)

    lr: Rate | None = Field(None, description="learning rate of both halves where the two below are not set")
    muon_lr: Rate | None = Field(None, description="learning rate of the Muon half; default lr, else 0.02")
    adam_lr: Rate | None = Field(None, description="learning rate of the AdamW half; default lr, else 3e-4")
    momentum: Fraction = Field(0.95, description="decay of Muon's momentum, an exponential average")
    nesterov: bool = Field(True, description="orthogonalize Nesterov's look-ahead instead of the momentum")
    weight_decay: Rate = Field(0.0, description="decoupled weight decay of both halves")
    muon_weight_decay: Rate | None = Field(None, description="weight decay of the Muon half; default weight_decay")
    adam_weight_decay: Rate | None = Field(None, description="weight decay of the AdamW half; default weight_decay")
    ns_method: Literal["auto", "standard", "gram"] = Field(
        "auto", description="Newton-Schulz on the matrix or its Gram"
    )
    ns_steps: Annotated[int, Field(ge=1, le=50)] | None = Field(None, description="Newton-Schulz steps; default 5")
    ns_coefficients: str | tuple[Triple, ...] = Field("simple", description="a named schedule, or triples (a, b, c)")
    ns_dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="dtype of Newton-Schulz and its exchange")
    adjust_lr_fn: Literal["auto", "original", "match_rms_adamw", "spectral_unclamped", "none"] = Field(
        "auto", description="scale of the update by shape; auto: match_rms_adamw for a section with AdamW's keys only"
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay rates")
    eps: Rate = Field(1e-10, description="AdamW's epsilon")
    adam_w_mode: bool = Field(True, description="decoupled decay in the AdamW half; false: Adam with L2")
    torch_adam: bool = Field(False, description="accepted for stock's sake; the AdamW half is torch's fused one anyway")
    fp32_optimizer_states: Literal[True] = Field(True, description="optimizer states are fp32")
    per_head_muon: Literal[False] = Field(False, description="not supported yet")

    @model_validator(mode="after")
    def _check_schedule(self) -> MuonConfig:
        coefficients.schedule(self.ns_coefficients, self.ns_steps)
        return self

    @property
    def schedule(self) -> coefficients.Schedule:
        """Newton-Schulz coefficients, one triple per step."""
        return coefficients.schedule(self.ns_coefficients, self.ns_steps)

    @property
    def scale(self) -> str:
        """``adjust_lr_fn`` with ``auto`` resolved.

        A section that holds AdamW's keys only has AdamW's learning rate, so the update gets AdamW's RMS;
        any key of Muon's own means that the section was tuned for stock's scale.
        """
        if self.adjust_lr_fn != "auto":
            return self.adjust_lr_fn
        given = self.model_fields_set
        return "match_rms_adamw" if given & {"lr"} and given <= ADAMW_KEYS | {"adjust_lr_fn"} else "original"

    def muon_group(self) -> dict[str, Any]:
        """Hyperparameters of a Muon group."""
        lr = self.muon_lr if self.muon_lr is not None else self.lr
        decay = self.muon_weight_decay
        return {
            "lr": DEFAULT_MUON_LR if lr is None else lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay if decay is None else decay,
        }

    def adam_group(self) -> dict[str, Any]:
        """Hyperparameters of an AdamW group."""
        lr = self.adam_lr if self.adam_lr is not None else self.lr
        decay = self.adam_weight_decay
        return {
            "lr": DEFAULT_ADAM_LR if lr is None else lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay if decay is None else decay,
            "fused": True,
        }

    def digest(self) -> str:
        """A hash of every setting, equal on all ranks of a correct launch."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:16]


def parse(params: dict[str, Any] | None) -> MuonConfig:
    """Check ``optimizer.params``.

    Raises:
        MuonConfigError: naming every key that is wrong, its value, what is allowed and, for an unknown
            key, the nearest one that exists.
    """
    params = dict(params or {})
    if "max_grad_norm" in params:
        raise MuonConfigError("optimizer.params.max_grad_norm: clip with the top-level key gradient_clipping instead")
    try:
        return MuonConfig(**params)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(dict(item), params) for item in error.errors())
        raise MuonConfigError("\n".join(lines)) from None


def _explain(item: dict[str, Any], params: dict[str, Any]) -> str:
    if not item["loc"]:
        return f"optimizer.params: {item['msg'].removeprefix('Value error, ')}"
    key = str(item["loc"][0])
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, MuonConfig.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(MuonConfig.model_fields)}"
        return f"optimizer.params.{key}: unknown key; {hint}"
    if key == "per_head_muon":
        return "optimizer.params.per_head_muon: true is not supported yet; remove the key"
    if key == "fp32_optimizer_states":
        return "optimizer.params.fp32_optimizer_states: only true is supported; remove the key"
    if key == "ns_dtype" and str(params.get(key)).lower() in ("fp16", "float16", "half"):
        return "optimizer.params.ns_dtype: fp16 is refused, because gradients underflow in it; use bf16 or fp32"
    value = params.get(key)
    return f"optimizer.params.{key}: got {value!r}; {item['msg']}{_nearest_choice(key, value)}"


def _nearest_choice(key: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    annotation = str(MuonConfig.model_fields[key].annotation)
    choices = [word.strip(" '\"") for word in annotation.partition("[")[2].rstrip("]").split(",")]
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
