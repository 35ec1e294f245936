# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stock DeepSpeed's own tools read.

Stock's universal converter knows the state keys ``exp_avg``, ``exp_avg_sq`` and ``step`` only. So a checkpoint
holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that share one element of storage; in memory it
is ``momentum_buffer`` and nothing else.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint.compatibility import blocks, check_groups, matrices, settings_of


def keep_convertible(optimizer: MuonWithAuxAdam) -> None:
    """Rename the momentum on the way out and in; refuse another routing on the way in."""
    optimizer.register_state_dict_post_hook(_export)
    optimizer.register_load_state_dict_pre_hook(_import, prepend=True)


def _export(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    facts = {"matrices": sorted(matrices(optimizer)), "blocks": blocks(optimizer)}
    groups = [group | facts if group["use_muon"] else group for group in state_dict["param_groups"]]
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        entry = dict(state[index])
        if "momentum_buffer" in entry:
            momentum = entry.pop("momentum_buffer")
            entry |= {"exp_avg": momentum, "exp_avg_sq": momentum.new_zeros(()).expand(momentum.shape)}
        state[index] = entry
    return {**state_dict, "state": state, "param_groups": groups}


def _import(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    check_groups(optimizer, state_dict["param_groups"])  # type: ignore[arg-type]
    saved = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    groups = [settings_of(current, group) | {"params": group["params"]} for current, group in saved]
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        state[index] = dict(state[index])
        _restore_momentum(state[index])
    return {**state_dict, "state": state, "param_groups": groups}


def _muon_indices(state_dict: dict[str, Any]) -> list[int]:
    return [
        i
        for group in state_dict["param_groups"]
        if group.get("use_muon")
        for i in group["params"]
        if i in state_dict["state"]
    ]


def _restore_momentum(state: dict[str, Any]) -> None:
    if "exp_avg" in state:
        state["momentum_buffer"] = state.pop("exp_avg")
        state.pop("exp_avg_sq", None)
