# SPDX-License-Identifier: Apache-2.0
"""The form in which the optimizer's state is saved: what ``state_dict`` and ``load_state_dict`` do beyond torch's own.

Stock's universal converter knows the state keys ``exp_avg``, ``exp_avg_sq`` and ``step`` only. So an engine's
checkpoint holds Muon's momentum as ``exp_avg`` and, as ``exp_avg_sq``, zeros that share one element of storage.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Register the hooks of an optimizer: one after a save, one before a load and one after it.

    The attributes are what an engine adds.
    """

    #: Whether the momentum is renamed for stock's converter, and another routing is refused.
    is_convertible = False
    #: The scaler of fp16 autocast at stage 0, whose scale would otherwise start anew.
    scaler: torch.amp.GradScaler | None = None
    #: (weights, one of their states) -> the values of the state, which may lie on NVMe.
    read: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._before: dict[Tensor, dict[str, Any]] = {}
        optimizer.register_state_dict_post_hook(self.save)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.load)

    # ---- saving -------------------------------------------------------------------------------------------------

    def save(self, optimizer: Any, saved: Saved) -> None:
        """Bring what ``state_dict`` has just made into its saved form; the optimizer's own state stays as it is."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        state, groups = saved["state"], saved["param_groups"]
        for group in groups:
            for index in group["params"]:
                if index in state:
                    state[index] = self._saved_entry(optimizer, tensors[index], state[index])
            if group["use_muon"] and optimizer.config.momentum_dtype == "int8":
                group[KEPT_AS] = "int8"
        optimizer.second_moments.save(groups)
        if self.scaler is not None:
            groups[0][SCALE] = self.scaler.state_dict()
        if self.is_convertible:
            found = muon_facts(optimizer)
            facts = {"matrices": list(found), "blocks": {name: cut for name, cut in found.items() if cut}}
            # In all groups: the converter keeps those of one pipeline stage, which may have no Muon group.
            for group in groups:
                group.update(facts)

    def _saved_entry(self, optimizer: Any, tensor: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        if self.read is not None:  # no state is empty, so that one file has all of a rank, which every tool reads
            entry = {name: self.read(tensor, value) for name, value in entry.items()}
        entry = dict(entry)
        if CODES in entry:
            # As fp32, of which a load makes the same codes: every reader of a checkpoint finds the whole momentum.
            codes = entry[CODES]
            values = optimizer.blocks_of(tensor).read_into(optimizer.host_zeros(codes.numel()), entry)
            del entry[CODES], entry[ABSMAX]
            entry[MOMENTUM] = values.view(codes.shape)
        if self.is_convertible and MOMENTUM in entry:
            momentum = entry.pop(MOMENTUM)
            entry |= {"exp_avg": momentum, "exp_avg_sq": momentum.new_zeros(()).expand(momentum.shape)}
        return entry

    # ---- loading ------------------------------------------------------------------------------------------------

    def before_load(self, optimizer: Any, saved: Saved) -> Saved:
        """Return a state dict in which each momentum has its own name and is :class:`AsSaved`.

        Raises:
            ValueError: an engine's checkpoint has another routing.
        """
        state, groups = dict(saved["state"]), [dict(group) for group in saved["param_groups"]]
        if self.is_convertible:
            check_groups(optimizer, groups)
            pairs = zip(optimizer.param_groups, groups, strict=True)
            groups = [settings_of(current, group) | {"params": group["params"]} for current, group in pairs]
        for group in groups:
            is_int8 = group.pop(KEPT_AS, None) == "int8"
            for index in state.keys() & set(group["params"]):
                entry = state[index] = dict(state[index])
                if self.is_convertible and group.get("use_muon") and "exp_avg" in entry:
                    entry.pop("exp_avg_sq", None)
                    entry[MOMENTUM] = entry.pop("exp_avg")
                if MOMENTUM in entry:
                    tensor = entry[MOMENTUM]
                    entry[MOMENTUM] = AsSaved(tensor, torch.int8 if is_int8 else tensor.dtype)
        self._before = {tensor: dict(entry) for tensor, entry in optimizer.state.items()}
        return {**saved, "state": state, "param_groups": groups}

    @torch.no_grad()
    def load(self, optimizer: Any) -> None:
        """Settle what was loaded, and bind again."""
        for group in optimizer.param_groups:
            # Groups of older versions have none: torch's schedulers cycle the betas of every group.
            group.setdefault("betas", optimizer.config.betas)
            scale = group.pop(SCALE, None)
            if scale and self.scaler is not None:
                self.scaler.load_state_dict(scale)
        _cast_momentum(optimizer)
        for tensor, state in optimizer.state.items():
            before = self._before.get(tensor, {})
            for key, value in state.items():
                # What was loaded may lie in a mapped file, which a later save overwrites.
                if torch.is_tensor(value) and _is_alike(value, before.get(key)):
                    state[key] = before[key].copy_(value)
        self._before = {}
        optimizer.second_moments.load(optimizer.param_groups, is_logging=optimizer.context.is_logging)
        optimizer.bind_again()


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


def _is_alike(value: Tensor, target: Any) -> bool:
    if not torch.is_tensor(target):
        return False
    return (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device)
