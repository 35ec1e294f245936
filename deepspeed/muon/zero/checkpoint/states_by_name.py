# SPDX-License-Identifier: Apache-2.0
"""Take weights and optimizer states of another run by parameter name: read DeepSpeed's files, match, write.

``"checkpoint": {"muon_changed_model": "match"}`` in the ds_config allows a load of a run whose model, parameter groups,
stage or ranks were different. ``ds_muon import`` writes what stock DeepSpeed's Muon saved as a universal checkpoint.

This package, DeepSpeed's AdamW and stock DeepSpeed's Muon save the same files. Only stock's momentum differs:

=====================================  ===========================================================================
stage 3; stages 1 and 2 with offload,  each rank's share, laid out like its fp32 weights
``BF16_Optimizer``
stages 1 and 2                         each matrix of which the rank has a part, whole, one after the other
=====================================  ===========================================================================

Under fp16 without offload it averages gradients that are still multiplied by the loss scale: a read divides by it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.checkpoint import constants
from torch import Tensor

from deepspeed.muon.errors import CheckpointError, ImportStateError, listed, logger
from deepspeed.muon.exchange.consensus import raise_on_all_ranks
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import NAMES, read_mapped, saved_groups
from deepspeed.muon.zero.refusals import refuse_load_by_name
from deepspeed.muon.zero.wrappers import stage3, stage12

#: Key of a parameter's fp32 weight, and of Muon's momentum in our files.
WEIGHT, MOMENTUM = "fp32", "exp_avg"
#: Whether Muon updates a parameter -> the keys of its state.
KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}
#: What becomes of a parameter's state -> the end of its text in the log.
ENDS = {"kept": "", "zero": ", state at zero", "first_moment": ", momentum from the first moment"}
#: Key in a universal checkpoint's ``optimizer_state.pt``: the optimizer whose checkpoint ``ds_muon import`` converted.
ORIGIN = "deepspeed_muon_origin"
#: Keys of a model file that DeepSpeed does not count among the script's ``client_state``.
COUNTED = {"module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
MAX_LISTED = 8


# ---- read -------------------------------------------------------------------------------------------------------


class States(Protocol):
    """The weights and optimizer states of another run, by parameter name: what a reader gives."""

    #: What messages call it, such as "a checkpoint of AdamW".
    title: str
    #: Parameter or buffer -> its shape; empty if the reader checks shapes itself.
    shapes: dict[str, tuple[int, ...]]
    #: Parameter with saved states -> whether Muon updated it; otherwise AdamW did.
    is_muon: dict[str, bool]

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or state ``key``; an empty tensor if it was not saved."""

    def step(self, name: str) -> float:
        """Return how many steps the parameter had taken."""


class SavedFiles:
    """:class:`States` in the folder of one tag, as DeepSpeed saves it at any stage.

    Attributes:
        values: {parameter name: {"fp32" (the weight) or a key from :data:`KEYS`: the ranks' parts of it, in order}}.
        model: the contents of the first file with a part of the model.
        groups: the saved parameter groups.
        saved_by: "deepspeed-muon", "stock's Muon" or "AdamW".
        stage: of ZeRO.
        loss_scale: by what the saved momentum was multiplied.
    """

    def __init__(self, folder: Path) -> None:
        self.files = _by_rank(folder.glob("*mp_rank_00_model_states.pt"))
        if not self.files:
            raise ImportStateError(f"{folder} has no mp_rank_00_model_states.pt; name the folder of one tag")
        models = [read_mapped(file) for file in self.files]
        files = _by_rank(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))
        ranks = [read_mapped(file)["optimizer_state_dict"] for file in files]
        self.model: dict[str, Any] = models[0]
        outer = ranks[0] if ranks else self.model["optimizer"] or {"param_groups": []}
        self.groups, self.stage = saved_groups(outer), int(ranks[0].get("zero_stage", 1)) if ranks else 0
        self.is_ours = any("matrices" in group for group in self.groups)
        is_stocks = not self.is_ours and any("use_muon" in group for group in self.groups)
        self.saved_by = "deepspeed-muon" if self.is_ours else "stock's Muon" if is_stocks else "AdamW"
        self.title, self.loss_scale = f"a checkpoint of {self.saved_by}", 1.0
        self.values: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.is_muon: dict[str, bool] = {}
        self._steps: dict[str, float] = {}
        self._matrices = {name for group in self.groups for name in group.get("matrices", ())}
        module = {name: value for name, value in (self.model["module"] or {}).items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in module.items()}
        frozen = self.model.get(constants.FROZEN_PARAM_SHAPES) or {}
        for shapes in (*(self.model[constants.PARAM_SHAPES] or ()), frozen):
            self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
        if ranks:
            self._add_zero(ranks)
        else:
            self._add_stage0(outer, module)
        #: Names of trained parameters without states.
        self.without_state = [name for name in self.values if name not in self.is_muon]
        for name in self.shapes.keys() - self.values.keys():  # frozen parameters and buffers
            fragments = [(model.get(constants.FROZEN_PARAM_FRAGMENTS) or {}).get(name) for model in models]
            is_whole = name in module and tuple(module[name].shape) == self.shapes[name]
            self.values[name][WEIGHT] = [module[name]] if is_whole else [part for part in fragments if part is not None]

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or state ``key``, 1-D; an empty tensor if it was not saved."""
        parts = [part.reshape(-1) for part in self.values.get(name, {}).get(key, ())]
        if not parts:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        value = torch.cat(parts)[: math.prod(self.shapes[name])]  # a frozen parameter's last part may be padded
        is_scaled = key == "momentum_buffer" and self.loss_scale != 1.0
        return value.float() / self.loss_scale if is_scaled else value

    def step(self, name: str) -> float:
        """Return how many steps the parameter had taken."""
        missed = next((group[STARTED][name] for group in self.groups if name in group.get(STARTED, {})), 0)
        # Stock's Muon counts no steps of its own; those of another parameter, or the engine's, are the same.
        engines = float(self.model["global_steps"] - self.model["skipped_steps"])
        return self._steps.get(name, next(iter(self._steps.values()), engines)) - missed

    def _add(self, name: str, use_muon: bool, saved: Mapping[str, Tensor], part: slice = slice(None)) -> None:
        """Append one rank's values of a parameter: the slice ``part`` of the flat tensors in ``saved``."""
        use_muon = name in self._matrices if self.is_ours else use_muon
        for key in (WEIGHT, *KEYS[use_muon]):
            file_key = MOMENTUM if self.is_ours and use_muon and key != WEIGHT else key
            if file_key in saved:
                self.values[name][key].append(saved[file_key][part])
                if key != WEIGHT:
                    self.is_muon[name] = use_muon
        if "step" in saved:
            self._steps.setdefault(name, float(saved["step"]))

    def _add_zero(self, ranks: list[dict[str, Any]]) -> None:
        """Add the parameters of stages 1 to 3, from the parts that the ranks saved. ``ranks``: the states of each."""
        section = (self.model.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
        is_whole = False
        if self.saved_by == "stock's Muon" and section.get("device", "none") == "none":
            self.loss_scale = float(getattr(ranks[0].get("loss_scaler"), "cur_scale", 1.0))
            is_whole = self.stage < 3 and "zero_stage" in ranks[0]
        weights = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        use_muon = {index: bool(group.get("use_muon")) for group in self.groups for index in group["params"]}
        for rank, state in enumerate(ranks):
            states = (state.get("base_optimizer_state") or state["optimizer_state_dict"])["state"]
            for index, shapes in enumerate(self.model[constants.PARAM_SHAPES]):
                saved = {WEIGHT: state[weights][index], **states.get(index, {})}
                whole = saved.pop("momentum_buffer", None) if is_whole else None
                numels = [math.prod(shape) for shape in shapes.values()]
                if self.stage == 3:
                    placements = stage3.placements(stage3.part_size(numel, len(ranks)) for numel in numels)
                else:
                    paddings = state.get("param_alignment_paddings", {index: [0] * len(numels)})[index]
                    # The padding at the end of a group is not saved. If it shortens rank 0's part, others hold nothing.
                    span = ranks[0][weights][index].numel()
                    placements = stage12.placements(map(sum, zip(numels, paddings, strict=True)), span)
                for name, numel, placement in zip(shapes, numels, placements, strict=True):
                    start, stop = placement.held_range(rank, 0, numel)
                    if start >= stop:
                        continue
                    at = placement.position(start)
                    self._add(name, use_muon[index], saved, slice(at, at + stop - start))
                    if whole is not None:
                        self.values[name]["momentum_buffer"], whole = [whole[:numel]], whole[numel:]
                        self.is_muon[name] = True

    def _add_stage0(self, outer: Mapping[str, Any], module: Mapping[str, Tensor]) -> None:
        """Add the parameters of stage 0, of which only this package saves the names."""
        base, names = outer.get("optimizer_state_dict", outer), [group.get(NAMES, ()) for group in self.groups]
        if [*map(len, names)] != [len(group["params"]) for group in self.groups]:
            raise ImportStateError(
                "the optimizer states of this stage-0 checkpoint have no parameter names, because another optimizer or "
                "an older version saved it; load it with the optimizer that saved it, or load only its weights"
            )
        masters = outer.get("fp32_groups") or [[module[name] for name in group] for group in names]
        indices = (index for group in self.groups for index in group["params"])
        for name, index, weight in zip(chain(*names), indices, chain(*masters), strict=True):
            entry = base["state"].get(index, {}) | {WEIGHT: weight.detach().float()}
            self._add(name, False, {key: value.reshape(-1) for key, value in entry.items()})


def _by_rank(files: Iterator[Path]) -> list[Path]:
    return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])


# ---- match --------------------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """What becomes of parameters in an import.

    ``actions``: parameter name -> key of :data:`ENDS`, what becomes of its state.
    ``outcomes``: text for the log, such as "as saved" -> names of the parameters that it describes.
    """

    actions: dict[str, str]
    outcomes: dict[str, list[str]]


def match(optimizer: MuonWithAuxAdam, states: States, is_changed: bool = False) -> Match:
    """Decide what becomes of the optimizer's parameters; nothing is written yet.

    ``is_changed``: whether the model may have changed. Then state that is missing, or of Muon where AdamW updates now,
    starts at zero, and a parameter that AdamW updates in both runs may have another number of rows.

    Raises:
        ImportStateError: a parameter has no state, another optimizer or another shape, and nothing says what to do.
    """
    # If the other run used Muon, what it left to AdamW probably belongs there, unless the config says otherwise.
    config = optimizer.config
    has_choice = is_changed or "import_momentum" in config.model_fields_set or not any(states.is_muon.values())
    momentum = config.import_momentum if has_choice else None
    actions: dict[str, str] = {}
    outcomes: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for spec in optimizer.specs.values():
        was_muon, old, new = states.is_muon.get(spec.name), states.shapes.get(spec.name, spec.shape), spec.shape
        action: str | None = "zero" if is_changed else None
        if old != new and (was_muon or spec.use_muon or len(old) != len(new) or old[1:] != new[1:]):
            action, text = None, f"shape {list(old)} in the other run and {list(new)} in the model"
        elif was_muon is None:
            text = "without state in the other run" if spec.name in states.shapes else "not in the other run"
        elif was_muon is spec.use_muon:
            rows = f"{old[0]} rows became {new[0]}, the rows that both have " if old != new else ""
            action, text = "kept", f"{rows}as saved"
        elif spec.use_muon:
            action, text = momentum, "moved from AdamW to Muon"
        else:
            action, text = "zero" if momentum == "zero" else action, "moved from Muon to AdamW"
        if action:
            actions[spec.name] = action
        (outcomes if action else refused)[text + ENDS.get(action or "", "")].append(spec.name)
    if refused:
        cure = (
            ". Assign parameters as in the other run, with muon_include and muon_exclude, or start the state of those "
            'that changed at zero: "import_momentum": "zero"'
        )
        texts = [f"{text}: {listed(names, MAX_LISTED)}" for text, names in list(refused.items())[:4]]
        raise ImportStateError(f"cannot import {states.title}: {'; '.join(texts)}{'' if is_changed else cure}")
    return Match(actions, outcomes)


def log_outcomes(what: str, outcomes: Mapping[str, Sequence[str]]) -> None:
    """Log ``what`` was imported, and what became of how many parameters."""
    lines = [f"  {len(names)}: {text} ({listed(names, MAX_LISTED)})" for text, names in outcomes.items()]
    logger.info("deepspeed-muon: %s. Parameters:\n%s", what, "\n".join(lines))


# ---- write, to an engine ------------------------------------------------------------------------------------------


@torch.no_grad()
def write(adapter: Any, states: States, actions: Mapping[str, str]) -> None:
    """Write weights, and states as ``actions`` says (:class:`Match`; if it is empty, none), on this rank.

    Afterwards the weights must be copied into the model; see :meth:`Adapter.publish_weights`.
    """
    optimizer = adapter.optimizer
    for partition in adapter.resident_partitions():
        if actions:
            _write_steps(optimizer, partition, states, actions)
        for shard, start, stop, position in partition.pieces():
            name, tensor = shard.spec.name, partition.tensors[shard.tensor]
            values = states.read(name, WEIGHT).reshape(-1)[start:stop]
            tensor.view(-1)[position : position + values.numel()] = values
            for key in KEYS[shard.spec.use_muon] if actions else ():
                values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
                if actions[name] != "zero":
                    saved = states.read(name, "exp_avg" if actions[name] == "first_moment" else key)
                    saved = saved.reshape(-1)[start:stop]
                    values[: saved.numel()] = saved  # rows that are new stay zero
                optimizer.write_state(tensor, key, values, position)


def _write_steps(optimizer: MuonWithAuxAdam, partition: Partition, states: States, actions: Mapping[str, str]) -> None:
    """Write step counts. Under ZeRO a tensor contains several parameters, and has the largest count of theirs.

    An AdamW group also stores how many fewer steps each parameter has taken.
    """
    # Moments at zero count from 0, so that their bias correction starts again.
    names = {shard.spec.name: shard.tensor for shard in partition.shards}
    taken = {name: 0.0 if actions[name] == "zero" else states.step(name) for name in names}
    largest: dict[int, float] = {}
    for name, index in names.items():
        largest[index] = max(taken[name], largest.get(index, 0.0))
    for index, count in largest.items():
        optimizer.state[partition.tensors[index]]["step"].fill_(count)
    group = optimizer.param_groups[partition.index]
    if not group["use_muon"]:
        missed = group.pop(STARTED, {}) | {name: int(largest[index] - taken[name]) for name, index in names.items()}
        if missed := {name: count for name, count in missed.items() if count}:
            group[STARTED] = missed


def load_by_name(
    engine: Any, arguments: Mapping[str, Any], load_states: bool, load_schedule: bool
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint by parameter names, in place of DeepSpeed; return (path, client_state). A collective.

    ``arguments``: {name of an argument of ``load_checkpoint``: value}. ``load_states``: whether to load optimizer
    states. ``load_schedule``: whether to load the state of the learning-rate schedule.

    Raises:
        CheckpointError: on all ranks, before the engine changes, if the checkpoint cannot be read or matched.
    """
    refuse_load_by_name(engine)
    folder, adapter, optimizer = (
        Path(arguments["load_dir"], arguments["tag"]),
        engine.muon_adapter,
        engine.basic_optimizer,
    )

    def read() -> tuple[SavedFiles, Match]:
        saved = SavedFiles(folder)
        if load_schedule:
            _check_schedule(engine.lr_scheduler, saved.model.get("lr_scheduler"))
        return saved, match(optimizer, saved, is_changed=True)

    saved, (actions, outcomes) = raise_on_all_ranks(
        read, lambda why: CheckpointError(f"{folder} cannot be matched: {why}")
    )
    write(adapter, saved, actions if load_states else {})
    adapter.publish_weights()
    if load_states and saved.is_ours:
        optimizer.owner_state.load(saved.groups, optimizer.context.is_logging)
        optimizer.after_load()
    outcomes |= _write_untrained(engine, saved)
    client_state = _load_counters(engine, arguments, saved.model, load_schedule)
    if engine.global_rank == 0:
        settings = "with the learning rates and other settings of this run's config"
        log_outcomes(f"{folder} was loaded by parameter names, {settings}", outcomes)
    return str(saved.files[0]), client_state


def _check_schedule(schedule: Any, saved: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if the learning-rate schedule was not saved, or has another number of groups."""
    if saved is None:
        raise CheckpointError("the checkpoint has no learning-rate schedule; pass load_lr_scheduler_states=False")
    old, new = len(saved.get("base_lrs", ())), len(getattr(schedule, "base_lrs", ()))
    if old and new and old != new:  # torch's schedulers save a rate per group
        raise CheckpointError(
            f"the checkpoint has a learning-rate schedule of {old} parameter groups, this run has {new}; pass "
            "load_lr_scheduler_states=False"
        )


def _load_counters(
    engine: Any, arguments: Mapping[str, Any], model: Mapping[str, Any], load_schedule: bool
) -> dict[str, Any]:
    """Load what DeepSpeed keeps in the model's file, except weights; return the script's ``client_state``."""
    left_out = {"module"} if arguments["load_module_only"] else set(COUNTED)
    left_out |= {kind for kind in ("lr_scheduler", "optimizer") if arguments[f"load_{kind}_states"]}
    if load_schedule:
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
    if not arguments["load_module_only"]:
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and model.get("random_ltd"):
            engine.random_ltd_scheduler.load_state_dict(model["random_ltd"])
        if engine.curriculum_learning_enabled() and engine.training_dataloader and model.get("data_sampler"):
            engine.training_dataloader.data_sampler.load_state_dict(model["data_sampler"])
        engine.global_steps, engine.skipped_steps = model["global_steps"], model["skipped_steps"]
        engine.global_samples = model.get("global_samples", engine.global_steps * engine.train_batch_size())
    return {key: value for key, value in model.items() if key not in left_out}


@torch.no_grad()
def _write_untrained(engine: Any, saved: SavedFiles) -> dict[str, list[str]]:
    """Copy the checkpoint's frozen parameters and buffers into the model; a collective at stage 3.

    Return {text for the log: names} of parameters that are not trained.
    """
    from deepspeed.runtime.zero import GatheredParameters

    outcomes: dict[str, list[str]] = defaultdict(list)
    trained = {spec.name for spec in engine.basic_optimizer.specs.values()}
    params, buffers = dict(engine.module.named_parameters()), dict(engine.module.named_buffers())
    for name, value in (params | buffers).items():
        shape = tuple(getattr(value, "ds_shape", value.shape))
        is_known = saved.shapes.get(name) == shape
        if name in params and name not in trained:
            outcomes["frozen, weight as saved" if is_known else "frozen, as the model was built"].append(name)
        if is_known and name not in trained:
            with GatheredParameters([value] if name in params else [], modifier_rank=0):
                if value.numel():
                    value.copy_(saved.read(name, WEIGHT).reshape(shape))
    if gone := sorted(saved.shapes.keys() - params.keys() - buffers.keys()):
        outcomes["dropped, not in this model"] = gone
    return outcomes


# ---- write, to a universal checkpoint -----------------------------------------------------------------------------


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
    if absent := saved.without_state:
        raise ImportStateError(
            f"{source} has no optimizer state of {', '.join(absent[:8])}; load only its weights (with "
            "save_muon_momentum_buffer_in_memory, stock's Muon does not save the momentum)"
        )
    for name, is_muon in saved.is_muon.items():
        folder = target / "zero" / name
        folder.mkdir(parents=True)
        for key in (WEIGHT, *KEYS[is_muon]):
            value = saved.read(name, key).view(saved.shapes[name])
            torch.save({"param": value.clone()}, folder / f"{MOMENTUM if key == 'momentum_buffer' else key}.pt")
        torch.save(saved.step(name), folder / "step.pt")
    matrices = sorted(name for name, is_muon in saved.is_muon.items() if is_muon)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved.groups]
    groups = [group | ({"matrices": matrices} if group["use_muon"] else {}) for group in groups]
    torch.save({"param_groups": groups, ORIGIN: saved.saved_by}, target / "zero" / "optimizer_state.pt")
    shutil.copy2(saved.files[0], target)
    (target.parent / "latest_universal").write_text(target.name)
    facts = {"stage": saved.stage, "matrices": len(matrices), "adamw": len(saved.is_muon) - len(matrices)}
    return {"from": str(source), "to": str(target), **facts, "loss_scale": saved.loss_scale}
