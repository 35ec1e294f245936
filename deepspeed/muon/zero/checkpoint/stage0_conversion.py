# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint of ZeRO stage 0, which DeepSpeed's converter does not know, to a universal one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.zero.checkpoint.engine import read_mapped

FILE = "mp_rank_00_model_states.pt"


def convert(saved: Path, target: Path) -> None:
    """Convert ``saved``, a checkpoint of an engine at ZeRO stage 0, to the universal checkpoint ``target``.

    Raises:
        CheckpointError: the states have no parameter names, because stock DeepSpeed or an older version saved them.
    """
    model = read_mapped(saved / FILE)
    optimizer: dict[str, Any] = model["optimizer"]
    inner, masters = optimizer.get("optimizer_state_dict", optimizer), optimizer.get("fp32_groups")
    names = [group.get("param_names") for group in inner["param_groups"]]
    if None in names:
        raise CheckpointError(
            "the optimizer states of this stage-0 checkpoint have no parameter names, because stock DeepSpeed or an "
            "older deepspeed-muon saved it; load it into the unchanged model and save it again, or, if AdamW saved it, "
            "pass its optimizer state and the names to deepspeed.muon.import_state"
        )
    for index, (group, members) in enumerate(zip(inner["param_groups"], names, strict=True)):
        for place, (key, name) in enumerate(zip(group["params"], members, strict=True)):
            weight = masters[index][place] if masters else model["module"][name]
            _write(target / "zero" / name, weight, inner["state"].get(key, {}))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
    torch.save({"optimizer_state_dict": {"state": {}, "param_groups": groups}}, target / "zero" / "optimizer_state.pt")
    shutil.copyfile(saved / FILE, target / FILE)


def _write(folder: Path, weight: Tensor, state: dict[str, Any]) -> None:
    """Write a parameter's weight and its states to one file each in ``folder``, as DeepSpeed's converter does."""
    folder.mkdir(parents=True)
    values = {"fp32": weight.detach()} | {key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}
    for key, value in values.items():
        torch.save({"param": value.float().contiguous()}, folder / f"{key}.pt")
    if "step" in state:
        torch.save(state["step"], folder / "step.pt")
