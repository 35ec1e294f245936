# SPDX-License-Identifier: Apache-2.0
"""The form in which the optimizer's state is saved: what ``state_dict`` and ``load_state_dict`` do beyond torch's own.

Stock's universal converter knows the state keys ``exp_avg``, ``exp_avg_sq`` and ``step`` only. So an engine's
checkpoint holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that share one element of storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.log import logger
from deepspeed.muon.math.momentum import ABSMAX, CODES, MOMENTUM, codes_of, kept_dtype
from deepspeed.muon.saved_groups import check_groups, muon_facts, settings_of

#: Keys of a saved group: that its momentum was kept in int8, and the scale of fp16 autocast at stage 0.
KEPT_AS, SCALE = "momentum_dtype", "grad_scaler"
Saved = dict[str, Any]


@dataclass(frozen=True)
class AsSaved:
    """Hide a momentum from ``Optimizer.load_state_dict``, which would cast a bare tensor. ``dtype``: as it was kept."""

    tensor: Tensor
    dtype: torch.dtype


class SavedForm:
    """Register the hooks of an optimizer: one each way, and one before a load, in which torch casts bare tensors.

    Each is a list of steps in the order in which they must come. The attributes are what an engine adds.
    """

    #: Whether the momentum is renamed for stock's converter, and another routing is refused.
    is_convertible = False
    #: The scaler of fp16 autocast at stage 0, whose scale would else start anew.
    scaler: torch.amp.GradScaler | None = None
    #: (weights, one of their states) -> the values of the state, which may lie on NVMe.
    read: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._before: dict[Tensor, dict[str, Any]] = {}
        optimizer.register_state_dict_post_hook(self.save)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.load)

    def save(self, optimizer: Any, saved: Saved) -> Saved:
        """Return a state dict in its saved form."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if self.read is not None:
            saved = _read_values(self.read, tensors, saved)
        saved = _decode_momentum(optimizer, tensors, saved)
        saved = optimizer.second_moments.save(saved)
        if self.scaler is not None:
            first, *others = saved["param_groups"]
            saved = {**saved, "param_groups": [first | {SCALE: self.scaler.state_dict()}, *others]}
        return _rename_to_adams(optimizer, saved) if self.is_convertible else saved

    def before_load(self, optimizer: Any, saved: Saved) -> Saved:
        """Return a state dict whose momentum has its own name and stays as it was saved.

        Raises:
            ValueError: an engine's checkpoint has another routing.
        """
        if self.is_convertible:
            check_groups(optimizer, saved["param_groups"])
            saved = _rename_from_adams(optimizer, saved)
        self._before = {tensor: dict(state) for tensor, state in optimizer.state.items()}
        return _hide_momentum(saved)

    def load(self, optimizer: Any) -> None:
        """Settle what was loaded, and bind again."""
        for group in optimizer.param_groups:
            # Those of older versions: torch's schedulers cycle the betas of every group.
            group.setdefault("betas", optimizer.config.betas)
            scale = group.pop(SCALE, None)
            if scale and self.scaler is not None:
                self.scaler.load_state_dict(scale)
        _cast_momentum(optimizer)
        _keep_tensors(optimizer, self._before)
        self._before = {}
        optimizer.second_moments.load(optimizer.param_groups, is_logging=optimizer.context.is_logging)
        optimizer.bind_again()


# ---- saving -----------------------------------------------------------------------------------------------------


def _read_values(read: Callable[[Tensor, Tensor], Tensor], tensors: list[Tensor], saved: Saved) -> Saved:
    """Return a state dict in which no state is empty: one file has all of a rank, which every tool reads."""
    state = {
        index: {name: read(tensors[index], value) for name, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    return {**saved, "state": state}


def _decode_momentum(optimizer: Any, tensors: list[Tensor], saved: Saved) -> Saved:
    """Return a state dict with a momentum in int8 as fp32, in the optimizer's ``host_zeros``.

    A load makes the same codes from it, so that every reader of a checkpoint finds the momentum of the whole tensor.
    """
    state = dict(saved["state"])
    for index, entry in state.items():
        if CODES in entry:
            values = optimizer.blocks_of(tensors[index]).read_into(optimizer.host_zeros(entry[CODES].numel()), entry)
            kept = {key: value for key, value in entry.items() if key not in (CODES, ABSMAX)}
            state[index] = kept | {MOMENTUM: values.view(entry[CODES].shape)}
    groups = saved["param_groups"]
    if optimizer.config.momentum_dtype == "int8":
        groups = [group | {KEPT_AS: "int8"} if group["use_muon"] else group for group in groups]
    return {**saved, "state": state, "param_groups": groups}


def _rename_to_adams(optimizer: Any, saved: Saved) -> Saved:
    """Return a state dict whose groups have the routing, and whose momentum has the name of Adam's first moment."""
    found = muon_facts(optimizer)
    facts = {"matrices": list(found), "blocks": {name: cut for name, cut in found.items() if cut}}
    # In all groups: the converter keeps those of one pipeline stage, which may have no Muon group.
    groups = [group | facts for group in saved["param_groups"]]
    state = dict(saved["state"])
    for index in _with_muon(groups) & state.keys():
        if MOMENTUM in state[index]:
            entry = dict(state[index])
            momentum = entry.pop(MOMENTUM)
            zeros = momentum.new_zeros(()).expand(momentum.shape)
            state[index] = entry | {"exp_avg": momentum, "exp_avg_sq": zeros}
    return {**saved, "state": state, "param_groups": groups}


def _with_muon(groups: list[dict[str, Any]]) -> set[int]:
    return {index for group in groups if group.get("use_muon") for index in group["params"]}


# ---- loading ----------------------------------------------------------------------------------------------------


def _rename_from_adams(optimizer: Any, saved: Saved) -> Saved:
    """Return a state dict whose groups have the settings that go on, and whose momentum has its own name."""
    pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    groups = [settings_of(current, group) | {"params": group["params"]} for current, group in pairs]
    state = dict(saved["state"])
    for index in _with_muon(groups) & state.keys():
        if "exp_avg" in state[index]:
            entry = dict(state[index])
            entry.pop("exp_avg_sq", None)
            state[index] = entry | {MOMENTUM: entry.pop("exp_avg")}
    return {**saved, "state": state, "param_groups": groups}


def _hide_momentum(saved: Saved) -> Saved:
    """Return a state dict in which each momentum is :class:`AsSaved`."""
    groups = [dict(group) for group in saved["param_groups"]]
    from_int8 = {index for group in groups if group.pop(KEPT_AS, None) == "int8" for index in group["params"]}
    state: dict[int, Mapping[str, Any]] = dict(saved["state"])
    for index, entry in state.items():
        if MOMENTUM in entry:
            tensor = entry[MOMENTUM]
            state[index] = {**entry, MOMENTUM: AsSaved(tensor, torch.int8 if index in from_int8 else tensor.dtype)}
    return {**saved, "state": state, "param_groups": groups}


def _cast_momentum(optimizer: Any) -> None:
    """Cast every momentum to the config's dtype, on its tensor's device; warn if it changes."""
    changes = set()
    for tensor, state in optimizer.state.items():
        if MOMENTUM not in state:
            continue
        saved: AsSaved = state.pop(MOMENTUM)
        dtype = kept_dtype(tensor, optimizer.config.momentum_dtype)
        if saved.dtype != dtype:
            changes.add((saved.dtype, dtype))
        if dtype == torch.int8:
            blocks = optimizer.blocks_of(tensor)
            state |= codes_of(saved.tensor.shape, blocks, tensor.device)  # the tensor itself may lie on NVMe
            blocks.write(state, 0, saved.tensor.reshape(-1))
        else:
            state[MOMENTUM] = saved.tensor.to(dtype=dtype, device=tensor.device)
    for was, now in changes:
        logger.warning(
            "deepspeed-muon: the checkpoint's momentum is %s and goes on in %s, by optimizer.params.momentum_dtype",
            str(was).removeprefix("torch."),
            str(now).removeprefix("torch."),
        )


@torch.no_grad()
def _keep_tensors(optimizer: Any, before: dict[Tensor, dict[str, Any]]) -> None:
    """Copy what was loaded into the tensors that were there before, where it fits.

    It may lie in a mapped file, which a later save overwrites.
    """
    for tensor, state in optimizer.state.items():
        kept = before.get(tensor, {})
        for key, value in state.items():
            target = kept.get(key)
            if torch.is_tensor(target) and torch.is_tensor(value) and _fits(value, target):
                state[key] = target.copy_(value)


def _fits(value: Tensor, target: Tensor) -> bool:
    return (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device)
