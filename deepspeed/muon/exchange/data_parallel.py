# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own data parallelism, without a DeepSpeed engine: ranks of DDP share the work, FSDP is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.exchange.groups import all_maxima, is_made, make_groups


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
    parts = torch.tensor(list(hashlib.sha256("".join(digests).encode()).digest()), dtype=torch.int32, device=device)
    highest, lowest = all_maxima(torch.stack([parts, -parts]), group).tolist()
    if any(high != -low for high, low in zip(highest, lowest, strict=True)):
        raise RuntimeError(
            "the ranks of DistributedDataParallel have built MuonWithAuxAdam with different settings or kernels, or "
            "for different parameters, or have loaded different states; build it identically on every rank, with "
            "kernels='torch' if some cannot compile them, and load the same state on every rank"
        )


def make_sets(sets: Collection[Sequence[int]], group: Any, device: torch.device) -> None:
    """Make the process groups of owners of matrices that do not exist yet; a collective of the world.

    ``sets``: of this rank; those of DDP's ranks have the same sizes. ``group``: DDP's. ``device``: of what they send.

    Raises:
        UnsupportedError: DDP's ranks are not all ranks, and the others do not join.
    """
    if all(map(is_made, sets)):
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    if len(ranks) < torch.distributed.get_world_size():
        raise UnsupportedError(
            "owners_per_matrix: in DistributedDataParallel over a part of all ranks a matrix has 1 owner or "
            f"{len(ranks)}, as only all ranks together can make the process groups of others"
        )
    sizes = {len(one) for one in sets}
    make_groups([ranks[first : first + size] for size in sizes for first in range(0, len(ranks), size)], device)
