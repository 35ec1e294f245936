# SPDX-License-Identifier: Apache-2.0
"""Load weights and optimizer states of another run by parameter name: read its files, match parameters, write.

``"checkpoint": {"muon_changed_model": "match"}`` in the ds_config allows loading a checkpoint of a run whose model,
parameter groups, ZeRO stage or number of ranks were different. ``ds_muon import`` converts a checkpoint of stock
DeepSpeed's Muon to a universal checkpoint.

This package, DeepSpeed's AdamW and stock DeepSpeed's Muon save the same kinds of files. Only the momentum of stock
DeepSpeed's Muon is stored differently. The file of a rank contains:

=====================================  ===========================================================================
stage 3; stages 1 and 2 with offload,  the rank's part of the momentum, laid out like its fp32 weights
``BF16_Optimizer``
stages 1 and 2                         the whole momentum of each matrix that the rank holds a part of, concatenated
=====================================  ===========================================================================

Under fp16 without offload this momentum is multiplied by the loss scale; :meth:`SavedFiles.read` divides by it.
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
from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import NAMES, read_mapped, saved_groups
from deepspeed.muon.zero.refusals import refuse_load_by_name
from deepspeed.muon.zero.wrappers import stage3, stage12

#: Key of a parameter's fp32 weight, and of Muon's momentum in the files of deepspeed-muon.
WEIGHT, MOMENTUM = "fp32", "exp_avg"
#: Whether Muon updates a parameter -> the keys of its state.
KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}
#: What happens to a parameter's state -> the end of its text in the log.
ENDS = {"kept": "", "zero": ", state at zero", "first_moment": ", momentum from the first moment"}
TO_MUON = "moved from AdamW to Muon"
#: What a user can do about parameters that cannot be imported: if another optimizer updates them, or the model differs.
SAME_ROUTING = (
    "Assign parameters as in the other run, with muon_include and muon_exclude, or start the state of those that moved "
    'at zero: "import_momentum": "zero"'
)
SAME_MODEL = "Load it into the model that was saved"
#: Key in a universal checkpoint's ``optimizer_state.pt``: the optimizer whose checkpoint ``ds_muon import`` converted.
ORIGIN = "deepspeed_muon_origin"
#: Keys of a model file that DeepSpeed does not count among the script's ``client_state``.
COUNTED = {"module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
MAX_LISTED = 8


# ---- read -------------------------------------------------------------------------------------------------------


class States(Protocol):
    """The interface of objects that read another run's weights and optimizer states by parameter name."""

    #: What messages call it, such as "a checkpoint of AdamW".
    title: str
    #: Parameter or buffer -> its shape; empty if the reader checks shapes itself.
    shapes: dict[str, tuple[int, ...]]
    #: Parameter with saved states -> whether Muon updated it; otherwise AdamW did.
    is_muon: dict[str, bool]

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or state ``key``; an empty tensor if it was not saved."""

    def step(self, name: str) -> float:
        """Return how many optimizer steps the parameter ``name`` had taken when it was saved."""


class SavedFiles:
    """:class:`States` that are read from the folder of one tag, as DeepSpeed saves it at any ZeRO stage.

    Attributes:
        saved_parts: {parameter name: {key: parts to concatenate, in rank order}}. The key is "fp32" for the weight, or
            that of a state, such as "exp_avg" or "momentum_buffer".
        model_state: the contents of the first model file.
        groups: the saved parameter groups.
        saved_by: "deepspeed-muon", "stock's Muon" (stock DeepSpeed's) or "AdamW".
        stage: ZeRO stage of the saved run.
        loss_scale: number by which the momentum in the files is multiplied; usually 1.
    """

    def __init__(self, folder: Path) -> None:
        self.files = _by_rank(folder.glob("*mp_rank_00_model_states.pt"))
        if not self.files:
            raise ImportStateError(f"{folder} has no mp_rank_00_model_states.pt; name the folder of one tag")
        models = [read_mapped(file) for file in self.files]
        files = _by_rank(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))
        zero_states = [read_mapped(file)["optimizer_state_dict"] for file in files]
        self.model_state: dict[str, Any] = models[0]
        outer = zero_states[0] if zero_states else self.model_state["optimizer"] or {"param_groups": []}
        self.groups, self.stage = saved_groups(outer), int(zero_states[0].get("zero_stage", 1)) if zero_states else 0
        self.is_ours = any("matrices" in group for group in self.groups)
        is_stocks = not self.is_ours and any("use_muon" in group for group in self.groups)
        self.saved_by = "deepspeed-muon" if self.is_ours else "stock's Muon" if is_stocks else "AdamW"
        self.title, self.loss_scale = f"a checkpoint of {self.saved_by}", 1.0
        self.saved_parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.is_muon: dict[str, bool] = {}
        self._steps_taken: dict[str, float] = {}
        self._matrices = {name for group in self.groups for name in group.get("matrices", ())}
        module_state = {
            name: value for name, value in (self.model_state["module"] or {}).items() if isinstance(value, Tensor)
        }
        self.shapes = {name: tuple(value.shape) for name, value in module_state.items()}
        frozen = self.model_state.get(constants.FROZEN_PARAM_SHAPES) or {}
        for shapes in (*(self.model_state[constants.PARAM_SHAPES] or ()), frozen):
            self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
        if zero_states:
            self._add_zero(zero_states)
        else:
            self._add_stage0(outer, module_state)
        #: Names of trained parameters without states.
        self.without_state = [name for name in self.saved_parts if name not in self.is_muon]
        for name in self.shapes.keys() - self.saved_parts.keys():  # frozen parameters and buffers
            fragments = [(model.get(constants.FROZEN_PARAM_FRAGMENTS) or {}).get(name) for model in models]
            is_whole = name in module_state and tuple(module_state[name].shape) == self.shapes[name]
            self.saved_parts[name][WEIGHT] = (
                [module_state[name]] if is_whole else [part for part in fragments if part is not None]
            )

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or state ``key``, 1-D; an empty tensor if it was not saved."""
        parts = [part.reshape(-1) for part in self.saved_parts.get(name, {}).get(key, ())]
        if not parts:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        value = torch.cat(parts)[: math.prod(self.shapes[name])]  # a frozen parameter's last part may be padded
        is_scaled = key == "momentum_buffer" and self.loss_scale != 1.0
        return value.float() / self.loss_scale if is_scaled else value

    def step(self, name: str) -> float:
        """Return how many optimizer steps the parameter ``name`` had taken when it was saved."""
        missed = next((group[STARTED][name] for group in self.groups if name in group.get(STARTED, {})), 0)
        # Stock's Muon counts no steps of its own; those of another parameter, or the engine's, are the same.
        engines = float(self.model_state["global_steps"] - self.model_state["skipped_steps"])
        return self._steps_taken.get(name, next(iter(self._steps_taken.values()), engines)) - missed

    def _add(self, name: str, use_muon: bool, flat_states: Mapping[str, Tensor], part: slice = slice(None)) -> None:
        """Append one rank's part of a parameter's weight and states to ``saved_parts``.

        ``flat_states``: {"fp32" or key of a state: the rank's flat tensor}. ``part``: the slice of these tensors that
        belongs to the parameter. ``use_muon``: whether Muon updated the parameter; ignored for files that
        deepspeed-muon saved, because they list Muon's parameters.
        """
        use_muon = name in self._matrices if self.is_ours else use_muon
        for key in (WEIGHT, *KEYS[use_muon]):
            file_key = MOMENTUM if self.is_ours and use_muon and key != WEIGHT else key
            if file_key in flat_states:
                self.saved_parts[name][key].append(flat_states[file_key][part])
                if key != WEIGHT:
                    self.is_muon[name] = use_muon
        if "step" in flat_states:
            self._steps_taken.setdefault(name, float(flat_states["step"]))

    def _add_zero(self, zero_states: list[dict[str, Any]]) -> None:
        """Add the weights and optimizer states of a checkpoint of ZeRO stages 1 to 3 to ``saved_parts``.

        ``zero_states``: the saved state of the ZeRO wrapper on each rank.
        """
        section = (self.model_state.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
        is_whole = False
        if self.saved_by == "stock's Muon" and section.get("device", "none") == "none":
            self.loss_scale = float(getattr(zero_states[0].get("loss_scaler"), "cur_scale", 1.0))
            is_whole = self.stage < 3 and "zero_stage" in zero_states[0]
        weights = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        use_muon = {index: bool(group.get("use_muon")) for group in self.groups for index in group["params"]}
        for rank, state in enumerate(zero_states):
            states = (state.get("base_optimizer_state") or state["optimizer_state_dict"])["state"]
            for index, shapes in enumerate(self.model_state[constants.PARAM_SHAPES]):
                saved = {WEIGHT: state[weights][index], **states.get(index, {})}
                whole = saved.pop("momentum_buffer", None) if is_whole else None
                numels = [math.prod(shape) for shape in shapes.values()]
                if self.stage == 3:
                    placements = stage3.placements(stage3.part_size(numel, len(zero_states)) for numel in numels)
                else:
                    paddings = state.get("param_alignment_paddings", {index: [0] * len(numels)})[index]
                    # The padding at the end of a group is not saved. If it shortens rank 0's part, others hold nothing.
                    span = zero_states[0][weights][index].numel()
                    placements = stage12.placements(map(sum, zip(numels, paddings, strict=True)), span)
                for name, numel, placement in zip(shapes, numels, placements, strict=True):
                    start, stop = placement.held_range(rank, 0, numel)
                    if start >= stop:
                        continue
                    at = placement.position(start)
                    self._add(name, use_muon[index], saved, slice(at, at + stop - start))
                    if whole is not None:
                        self.saved_parts[name]["momentum_buffer"], whole = [whole[:numel]], whole[numel:]
                        self.is_muon[name] = True

    def _add_stage0(self, outer: Mapping[str, Any], module_state: Mapping[str, Tensor]) -> None:
        """Add the weights and optimizer states of a stage-0 checkpoint to ``saved_parts``.

        ``outer``: the saved state of the optimizer or of its wrapper. ``module_state``: {name: tensor} of the model.
        Raise ImportStateError if the parameter groups lack parameter names, which only deepspeed-muon saves at stage 0.
        """
        base, names = outer.get("optimizer_state_dict", outer), [group.get(NAMES, ()) for group in self.groups]
        if [*map(len, names)] != [len(group["params"]) for group in self.groups]:
            raise ImportStateError(
                "the optimizer states of this stage-0 checkpoint have no parameter names, because another optimizer or "
                "an older version saved it; load it with the optimizer that saved it, or load only its weights"
            )
        masters = outer.get("fp32_groups") or [[module_state[name] for name in group] for group in names]
        indices = (index for group in self.groups for index in group["params"])
        for name, index, weight in zip(chain(*names), indices, chain(*masters), strict=True):
            entry = base["state"].get(index, {}) | {WEIGHT: weight.detach().float()}
            self._add(name, False, {key: value.reshape(-1) for key, value in entry.items()})


def _by_rank(files: Iterator[Path]) -> list[Path]:
    """Return the files of one checkpoint folder, sorted by the rank numbers in their names."""
    return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])


# ---- match --------------------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """What happens to each parameter when weights and optimizer states of another run are loaded.

    ``actions``: {parameter name: where its state comes from}. "kept": from the same state of the other run. "zero": it
    starts at zero. "first_moment": Muon's momentum starts as AdamW's first moment.
    ``outcomes``: {text for the log, such as "as saved": names of the parameters that it describes}.
    """

    actions: dict[str, str]
    outcomes: dict[str, list[str]]


def match(optimizer: MuonWithAuxAdam, other_run: States, is_changed: bool = False) -> Match:
    """Return what happens to each parameter of ``optimizer`` when ``other_run`` is loaded; write nothing.

    ``is_changed``: whether the model may differ from the other run's. Then a parameter's state starts at zero if the
    other run did not save it, or if Muon updated the parameter there and AdamW does here. A parameter that AdamW
    updates in both runs may have another number of rows, such as an embedding with new tokens.

    Raises:
        ImportStateError: the shape of a parameter does not fit. Without ``is_changed`` also: a parameter has no saved
            state, or it moved between AdamW and Muon and ``import_momentum`` does not say how its state starts.
    """
    # If the other run used Muon, what it left to AdamW probably belongs there, unless the config says otherwise.
    config = optimizer.config
    has_choice = is_changed or "import_momentum" in config.model_fields_set or not any(other_run.is_muon.values())
    momentum = config.import_momentum if has_choice else None
    actions: dict[str, str] = {}
    outcomes: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    cures = set[str]()
    for spec in optimizer.specs.values():
        was_muon, old, new = other_run.is_muon.get(spec.name), other_run.shapes.get(spec.name, spec.shape), spec.shape
        action: str | None = "zero" if is_changed else None
        if old != new and (was_muon or spec.use_muon or len(old) != len(new) or old[1:] != new[1:]):
            action, text = None, f"shape {list(old)} in the other run and {list(new)} in the model"
        elif was_muon is None:
            text = "without state in the other run" if spec.name in other_run.shapes else "not in the other run"
        elif was_muon is spec.use_muon:
            rows = f"{old[0]} rows became {new[0]}, the rows that both have " if old != new else ""
            action, text = "kept", f"{rows}as saved"
        elif spec.use_muon:
            action, text = momentum, TO_MUON
        else:
            action, text = "zero" if momentum == "zero" else action, "moved from Muon to AdamW"
        if action:
            actions[spec.name] = action
        else:
            cures.add(SAME_MODEL if was_muon is None or old != new else SAME_ROUTING)
        (outcomes if action else refused)[text + ENDS.get(action or "", "")].append(spec.name)
    if refused:
        texts = [f"{text}: {listed(names, MAX_LISTED)}" for text, names in list(refused.items())[:4]]
        advice = "" if is_changed else "".join(f". {cure}" for cure in sorted(cures))
        raise ImportStateError(f"cannot import {other_run.title}: {'; '.join(texts)}{advice}")
    return Match(actions, outcomes)


def log_outcomes(what: str, outcomes: Mapping[str, Sequence[str]]) -> None:
    """Log ``what``, a phrase such as "imported the optimizer states of AdamW", and a line for each outcome.

    ``outcomes``: {text such as "as saved": names of the parameters that it describes}, from :class:`Match`.
    """
    lines = [f"  {len(names)}: {text} ({listed(names, MAX_LISTED)})" for text, names in outcomes.items()]
    if any(text.startswith(TO_MUON) for text in outcomes):
        lines.append(
            "  Muon usually does best at 3 to 10 times AdamW's learning rate; at AdamW's the loss may get worse"
        )
    logger.info("deepspeed-muon: %s. Parameters:\n%s", what, "\n".join(lines))


# ---- write, to an engine ------------------------------------------------------------------------------------------


@torch.no_grad()
def write(adapter: Any, other_run: States, actions: Mapping[str, str]) -> None:
    """Write the weights and states of ``other_run`` into this rank's fp32 weights and optimizer states.

    ``adapter``: the engine's :class:`Adapter`. ``actions``: {parameter name: where its state comes from}, as in
    :class:`Match`; if empty, only weights are written. Then call :meth:`Adapter.publish_weights`, which copies the
    weights into the model.
    """
    optimizer = adapter.optimizer
    for partition in adapter.resident_partitions():
        if actions:
            _write_steps(optimizer, partition, other_run, actions)
        for shard, start, stop, position in partition.pieces():
            name, tensor = shard.spec.name, partition.tensors[shard.tensor]
            values = other_run.read(name, WEIGHT).reshape(-1)[start:stop]
            tensor.view(-1)[position : position + values.numel()] = values
            for key in KEYS[shard.spec.use_muon] if actions else ():
                values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
                if actions[name] != "zero":
                    saved = other_run.read(name, "exp_avg" if actions[name] == "first_moment" else key)
                    saved = saved.reshape(-1)[start:stop]
                    values[: saved.numel()] = saved  # rows that are new stay zero
                optimizer.write_state(tensor, key, values, position)


def _write_steps(
    optimizer: MuonWithAuxAdam, partition: Partition, other_run: States, actions: Mapping[str, str]
) -> None:
    """Set the step count of each of a partition's tensors to the largest count of the parameters in it.

    An AdamW group also stores, for each parameter with a smaller count, how much smaller it is. ``actions``: as in
    :class:`Match`; a parameter with "zero" counts from 0.
    """
    # Moments at zero count from 0, so that their bias correction starts again.
    tensor_of = {shard.spec.name: shard.tensor for shard in partition.shards}
    taken = {name: 0.0 if actions[name] == "zero" else other_run.step(name) for name in tensor_of}
    most_steps: dict[int, float] = {}
    for name, index in tensor_of.items():
        most_steps[index] = max(taken[name], most_steps.get(index, 0.0))
    for index, count in most_steps.items():
        optimizer.state[partition.tensors[index]]["step"].fill_(count)
    group = optimizer.param_groups[partition.index]
    if not group["use_muon"]:
        missed = group.pop(STARTED, {}) | {
            name: int(most_steps[index] - taken[name]) for name, index in tensor_of.items()
        }
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
        saved_files = SavedFiles(folder)
        if load_schedule:
            _check_schedule(engine.lr_scheduler, saved_files.model_state.get("lr_scheduler"))
        return saved_files, match(optimizer, saved_files, is_changed=True)

    saved_files, (actions, outcomes) = raise_on_all_ranks(
        read, lambda why: CheckpointError(f"{folder} cannot be matched: {why}")
    )
    write(adapter, saved_files, actions if load_states else {})
    adapter.publish_weights()
    if load_states and saved_files.is_ours:
        optimizer.owner_state.load(saved_files.groups, optimizer.context.is_logging)
        optimizer.after_load()
    outcomes |= _write_untrained(engine, saved_files)
    client_state = _load_counters(engine, arguments, saved_files.model_state, load_schedule)
    if engine.global_rank == 0:
        settings = "with the learning rates and other settings of this run's config"
        log_outcomes(f"{folder} was loaded by parameter names, {settings}", outcomes)
    return str(saved_files.files[0]), client_state


def _check_schedule(schedule: Any, saved: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if ``saved`` does not fit ``schedule``, this run's learning-rate schedule.

    ``saved``: the schedule's state in the checkpoint. It does not fit if it is ``None``, or is for another number of
    parameter groups.
    """
    if saved is None:
        raise CheckpointError("the checkpoint has no learning-rate schedule; pass load_lr_scheduler_states=False")
    old, new = len(saved.get("base_lrs", ())), len(getattr(schedule, "base_lrs", ()))
    if old and new and old != new:  # torch's schedulers save a rate per group
        raise CheckpointError(
            f"the checkpoint has a learning-rate schedule of {old} parameter groups, this run has {new}; pass "
            "load_lr_scheduler_states=False"
        )


def _load_counters(
    engine: Any, arguments: Mapping[str, Any], model_state: Mapping[str, Any], load_schedule: bool
) -> dict[str, Any]:
    """Load step counts and the states of schedules and data samplers from ``model_state``, a model file's contents.

    Return the script's ``client_state``. ``arguments``: {name of an argument of ``load_checkpoint``: value}.
    ``load_schedule``: whether to load the state of the learning-rate schedule.
    """
    left_out = {"module"} if arguments["load_module_only"] else set(COUNTED)
    left_out |= {kind for kind in ("lr_scheduler", "optimizer") if arguments[f"load_{kind}_states"]}
    if load_schedule:
        engine.lr_scheduler.load_state_dict(model_state["lr_scheduler"])
    if not arguments["load_module_only"]:
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and model_state.get("random_ltd"):
            engine.random_ltd_scheduler.load_state_dict(model_state["random_ltd"])
        if engine.curriculum_learning_enabled() and engine.training_dataloader and model_state.get("data_sampler"):
            engine.training_dataloader.data_sampler.load_state_dict(model_state["data_sampler"])
        engine.global_steps, engine.skipped_steps = model_state["global_steps"], model_state["skipped_steps"]
        engine.global_samples = model_state.get("global_samples", engine.global_steps * engine.train_batch_size())
    return {key: value for key, value in model_state.items() if key not in left_out}


@torch.no_grad()
def _write_untrained(engine: Any, saved_files: SavedFiles) -> dict[str, list[str]]:
    """Copy the checkpoint's frozen parameters and buffers into the model; a collective at stage 3.

    Return {text for the log: names}, for frozen parameters and for what the checkpoint has but not this model.
    """
    from deepspeed.runtime.zero import GatheredParameters

    outcomes: dict[str, list[str]] = defaultdict(list)
    trained = {spec.name for spec in engine.basic_optimizer.specs.values()}
    params, buffers = dict(engine.module.named_parameters()), dict(engine.module.named_buffers())
    for name, value in (params | buffers).items():
        shape = tuple(getattr(value, "ds_shape", value.shape))
        is_known = saved_files.shapes.get(name) == shape
        if name in params and name not in trained:
            outcomes["frozen, weight as saved" if is_known else "frozen, as the model was built"].append(name)
        if is_known and name not in trained:
            with GatheredParameters([value] if name in params else [], modifier_rank=0):
                if value.numel():
                    value.copy_(saved_files.read(name, WEIGHT).reshape(shape))
    if gone := sorted(saved_files.shapes.keys() - params.keys() - buffers.keys()):
        outcomes["dropped, not in this model"] = gone
    return outcomes


# ---- write, to a universal checkpoint -----------------------------------------------------------------------------


def import_stocks_muon(stock_folder: Path, universal_folder: Path) -> dict[str, Any]:
    """Convert a checkpoint of stock DeepSpeed's Muon, in the folder of one tag, to a universal checkpoint.

    Return a dict: "from" and "to" (the paths), "stage" (of ZeRO), "matrices" and "adamw" (how many parameters Muon and
    AdamW update) and "loss_scale" (by which the momentum was divided).

    Raises:
        ImportStateError: ``universal_folder`` exists, another optimizer saved ``stock_folder``, or states are
            missing. Nothing is written then.
    """
    if universal_folder.exists():
        raise ImportStateError(f"{universal_folder} exists already; name a new folder")
    saved_files = SavedFiles(stock_folder)
    if saved_files.saved_by != "stock's Muon":
        raise ImportStateError(
            f"{stock_folder} is not a checkpoint of stock DeepSpeed's Muon; convert checkpoints of AdamW and of "
            "deepspeed-muon with python -m deepspeed.checkpoint.ds_to_universal (AdamW's with --inject_missing_state)"
        )
    if absent := saved_files.without_state:
        raise ImportStateError(
            f"{stock_folder} has no optimizer state of {', '.join(absent[:8])}; load only its weights. Stock's Muon "
            "does not save the momentum if save_muon_momentum_buffer_in_memory is set"
        )
    for name, is_muon in saved_files.is_muon.items():
        folder = universal_folder / "zero" / name
        folder.mkdir(parents=True)
        for key in (WEIGHT, *KEYS[is_muon]):
            value = saved_files.read(name, key).view(saved_files.shapes[name])
            torch.save({"param": value.clone()}, folder / f"{MOMENTUM if key == 'momentum_buffer' else key}.pt")
        torch.save(saved_files.step(name), folder / "step.pt")
    matrices = sorted(name for name, is_muon in saved_files.is_muon.items() if is_muon)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in saved_files.groups]
    groups = [group | ({"matrices": matrices} if group["use_muon"] else {}) for group in groups]
    torch.save({"param_groups": groups, ORIGIN: saved_files.saved_by}, universal_folder / "zero" / "optimizer_state.pt")
    shutil.copy2(saved_files.files[0], universal_folder)
    (universal_folder.parent / "latest_universal").write_text(universal_folder.name)
    facts = {"stage": saved_files.stage, "matrices": len(matrices), "adamw": len(saved_files.is_muon) - len(matrices)}
    return {"from": str(stock_folder), "to": str(universal_folder), **facts, "loss_scale": saved_files.loss_scale}
