# SPDX-License-Identifier: Apache-2.0
"""The ``optimizer.params`` section of a ds_config whose optimizer type is Muon."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepspeed.muon import coefficients


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


def _as_triples(value: Any) -> Any:
    """One triple may be given without the outer list, as to ``torch.optim.Muon``."""
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
        raise ValueError("Input should be a name or a list of triples of finite numbers (a, b, c), a not zero")
    return value


def _is_triple(value: Any) -> bool:
    numbers = isinstance(value, (list, tuple)) and len(value) == 3 and all(type(x) in (int, float) for x in value)
    return numbers and all(map(math.isfinite, value)) and value[0] != 0


Number = Annotated[float, BeforeValidator(_not_a_flag), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Steps = Annotated[int, BeforeValidator(_not_a_flag), Field(ge=1, le=50)]
Coefficients = Annotated[Any, BeforeValidator(_as_triples), AfterValidator(_known_schedule)]

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
    ns_steps: Steps | None = Field(None, description="Newton-Schulz steps; default 5")
    ns_coefficients: Coefficients = Field("simple", description="a named schedule, or triples (a, b, c)")
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
        try:
            coefficients.schedule(self.ns_coefficients, self.ns_steps)
        except ValueError as error:
            raise ValueError(f"ns_steps: {error}") from None
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
        settings = self.model_dump() | {"adjust_lr_fn": self.scale}
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def parse(params: dict[str, Any] | None) -> MuonConfig:
    """Check ``optimizer.params``; a value of null leaves the default.

    Raises:
        MuonConfigError: naming every key that is wrong, its value, what is allowed and, for an unknown
            key, the nearest one that exists.
    """
    given = {key: value for key, value in (params or {}).items() if value is not None}
    try:
        return MuonConfig(**given)
    except ValidationError as error:
        lines = dict.fromkeys(_explain(dict(item), given) for item in error.errors())
        raise MuonConfigError("\n".join(lines)) from None


#: What to say of values that are right elsewhere.
ADVICE = {
    "max_grad_norm": "clip with the top-level key gradient_clipping instead",
    "per_head_muon": "true is not supported yet; remove the key",
    "fp32_optimizer_states": "only true is supported; remove the key",
    "amsgrad": "AMSGrad is not supported; remove the key",
}


def _explain(item: dict[str, Any], params: dict[str, Any]) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return f"optimizer.params.{message}"
    key = str(item["loc"][0])
    if key in ADVICE:
        return f"optimizer.params.{key}: got {params.get(key)!r}; {ADVICE[key]}"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key.lower(), MuonConfig.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(MuonConfig.model_fields)}"
        return f"optimizer.params.{key}: unknown key; {hint}"
    if key == "ns_dtype" and str(params.get(key)).lower() in ("fp16", "float16", "half"):
        return "optimizer.params.ns_dtype: fp16 is refused, because gradients underflow in it; use bf16 or fp32"
    value = params.get(key)
    return f"optimizer.params.{key}: got {value!r}; {message}{_nearest_choice(key, value)}"


def _nearest_choice(key: str, value: Any) -> str:
    if not isinstance(value, str):
        return ""
    annotation = str(MuonConfig.model_fields[key].annotation)
    choices = [word.strip(" '\"") for word in annotation.partition("[")[2].rstrip("]").split(",")]
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
