# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stock DeepSpeed's own tools read.

Stock's universal converter knows the state keys ``exp_avg``, ``exp_avg_sq`` and ``step`` only. So a checkpoint
holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that share one element of storage; in memory it
is ``momentum_buffer`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint.compatibility import check_groups, muon_facts, settings_of


def keep_convertible(optimizer: MuonWithAuxAdam) -> None:
    """Rename the momentum on the way out and in; refuse another routing on the way in."""
    optimizer.register_state_dict_post_hook(_export)
    optimizer.register_load_state_dict_pre_hook(_import, prepend=True)


def _export(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    found = muon_facts(optimizer)
    facts = {"matrices": list(found), "blocks": {name: cut for name, cut in found.items() if cut}}
    # In all groups: the converter keeps those of one pipeline stage, which may have no Muon group.
    groups = [group | facts for group in state_dict["param_groups"]]
    return _converted(state_dict, groups, _to_moments)


def _import(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    check_groups(optimizer, state_dict["param_groups"])  # type: ignore[arg-type]
    saved = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    groups = [settings_of(current, group) | {"params": group["params"]} for current, group in saved]
    return _converted(state_dict, groups, _to_momentum)


def _converted(state_dict: dict[str, Any], groups: list[dict], convert: Callable[[dict], dict]) -> dict[str, Any]:
    """With these groups, and with the states of Muon's parameters converted."""
    muon = {index for group in groups if group.get("use_muon") for index in group["params"]}
    state = {index: convert(entry) if index in muon else entry for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _to_moments(entry: dict[str, Any]) -> dict[str, Any]:
    if "momentum_buffer" not in entry:
        return entry
    momentum = entry["momentum_buffer"]
    rest = {key: value for key, value in entry.items() if key != "momentum_buffer"}
    return rest | {"exp_avg": momentum, "exp_avg_sq": momentum.new_zeros(()).expand(momentum.shape)}


def _to_momentum(entry: dict[str, Any]) -> dict[str, Any]:
    if "exp_avg" not in entry:
        return entry
    rest = {key: value for key, value in entry.items() if key not in ("exp_avg", "exp_avg_sq")}
    return rest | {"momentum_buffer": entry["exp_avg"]}
