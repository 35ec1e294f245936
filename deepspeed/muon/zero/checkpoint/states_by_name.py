# SPDX-License-Identifier: Apache-2.0
"""Take weights and optimizer states of another run by parameter name: read them, match them, write them.

``"checkpoint": {"muon_changed_model": "match"}`` in the ds_config allows a load of a run whose model, parameter groups,
stage or ranks were different. ``ds_muon import`` writes what stock DeepSpeed's Muon saved as a universal checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.errors import CheckpointError, ImportStateError, MuonConfigError
from deepspeed.muon.log import listed, logger
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.state_import import KEYS, Actions, Source
from deepspeed.muon.step.normuon_moments import SAVED
from deepspeed.muon.zero.checkpoint.fit import loads_states
from deepspeed.muon.zero.checkpoint.saved_files import MOMENTUM, WEIGHT, ModelFiles, SavedFiles
from deepspeed.muon.zero.checkpoint.universal import ORIGIN, Folder, load_weights_and_states
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.tp_ranks import tp_rank

KEY = "checkpoint.muon_changed_model"
#: The most names that one line of the log lists, and the most problems that one error lists.
MAX_LISTED, MAX_PROBLEMS = 10, 4
#: Keys of a model file that DeepSpeed does not count among the script's ``client_state``.
COUNTED = {"module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}


@dataclass(frozen=True)
class Renames:
    """A callable that turns the name of a parameter in the checkpoint into its name in this model.

    ``pairs``: (regular expression, replacement). Only the first expression that is found in a name is applied. If none
    is found, the name stays as it is.
    """

    pairs: tuple[tuple[re.Pattern[str], str], ...] = ()

    def __call__(self, name: str) -> str:
        """Return the parameter's name in this model."""
        for pattern, replacement in self.pairs:
            if pattern.search(name):
                return pattern.sub(replacement, name)
        return name


def renames_allowed(section: Mapping[str, Any] | None) -> Renames | None:
    """Return the :class:`Renames` of a load by parameter names; ``None`` if the ds_config does not allow such a load.

    ``section``: the ds_config's section ``checkpoint``. Its key ``muon_changed_model`` is "error" (the default: do not
    allow it), "match" (no renames) or {"rename": {pattern: replacement}}.

    Raises:
        MuonConfigError: that key has another value, or the section has another key that begins with "muon".
    """
    name = KEY.partition(".")[2]
    if wrong := [key for key in section or () if key.startswith("muon") and key != name]:
        hint = did_you_mean(wrong[0], [name], f"the only key of deepspeed-muon in this section is {name}", quote="'")
        raise MuonConfigError(f"checkpoint.{wrong[0]}: unknown key; {hint}")
    value = (section or {}).get(name, "error")
    if value in ("error", "match"):
        return None if value == "error" else Renames()
    if not isinstance(value, Mapping) or set(value) != {"rename"} or not isinstance(value["rename"], Mapping):
        example = '{"rename": {"^old": "new"}}'
        raise MuonConfigError(f'{KEY}: got {value!r}; expected "error", "match" or an object such as {example}')
    pairs = []
    for pattern, replacement in value["rename"].items():
        try:
            pairs.append((re.compile(pattern), str(replacement)))
        except re.error as error:
            raise MuonConfigError(f"{KEY}.rename: {pattern!r} is not a regular expression: {error}") from None
    return Renames(tuple(pairs))


# ---- match --------------------------------------------------------------------------------------------------------


class Renamed:
    """A saved checkpoint whose parameters are looked up by their names in this model.

    ``saved``: reader of the states. ``model``: reader of frozen parameters and buffers. ``title``: for log messages.
    """

    def __init__(self, saved: SavedFiles | Folder, model: ModelFiles, renames: Renames, title: str) -> None:
        self._saved, self.model, self._renames = saved, model, renames
        #: Name of a parameter or buffer in this model -> its saved name.
        self.saved_names = {renames(name): name for name in sorted({*model.shapes, *saved.is_muon})}
        if len(self.saved_names) < len(model.shapes):
            raise CheckpointError(
                f"{KEY}: rename gives several parameters of the checkpoint the same name; change the patterns"
            )
        self.shapes = {name: model.shapes[old] for name, old in self.saved_names.items()}
        self.is_muon = {renames(name): was_muon for name, was_muon in saved.is_muon.items() if saved.has_state(name)}
        self.source = Source(title, self.is_muon, self.read, lambda name: saved.step(self.saved_names[name]))

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or its state ``key``; an empty tensor if that was not saved."""
        old = self.saved_names.get(name, name)
        if name in self.is_muon or (key == WEIGHT and self._saved.has_weight(old)):
            return self._saved.read(old, key)
        value = self.model.read(old) if key == WEIGHT else None
        return torch.empty(0, dtype=torch.float32, device="cpu") if value is None else value

    def groups(self) -> list[dict[str, Any]]:
        """Return the saved parameter groups, if deepspeed-muon saved them, with names of matrices in this model."""
        groups = [dict(group) for group in self._saved.groups] if self._saved.is_ours else []
        for group in groups:
            if SAVED in group:
                group[SAVED] = {self._renames(name): moment for name, moment in group[SAVED].items()}
        return groups


@dataclass(frozen=True)
class Match:
    """The plan of a load by parameter names, which :func:`match` returns.

    ``actions``: parameter name -> "kept", "zero" or "first_moment" (of AdamW, as momentum): what becomes of its state.
    ``outcomes``: text for the log, such as "weight and state as saved" -> names of the parameters that it describes.
    """

    saved: Renamed
    actions: Actions
    outcomes: dict[str, list[str]]


def match(engine: Any, folder: Path, renames: Renames, load_states: bool) -> Match:
    """Plan how to load the checkpoint in ``folder`` by parameter names. Nothing is loaded yet.

    ``load_states``: whether optimizer states are to be loaded too.

    Raises:
        CheckpointError: a parameter has another shape, or ``renames`` gives two saved parameters the same name. Only
            the number of rows may differ, if AdamW updates the parameter in both runs (an embedding, for example).
    """
    if engine.load_universal_checkpoint():
        saved = Renamed(Folder(str(folder), {}), ModelFiles(folder), renames, f"the checkpoint {folder}")
    else:
        files = SavedFiles(folder)
        saved = Renamed(files, files.model, renames, f"the checkpoint {folder}")
    optimizer = engine.basic_optimizer
    outcomes: dict[str, list[str]] = {}
    actions: Actions = {}
    problems = []
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    for spec in specs.values():
        shape = saved.shapes.get(spec.name)
        if shape is not None and shape != spec.shape and not _may_change_rows(spec, shape, saved):
            problems.append(
                f"{spec.name} has shape {list(shape)} in the checkpoint and {list(spec.shape)} in the model"
            )
            continue
        action, text = _outcome(spec, saved, optimizer.config.import_momentum)
        outcomes.setdefault(text, []).append(spec.name)
        if load_states:
            actions[spec.name] = action
    current = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
    for name in sorted(current.keys() - specs.keys()):
        is_known = saved.shapes.get(name) == current[name]
        text = "frozen, weight as saved" if is_known else "frozen, as the model was built"
        outcomes.setdefault(text, []).append(name)
    buffers = {name for name, _ in engine.module.named_buffers()}
    if gone := sorted(saved.shapes.keys() - current.keys() - buffers):
        outcomes["dropped, not in this model"] = gone
    if problems:
        more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError("; ".join(problems[:MAX_PROBLEMS]) + more)
    return Match(saved, actions, outcomes)


def _may_change_rows(spec: MatrixSpec, shape: tuple[int, ...], saved: Renamed) -> bool:
    """Return whether AdamW updates the weight in both runs, and ``shape`` differs in the number of rows only."""
    is_adamw = not spec.use_muon and not saved.is_muon.get(spec.name, False)
    return is_adamw and len(shape) == len(spec.shape) >= 1 and shape[1:] == spec.shape[1:]


def _outcome(spec: MatrixSpec, saved: Renamed, import_momentum: str) -> tuple[str, str]:
    """Return (action, text for the log) for a trained parameter. The action is "kept", "zero" or "first_moment".

    It says what becomes of the state (:class:`Match`). ``import_momentum``: the action after a move from AdamW to Muon.
    """
    if spec.name not in saved.is_muon:
        return "zero", "state new, weight as saved" if spec.name in saved.shapes else "new, as the model was built"
    was_muon = saved.is_muon[spec.name]
    if was_muon and not spec.use_muon:
        return "zero", "weight as saved, moved from Muon to AdamW, whose state starts at zero"
    if spec.use_muon and not was_muon:
        how = "from AdamW's first moment" if import_momentum == "first_moment" else "at zero"
        return import_momentum, f"weight as saved, moved from AdamW to Muon, momentum {how}"
    if (old := saved.shapes[spec.name][:1]) != spec.shape[:1]:
        return "kept", f"{old[0]} rows became {spec.shape[0]}, the rows that both have keep weight and state"
    return "kept", "weight and state as saved"


# ---- write, to an engine ----------------------------------------------------------------------------------------


def refuse_load_by_name(engine: Any) -> None:
    """Raise CheckpointError if the engine cannot load by names: with pipelines, tensor parallelism or MoE layers."""
    found = [
        name
        for name, is_used in (
            ("pipelines", engine.pipeline_parallelism),
            ("tensor parallelism", tp_rank(engine)[1] > 1),
            ("experts that are spread over ranks", engine.has_moe_layers),
        )
        if is_used
    ]
    if found:
        raise CheckpointError(
            f"{KEY}: not supported with {' and '.join(found)}; remove this key and resume the same model, or resume "
            "without them"
        )


def load_by_name(engine: Any, arguments: Mapping[str, Any], renames: Renames) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint by parameter names, in place of DeepSpeed; return (path, client_state). A collective.

    ``arguments``: {name of an argument of ``load_checkpoint``: value}.

    Raises:
        CheckpointError: on all ranks, before the engine changes, if the checkpoint cannot be read or matched.
    """
    refuse_load_by_name(engine)
    folder, load_states = Path(arguments["load_dir"], arguments["tag"]), loads_states(arguments)
    plan = partial(match, engine, folder, renames, load_states)
    found = raise_on_all_ranks(plan, lambda why: CheckpointError(f"{folder} cannot be matched: {why}"))
    saved, adapter, optimizer = found.saved, engine.muon_adapter, engine.basic_optimizer
    _check_schedule(engine, arguments, saved.model.first)
    load_weights_and_states(adapter, saved, found.actions, load_states)
    adapter.publish_weights()
    if load_states and (groups := saved.groups()):
        optimizer.second_moments.load(groups, optimizer.context.is_logging)
        optimizer.after_load()
    _write_untrained(engine, saved)
    client_state = _load_counters(engine, arguments, saved.model.first)
    if engine.global_rank == 0:
        _log(folder, found.outcomes)
    return str(saved.model.files[0]), client_state


def _check_schedule(engine: Any, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the learning-rate schedule to load was not saved, or has another number of groups."""
    if engine.lr_scheduler is None or not loads_states(arguments, "lr_scheduler"):
        return
    saved = model.get("lr_scheduler")
    if saved is None:
        raise CheckpointError("the checkpoint has no learning-rate schedule; pass load_lr_scheduler_states=False")
    old, new = len(saved.get("base_lrs", ())), len(getattr(engine.lr_scheduler, "base_lrs", ()))
    if old and new and old != new:  # torch's schedulers save a rate per group
        raise CheckpointError(
            f"the checkpoint has a learning-rate schedule of {old} parameter groups, this run has {new}; pass "
            "load_lr_scheduler_states=False"
        )


def _load_counters(engine: Any, arguments: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Load what DeepSpeed keeps in the model's file, except weights; return the script's ``client_state``."""
    left_out = {"module"} if arguments["load_module_only"] else set(COUNTED)
    left_out |= {kind for kind in ("lr_scheduler", "optimizer") if arguments[f"load_{kind}_states"]}
    if not arguments["load_module_only"]:
        if loads_states(arguments, "lr_scheduler") and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and model.get("random_ltd"):
            engine.random_ltd_scheduler.load_state_dict(model["random_ltd"])
        if engine.curriculum_learning_enabled() and engine.training_dataloader and model.get("data_sampler"):
            engine.training_dataloader.data_sampler.load_state_dict(model["data_sampler"])
        engine.global_steps, engine.skipped_steps = model["global_steps"], model["skipped_steps"]
        engine.global_samples = model.get("global_samples", engine.global_steps * engine.train_batch_size())
    return {key: value for key, value in model.items() if key not in left_out}


@torch.no_grad()
def _write_untrained(engine: Any, saved: Renamed) -> None:
    """Copy the checkpoint's frozen parameters and buffers into the model; a collective at stage 3."""
    from deepspeed.runtime.zero import GatheredParameters

    trained = {spec.name for spec in engine.basic_optimizer.specs.values()}
    for name, param in engine.module.named_parameters():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if name in trained or saved.shapes.get(name) != shape:
            continue
        with GatheredParameters([param], modifier_rank=0):
            if param.numel():
                param.copy_(saved.read(name, WEIGHT).reshape(shape))
    for name, buffer in engine.module.named_buffers():
        if saved.shapes.get(name) == tuple(buffer.shape):
            buffer.copy_(saved.read(name, WEIGHT).reshape(buffer.shape))


def _log(saved: Path, outcomes: Mapping[str, Sequence[str]]) -> None:
    lines = [f"  {len(names)}: {text} ({listed(names, MAX_LISTED)})" for text, names in outcomes.items()]
    logger.info(
        "deepspeed-muon: %s was loaded by parameter names, with the learning rates and other settings of this run's "
        "config. Parameters:\n%s",
        saved,
        "\n".join(lines),
    )


# ---- write, to a universal checkpoint ------------------------------------------------------------------------------


def import_stocks_muon(source: Path, target: Path) -> dict[str, Any]:
    """Write ``source``, one tag's folder saved by stock DeepSpeed's Muon, as the universal checkpoint ``target``.

    Return a dict: "from" and "to" (the paths), "stage" (of ZeRO), "matrices" and "adamw" (how many parameters Muon and
    AdamW update) and "loss_scale" (by which the momentum was divided).

    Raises:
        ImportStateError: ``target`` exists, stock's Muon did not save ``source``, or states are missing. Nothing is
            written then.
    """
    if target.exists():
        raise ImportStateError(f"{target} exists already; name a new folder")
    saved = SavedFiles(source)
    if saved.saved_by != "stock's Muon":
        raise ImportStateError(
            f"{source} is not a checkpoint of stock DeepSpeed's Muon; convert checkpoints of AdamW and of "
            "deepspeed-muon with python -m deepspeed.checkpoint.ds_to_universal (AdamW's with --inject_missing_state)"
        )
    if absent := saved.missing_states():
        raise ImportStateError(
            f"{source} has no optimizer state of {', '.join(absent[:8])}; load only its weights (with "
            "save_muon_momentum_buffer_in_memory, stock's Muon does not save the momentum)"
        )
    work = target.with_name(f".{target.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        for name, is_muon in saved.is_muon.items():
            (work / "zero" / name).mkdir(parents=True)
            for key in (WEIGHT, *KEYS[is_muon]):
                value = saved.read(name, key).view(saved.model.shapes[name])
                file = f"{MOMENTUM if key == 'momentum_buffer' else key}.pt"
                torch.save({"param": value.clone()}, work / "zero" / name / file)
            torch.save(saved.step(name), work / "zero" / name / "step.pt")
        matrices = sorted(name for name, is_muon in saved.is_muon.items() if is_muon)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in saved.groups]
        groups = [group | ({"matrices": matrices} if group["use_muon"] else {}) for group in groups]
        torch.save({"param_groups": groups, ORIGIN: saved.saved_by}, work / "zero" / "optimizer_state.pt")
        shutil.copy2(saved.model.files[0], work)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    (target.parent / "latest_universal").write_text(target.name)
    facts = {"stage": saved.stage, "matrices": len(matrices), "adamw": len(saved.is_muon) - len(matrices)}
    return {"from": str(source), "to": str(target), **facts, "loss_scale": saved.loss_scale}
