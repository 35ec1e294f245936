# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that stock DeepSpeed's own tools read.

Stock's universal converter and its stage-3 loader know the state keys ``exp_avg``, ``exp_avg_sq`` and
``step`` only. So a checkpoint holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that
share one element of storage; in memory it is ``momentum_buffer`` and nothing else.
"""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.muon.logs import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam


def keep_convertible(wrapper: Any, optimizer: MuonWithAuxAdam) -> None:
    """Rename the momentum on the way out and in, refuse another routing, repair what stock's loaders do."""
    optimizer.register_state_dict_post_hook(_export)
    optimizer.register_load_state_dict_pre_hook(_import)
    if wrapper is optimizer:
        return
    wrapper.load_state_dict = _checked(wrapper, optimizer, wrapper.load_state_dict)
    for name in ("load_hp_checkpoint_state_from_checkpoint_dir", "load_hp_checkpoint_state_from_checkpoint_dir_stage3"):
        load = getattr(wrapper, name, None)
        if load is not None:
            setattr(wrapper, name, _repaired(optimizer, load))


def _export(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    matrices = sorted(_matrices(optimizer))
    groups = [{**group, "matrices": matrices} if group["use_muon"] else group for group in state_dict["param_groups"]]
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        entry = dict(state[index])
        if "momentum_buffer" in entry:
            momentum = entry.pop("momentum_buffer")
            entry |= {"exp_avg": momentum, "exp_avg_sq": momentum.new_zeros(()).expand(momentum.shape)}
        state[index] = entry
    return {**state_dict, "state": state, "param_groups": groups}


def _import(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    _check(optimizer, state_dict["param_groups"])
    saved = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    groups = [_merged(current, group) | {"params": group["params"]} for current, group in saved]
    state = dict(state_dict["state"])
    for index in _muon_indices(state_dict):
        state[index] = dict(state[index])
        _restore_momentum(state[index])
    return {**state_dict, "state": state, "param_groups": groups}


def _check(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    if text := routing_difference(optimizer, groups):
        raise ValueError(text)


def routing_difference(optimizer: Any, groups: list[dict[str, Any]]) -> str | None:
    """An error text unless saved groups are of the same kinds and the same parameters go to Muon."""
    saved, current = ([group.get("use_muon") for group in side] for side in (groups, optimizer.param_groups))
    there = {name for group in groups for name in group.get("matrices", ())}
    here = _matrices(optimizer)
    if saved == current and there == here:
        return None
    return (
        f"the checkpoint's parameter groups are {_kinds(saved)}, the optimizer's are {_kinds(current)}; "
        f"Muon has {sorted(there - here)[:4]} in the checkpoint only and {sorted(here - there)[:4]} here only: "
        "it was saved with another optimizer or another routing"
    )


def _matrices(optimizer: Any) -> set[str]:
    return {spec.name for spec in optimizer.specs.values() if spec.use_muon}


def _merged(current: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved settings of a group, which act as with any optimizer of torch's; a warning where the config's differ.

    Learning rates are left out of the warning, since a schedule changes them. Their ratio is the config's: a schedule
    is built from the config too.
    """
    settings = {key: value for key, value in saved.items() if key not in ("params", "matrices", "lr_ratio")}
    other = {
        key: value
        for key, value in settings.items()
        if key in current and key not in ("lr", "initial_lr") and value != current[key]
    }
    for key, value in other.items():
        logger.warning(
            "deepspeed-muon: group %s goes on with %s = %s from the checkpoint; the config has %s",
            settings.get("name"),
            key,
            value,
            current[key],
        )
    return {key: value for key, value in current.items() if key != "params"} | settings


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


def _checked(wrapper: Any, optimizer: MuonWithAuxAdam, load: Any) -> Any:
    """Stock's ``load_state_dict``, after a check of the routing, whose lack it reports in misleading words.

    At stages 1 and 2 stock links parameters to state once, after the first step. Loading replaces the state, so
    they are linked again, for ``safe_get_full_optimizer_state``.
    """

    @functools.wraps(load)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("state_dict_list")
        saved = next(filter(None, given), None) if isinstance(given, list) else given
        if saved and kwargs.get("load_optimizer_states", True):
            _check(optimizer, saved_groups(saved))
        result = load(*args, **kwargs)
        if hasattr(wrapper, "_hp_optimizer_states_linked"):
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()
        return result

    return checked


def _repaired(optimizer: MuonWithAuxAdam, load: Any) -> Any:
    """Stock's universal loader, then: Adam's keys become the momentum, each group gets its own settings back.

    Stage 3 copies the settings of group 0 into all groups and lets all tensors share one step count, and both
    stages give Muon's groups Adam's keys.
    """

    @functools.wraps(load)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        folder = str(kwargs.get("checkpoint_dir", args[-1] if args else ""))
        saved = saved_groups(read_states(Path(folder, "zero", "optimizer_state.pt")))
        _check(optimizer, saved)
        before = [dict(group) for group in optimizer.param_groups]
        result = load(*args, **kwargs)
        for group, current, settings in zip(optimizer.param_groups, before, saved, strict=True):
            params = group["params"]
            group.clear()
            group.update(_merged(current, settings), params=params)
        for partition in optimizer.partitions:
            for tensor in partition.tensors:
                _restore_momentum(optimizer.state[tensor])
        for tensor, state in optimizer.state.items():
            device = tensor.device if "exp_avg" in state else None
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=device)
        return result

    return repaired


def read_states(file: Path) -> dict[str, Any]:
    """An optimizer's file, whose tensors stay on disk where its format permits; it runs no code of the file's.

    Raises:
        pickle.UnpicklingError: it holds other things than tensors and what ZeRO puts beside them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)


def saved_groups(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups in what any of ZeRO's wrappers, or the optimizer itself, has saved."""
    inner = saved.get("optimizer_state_dict", saved)
    return inner["param_groups"] if "param_groups" in inner else inner["base_optimizer_state"]["param_groups"]


def _restore_momentum(state: dict[str, Any]) -> None:
    if "exp_avg" in state:
        state["momentum_buffer"] = state.pop("exp_avg")
        state.pop("exp_avg_sq", None)
