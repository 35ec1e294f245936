# SPDX-License-Identifier: Apache-2.0
"""Plan the optimizer's steps in plain PyTorch, where every rank has whole parameters.

The ranks of DistributedDataParallel share the work of Newton-Schulz.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.muon.exchange.consensus import all_maxima, init_and_rank
from deepspeed.muon.exchange.placed_params import whole_partition
from deepspeed.muon.kernels.selection import choose, fast_dtype, unavailable_kernels
from deepspeed.muon.step import StepContext


def bind_without_sharding(optimizer: Any, replicas: Any) -> None:
    """Plan an optimizer's steps in plain PyTorch: set ``optimizer.context``, and call ``optimizer.bind``.

    Called in the first step. ``optimizer``: a :class:`MuonWithAuxAdam`. ``replicas``: DDP's process group, whose ranks
    share the work of Newton-Schulz; ``None`` without DDP.
    """
    rank, copies = init_and_rank(replicas) if replicas else (0, 1)
    unavailable = unavailable_kernels(optimizer.config.kernels, {p.device.type for p in optimizer.specs})
    device = next(iter(optimizer.specs)).device
    optimizer.context = StepContext(
        is_logging=rank == 0,
        kernels=choose(unavailable),
        dtype=fast_dtype(device.type, unavailable),
        unavailable=unavailable,
        peers=replicas,
    )
    if rank == 0 and not any(group["use_muon"] for group in optimizer.param_groups):
        optimizer.warn_of_no_matrix()
    partitions = [
        whole_partition(
            index,
            tensors=group["params"],
            specs=[optimizer.specs[param] for param in group["params"]],
            group=replicas,
            rank=rank,
            copies=copies,
        )
        for index, group in enumerate(optimizer.param_groups)
    ]
    optimizer.bind(partitions, device)


def check_replicas_agree(optimizer: Any, replicas: Any) -> None:
    """Raise RuntimeError if DDP's ranks differ in settings, kernels, plan or number of steps done; a collective.

    Called in every step, because one rank may have loaded another state. ``replicas``: DDP's process group.
    """
    unavailable = sorted(kind for kind, reason in optimizer.context.unavailable.items() if reason)
    facts = optimizer.config.digest(), str(unavailable), optimizer.digest(), str(optimizer.steps_done)
    check_agreement(facts, replicas, optimizer.compute_device)


def check_agreement(facts: Iterable[str], group: Any, device: torch.device) -> None:
    """Raise RuntimeError on all ranks of ``group`` if their ``facts`` differ; a collective on ``device``."""
    digest = torch.tensor(list(hashlib.sha256("".join(facts).encode()).digest()), dtype=torch.int32, device=device)
    highest, lowest = all_maxima(torch.stack([digest, -digest]), group)
    if not torch.equal(highest, -lowest):
        raise RuntimeError(
            "MuonWithAuxAdam differs between DistributedDataParallel's ranks, in settings, kernels, parameters or "
            "loaded state; build it identically and load the same state on every rank, with kernels='torch' if some "
            "ranks cannot compile kernels"
        )
