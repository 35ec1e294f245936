# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch, without an engine: every rank has the parameters whole, and those of DDP share the work."""

from __future__ import annotations

from functools import partial
from typing import Any

from deepspeed.muon.context import StepContext
from deepspeed.muon.exchange.data_parallel import check_agreement, make_sets
from deepspeed.muon.exchange.groups import join, processes
from deepspeed.muon.exchange.partition import whole_partition
from deepspeed.muon.exchange.watchdog import start_watchdog
from deepspeed.muon.kernels.selection import choose, missing
from deepspeed.muon.tuning import Candidates, has_bf16


def bind_whole(optimizer: Any, replicas: Any) -> None:
    """Bind an optimizer to the parameters themselves. ``replicas``: the process group of DDP, if any."""
    rank, copies = join(replicas) if replicas else (0, 1)
    lacking = missing(optimizer.config.kernels, {p.device.type for p in optimizer.specs})
    optimizer.context = StepContext(is_logging=rank == 0, kernels=choose(lacking), lacking=lacking, peers=replicas)
    if rank == 0 and not any(group["use_muon"] for group in optimizer.param_groups):
        optimizer.warn_of_no_matrix()
    partitions = [
        whole_partition(
            index,
            params=group["params"],
            specs=[optimizer.specs[param] for param in group["params"]],
            group=replicas,
            rank=rank,
            copies=copies,
        )
        for index, group in enumerate(optimizer.param_groups)
    ]
    device = partitions[0].tensors[0].device
    candidates = Candidates.of(
        optimizer.config,
        optimizer.tables_on(device),
        optimizer.ns_methods,
        device,
        has_bf16(device.type),
    )
    # Ranks that race apart might choose apart.
    tune = candidates.without_race if processes() > 1 else partial(candidates.in_one_process, world_size=1)
    optimizer.bind(partitions, tune(optimizer.shapes))


def agree_with_replicas(optimizer: Any, replicas: Any) -> None:
    """Compare with DDP's other ranks in every step, as one of them alone may have loaded a state since the last.

    Raises:
        RuntimeError: the ranks differ.
        UnsupportedError: a matrix has owners that are a part of DDP's ranks, and these are a part of the world.
    """
    start_watchdog()
    lacking = sorted(kind for kind, reason in optimizer.context.lacking.items() if reason)
    facts = optimizer.config.digest(), str(lacking), optimizer.digest(), str(optimizer.steps_done)
    check_agreement(facts, replicas, optimizer.compute_device)
    make_sets(optimizer.owner_sets, replicas, optimizer.compute_device)
