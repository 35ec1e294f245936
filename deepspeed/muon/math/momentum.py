# SPDX-License-Identifier: Apache-2.0
"""The momentum as it is kept: in the tensor's dtype, which is fp32 under ZeRO, or in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.log import logger


@dataclass(frozen=True)
class Held:
    """Hides a momentum from ``Optimizer.load_state_dict``, which would cast a bare tensor."""

    tensor: Tensor


def state_of(state: dict[str, Any], tensor: Tensor, momentum_dtype: str) -> dict[str, Any]:
    """``state`` with ``momentum_buffer`` of the tensor's shape, and ``step``, fp32 on the CPU; zeros at first."""
    if "momentum_buffer" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        dtype = kept_dtype(tensor, momentum_dtype)
        state["momentum_buffer"] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    return state


def kept_dtype(tensor: Tensor, momentum_dtype: str) -> torch.dtype:
    """The dtype of a tensor's momentum."""
    return torch.bfloat16 if momentum_dtype == "bf16" else tensor.dtype


def hold(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook before ``load_state_dict``: keep every momentum as it was saved."""
    state = {
        index: {**entry, "momentum_buffer": Held(entry["momentum_buffer"])} if "momentum_buffer" in entry else entry
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def settle(optimizer: Any) -> None:
    """Hook after loading: cast every momentum to the config's dtype, on its tensor's device; warn if it changes."""
    changes = set()
    for tensor, state in optimizer.state.items():
        if "momentum_buffer" not in state:
            continue
        loaded = state["momentum_buffer"]
        loaded = loaded.tensor if isinstance(loaded, Held) else loaded
        dtype = kept_dtype(tensor, optimizer.config.momentum_dtype)
        if loaded.dtype != dtype:
            changes.add((loaded.dtype, dtype))
        state["momentum_buffer"] = loaded.to(dtype=dtype, device=tensor.device)
    for saved, dtype in changes:
        logger.warning(
            "deepspeed-muon: the checkpoint's momentum is %s and goes on in %s, by optimizer.params.momentum_dtype",
            *(str(kind).removeprefix("torch.") for kind in (saved, dtype)),
        )
