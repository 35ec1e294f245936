# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own data parallelism, without a DeepSpeed engine: ranks of DDP share the work, FSDP is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.exchange import all_maxima


def unwrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    """The user's module, and the process group over which DDP averages its gradients; ``None`` without DDP.

    Raises:
        UnsupportedError: FSDP, or DTensors of any other origin, hold shards of the parameters.
    """
    inner: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    is_ddp = isinstance(inner, DistributedDataParallel)
    module = inner.module if is_ddp else model
    if kind := next(filter(None, map(_sharded_by, module.modules())), None):
        raise UnsupportedError(
            f"MuonWithAuxAdam needs whole parameters, and {kind} holds shards of them. Let DeepSpeed shard the model "
            'instead: "zero_optimization": {"stage": 3} in ds_config.json, with "optimizer": {"type": "Muon"}; or use '
            "DistributedDataParallel"
        )
    return module, inner.process_group if is_ddp else None


def _sharded_by(module: nn.Module) -> str | None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    if any(type(param.data).__name__ == "DTensor" for param in module.parameters(recurse=False)):
        return f"fully_shard or another user of DTensor ({type(module).__name__})"
    return None


def check_agreement(digests: Iterable[str], group: Any, device: torch.device) -> None:
    """A collective. Raises RuntimeError on all ranks where one of them has other settings, matrices or plans."""
    number = int(hashlib.sha256("".join(digests).encode()).hexdigest()[:12], 16)  # exact in float64
    values = torch.tensor([number, -number], dtype=torch.float64, device=device)
    highest, lowest = all_maxima(values, group).tolist()
    if highest != -lowest:
        raise RuntimeError(
            "the ranks of DistributedDataParallel have built MuonWithAuxAdam with different settings or kernels, or "
            "for different parameters; build it identically on every rank, with kernels='torch' if some cannot compile "
            "them"
        )
