# SPDX-License-Identifier: Apache-2.0
"""``ds_muon init``: convert a ds_config for AdamW to one for Muon, with a reason for every change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.muon.cli.accelerate import ds_config_of, needs_flag, notes_on, precision_of, with_ds_config_file
from deepspeed.muon.cli.edit_hjson import edited
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
from deepspeed.muon.zero.scheduler_section import Schedule, momentum_note, read_schedule

#: Values of ``optimizer.type`` that mean AdamW, in lower case: DeepSpeed's types, and the names of its classes.
ADAMW = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
#: AdamW's defaults, added to the config because a section for Muon has the defaults of stock DeepSpeed's Muon.
ADAMW_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
#: Default weight decay of torch's AdamW. DeepSpeed's AdamW has 0.
TORCH_WEIGHT_DECAY = 0.01
_DEFAULT, _IMPLEMENTATION = "it is AdamW's default", "it chooses an implementation of AdamW, with the same results"
#: Key of AdamW that a section for Muon does not have -> (values that can be left out, the reason).
DROPPED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bias_correction": ((True,), _DEFAULT),
    "amsgrad": ((False,), _DEFAULT),
    "maximize": ((False,), _DEFAULT),
    "set_grad_none": ((True, False, None), "the engine decides how gradients are cleared"),
    **dict.fromkeys(("fused", "foreach", "capturable", "differentiable"), ((True, False, None), _IMPLEMENTATION)),
}
#: Keys of DROPPED that a section for Muon has, too. Values that cannot be left out are kept.
KEPT = {"bias_correction"} & MuonConfig.model_fields.keys()
NEXT = "next: ds_muon plan --config {} --model MODEL --world-size RANKS shows which parameters go to Muon, and the cost"
#: What a script without the Trainer passes to accelerate where the ds_config has an optimizer.
DUMMY = "a SCRIPT without the Trainer passes accelerate's DummyOptim"
#: (Tool, how to start a run on N ranks with the ds_config ``{0}``, what else to write) for tools that use DeepSpeed.
START = (
    ("Trainer", "deepspeed --num_gpus N SCRIPT --deepspeed {0}", ""),
    ("TRL", "trl sft --config sft.yaml --num_processes N --deepspeed {0}", ""),
    ("LLaMA-Factory", "FORCE_TORCHRUN=1 llamafactory-cli train sft.yaml deepspeed={0}", "no use_muon in sft.yaml"),
    (
        "ms-swift",
        "NPROC_PER_NODE=N swift sft sft.yaml --deepspeed {0} --external_plugins plugin.py --optimizer deepspeed",
        "plugin.py of examples/ms_swift",
    ),
    (
        "axolotl",
        "axolotl train sft.yaml --launcher torchrun -- --nproc_per_node N",
        "in sft.yaml deepspeed: {0}, and no optimizer",
    ),
    ("accelerate", "accelerate launch --use_deepspeed --num_processes N --deepspeed_config_file {0} SCRIPT", DUMMY),
)
#: Matches a comment in YAML or Hjson.
COMMENT = re.compile(r"(?:^|\s)(?:#|//|/\*)")


class Decision(NamedTuple):
    """What ``ds_muon init`` changed or kept in a ds_config, in words: which key, what was done to it, and why."""

    key: str
    what: str
    why: str


class Converted(NamedTuple):
    """What ``ds_muon init`` has made of a file.

    Attributes:
        facts: a dict with ``config``, the new ds_config; ``decisions``, a list of :class:`Decision` as dicts; and
            ``accelerate``, accelerate's new configuration as YAML text, or ``None`` if the file was not accelerate's.
        text: the new ds_config as text: the file's own, with the changes, if the file is a ds_config in JSON or Hjson;
            otherwise JSON.
        launch_flags: flags that ``accelerate launch`` needs next to the new configuration.
    """

    facts: dict[str, Any]
    text: str
    launch_flags: str = ""


def convert(path: str, out: str = "ds_config.json") -> Converted:
    """Read a ds_config for AdamW from the file ``path``, and return it converted to Muon.

    The file may also be accelerate's own configuration, with settings or with the name of a ds_config file. A ds_config
    without a section ``optimizer`` is treated as if it had the defaults of torch's AdamW, with the rate of its schedule
    if that sets one. If any value in such a ds_config is ``"auto"``, its new ``lr`` and ``weight_decay`` are, too, for
    Hugging Face's Trainer or accelerate to fill in.

    ``out``: name of the file in which the user will save the new ds_config.

    Raises:
        SettingsError: the file cannot be read, contains no ds_config, or its optimizer is not AdamW.
        MuonConfigError, UnsupportedError: Muon does not support a setting; the message says what to change.
    """
    whole = parse_file(path)
    if not is_accelerate_config(whole):
        return _convert(path, whole, find_ds_config(path, whole))
    file = named_ds_config(path, whole)
    notes = notes_on(path, whole, out, bool(file))
    if file:
        content = parse_file(file)
        done = _convert(file, content, find_ds_config(file, content))
        notes.insert(0, ("deepspeed_config.deepspeed_config_file", "changed", f"{out} is {file} for Muon"))
        if _has_comments(path):
            notes.append(("comments", "not kept", f"in accelerate's new configuration; copy what you need from {path}"))
    else:
        done = _convert(path, whole, ds_config_of(path, whole))
        why = f"accelerate reads them from the file that its deepspeed_config.deepspeed_config_file names: {out}"
        notes.insert(0, ("deepspeed_config", "fields moved here", why))
    rows = [Decision(*note)._asdict() for note in notes]
    facts = done.facts | {
        "decisions": rows + done.facts["decisions"],
        "accelerate": with_ds_config_file(whole, out),
    }
    precision = precision_of(path, whole)
    flags = f"--mixed_precision {precision} " if needs_flag(precision, bool(file)) else ""
    return Converted(facts, done.text, flags)


def named_ds_config(path: str, whole: Mapping[str, Any]) -> str:
    """Return the path of the ds_config that accelerate's configuration ``whole`` names; empty if it names none.

    ``path``: the configuration's file; the ds_config is looked for in the current folder, then in that of this file.

    Raises:
        SettingsError: there is no such file.
    """
    named = accelerates_ds_config_file(whole) if is_accelerate_config(whole) else None
    if not named:
        return ""
    for place in (Path(named), Path(path).parent / named):
        if place.is_file():
            return str(place)
    raise SettingsError(f"{path}: deepspeed_config.deepspeed_config_file: there is no file {named}")


def _convert(path: str, whole: Mapping[str, Any], section: Mapping[str, Any]) -> Converted:
    """Convert the ds_config ``section``, which is part of ``whole``, the content of the file ``path``."""
    decisions = list[Decision]()
    if section is not whole and not is_accelerate_config(whole):
        decisions.append(
            Decision("optimizer", "taken", f"from {path}, with the rest of the ds_config that it contains")
        )
    optimizer, schedule = section.get("optimizer"), read_schedule(section.get("scheduler"))
    config = dict(section)
    if optimizer is None:
        params, changes = _params_without_optimizer(section, schedule)
    else:
        params, changes = _params_from_adamw(path, config, optimizer, schedule)
    config["optimizer"] = {"type": "Muon", "params": params}
    if momentum := momentum_note(schedule):
        what = "kept" if schedule.sets_cycle_momentum else "on by default"
        changes.append(Decision("scheduler.params.cycle_momentum", what, momentum.partition(" ")[2]))
    read_settings(path, config, world_size=1)  # raises what the engine would raise
    text = _text_of(path, whole, config)
    if text is None and _has_comments(path):
        why = f"the result is plain JSON; copy what you need from {path}"
        decisions.append(Decision("comments", "not kept", why))
    rows = [each._asdict() for each in decisions + changes]
    return Converted({"config": config, "decisions": rows, "accelerate": None}, text or json.dumps(config, indent=2))


def _params_without_optimizer(section: Mapping[str, Any], schedule: Schedule) -> tuple[dict[str, Any], list[Decision]]:
    """Return (``optimizer.params`` for Muon, changes) for a ds_config ``section`` that has no section ``optimizer``.

    ``schedule``: what the ds_config's section ``scheduler`` sets.
    """
    params = ADAMW_DEFAULTS | {"weight_decay": TORCH_WEIGHT_DECAY}
    added = Decision("optimizer", "added", "the script must not pass an optimizer to deepspeed.initialize any more")
    if _has_auto(section):
        betas = f"{params['betas']}, eps {params['eps']}"
        return params | {"lr": "auto", "weight_decay": "auto"}, [
            added,
            _param("lr", '"auto"', "Hugging Face's Trainer or accelerate fills it in, as for AdamW"),
            _param(
                "weight_decay",
                '"auto"',
                "acts on norms and biases too, which the Trainer's own AdamW exempts; "
                'add "adam_weight_decay": 0 to exempt all that AdamW updates',
            ),
            _param(
                "betas",
                betas,
                "torch's defaults for AdamW, and the Trainer's; accelerate fills in no \"auto\" for them",
            ),
        ]
    if isinstance(schedule.rate, (int, float)):
        params["lr"] = schedule.rate
    why = "torch's default; replace it by your script's rate"
    if schedule.rate_key:
        why = f"{_rate(schedule)}; replace it by your script's"
    defaults = [
        _param(key, f"added, {params[key]}", "torch's default for AdamW") for key in ("betas", "eps", "weight_decay")
    ]
    return params, [added, _param("lr", f"added, {params['lr']}", why), *defaults]


def _param(key: str, what: str, why: str) -> Decision:
    return Decision(f"optimizer.params.{key}", what, why)


def _has_auto(value: Any) -> bool:
    return value == "auto" or (isinstance(value, Mapping) and any(map(_has_auto, value.values())))


def _rate(schedule: Schedule) -> str:
    return f"scheduler.params.{schedule.rate_key}, {schedule.rate}, is the rate, whatever lr says"


def _wrong_type(path: str, section: Mapping[str, Any], name: Any) -> SettingsError:
    """Return the error to raise for the ds_config ``section`` whose ``optimizer.type``, ``name``, is not AdamW."""
    if isinstance(name, str) and is_muon(name):
        read_settings(path, dict(section), world_size=1)  # raises if another setting is wrong
        return SettingsError(
            f"{path}: optimizer.type: got {name!r}, so the config needs no change; {NEXT.format(path)[6:]}"
        )
    otherwise = (
        "the rate of another optimizer does not fit Muon; write the section yourself, with the rate that AdamW would "
        "have for this model"
    )
    if not isinstance(name, str) or not (is_optimizer(name) and name.lower() not in ADAMW):
        otherwise = did_you_mean(str(name).lower(), ("adam", "adamw", "muon"), otherwise, cutoff=0.7)
    return SettingsError(f'{path}: optimizer.type: got {name!r}, expected "AdamW" or "Adam"; {otherwise}')


def _params_from_adamw(
    path: str, config: dict[str, Any], optimizer: Any, schedule: Schedule
) -> tuple[dict[str, Any], list[Decision]]:
    """Convert AdamW's section ``optimizer`` of a ds_config. Return (``optimizer.params`` for Muon, changes).

    ``config``: the ds_config; ``gradient_clipping`` in it is set if AdamW has ``max_grad_norm``. ``schedule``: what its
    section ``scheduler`` sets.
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
    for key in [key for key in params if key in DROPPED]:
        values, why = DROPPED[key]
        if params[key] in values:
            decisions.append(_param(key, "removed", why))
            del params[key]
        elif key not in KEPT:
            raise SettingsError(
                f"{path}: optimizer.params.{key}: got {params[key]!r}, which deepspeed-muon's AdamW does not support; "
                "remove the key"
            )
    if "max_grad_norm" in params:
        limit, clipping = params.pop("max_grad_norm"), config.get("gradient_clipping")
        config["gradient_clipping"] = limit if clipping is None else clipping
        what = "moved to gradient_clipping" if clipping is None else f"removed, gradient_clipping {clipping} stays"
        decisions.append(_param("max_grad_norm", what, "DeepSpeed clips by gradient_clipping only"))
    if name.lower() != "adam" and params.get("adam_w_mode") is False:
        decisions.append(_param("adam_w_mode", "removed", "DeepSpeed ignores it under type AdamW"))
        del params["adam_w_mode"]
    rate = "kept" if "lr" in params else f"added, {ADAMW_DEFAULTS['lr']}"
    tuned = f"multiply {schedule.rate_key} by 3 and by 10" if schedule.rate_key else "multiply it by 3 and by 10"
    why = _rate(schedule) if schedule.rate_key else "AdamW's rate"
    decisions.append(_param("lr", rate, f"{why}: a safe start; to tune, {tuned}"))
    missing = {key: value for key, value in ADAMW_DEFAULTS.items() if key not in params}
    if "weight_decay" not in params and params.get("torch_adam"):
        missing["weight_decay"] = TORCH_WEIGHT_DECAY
    decisions += [
        _param(key, f"added, {value}", f"AdamW's default; Muon's default is {_muon_default(key)}")
        for key, value in missing.items()
        if key != "lr"
    ]
    return params | missing, decisions


def _muon_default(key: str) -> str:
    default = MuonConfig.model_fields[key].default
    return str(list(default) if isinstance(default, tuple) else default)


def _text_of(path: str, whole: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return the text of the file ``path`` with the changes that make it ``config``.

    ``None`` if that is not possible, because the file is YAML, or because ``config`` is only a part of ``whole``, its
    content.
    """
    text = None if Path(path).suffix in (".yaml", ".yml") else edited(_read(path), whole, config)
    return None if text is None else text.rstrip()


def _has_comments(path: str) -> bool:
    return COMMENT.search(_read(path)) is not None


def _read(path: str) -> str:
    return Path(path).read_bytes().decode("utf-8-sig")  # keeps the ends of lines, unlike read_text


def start_lines(config: str, done: Converted, accelerate_file: Path | None) -> list[tuple[str, str, str]]:
    """Return (tool, command line, what else to write) for each tool that can start a run with the new ds_config.

    ``config``: the ds_config's file. ``accelerate_file``: that of accelerate's new configuration, if there is one.
    """
    if accelerate_file:
        return [("accelerate", f"accelerate launch --config_file {accelerate_file} {done.launch_flags}SCRIPT", DUMMY)]
    try:
        json.loads(done.text)
    except ValueError:
        return [
            (
                "DeepSpeed",
                "its own scripts only",
                f"tools read plain JSON: first remove comments, and commas before brackets, from {config}",
            )
        ]
    return [(tool, line.format(config), also.format(config)) for tool, line, also in START]
