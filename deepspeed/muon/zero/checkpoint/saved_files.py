# SPDX-License-Identifier: Apache-2.0
"""Read weights and optimizer states by parameter name from the folder of one tag, as DeepSpeed saves it at any stage.

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
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import constants
from torch import Tensor

from deepspeed.muon.errors import ImportStateError
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.saved_state import NAMES, saved_groups
from deepspeed.muon.state_import import KEYS, Source

#: Key of a parameter's fp32 weight, and of Muon's momentum in our files.
WEIGHT, MOMENTUM = "fp32", "exp_avg"
#: Stock's Muon updates a parameter with AdamW if its name contains one of these.
ADAMW_NAMES = ("embed", "lm_head")


class ModelFiles:
    """The parameters and buffers in a checkpoint's ``*model_states.pt`` files; at stage 3 no trained parameters."""

    def __init__(self, folder: Path) -> None:
        self.files = _by_rank(folder.glob("*mp_rank_00_model_states.pt"))
        if not self.files:
            raise ImportStateError(f"{folder} has no mp_rank_00_model_states.pt; name the folder of one tag")
        self._ranks = [read_mapped(file) for file in self.files]
        #: The contents of the first file.
        self.first: dict[str, Any] = self._ranks[0]
        self._values = {
            name: value for name, value in (self.first["module"] or {}).items() if isinstance(value, Tensor)
        }
        self.shapes = {name: tuple(value.shape) for name, value in self._values.items()}
        #: For each parameter group, at stage 3 sub-group: {name: shape} in flattened order; empty at stage 0.
        self.trained: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in self.first[constants.PARAM_SHAPES] or ()
        ]
        for shapes in (*self.trained, self.first.get(constants.FROZEN_PARAM_SHAPES) or {}):
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


class SavedFiles:
    """The weights and optimizer states in the folder of one tag, by parameter name.

    Attributes:
        is_muon: parameter with saved states -> whether Muon updated it; otherwise AdamW did.
        saved_by: "deepspeed-muon", "stock's Muon" or "AdamW".
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, ModelFiles(folder)
        #: Parameter name -> key of its weight or state -> the ranks' parts of it, in order.
        self._parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._steps: dict[str, float] = {}
        self.is_muon: dict[str, bool] = {}
        #: By what the saved momentum was multiplied.
        self.loss_scale = 1.0
        files = _by_rank(folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))
        ranks = [read_mapped(file)["optimizer_state_dict"] for file in files]
        states = ranks[0] if ranks else self.model.first["optimizer"] or {"param_groups": []}
        self.groups = saved_groups(states)
        flags = [group.get("use_muon") for group in self.groups]
        is_ours = any("matrices" in group for group in self.groups)
        self.saved_by = "deepspeed-muon" if is_ours else "AdamW" if None in flags or not flags else "stock's Muon"
        self._matrices = {name for group in self.groups for name in group.get("matrices", ())}
        self.stage = int(ranks[0].get("zero_stage", 1)) if ranks else 0
        for rank, state in enumerate(ranks):
            inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
            if self.stage == 3:
                self._add_stage3(state, inner["state"], len(ranks))
            else:
                self._add_stage12(state, inner["state"], rank, ranks[0])
        if not ranks:
            self._add_stage0(states)

    @property
    def is_ours(self) -> bool:
        """Return whether deepspeed-muon saved it."""
        return self.saved_by == "deepspeed-muon"

    @property
    def source(self) -> Source:
        """Return the states in the form that :func:`write_state` imports."""
        return Source(f"a checkpoint of {self.saved_by}", self.is_muon, self.read, self.step)

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or its state ``key``, 1-D."""
        key = MOMENTUM if self.is_ours and key == "momentum_buffer" else key
        value = torch.cat([part.reshape(-1) for part in self._parts[name][key]])[: math.prod(self.model.shapes[name])]
        is_scaled = key == "momentum_buffer" and self.loss_scale != 1.0
        return value.float() / self.loss_scale if is_scaled else value

    def step(self, name: str) -> float:
        """Return how many steps the parameter had taken when it was saved."""
        missed = next((group[STARTED][name] for group in self.groups if name in group.get(STARTED, {})), 0)
        # Stock's Muon counts no steps of its own; those of another parameter, or the engine's, are the same.
        engines = float(self.model.first["global_steps"] - self.model.first["skipped_steps"])
        return self._steps.get(name, next(iter(self._steps.values()), engines)) - missed

    def has_weight(self, name: str) -> bool:
        """Return whether the checkpoint has the fp32 weight of the parameter ``name``."""
        return name in self._parts

    def has_state(self, name: str) -> bool:
        """Return whether the checkpoint has the optimizer state of the parameter ``name``."""
        return name in self.is_muon

    def missing_states(self) -> list[str]:
        """Return the names of trained parameters whose optimizer states were not saved."""
        return [name for name in self._parts if name not in self.is_muon]

    def _add(
        self, name: str, use_muon: bool, weight: Tensor, entry: Mapping[str, Tensor], part: Any = slice(None)
    ) -> None:
        """Append one rank's values of a parameter to those of the ranks before it.

        ``weight``: the rank's flat weights. ``entry``: {state key: flat state}. ``part``: the slice of these tensors
        that belongs to the parameter.
        """
        use_muon = name in self._matrices if self.is_ours else use_muon
        self._parts[name][WEIGHT].append(weight[part])
        for key in (MOMENTUM,) if use_muon and self.is_ours else KEYS[use_muon]:
            if key in entry:
                self.is_muon[name] = use_muon
                self._parts[name][key].append(entry[key][part])
        if "step" in entry:
            self._steps.setdefault(name, float(entry["step"]))

    def _add_stage12(
        self, state: Mapping[str, Any], states: Mapping[int, Any], rank: int, first: Mapping[str, Any]
    ) -> None:
        """Add one rank's partition of each parameter group. ``first``: the ZeRO state of rank 0."""
        section = (self.model.first.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
        is_share = (
            self.saved_by != "stock's Muon" or "zero_stage" not in state or section.get("device", "none") != "none"
        )
        self._take_scale(first)
        for index, (group, shapes) in enumerate(zip(self.groups, self.model.trained, strict=True)):
            use_muon, entry = bool(group.get("use_muon")), states.get(index, {})
            # Saved without the padding at the end of a group; if that shortens rank 0's partition, others hold nothing.
            span = first["single_partition_of_fp32_groups"][index].numel()
            has_whole = use_muon and not is_share and "momentum_buffer" in entry
            paddings = state.get("param_alignment_paddings", {index: [0] * len(shapes)})[index]
            start, whole_start = -rank * span, 0  # where a parameter begins in the partition, and among whole matrices
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                low, high = max(start, 0), min(start + math.prod(shape), span)
                start += math.prod(shape) + padding
                if low >= high:
                    continue
                weights = state["single_partition_of_fp32_groups"][index]
                self._add(name, use_muon, weights, {} if has_whole else entry, slice(low, high))
                if has_whole:
                    whole_end = whole_start + math.prod(shape)
                    self._parts[name]["momentum_buffer"] = [entry["momentum_buffer"][whole_start:whole_end]]
                    self.is_muon[name] = True
                    whole_start = whole_end

    def _add_stage3(self, state: Mapping[str, Any], states: Mapping[int, Any], count: int) -> None:
        """Add one rank's part of each parameter, at stage 3 on ``count`` ranks."""
        self._take_scale(state)
        muon = {i for group in self.groups if group.get("use_muon") for i in group["params"]}
        for index, shapes in enumerate(self.model.trained):
            start, weights = 0, state["fp32_flat_groups"][index]
            for name, shape in shapes.items():
                end = start + -(-math.prod(shape) // count)
                self._add(name, index in muon, weights, states.get(index, {}), slice(start, end))
                start = end

    def _take_scale(self, state: Mapping[str, Any]) -> None:
        section = (self.model.first.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
        if self.saved_by == "stock's Muon" and section.get("device", "none") == "none":
            self.loss_scale = float(getattr(state.get("loss_scaler"), "cur_scale", 1.0))

    def _add_stage0(self, outer: Mapping[str, Any]) -> None:
        """Add the parameters of stage 0, where states have no names: take those of the groups, or stock's order."""
        base = outer.get("optimizer_state_dict", outer)
        names: list[list[str]] = [group.get(NAMES, []) for group in self.groups]
        if self.saved_by == "stock's Muon":
            names = self._names_of_stock()
        found = [[base["state"].get(index, {}) for index in group["params"]] for group in self.groups]
        if len(names) != len(found) or not all(map(self._fit, names, found)):
            raise ImportStateError(
                "the optimizer states of this stage-0 checkpoint have no parameter names, or they do not match the "
                "model's parameters; load it into the unchanged model and save it again with this version, or load "
                "only its weights and import the states with deepspeed.muon.import_state"
            )
        masters = outer.get("fp32_groups") or [[self.model.read(name) for name in group] for group in names]
        for group, members, entries, weights in zip(self.groups, names, found, masters, strict=True):
            for name, entry, weight in zip(members, entries, weights, strict=True):
                flat = {key: value.reshape(-1) if key != "step" else value for key, value in entry.items()}
                self._add(name, bool(group.get("use_muon")), weight.detach().float().reshape(-1), flat)

    def _names_of_stock(self) -> list[list[str]]:
        """Return the names of each group's parameters, in the order in which stock's Muon stores their states."""
        weights = {name: value for name, value in self.model.first["module"].items() if value.is_floating_point()}
        muon = [n for n, w in weights.items() if w.ndim >= 2 and not any(part in n.lower() for part in ADAMW_NAMES)]
        muon.sort(key=lambda name: tuple(weights[name].shape), reverse=True)
        halves = {True: muon, False: [name for name in weights if name not in set(muon)]}
        names = [halves[bool(group["use_muon"])] for group in self.groups]
        fit = sum(map(len, names)) == len(weights)
        return names if fit and all(len(n) == len(g["params"]) for n, g in zip(names, self.groups, strict=True)) else []

    def _fit(self, names: list[str], entries: list[Mapping[str, Any]]) -> bool:
        shapes = [next((e[k].shape for k in ("momentum_buffer", "exp_avg") if k in e), None) for e in entries]
        return [self.model.shapes.get(name) for name in names] == [s and tuple(s) for s in shapes]


def read_mapped(path: str | Path) -> Any:
    """Return the contents of a checkpoint file, with tensors that are mapped from it if its format permits."""
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False)


def _by_rank(files: Iterator[Path]) -> list[Path]:
    return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])
