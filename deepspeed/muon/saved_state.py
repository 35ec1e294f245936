# SPDX-License-Identifier: Apache-2.0
"""The form in which the optimizer's state is saved: what ``state_dict`` and ``load_state_dict`` do beyond torch's own.

There is one hook each way, and one before a load, because torch casts bare tensors while it loads. Each is a list of
steps in the order in which they must come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.log import logger
from deepspeed.muon.math.momentum import ABSMAX, CODES, MOMENTUM, codes_of, kept_dtype

#: The key under which a saved group says that its momentum was kept in int8.
KEPT_AS = "momentum_dtype"


@dataclass(frozen=True)
class AsSaved:
    """Hide a momentum from ``Optimizer.load_state_dict``, which would cast a bare tensor. ``dtype``: as it was kept."""

    tensor: Tensor
    dtype: torch.dtype


def save(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict in its saved form; the hook after ``state_dict``."""
    state_dict = _decode_momentum(optimizer, state_dict)
    return optimizer.second_moments.save(state_dict)


def before_load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that keeps every momentum as it was saved; the hook before ``load_state_dict``."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    from_int8 = {index for group in groups if group.pop(KEPT_AS, None) == "int8" for index in group["params"]}

    def hidden(index: Any, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        if MOMENTUM not in entry:
            return entry
        saved = entry[MOMENTUM]
        return {**entry, MOMENTUM: AsSaved(saved, torch.int8 if index in from_int8 else saved.dtype)}

    state = {index: hidden(index, entry) for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def after_load(optimizer: Any) -> None:
    """Settle what was loaded, and bind again; the hook after ``load_state_dict``."""
    _fill_in_betas(optimizer)
    _cast_momentum(optimizer)
    optimizer.second_moments.load(optimizer.param_groups, is_logging=optimizer.context.is_logging)
    optimizer.bind_again()


def _decode_momentum(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with a momentum in int8 as fp32, in the optimizer's ``host_zeros``.

    A load makes the same codes from it, so that every reader of a checkpoint finds the momentum of the whole tensor.
    """
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    state = dict(state_dict["state"])
    for index, entry in state.items():
        if CODES in entry:
            values = optimizer.blocks_of(tensors[index]).read_into(optimizer.host_zeros(entry[CODES].numel()), entry)
            kept = {key: value for key, value in entry.items() if key not in (CODES, ABSMAX)}
            state[index] = kept | {MOMENTUM: values.view(entry[CODES].shape)}
    is_int8 = optimizer.config.momentum_dtype == "int8"
    groups = [
        group | {KEPT_AS: "int8"} if is_int8 and group["use_muon"] else group for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _fill_in_betas(optimizer: Any) -> None:
    """Give Muon's groups of older versions betas, which torch's schedulers cycle in every group."""
    for group in optimizer.param_groups:
        group.setdefault("betas", optimizer.config.betas)


def _cast_momentum(optimizer: Any) -> None:
    """Cast every momentum to the config's dtype, on its tensor's device; warn if it changes.

    One without elements stays: it lies in a file of its own.
    """
    changes = set()
    for tensor, state in optimizer.state.items():
        if MOMENTUM not in state:
            continue
        loaded = state.pop(MOMENTUM)
        saved = loaded if isinstance(loaded, AsSaved) else AsSaved(loaded, loaded.dtype)
        dtype = kept_dtype(tensor, optimizer.config.momentum_dtype)
        if saved.dtype != dtype:
            changes.add((saved.dtype, dtype))
        if dtype == torch.int8 and saved.tensor.numel():
            blocks = optimizer.blocks_of(tensor)
            state |= codes_of(saved.tensor.shape, blocks, tensor.device)  # the tensor itself may lie on NVMe
            blocks.write(state, 0, saved.tensor.reshape(-1))
        else:
            kept = torch.float32 if dtype == torch.int8 else dtype
            state[MOMENTUM] = saved.tensor.to(dtype=kept, device=tensor.device)
    for was, now in changes:
        logger.warning(
            "deepspeed-muon: the checkpoint's momentum is %s and goes on in %s, by optimizer.params.momentum_dtype",
            str(was).removeprefix("torch."),
            str(now).removeprefix("torch."),
        )
