# SPDX-License-Identifier: Apache-2.0
"""A ds_config for Muon from one for AdamW, with a reason for everything that changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.muon.config.messages import FILLED_BY, did_you_mean
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.hooks import TYPES, is_muon
from deepspeed.muon.zero.read_config import load_config, settings_of

#: Types of DeepSpeed's optimizers that are AdamW.
ADAMW = ("adam", "adamw")
#: What AdamW takes where a config says nothing. In Muon's section these keys have the defaults of stock's Muon.
ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
#: Weight decay that torch's AdamW takes by itself, and DeepSpeed's does not.
TORCH_WEIGHT_DECAY = 0.01
#: Keys of AdamW that Muon's section lacks, and the values with which leaving them out changes nothing.
DROPPED: dict[str, tuple[Any, ...]] = {
    "bias_correction": (True,),
    "amsgrad": (False,),
    "maximize": (False,),
    **dict.fromkeys(("set_grad_none", "fused", "foreach", "capturable", "differentiable"), (True, False, None)),
}


class Decision(NamedTuple):
    """What became of one key of the ds_config, and why."""

    key: str
    what: str
    why: str


def convert(path: str) -> dict[str, Any]:
    """The ds_config in a file, with Muon in place of AdamW.

    A config without an optimizer is taken for one of Hugging Face's Trainer, which fills in ``"auto"``.

    Returns:
        ``config``, the whole section, in the file's order, and ``decisions``, a list of :class:`Decision` as dicts.

    Raises:
        SettingsError: the file cannot be read, or its optimizer is not AdamW.
        MuonConfigError, UnsupportedError: what Muon refuses of the config; the message says what to change.
    """
    section = load_config(path)
    optimizer = section.get("optimizer")
    if optimizer is None:
        params, decisions = _of_trainer()
    else:
        params, decisions = _of_adamw(path, optimizer)
    changed = {"type": "Muon", "params": params}
    config = {key: changed if key == "optimizer" else value for key, value in section.items()} | {"optimizer": changed}
    settings_of(path, config, world_size=1)
    return {"config": config, "decisions": [decision._asdict() for decision in decisions]}


def _of_trainer() -> tuple[dict[str, Any], list[Decision]]:
    why = "the config has no optimizer: Hugging Face's Trainer fills these in from its arguments, as for its own AdamW"
    return dict.fromkeys(FILLED_BY, "auto"), [
        Decision("optimizer", "added, with " + ", ".join(FILLED_BY) + ' "auto"', why),
        Decision(
            "optimizer.params.weight_decay",
            '"auto"',
            "acts on norms and biases too, which the Trainer's own AdamW exempts; "
            'add "adam_weight_decay": 0 to exempt all that AdamW updates',
        ),
    ]


def _of_adamw(path: str, optimizer: Any) -> tuple[dict[str, Any], list[Decision]]:
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(name, str) and is_muon(name):
        raise SettingsError(
            f"{path}: optimizer.type: got {name!r}, which needs no change; ds_muon plan shows what it does"
        )
    if not isinstance(name, str) or name.lower() not in ADAMW:
        otherwise = "settings of other optimizers say nothing about Muon; write the section by hand"
        raise SettingsError(
            f'{path}: optimizer.type: got {name!r}, expected "AdamW" or "Adam"; '
            + did_you_mean(str(name).lower(), (*ADAMW, *TYPES), otherwise)
        )
    given = optimizer.get("params") or {}
    if not isinstance(given, Mapping):
        raise SettingsError(f"{path}: optimizer.params: expected an object, got {given!r}")
    params = dict(given)
    decisions = [Decision("optimizer.type", f"{name} -> Muon", "matrices go to Muon, everything else stays with AdamW")]
    for key in [key for key in params if key in DROPPED]:
        if params[key] not in DROPPED[key]:
            raise SettingsError(
                f"{path}: optimizer.params.{key}: got {params[key]!r}, which the AdamW half cannot do; remove the key"
            )
        decisions.append(Decision(f"optimizer.params.{key}", "removed", "has no effect"))
        del params[key]
    if name.lower() == "adamw" and params.get("adam_w_mode") is False:
        decisions.append(Decision("optimizer.params.adam_w_mode", "removed", "DeepSpeed ignores it under type AdamW"))
        del params["adam_w_mode"]
    rate = "kept" if "lr" in params else f"added, {ADAMW_DEFAULTS['lr']}"
    why = "the rate of AdamW, a safe start; then try 3 and 10 times"
    decisions.append(Decision("optimizer.params.lr", rate, why))
    missing = {key: value for key, value in ADAMW_DEFAULTS.items() if key not in params}
    if "weight_decay" not in params and params.get("torch_adam"):
        missing["weight_decay"] = TORCH_WEIGHT_DECAY
    decisions += [
        Decision(f"optimizer.params.{key}", f"added, {value}", "AdamW's default, where Muon's section has another")
        for key, value in missing.items()
        if key != "lr"
    ]
    return params | missing, decisions


#: Stands before the text of a number in a string that is to be printed without its quotes.
_MARK = "\0"


def as_written(config: Mapping[str, Any], path: str) -> str:
    """The config as JSON, in which numbers of the file keep their spelling, such as 2e8."""
    try:
        given = json.loads(Path(path).read_text(), parse_float=lambda text: _MARK + text)
    except ValueError:  # Hjson, which DeepSpeed reads as well
        given = {}
    marked = json.dumps(_spelt(config, given), indent=2)
    return re.sub(rf'"{re.escape(json.dumps(_MARK)[1:-1])}([^"]*)"', r"\1", marked)


def _spelt(value: Any, given: Any) -> Any:
    """The value, with the marked text of the file's for each number that is still the same."""
    if isinstance(value, Mapping):
        return {key: _spelt(own, given.get(key) if isinstance(given, Mapping) else None) for key, own in value.items()}
    if isinstance(value, list) and isinstance(given, list):
        return [_spelt(own, theirs) for own, theirs in zip_longest(value, given[: len(value)])]
    is_marked = isinstance(given, str) and given.startswith(_MARK) and isinstance(value, (int, float))
    return given if is_marked and float(given.removeprefix(_MARK)) == value else value
