# SPDX-License-Identifier: Apache-2.0
"""What one rank finds, known to all: a rank that raises alone leaves the others waiting in their next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed.muon.zero.manifest import CheckpointError

Result = TypeVar("Result")


def gathered(value: Any) -> list[Any]:
    """The value of every rank, by rank."""
    from deepspeed import comm  # type: ignore[attr-defined]

    values = [None] * comm.get_world_size()
    comm.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """The value that rank 0 has."""
    from deepspeed import comm  # type: ignore[attr-defined]

    values = [value]
    comm.broadcast_object_list(values, src=0)
    return values[0]


def agreed(act: Callable[[], Result]) -> Result:
    """What ``act`` returns, once it has returned on all ranks.

    Raises:
        Exception: its own, where it raised here.
        CheckpointError: where it raised on another rank.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as raised:
        error = raised
    texts = gathered(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"rank {rank} cannot load the checkpoint, and nothing was changed: {text}")
    return result  # type: ignore[return-value]
