# SPDX-License-Identifier: Apache-2.0
"""How the momentum is kept: in the dtype of the tensor, fp32 under ZeRO, or in bf16 with stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.logs import logger
from deepspeed.muon.orthogonalize import Workspace
from deepspeed.muon.rounding import Key, noise, round_
from deepspeed.muon.update import direction, momentum_

#: Elements that are rounded at once: on a CPU so few that they stay in its cache, elsewhere so many that the
#: launches of kernels do not count.
CPU_CHUNK, CHUNK = 2**17, 2**21


@dataclass(frozen=True)
class Held:
    """A momentum on its way through ``Optimizer.load_state_dict``, which would cast a bare tensor."""

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


def advance(
    buffer: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool, key: Key, first: int, work: Workspace
) -> None:
    """A step of a bf16 momentum: computed in fp32, handed on unrounded, kept rounded.

    Args:
        buffer: bf16, 1-D.
        grad: of the same shape, any floating dtype.
        out: any floating dtype; receives what Newton-Schulz orthogonalizes.
        key: of :func:`deepspeed.muon.rounding.key_of`.
        first: index in its parameter of the first element.
        work: where temporaries come from, 16 bytes for each element of a chunk (2 MiB on a CPU, 32 MiB elsewhere).
    """
    size = CPU_CHUNK if buffer.device.type == "cpu" else CHUNK
    for start in range(0, buffer.numel(), size):
        part = slice(start, min(start + size, buffer.numel()))
        shape, device = (part.stop - part.start,), buffer.device
        wide, ahead = (work.get(name, shape, torch.float32, device) for name in ("wide", "ahead"))
        bits, spare = (work.get(name, shape, torch.int32, device) for name in ("bits", "spare_bits"))
        wide.copy_(buffer[part])
        steep = grad[part].float()
        momentum_(wide, steep, momentum)
        out[part].copy_(direction(wide, steep, momentum, nesterov, out=ahead))
        round_(buffer[part], wide, noise(bits, spare, key, first + start), spare)


def hold(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before ``load_state_dict``: keep every momentum as it was saved."""
    state = {
        index: {**entry, "momentum_buffer": Held(entry["momentum_buffer"])} if "momentum_buffer" in entry else entry
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def settle(optimizer: Any) -> None:
    """After loading: every momentum in the dtype of the config, on its tensor's device; a warning where it changes."""
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
