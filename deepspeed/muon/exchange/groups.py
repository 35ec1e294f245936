# SPDX-License-Identifier: Apache-2.0
"""Process groups, and answers that are equal on all ranks of a group.

All ranks of the world make the package's groups, in one order, before any step: if DeepSpeed has bound a process to its
device, NCCL makes a group by splitting the world's communicator, which ranks outside of the group must call too.

Collectives are called through torch, not through DeepSpeed: with ``comms_logger``, DeepSpeed's wrapper ends the process
at an operation that it cannot log, such as ``all_gather_object``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NewType

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import has_fp64

#: An answer that is equal on all ranks. Only :func:`agreed` makes one.
Agreed = NewType("Agreed", bool)


def short_hash(text: str, digits: int = 16) -> str:
    """Return the first ``digits`` hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def processes() -> int:
    """Return the number of processes in the job; 1 if torch.distributed is not initialized."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def init_and_rank(group: Any) -> tuple[int, int]:
    """Initialize ``deepspeed.comm`` if needed. Return (this process's rank in the process group, the group's size)."""
    from deepspeed import comm  # type: ignore[attr-defined]

    if not comm.is_initialized():
        comm.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    return comm.get_rank(group=group), comm.get_world_size(group=group)


def all_maxima(values: Tensor, group: Any) -> Tensor:
    """Replace each element of ``values`` by its maximum over the ranks of ``group``; return ``values``.

    ``group``: ``None`` for all ranks. A collective if the job has several processes.
    """
    if processes() > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return values


def summed(values: Tensor) -> Tensor:
    """Return the elementwise sum of ``values`` over all ranks; a collective.

    ``values``: an fp64 CPU tensor. The result is on the accelerator: fp64 if it supports this dtype, otherwise fp32.
    """
    device = torch.device(get_accelerator().current_device_name())
    sums = values.to(torch.float64 if has_fp64(device) else torch.float32).to(device)
    torch.distributed.all_reduce(sums)
    return sums


def agreed(has_passed: bool, *, group: Any = None, is_same_on_all_ranks: bool = False) -> Agreed:
    """Return whether a check has passed on all ranks of ``group`` (``None``: all ranks).

    ``has_passed``: whether it has passed on this rank. ``is_same_on_all_ranks``: whether all ranks check the same
    numbers, such as a norm that ZeRO has reduced. If so, ``has_passed`` is returned. Otherwise this is a collective.
    """
    if is_same_on_all_ranks:
        return Agreed(has_passed)
    has_failed = torch.tensor(
        float(not has_passed), dtype=torch.float32, device=get_accelerator().current_device_name()
    )
    return Agreed(not all_maxima(has_failed, group).item())


def ranks_by_value(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return {value: ranks that have this value}. ``values``: the value of rank 0, of rank 1, and so on."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of ``group`` (``None``: all ranks) as a list in rank order; a collective.

    ``value``: this rank's value, which pickle must support.
    """
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, source: int = 0) -> Any:
    """Return on every rank the ``value`` that rank ``source`` passed, which pickle must support; a collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=source)
    return values[0]


def union(names: Iterable[str]) -> list[str]:
    """Return the union of ``names`` over all ranks, in the same order on every rank; a collective."""
    local = list(names)
    digests = gathered(hashlib.sha256("\n".join(local).encode()).hexdigest())
    firsts = [ranks[0] for ranks in ranks_by_value(digests).values()]
    return list(dict.fromkeys(name for first in firsts for name in broadcast(local, first)))


def own_group(wanted: Iterable[Sequence[int]], device: torch.device) -> Any:
    """Make process groups, and return the one that this rank is in. All ranks of the world must call this together.

    ``wanted``: the world ranks of each group, such as ``[(0, 1), (2, 3)]``; equal on all ranks, each of which is in one
    of them. ``device``: device of the tensors that will be sent.
    """
    own: Any = torch.distributed.group.WORLD
    # In one order on all ranks, members or not: if NCCL splits the world's communicator, every rank must take part.
    for ranks in sorted({tuple(ranks) for ranks in wanted if len(ranks) < torch.distributed.get_world_size()}):
        group = torch.distributed.new_group(list(ranks), timeout=_timeout(device))
        if torch.distributed.get_rank() in ranks:
            own = group
            # Use it once now: some backends build a group's connections only in its first collective.
            torch.distributed.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=own)
    return own


def _timeout(device: torch.device) -> timedelta | None:
    """Return the time limit of the world's collectives on ``device``; ``None``: torch's default."""
    world: Any = torch.distributed.group.WORLD
    return getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
