# SPDX-License-Identifier: Apache-2.0
"""Load the checkpoint of a run whose model, parameter groups, stage or ranks were different: by parameter name.

``"checkpoint": {"muon_changed_model": "match"}`` in the ds_config allows it. The checkpoint is converted to a temporary
universal one. The log lists what becomes of each parameter.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants
from torch import Tensor

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.errors import CheckpointError, MuonConfigError
from deepspeed.muon.log import listed, logger
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.seam import replaced
from deepspeed.muon.state_import import Actions, Source
from deepspeed.muon.step.normuon_moments import SAVED
from deepspeed.muon.zero.checkpoint import stage0_conversion
from deepspeed.muon.zero.checkpoint.engine import read_mapped
from deepspeed.muon.zero.checkpoint.fit import loads_states
from deepspeed.muon.zero.checkpoint.universal import MOMENTUM, WEIGHT, Folder, either_name, load_weights_and_states
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.tp_ranks import tp_rank

KEY = "checkpoint.muon_changed_model"
#: The most names that one line of the log lists, and the most problems that one error lists.
MAX_LISTED, MAX_PROBLEMS = 10, 4
#: Characters of the converter's output that an error quotes.
MAX_QUOTED = 600


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


# ---- what the checkpoint has ------------------------------------------------------------------------------------


class ModelFiles:
    """The parameters and buffers in a checkpoint's ``*model_states.pt`` files; at stage 3 no trained parameters."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*model_states.pt"), key=lambda file: list(map(int, re.findall(r"\d+", file.name))))
        self._ranks = [read_mapped(file) for file in files]
        first = self._ranks[0]
        #: The saved state of the learning-rate schedule; ``None`` without one.
        self.lr_scheduler: dict[str, Any] | None = first.get("lr_scheduler")
        self._values = {name: value for name, value in (first["module"] or {}).items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in self._values.items()}
        trained = first.get(constants.PARAM_SHAPES) or []
        for shapes in (*trained, first.get(constants.FROZEN_PARAM_SHAPES) or {}):
            self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}

    def read(self, name: str) -> Tensor | None:
        """Return the parameter or buffer ``name``, not sharded; ``None`` if the model files do not contain it."""
        shape, value = self.shapes.get(name), self._values.get(name)
        if value is not None and tuple(value.shape) == shape:
            return value
        fragments = [rank.get(constants.FROZEN_PARAM_FRAGMENTS) or {} for rank in self._ranks]
        if shape is None or not all(name in rank for rank in fragments):
            return None
        return torch.cat([rank[name].reshape(-1) for rank in fragments])[: math.prod(shape)].view(shape)


class MatchedFolder(Folder):
    """A universal checkpoint whose parameters are looked up by their names in this model instead of their saved names.

    ``title``: what log messages call the checkpoint.
    """

    def __init__(self, folder: str, renames: Renames, title: str) -> None:
        super().__init__(folder, {})
        self.files = ModelFiles(Path(folder))
        trained = {name for name in self.is_muon if (self.zero / name / f"{MOMENTUM}.pt").is_file()}
        self.saved_names = {renames(name): name for name in sorted({*self.files.shapes, *trained})}
        self.shapes = {name: self.files.shapes[saved] for name, saved in self.saved_names.items()}
        self.is_muon = {renames(name): self.is_muon[name] for name in trained}
        self.missed = {renames(name): count for name, count in self.missed.items()}
        for group in self.groups:
            if SAVED in group:
                group[SAVED] = {renames(name): moment for name, moment in group[SAVED].items()}
        self.source = Source(title, self.is_muon, self.read, self.step)

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or its state ``key``; an empty tensor if that was not saved."""
        if name in self.is_muon:
            return super().read(self.saved_names[name], key)
        value = self.files.read(self.saved_names.get(name, name)) if key == WEIGHT else None
        return torch.empty(0, dtype=torch.float32, device="cpu") if value is None else value

    def step(self, name: str) -> float:
        """Return how many optimizer steps the parameter had taken when it was saved."""
        return super().step(self.saved_names[name])


# ---- what becomes of each parameter -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """The plan of a load by parameter names, which :func:`match` returns.

    ``actions``: parameter name -> "kept", "zero" or "first_moment" (of AdamW, as momentum): what becomes of its state.
    ``outcomes``: text for the log, such as "weight and state as saved" -> names of the parameters that it describes.
    """

    folder: MatchedFolder
    actions: Actions
    outcomes: dict[str, list[str]]


def match(engine: Any, path: str, renames: Renames, title: str, load_states: bool) -> Match:
    """Plan how to load the universal checkpoint in the folder ``path`` by parameter names. Nothing is loaded yet.

    ``title``: what log messages call the checkpoint. ``load_states``: whether optimizer states are to be loaded too.

    Raises:
        CheckpointError: a parameter has another shape, or ``renames`` gives two saved parameters the same name. Only
            the number of rows may differ, if AdamW updates the parameter in both runs (an embedding, for example).
    """
    folder, optimizer = MatchedFolder(path, renames, title), engine.basic_optimizer
    if len(folder.saved_names) < len(folder.files.shapes):
        raise CheckpointError(
            f"{KEY}: rename gives several parameters of the checkpoint the same name; change the patterns"
        )
    outcomes: dict[str, list[str]] = {}
    actions: Actions = {}
    problems = []
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    for spec in specs.values():
        saved = folder.shapes.get(spec.name)
        if saved is not None and saved != spec.shape and not _may_change_rows(spec, saved, folder):
            problems.append(
                f"{spec.name} has shape {list(saved)} in the checkpoint and {list(spec.shape)} in the model"
            )
            continue
        action, text = _outcome(spec, folder, optimizer.config.import_momentum)
        outcomes.setdefault(text, []).append(spec.name)
        if load_states:
            actions[spec.name] = action
    current = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
    for name in sorted(current.keys() - specs.keys()):
        is_known = folder.shapes.get(name) == current[name]
        text = "frozen, weight as saved" if is_known else "frozen, as the model was built"
        outcomes.setdefault(text, []).append(name)
    buffers = {name for name, _ in engine.module.named_buffers()}
    if gone := sorted(folder.shapes.keys() - current.keys() - buffers):
        outcomes["dropped, not in this model"] = gone
    if problems:
        more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise CheckpointError("; ".join(problems[:MAX_PROBLEMS]) + more)
    return Match(folder, actions, outcomes)


def _may_change_rows(spec: MatrixSpec, saved: tuple[int, ...], folder: MatchedFolder) -> bool:
    """Return whether shape ``saved`` fits except for the number of rows, and AdamW updates the weight in both runs."""
    is_adamw = not spec.use_muon and not folder.is_muon.get(spec.name, False)
    return is_adamw and len(saved) == len(spec.shape) >= 1 and saved[1:] == spec.shape[1:]


def _outcome(spec: MatrixSpec, folder: MatchedFolder, import_momentum: str) -> tuple[str, str]:
    """Return (action, text for the log) for a trained parameter. The action is "kept", "zero" or "first_moment".

    It says what becomes of the state (:class:`Match`). ``import_momentum``: the action after a move from AdamW to Muon.
    """
    if spec.name not in folder.is_muon:
        return "zero", "state new, weight as saved" if spec.name in folder.shapes else "new, as the model was built"
    was_muon = folder.is_muon[spec.name]
    if was_muon and not spec.use_muon:
        return "zero", "weight as saved, moved from Muon to AdamW, whose state starts at zero"
    if spec.use_muon and not was_muon:
        how = "from AdamW's first moment" if import_momentum == "first_moment" else "at zero"
        return import_momentum, f"weight as saved, moved from AdamW to Muon, momentum {how}"
    if (old := folder.shapes[spec.name][:1]) != spec.shape[:1]:
        return "kept", f"{old[0]} rows became {spec.shape[0]}, the rows that both have keep weight and state"
    return "kept", "weight and state as saved"


# ---- the load ---------------------------------------------------------------------------------------------------


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


@contextmanager
def loading_by_name(
    engine: Any, arguments: Mapping[str, Any], renames: Renames
) -> Iterator[Callable[[Callable], tuple[Any, Any]]]:
    """Plan a load by parameter names, and yield a function that carries it out; a collective.

    Pass DeepSpeed's ``load_checkpoint`` to the function, which returns (path, client_state). A checkpoint that is not
    universal is converted to a temporary universal one.

    ``arguments``: {name of an argument of ``load_checkpoint``: value}.

    Raises:
        CheckpointError: on all ranks, before the engine changes, if the checkpoint cannot be converted or matched.
    """
    refuse_load_by_name(engine)
    saved, load_states = Path(arguments["load_dir"], arguments["tag"]), loads_states(arguments)
    with _universal(engine, saved) as folder, _in_universal_mode(engine):
        check = partial(match, engine, str(folder), renames, f"the checkpoint {saved}", load_states)
        found = raise_on_all_ranks(check, lambda why: CheckpointError(f"{saved} cannot be matched: {why}"))
        _check_schedule(engine, arguments, found.folder.files)

        def load(original: Callable) -> tuple[Any, Any]:
            options = {**arguments, "load_dir": str(folder.parent), "tag": folder.name}
            adapter = engine.muon_adapter
            adapter.opened_universal = found.folder, found.actions
            try:
                if engine.zero_optimization():
                    path, client_state = original(**options)
                else:
                    path, client_state = _load_at_stage_0(engine, options, found, load_states)
            finally:
                adapter.opened_universal = None
            if load_states and found.folder.is_ours:
                optimizer = engine.basic_optimizer
                optimizer.second_moments.load(found.folder.groups, optimizer.context.is_logging)
                optimizer.after_load()
            _write_untrained(engine, found.folder)
            if engine.global_rank == 0:
                _log(saved, found.outcomes)
            return path and str(saved / Path(path).name), client_state

        yield load


@contextmanager
def _universal(engine: Any, saved: Path) -> Iterator[Path]:
    """Yield the path of ``saved`` if the config sets ``load_universal``, otherwise of a temporary universal copy."""
    if engine.load_universal_checkpoint():
        yield saved
        return
    temporary = saved.with_name(f".{saved.name}.universal")
    try:
        raise_on_all_ranks(partial(_convert, engine, saved, temporary / saved.name), CheckpointError)
        yield temporary / saved.name
    finally:
        torch.distributed.barrier()
        if engine.global_rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _convert(engine: Any, saved: Path, target: Path) -> None:
    """Convert the checkpoint ``saved`` to the universal checkpoint ``target``, on rank 0 only."""
    if engine.global_rank:
        return
    logger.info("deepspeed-muon: converting the checkpoint %s to a universal one, to load it by parameter names", saved)
    shutil.rmtree(target.parent, ignore_errors=True)
    if not any(saved.glob("*_optim_states.pt")):  # stage 0, which DeepSpeed's converter does not know
        stage0_conversion.convert(saved, target)
        return
    module = "deepspeed.checkpoint.ds_to_universal"
    options = ("--input_folder", str(saved), "--output_folder", str(target), "--inject_missing_state")
    target.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", module, *options], capture_output=True, text=True, env=os.environ, check=False
    )
    if done.returncode:
        raise CheckpointError(
            "DeepSpeed's converter failed; run python -m deepspeed.checkpoint.ds_to_universal to see all of its "
            f"output: {(done.stderr or done.stdout).strip()[-MAX_QUOTED:]}"
        )


@contextmanager
def _in_universal_mode(engine: Any) -> Iterator[None]:
    """Make the engine load universal checkpoints in this context, as with ``"load_universal": true`` in its config."""
    with replaced(engine, load_universal_checkpoint=lambda original: True, _get_all_ckpt_names=either_name):
        yield


def _check_schedule(engine: Any, arguments: Mapping[str, Any], files: ModelFiles) -> None:
    """Raise CheckpointError if the learning-rate schedule to load was not saved, or has another number of groups."""
    if engine.lr_scheduler is None or not loads_states(arguments, "lr_scheduler"):
        return
    saved = files.lr_scheduler
    if saved is None:
        raise CheckpointError("the checkpoint has no learning-rate schedule; pass load_lr_scheduler_states=False")
    old, new = len(saved.get("base_lrs", ())), len(getattr(engine.lr_scheduler, "base_lrs", ()))
    if old and new and old != new:  # torch's schedulers save a rate per group
        raise CheckpointError(
            f"the checkpoint has a learning-rate schedule of {old} parameter groups, this run has {new}; pass "
            "load_lr_scheduler_states=False"
        )


def _load_at_stage_0(engine: Any, options: Mapping[str, Any], found: Match, load_states: bool) -> tuple[Any, Any]:
    """Load the universal checkpoint ``found`` at stage 0, which DeepSpeed cannot do; return (path, client_state).

    ``options``: {name of an argument of ``load_checkpoint``: value}.
    """
    folder, tag, *_ = options["load_dir"], options["tag"]
    rest = {key: value for key, value in options.items() if key not in ("engine", "self", "load_dir", "tag")}
    # DeepSpeed loads the counters and the schedule.
    path, client_state = engine._load_checkpoint(folder, tag, **rest | {"load_optimizer_states": False})
    client_state.pop("optimizer", None)
    load_weights_and_states(engine.muon_adapter, found.folder, found.actions, load_states)
    engine.muon_adapter.publish_weights()
    return path, client_state


@torch.no_grad()
def _write_untrained(engine: Any, folder: MatchedFolder) -> None:
    """Copy the checkpoint's frozen parameters and buffers into the model; a collective at stage 3."""
    from deepspeed.runtime.zero import GatheredParameters

    trained = {spec.name for spec in engine.basic_optimizer.specs.values()}
    for name, param in engine.module.named_parameters():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if name in trained or folder.shapes.get(name) != shape:
            continue
        with GatheredParameters([param], modifier_rank=0):
            if param.numel():
                param.copy_(folder.read(name, WEIGHT).reshape(shape))
    for name, buffer in engine.module.named_buffers():
        if folder.shapes.get(name) == tuple(buffer.shape):
            buffer.copy_(folder.read(name, WEIGHT).reshape(buffer.shape))


def _log(saved: Path, outcomes: Mapping[str, Sequence[str]]) -> None:
    lines = [f"  {len(names)}: {text} ({listed(names, MAX_LISTED)})" for text, names in outcomes.items()]
    logger.info(
        "deepspeed-muon: %s was loaded by parameter names, with the learning rates and other settings of this run's "
        "config. Parameters:\n%s",
        saved,
        "\n".join(lines),
    )
