# SPDX-License-Identifier: Apache-2.0
"""Convert a ds_config for AdamW, or accelerate's YAML, to Muon, and say why each key changed: ``ds_muon init``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.patches import is_muon
from deepspeed.muon.zero.read_config import (
    accelerates_ds_config_file,
    find_ds_config,
    is_accelerate_config,
    is_optimizer,
    parse_file,
    read_settings,
)
from deepspeed.muon.zero.scheduler import Schedule, momentum_note, read_schedule

#: Values of ``optimizer.type`` that mean AdamW, in lower case: DeepSpeed's types, and the names of its classes.
ADAMW = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
#: AdamW's defaults. They are written into the new config, because Muon's defaults of these keys are other ones.
ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
#: Default weight decay of torch's AdamW. DeepSpeed's AdamW has 0.
TORCH_WEIGHT_DECAY = 0.01
_DEFAULT, _IMPLEMENTATION = "it is AdamW's default", "it chooses an implementation of AdamW, with the same results"
#: Key of AdamW's parameters -> (values with which ``ds_muon init`` removes the key, why it can be removed).
DROPPED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_correction": ((True,), _DEFAULT),
    "amsgrad": ((False,), _DEFAULT),
    "maximize": ((False,), _DEFAULT),
    "set_grad_none": ((True, False, None), "the engine decides how gradients are cleared"),
    **dict.fromkeys(("fused", "foreach", "capturable", "differentiable"), ((True, False, None), _IMPLEMENTATION)),
}
NEXT = "next: ds_muon plan --config {} --model MODEL --world-size RANKS shows which parameters go to Muon, and the cost"
#: Command that starts a run with accelerate: configuration file, more flags. A script without Hugging Face's Trainer
#: passes accelerate's DummyOptim as its optimizer.
LAUNCH = "accelerate launch --config_file {} {}SCRIPT"
#: Matches a comment in YAML or Hjson.
COMMENT = re.compile(r"(?:^|\s)(?:#|//|/\*)")

#: Fields that accelerate refuses together with ``deepspeed_config_file``, because the ds_config sets them.
MOVED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
#: accelerate's ``mixed_precision`` -> what accelerate adds to a ds_config.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True}},
    "fp8": {"bf16": {"enabled": True}},
    "no": {},
}


class Decision(NamedTuple):
    """One line of what ``ds_muon init`` reports: a key, what was done with it (such as "kept"), and why."""

    key: str
    what: str
    why: str


class Converted(NamedTuple):
    """What ``ds_muon init`` has made of a file.

    ``config``: the new ds_config. ``decisions``: what was changed or kept, and why. ``accelerate``: accelerate's new
    configuration, as YAML text; ``None`` if the file was not accelerate's. ``launch_flags``: what ``accelerate launch``
    needs in addition to that configuration, such as ``"--mixed_precision fp8 "``; may be empty.
    """

    config: dict[str, Any]
    decisions: list[Decision]
    accelerate: str | None = None
    launch_flags: str = ""


def convert(path: str, out: str = "ds_config.json") -> Converted:
    """Convert the file ``path``, a ds_config for AdamW or accelerate's configuration, to Muon. Write no file.

    ``out``: name of the file in which the user will save the new ds_config; accelerate's new configuration names it.

    Raises:
        SettingsError: the file cannot be read, contains no ds_config, or its optimizer is not AdamW.
        MuonConfigError, UnsupportedError: Muon does not support a setting; the message says what to change.
    """
    whole = parse_file(path)
    done = _from_accelerate(path, whole, out) if is_accelerate_config(whole) else _from_ds_config(path, whole)
    read_settings(path, done.config, world_size=1)  # raises what the engine would raise
    return done


def _from_ds_config(path: str, whole: dict[str, Any]) -> Converted:
    """Convert the ds_config in ``whole``, the parsed content of the file ``path``."""
    section = find_ds_config(path, whole)
    config, decisions = to_muon(path, section)
    if section is not whole:
        decisions.insert(0, Decision("ds_config", "taken", f"from a section of {path}"))
    return Converted(config, decisions + _lost_comments(path))


def _lost_comments(path: str) -> list[Decision]:
    has_some = COMMENT.search(Path(path).read_text(encoding="utf-8-sig"))
    return [Decision("comments", "not kept", f"copy what you need from {path}")] if has_some else []


def to_muon(path: str, section: Mapping[str, Any]) -> tuple[dict[str, Any], list[Decision]]:
    """Return (copy of the ds_config ``section`` with Muon instead of AdamW, the decisions that the user is shown).

    ``path``: what error messages call the ds_config. Raise SettingsError if its optimizer is not AdamW.
    """
    config, optimizer, schedule = dict(section), section.get("optimizer"), read_schedule(section.get("scheduler"))
    if optimizer is None:
        params, changes = _params_without_optimizer(section, schedule)
    else:
        params, changes = _params_from_adamw(path, config, optimizer, schedule)
    config["optimizer"] = {"type": "Muon", "params": params}
    if momentum := momentum_note(schedule):
        what = "kept" if schedule.sets_cycle_momentum else "on by default"
        changes.append(Decision("scheduler.params.cycle_momentum", what, momentum.partition(" ")[2]))
    return config, changes


def _param(key: str, what: str, why: str) -> Decision:
    return Decision(f"optimizer.params.{key}", what, why)


def _rate(schedule: Schedule) -> str:
    """Return a phrase which says that ``schedule`` sets the learning rate, and not ``lr``."""
    return f"scheduler.params.{schedule.rate_key} = {schedule.rate} sets the rate and overrides lr"


# ---- AdamW's section ----------------------------------------------------------------------------------------------


def _params_without_optimizer(section: Mapping[str, Any], schedule: Schedule) -> tuple[dict[str, Any], list[Decision]]:
    """Return (``optimizer.params`` for Muon, decisions to show) for a ds_config ``section`` without an optimizer.

    The values are the defaults of torch's AdamW, and ``lr`` is the schedule's rate if it sets one. If any value in the
    ds_config is ``"auto"``, ``lr`` and ``weight_decay`` are ``"auto"`` instead: Hugging Face's Trainer and accelerate
    fill in these two.
    """
    params = ADAMW_DEFAULTS | {"weight_decay": TORCH_WEIGHT_DECAY}
    why = dict.fromkeys(params, "torch's default for AdamW")
    if _has_auto(section):
        filler = "Hugging Face's Trainer or accelerate fills it in"
        params |= {"lr": "auto", "weight_decay": "auto"}
        why |= {
            "lr": f"{filler}, as for AdamW",
            "weight_decay": f'{filler}; acts on norms and biases too: add "adam_weight_decay": 0 to exempt them',
        }
    else:
        params["lr"] = schedule.rate if isinstance(schedule.rate, (int, float)) else params["lr"]
        origin = _rate(schedule) if schedule.rate_key else "torch's default"
        why["lr"] = f"{origin}; replace it with your script's rate"
    added = Decision("optimizer", "added", "the script must not pass an optimizer to deepspeed.initialize any more")
    return params, [added, *(_param(key, f"added, {params[key]}", why[key]) for key in params)]


def _has_auto(value: Any) -> bool:
    return value == "auto" or (isinstance(value, Mapping) and any(map(_has_auto, value.values())))


def _params_from_adamw(
    path: str, config: dict[str, Any], optimizer: Any, schedule: Schedule
) -> tuple[dict[str, Any], list[Decision]]:
    """Convert ``optimizer``, AdamW's section of a ds_config; return (``optimizer.params`` for Muon, decisions to show).

    This also changes ``config``, the ds_config: ``max_grad_norm`` moves to ``gradient_clipping`` unless that is set.
    ``path``, the file, and ``schedule``, the ds_config's learning rate schedule, only appear in messages. Raise
    SettingsError if ``optimizer`` is not AdamW, or its ``params`` is not an object.
    """
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not isinstance(name, str) or name.lower() not in ADAMW:
        raise _wrong_type(path, config, name)
    given = optimizer.get("params") or {}
    if not isinstance(given, Mapping):
        raise SettingsError(f"{path}: optimizer.params: expected an object, got {given!r}")
    params = dict(given)
    why = "hidden matrices go to Muon; embeddings, output heads, norms and biases stay with AdamW"
    decisions = [Decision("optimizer.type", f"{name} -> Muon", why)]
    for key in [key for key in params if key in DROPPED and params[key] in DROPPED[key][0]]:
        decisions.append(_param(key, "removed", DROPPED[key][1]))
        del params[key]
    if "max_grad_norm" in params:
        limit, clipping = params.pop("max_grad_norm"), config.get("gradient_clipping")
        config["gradient_clipping"] = limit if clipping is None else clipping
        what = "moved to gradient_clipping" if clipping is None else f"removed, gradient_clipping {clipping} stays"
        decisions.append(_param("max_grad_norm", what, "DeepSpeed clips by gradient_clipping only"))
    if name.lower() != "adam" and params.get("adam_w_mode") is False:
        decisions.append(_param("adam_w_mode", "removed", "DeepSpeed ignores it under type AdamW"))
        del params["adam_w_mode"]
    origin, tuned = (_rate(schedule), schedule.rate_key) if schedule.rate_key else ("AdamW's rate", "it")
    rate = "kept" if "lr" in params else f"added, {ADAMW_DEFAULTS['lr']}"
    decisions.append(_param("lr", rate, f"{origin}: a safe start; to tune, multiply {tuned} by 3 and by 10"))
    missing = {key: value for key, value in ADAMW_DEFAULTS.items() if key not in params}
    if "weight_decay" not in params and params.get("torch_adam"):
        missing["weight_decay"] = TORCH_WEIGHT_DECAY
    for key in (key for key in missing if key != "lr"):
        default = json.dumps(MuonConfig.model_fields[key].default)
        decisions.append(_param(key, f"added, {missing[key]}", f"AdamW's default; Muon's default is {default}"))
    return params | missing, decisions


def _wrong_type(path: str, section: Mapping[str, Any], name: Any) -> SettingsError:
    """Return the error to raise for the ds_config ``section``, whose ``optimizer.type`` is ``name`` instead of AdamW.

    If the type is Muon already and another setting is wrong, raise the error about that setting instead.
    """
    if isinstance(name, str) and is_muon(name):
        read_settings(path, dict(section), world_size=1)  # raises if another setting is wrong
        return SettingsError(
            f"{path}: optimizer.type: got {name!r}, so the config needs no change; {NEXT.format(path)[6:]}"
        )
    otherwise = (
        "the rate of another optimizer does not fit Muon; write the section yourself, with the rate that AdamW would "
        "have for this model"
    )
    if not (isinstance(name, str) and is_optimizer(name)):
        otherwise = did_you_mean(str(name).lower(), ("adam", "adamw", "muon"), otherwise, cutoff=0.7)
    return SettingsError(f'{path}: optimizer.type: got {name!r}, expected "AdamW" or "Adam"; {otherwise}')


# ---- accelerate's configuration -----------------------------------------------------------------------------------


def _from_accelerate(path: str, whole: dict[str, Any], out: str) -> Converted:
    """Convert accelerate's configuration ``whole``, which has DeepSpeed's settings as fields or names a ds_config file.

    ``path``: the file that contains ``whole``. ``out``: name of the file for the new ds_config.
    """
    import yaml

    fields, precision = _fields_of(path, whole), _precision_of(path, whole)
    named = _named_ds_config(path, whole, fields)
    if named:
        config, changes = to_muon(named, find_ds_config(named, parse_file(named)))
        notes = [Decision("deepspeed_config.deepspeed_config_file", "changed", f"{out} is {named} converted to Muon")]
    else:
        config, changes = to_muon(path, _ds_config_of(path, fields, precision))
        why = f"accelerate reads them from the file that its deepspeed_config.deepspeed_config_file names: {out}"
        notes = [Decision("deepspeed_config", "fields moved to the ds_config", why)]
        if "gradient_clipping" in fields and "gradient_clipping" not in config:
            why = "accelerate does not pass 0 on, so DeepSpeed clips at its default, 1.0"
            notes.append(Decision("deepspeed_config.gradient_clipping", "removed", why))
    flags = ""
    if precision == "fp8" or (named and precision != "no"):
        flags = f"--mixed_precision {precision} "
        why = f"accelerate refuses it next to deepspeed_config_file; pass {flags}to accelerate launch"
        notes.append(Decision("mixed_precision", "removed", why))
    elif precision != "no":
        notes.append(Decision("mixed_precision", f"moved to {precision}.enabled", f"{out} sets it now"))
    kept = {key: value for key, value in whole.items() if key not in ("mixed_precision", "fp16")}
    others = {key: value for key, value in fields.items() if key not in MOVED}
    kept["deepspeed_config"] = others | {"deepspeed_config_file": out}
    lost = [comments for file in filter(None, (path, named)) for comments in _lost_comments(file)]
    return Converted(config, notes + changes + lost, yaml.safe_dump(kept, sort_keys=False), flags)


def _fields_of(path: str, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section ``deepspeed_config`` of ``whole``, the accelerate configuration in the file ``path``.

    Raise SettingsError if ``whole`` is not for DeepSpeed, or for a ``compute_environment`` other than LOCAL_MACHINE.
    """
    if (place := whole.get("compute_environment") or "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise SettingsError(
            f"{path}: compute_environment: got {place!r}, expected LOCAL_MACHINE, the only one in which accelerate "
            "reads a section deepspeed_config"
        )
    kind, fields = whole.get("distributed_type", "DEEPSPEED"), whole.get("deepspeed_config") or {}
    kind = "NO" if kind is False else str(kind).upper()  # YAML reads NO as false
    if kind != "DEEPSPEED" or not isinstance(fields, Mapping):
        raise SettingsError(
            f"{path}: accelerate's configuration has distributed_type {kind}; expected DEEPSPEED, and a section "
            "deepspeed_config; run accelerate config and choose DeepSpeed"
        )
    return fields


def _precision_of(path: str, whole: Mapping[str, Any]) -> str:
    """Return accelerate's ``mixed_precision``, a key of :data:`PRECISIONS`; raise SettingsError if it is not one."""
    old = "fp16" if whole.get("fp16") else "no"  # as accelerate reads files of its first versions
    precision = str(whole.get("mixed_precision", old) or "no").lower()
    if precision not in PRECISIONS:
        raise SettingsError(f"{path}: mixed_precision: got {precision!r}, expected {', '.join(PRECISIONS)}")
    return precision


def _named_ds_config(path: str, whole: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Return the path of the ds_config file that accelerate's configuration ``whole`` names; "" if it names none.

    A relative name is looked up in the current folder, then in the folder of ``path``, accelerate's own file.
    ``fields``: the section ``deepspeed_config``. Raise SettingsError if the ds_config file does not exist, or if
    ``fields`` sets what accelerate allows only in the ds_config (:data:`MOVED`).
    """
    named = accelerates_ds_config_file(whole)
    if not named:
        return ""
    if refused := [key for key in MOVED if key in fields]:
        raise SettingsError(
            f"{path}: deepspeed_config: accelerate refuses {', '.join(refused)} next to deepspeed_config_file; write "
            "them into that file"
        )
    for place in (Path(named), Path(path).parent / named):
        if place.is_file():
            return str(place)
    raise SettingsError(f"{path}: deepspeed_config.deepspeed_config_file: there is no file {named}")


def _ds_config_of(path: str, fields: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the ds_config, without an optimizer, that accelerate makes from ``fields``, its ``deepspeed_config``.

    ``path``: accelerate's file, for errors. ``precision``: its ``mixed_precision``. Raise SettingsError for a wrong
    value.
    """
    zero: dict[str, Any] = {"stage": _number(path, fields, "zero_stage", 2, int)}
    for part in ("optimizer", "param"):
        key, folder = f"offload_{part}_device", f"offload_{part}_nvme_path"
        device = str(fields.get(key) or "none").lower()
        if device not in ("none", "cpu", "nvme"):
            raise SettingsError(f"{path}: deepspeed_config.{key}: got {fields[key]!r}, expected none, cpu or nvme")
        if device == "nvme" and not fields.get(folder):
            raise SettingsError(f"{path}: deepspeed_config.{folder}: expected a folder, because {key} is nvme")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device} | ({"nvme_path": fields[folder]} if device == "nvme" else {})
    if fields.get("zero3_save_16bit_model") is not None:
        is_true = str(fields["zero3_save_16bit_model"]).lower() == "true"
        zero["stage3_gather_16bit_weights_on_model_save"] = is_true
    clipping = _number(path, fields, "gradient_clipping", "auto", float)
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number(path, fields, "gradient_accumulation_steps", "auto", int),
        **({"gradient_clipping": clipping} if clipping else {}),
        **PRECISIONS[precision],
        "zero_optimization": zero,
    }


def _number(path: str, fields: Mapping[str, Any], key: str, default: Any, kind: type[int] | type[float]) -> Any:
    value = fields.get(key)
    if value is None or str(value).lower() == "auto":
        return default
    try:
        return kind(str(value))
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise SettingsError(f"{path}: deepspeed_config.{key}: got {value!r}, expected {what}") from None
