# SPDX-License-Identifier: Apache-2.0
"""Process groups, and answers that all their ranks have alike.

Groups that the package makes are made by all ranks of the world, in one order, before any step.

Where DeepSpeed has bound a process to its device, NCCL makes a group by a split of the world's communicator, which all
ranks of the world must call, also those outside of the group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NewType

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

Ranks = tuple[int, ...]
#: What is equal on all ranks. Made by :func:`agreed` only.
Agreed = NewType("Agreed", bool)

#: Those of this rank, by the world's group and their ranks.
_made: dict[tuple[Any, Ranks], Any] = {}


def processes() -> int:
    """Return how many processes of this job could exchange anything."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def join(group: Any) -> tuple[int, int]:
    """Initialize DeepSpeed's collectives; return this rank's index in a process group of torch's, and its size."""
    from deepspeed import comm  # type: ignore[attr-defined]

    if not comm.is_initialized():
        comm.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    return comm.get_rank(group=group), comm.get_world_size(group=group)


def all_maxima(values: Tensor, group: Any) -> Tensor:
    """Return the largest of each value over the ranks of a group, by default all; a collective."""
    if processes() > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return values


def agreed(has_passed: bool, *, group: Any = None, is_common: bool = False) -> Agreed:
    """Return whether a check has passed on all ranks of a group, by default all; a collective unless ``is_common``.

    Args:
        has_passed: on this rank.
        is_common: the ranks checked the same numbers, such as a norm that ZeRO has reduced over them.
    """
    if is_common:
        return Agreed(has_passed)
    has_failed = torch.tensor(
        float(not has_passed), dtype=torch.float32, device=get_accelerator().current_device_name()
    )
    return Agreed(not all_maxima(has_failed, group).item())


def make_groups(wanted: Iterable[Sequence[int]], device: torch.device) -> None:
    """Make process groups, and use each once; a collective of the world.

    ``wanted``: the ranks of each group, equal on all ranks. ``device``: of what the groups will send.
    """
    for ranks in sorted({tuple(ranks) for ranks in wanted if len(ranks) < torch.distributed.get_world_size()}):
        group = torch.distributed.new_group(list(ranks), timeout=group_timeout(device))
        if torch.distributed.get_rank() in ranks:
            _made[torch.distributed.group.WORLD, ranks] = group
            torch.distributed.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)


def is_made(ranks: Sequence[int]) -> bool:
    """Return whether :func:`group_of` has a group of these ranks; this rank is one of them."""
    if len(ranks) == torch.distributed.get_world_size():
        return True
    group = _made.get((torch.distributed.group.WORLD, tuple(ranks)))
    return group in torch.distributed.distributed_c10d._world.pg_map  # else the script has destroyed it


def group_of(ranks: Sequence[int]) -> Any:
    """Return the process group of these ranks, which :func:`make_groups` has made.

    Raises:
        RuntimeError: it has not.
    """
    if len(ranks) == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD
    if not is_made(ranks):
        raise RuntimeError(
            f"ranks {list(ranks)} own matrices together since a state was loaded, and have no process group; load it "
            "with engine.load_checkpoint on all ranks, or before the first step"
        )
    return _made[torch.distributed.group.WORLD, tuple(ranks)]


def group_timeout(device: torch.device) -> timedelta | None:
    """Return the limit of collectives: ``DEEPSPEED_TIMEOUT`` (minutes), else that of the world's group, if known.

    torch's ``new_group`` takes a constant of its own.
    """
    if minutes := os.environ.get("DEEPSPEED_TIMEOUT"):
        return timedelta(minutes=int(minutes))
    world: Any = torch.distributed.group.WORLD
    return getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)


def limit_time(group: Any) -> None:
    """Give a group that DeepSpeed or the script has made the time limit ``DEEPSPEED_TIMEOUT``, where torch can."""
    set_timeout = getattr(torch.distributed.distributed_c10d, "_set_pg_timeout", None)
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if set_timeout is not None and minutes and torch.distributed.get_backend(group) in ("nccl", "gloo"):
        set_timeout(timedelta(minutes=int(minutes)), group)
