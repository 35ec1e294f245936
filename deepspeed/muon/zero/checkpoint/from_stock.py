# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint of stock DeepSpeed's Muon to a universal one, without a GPU or a running job.

Stock's converter fails on stock's own Muon (it looks for ``exp_avg``), whose momentum is saved differently by stage:

=====================================  ===========================================================================
stage 3; stages 1 and 2 with offload,  each rank's share, laid out like its fp32 weights
``BF16_Optimizer``
stages 1 and 2                         each matrix of which the rank has a part, whole, one after the other
stage 0                                one tensor per parameter, in the order of the groups
=====================================  ===========================================================================

The momentum is always an exponential average of gradients, in fp32 or bf16. Under fp16 without offload these gradients
are still multiplied by the loss scale, so the conversion divides by it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import ImportStateError
from deepspeed.muon.state_import import KEYS
from deepspeed.muon.zero.checkpoint.engine import read_mapped
from deepspeed.muon.zero.checkpoint.universal import MOMENTUM, ORIGIN, WEIGHT

#: Stock's Muon updates a parameter with AdamW if its name contains one of these.
ADAMW_NAMES = ("embed", "lm_head")
MODEL_FILE = "mp_rank_00_model_states.pt"


def convert(source: Path, target: Path) -> dict[str, Any]:
    """Convert ``source``, one tag's folder saved by stock DeepSpeed's Muon, to the universal checkpoint ``target``.

    Return a dict: "from" and "to" (the paths), "stage" (of ZeRO), "matrices" and "adamw" (how many parameters Muon and
    AdamW update) and "loss_scale" (by which the momentum was divided).

    Raises:
        ImportStateError: ``target`` exists, stock's Muon did not save ``source``, or states are missing. Nothing is
            written then.
    """
    if target.exists():
        raise ImportStateError(f"{target} exists already; name a new folder")
    saved = read(source)
    work = target.with_name(f".{target.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        for name, states in saved.whole():
            folder = work / "zero" / name
            folder.mkdir(parents=True)
            for key, value in states.items():
                file = folder / f"{MOMENTUM if key == 'momentum_buffer' else key}.pt"
                torch.save({"param": value.clone()} if isinstance(value, Tensor) else value, file)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in saved.groups]
        groups = [group | ({"matrices": sorted(saved.matrices)} if group["use_muon"] else {}) for group in groups]
        torch.save({"param_groups": groups, ORIGIN: "stock's Muon"}, work / "zero" / "optimizer_state.pt")
        shutil.copy2(saved.model_file, work)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    (target.parent / "latest_universal").write_text(target.name)
    rest = len(saved.shapes) - len(saved.matrices)
    facts = {"stage": saved.stage, "matrices": len(saved.matrices), "adamw": rest, "loss_scale": saved.loss_scale}
    return {"from": str(source), "to": str(target), **facts}


class Saved:
    """A checkpoint of stock's Muon: parameter groups, and the shape, weight and optimizer states of each parameter."""

    def __init__(self, folder: Path, name: str, stage: int) -> None:
        self.model_file, self.stage = folder / name, stage
        if not self.model_file.is_file():
            raise ImportStateError(f"{folder} has no {name}; name the folder of one tag, not the one above it")
        self.model = read_mapped(self.model_file)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.groups: list[dict[str, Any]] = []
        self.matrices: set[str] = set()
        #: Parameter name -> key of its weight or state -> the ranks' parts of it, in order.
        self.parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        #: For each group, the elements of one rank's partition.
        self.spans: list[int] = []
        self.loss_scale = 1.0
        self.steps = 0.0

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Set ``self.groups`` to the saved parameter groups; raise ImportStateError unless stock's Muon saved them."""
        flags = [group.get("use_muon") for group in groups]
        if None in flags or any("matrices" in group for group in groups):
            raise ImportStateError(
                f"{self.model_file.parent} is not a checkpoint of stock DeepSpeed's Muon; convert checkpoints of AdamW "
                "and of deepspeed-muon with python -m deepspeed.checkpoint.ds_to_universal (AdamW's with "
                "--inject_missing_state)"
            )
        self.groups = groups

    def take_steps(self, entries: Iterable[dict[str, Any]]) -> None:
        """Set ``self.steps`` to the first value of the key "step" in ``entries``, the states of parameters.

        If none has this key, take the engine's count of steps that were not skipped.
        """
        counts = (float(entry["step"]) for entry in entries if "step" in entry)
        self.steps = next(counts, float(self.model["global_steps"] - self.model["skipped_steps"]))

    def add(self, name: str, use_muon: bool, weight: Tensor, entry: Mapping[str, Tensor], part: Any = ...) -> None:
        """Append one rank's values of the parameter ``name`` to those of the ranks before it.

        ``weight``: the rank's flat weights. ``entry``: {state key: flat state}. ``part``: the slice of these tensors
        that belongs to the parameter.
        """
        if use_muon:
            self.matrices.add(name)
        self.parts[name][WEIGHT].append(weight[part])
        for key in KEYS[use_muon]:
            if key in entry:
                self.parts[name][key].append(entry[key][part])

    def whole(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (parameter name, {"fp32": weight, "step": number, state key: state}), tensors in the parameter's shape.

        Raises:
            ImportStateError: the optimizer state of a parameter is missing.
        """
        absent = [n for n in self.shapes for key in KEYS[n in self.matrices] if key not in self.parts[n]]
        if absent:
            raise ImportStateError(
                f"{self.model_file.parent} has no optimizer state of {', '.join(absent[:8])}; load only its weights "
                "(with save_muon_momentum_buffer_in_memory, stock's Muon does not save the momentum)"
            )
        for name, shape in self.shapes.items():
            states: dict[str, Any] = {"step": self.steps}
            for key in (WEIGHT, *KEYS[name in self.matrices]):
                flat = torch.cat([part.reshape(-1) for part in self.parts[name][key]])[: math.prod(shape)]
                is_scaled = key == "momentum_buffer" and self.loss_scale != 1.0
                states[key] = (flat.float() / self.loss_scale if is_scaled else flat).view(shape)
            yield name, states


def read(folder: Path) -> Saved:
    """Read the checkpoint in ``folder``, the folder of one tag, through memory maps.

    Raises:
        ImportStateError: stock DeepSpeed's Muon did not save it.
    """
    files = list(folder.glob("*zero_pp_rank_*_optim_states.pt"))
    if not files:
        return _read_stage0(folder)
    files.sort(key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])  # by rank
    ranks = [read_mapped(file)["optimizer_state_dict"] for file in files]
    bases = [state.get("base_optimizer_state") or state["optimizer_state_dict"] for state in ranks]
    stage = int(ranks[0].get("zero_stage", 1))
    saved = Saved(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else MODEL_FILE, stage)
    saved.take_groups(bases[0]["param_groups"])
    saved.take_steps(entry for base in bases for entry in base["state"].values())
    saved.shapes = {n: tuple(shape) for group in saved.model["param_shapes"] for n, shape in group.items()}
    # Saved without the padding at the end of a group; if that shortens rank 0's partition, other ranks hold nothing.
    saved.spans = [part.numel() for part in ranks[0].get("single_partition_of_fp32_groups", ())]
    section = (saved.model.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
    is_offloaded = section.get("device", "none") != "none"
    if not is_offloaded:
        saved.loss_scale = float(getattr(ranks[0].get("loss_scaler"), "cur_scale", 1.0))
    for rank, (state, base) in enumerate(zip(ranks, bases, strict=True)):
        if stage == 3:
            _add_stage3(saved, state, base["state"], len(ranks))
        else:
            is_bf16_optimizer = "zero_stage" not in state
            _add_stage12(saved, state, base["state"], rank, is_offloaded or is_bf16_optimizer)
    return saved


def _add_stage12(saved: Saved, state: Mapping[str, Any], states: Mapping[int, Any], rank: int, is_share: bool) -> None:
    """Add one rank's partition of each parameter group to ``saved``, at stage 1 or 2.

    ``state``: the rank's ZeRO state. ``states``: {group index: optimizer state}. ``is_share``: whether the momentum is
    partitioned like the weights; otherwise the rank has the momentum of whole matrices.
    """
    for index, (group, shapes) in enumerate(zip(saved.groups, saved.model["param_shapes"], strict=True)):
        use_muon, entry, span = group["use_muon"], states.get(index, {}), saved.spans[index]
        has_whole = use_muon and not is_share and "momentum_buffer" in entry
        paddings = state.get("param_alignment_paddings", {index: [0] * len(shapes)})[index]
        start, whole_start = -rank * span, 0  # where a parameter begins in the partition, and among the whole matrices
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            low, high = max(start, 0), min(start + math.prod(shape), span)
            start += math.prod(shape) + padding
            if low >= high:
                continue
            weights = state["single_partition_of_fp32_groups"][index]
            saved.add(name, use_muon, weights, {} if has_whole else entry, slice(low, high))
            if has_whole:
                whole_end = whole_start + math.prod(shape)
                saved.parts[name]["momentum_buffer"] = [entry["momentum_buffer"][whole_start:whole_end]]
                whole_start = whole_end


def _add_stage3(saved: Saved, state: Mapping[str, Any], states: Mapping[int, Any], count: int) -> None:
    """Add one rank's part of each parameter to ``saved``, at stage 3 on ``count`` ranks.

    ``state``: the rank's ZeRO state. ``states``: {sub-group index: optimizer state}.
    """
    muon = {i for group in saved.groups if group["use_muon"] for i in group["params"]}
    for index, shapes in enumerate(saved.model["param_shapes"]):
        start, weights = 0, state["fp32_flat_groups"][index]
        for name, shape in shapes.items():
            end = start + -(-math.prod(shape) // count)
            saved.add(name, index in muon, weights, states.get(index, {}), slice(start, end))
            start = end


def _read_stage0(folder: Path) -> Saved:
    """Read a stage-0 checkpoint, whose states have no names: assign them in the order in which stock stores them."""
    saved = Saved(folder, MODEL_FILE, 0)
    outer = saved.model["optimizer"] or {}
    base = outer.get("optimizer_state_dict", outer)
    saved.take_groups(base.get("param_groups", [{}]))
    weights = {name: value for name, value in saved.model["module"].items() if value.is_floating_point()}
    matrices = [name for name in weights if weights[name].ndim >= 2]
    muon = [name for name in matrices if not any(part in name.lower() for part in ADAMW_NAMES)]
    muon.sort(key=lambda name: tuple(weights[name].shape), reverse=True)  # as stock's Muon orders its parameters
    halves = {True: muon, False: [name for name in weights if name not in set(muon)]}
    masters = [master for group in outer.get("fp32_groups", ()) for master in group]
    order = [name for group in saved.groups for name in halves[group["use_muon"]][: len(group["params"])]]
    found = [base["state"].get(index, {}) for group in saved.groups for index in group["params"]]
    shapes = [next(iter(e[k].shape for k in ("momentum_buffer", "exp_avg") if k in e), None) for e in found]
    if len(order) != len(weights) or shapes != [weights[name].shape for name in order]:
        raise ImportStateError(
            "this checkpoint of stage 0 has optimizer states without parameter names, and their shapes do not match "
            "the model's parameters in order (the model may have frozen, tied or grouped parameters, or buffers); load "
            "only the weights, then import the states with deepspeed.muon.import_state"
        )
    for name, entry, master in zip(order, found, masters or [weights[name] for name in order], strict=True):
        saved.shapes[name] = tuple(weights[name].shape)
        saved.add(name, name in muon, master.float(), entry)
    saved.take_steps(found)
    return saved
