# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stock DeepSpeed's own tools read.

Stock's universal converter and its stage-3 loader know the state keys ``exp_avg``, ``exp_avg_sq`` and
``step`` only. So a checkpoint holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that
share one element of storage; in memory it is ``momentum_buffer`` and nothing else.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.muon.optimizer import MuonWithAuxAdam


def keep_convertible(wrapper: Any, optimizer: MuonWithAuxAdam) -> None:
    """Rename the momentum on the way out and in, and repair what stock's universal loaders do."""
    if wrapper is optimizer:
        return
    optimizer.register_state_dict_post_hook(_export)
    optimizer.register_load_state_dict_pre_hook(_import)
    for name in ("load_hp_checkpoint_state_from_checkpoint_dir", "load_hp_checkpoint_state_from_checkpoint_dir_stage3"):
        load = getattr(wrapper, name, None)
        if load is not None:
            setattr(wrapper, name, _repaired(optimizer, load))
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper.load_state_dict = _relinking(wrapper, wrapper.load_state_dict)


def _export(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        entry = dict(state[index])
        momentum = entry.pop("momentum_buffer")
        entry |= {"exp_avg": momentum, "exp_avg_sq": momentum.new_zeros(()).expand(momentum.shape)}
        state[index] = entry
    return {**state_dict, "state": state}


def _import(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = [group.get("use_muon") for group in state_dict["param_groups"]]
    current = [group["use_muon"] for group in optimizer.param_groups]
    if saved != current:
        raise ValueError(
            f"the checkpoint's parameter groups are {_kinds(saved)}, the optimizer's are {_kinds(current)}: "
            "it was saved with another optimizer or another routing"
        )
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        entry = dict(state[index])
        if "exp_avg" in entry:
            entry["momentum_buffer"] = entry.pop("exp_avg")
            entry.pop("exp_avg_sq", None)
        state[index] = entry
    return {**state_dict, "state": state}


def _muon_indices(state_dict: dict[str, Any]) -> list[int]:
    return [
        i
        for group in state_dict["param_groups"]
        if group.get("use_muon")
        for i in group["params"]
        if i in state_dict["state"]
    ]


def _kinds(flags: list[bool | None]) -> str:
    return str([{True: "Muon", False: "AdamW", None: "unknown"}[flag] for flag in flags])


def _repaired(optimizer: MuonWithAuxAdam, load: Any) -> Any:
    """Stock's universal loader, then: Adam's keys become the momentum, each group gets its own settings back.

    Stage 3 copies the settings of group 0 into all groups, and both stages give Muon's groups Adam's keys.
    """

    @functools.wraps(load)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        folder = str(kwargs.get("checkpoint_dir", args[-1] if args else ""))
        saved = torch.load(os.path.join(folder, "zero", "optimizer_state.pt"), map_location="cpu", weights_only=False)
        groups = _saved_groups(saved)
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        for bound in optimizer._bound.values():
            for tensor in bound.partition.tensors:
                _restore_momentum(optimizer.state[tensor])
        return result

    return repaired


def _saved_groups(saved: dict[str, Any]) -> list[dict[str, Any]]:
    inner = saved.get("optimizer_state_dict", saved)
    return inner["param_groups"] if "param_groups" in inner else inner["base_optimizer_state"]["param_groups"]


def _restore_momentum(state: dict[str, Any]) -> None:
    if "exp_avg" in state:
        state["momentum_buffer"] = state.pop("exp_avg")
        state.pop("exp_avg_sq", None)
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32)


def _relinking(wrapper: Any, load: Any) -> Any:
    """Let ``safe_get_full_optimizer_state`` find the loaded state at stages 1 and 2.

    Stock links parameters to state once, after the first step, and loading replaces the state.
    """

    @functools.wraps(load)
    def relinking(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
        return result

    return relinking
