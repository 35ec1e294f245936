# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a job run the same optimizer, found out without a collective."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from deepspeed.muon.errors import CheckpointError, DisagreementError

_consultations = itertools.count()


def consult(facts: dict[str, Any], judge: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
    """Let rank 0 judge what all ranks state, through the rendezvous store.

    A store and not a collective, because a rank that runs another optimizer would not take part in a
    collective: here its silence ends in an error that names it. O(ranks) messages in all.

    Args:
        facts: this rank's statement, as JSON values.
        judge: rank 0 calls it with every rank's facts, by rank; it returns the verdict for all ranks, in
            which a key ``error`` is raised everywhere.

    Raises:
        DisagreementError: the judge found an error, or a rank was silent for ``DS_MUON_BIND_TIMEOUT`` seconds
            (120 by default).
    """
    if not torch.distributed.is_initialized():
        return judge([facts])
    seconds = float(os.environ.get("DS_MUON_BIND_TIMEOUT", "120"))
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prefix = f"deepspeed_muon/{next(_consultations)}"
    store.set(f"{prefix}/{rank}", json.dumps(facts))
    if rank == 0:
        keys = [f"{prefix}/{r}" for r in range(world_size)]
        silent = _silent(store, keys, seconds)
        verdict = {"error": _silence(silent)} if silent else judge([json.loads(store.get(key)) for key in keys])
        store.set(f"{prefix}/verdict", json.dumps(verdict))
    elif _silent(store, [f"{prefix}/verdict"], 2 * seconds):
        raise DisagreementError(_silence([0]))
    else:
        verdict = json.loads(store.get(f"{prefix}/verdict"))
    if "error" in verdict:
        raise DisagreementError(verdict["error"])
    return verdict


def _silent(store: Any, keys: list[str], seconds: float) -> list[int]:
    """Indices of the keys that nobody has set in this time."""
    deadline = time.monotonic() + seconds
    silent = []
    for index, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            silent.append(index)
    return silent


def _silence(ranks: list[int]) -> str:
    return (
        f"ranks {ranks} did not bind deepspeed-muon: they run stock DeepSpeed's Muon or another optimizer. "
        "Install the same deepspeed-muon on every node and unset DS_MUON_AUTOLOAD=0, or raise DS_MUON_BIND_TIMEOUT "
        "if those ranks are only slow"
    )


def differences(facts: list[dict[str, Any]], keys: dict[str, str], within: str | None = None) -> str | None:
    """An error text that names the ranks which differ from the first, or ``None``.

    Args:
        keys: fact -> what to call it in the message.
        within: a fact; only ranks that state the same of it are compared with each other.
    """
    teams: dict[Any, list[int]] = {}
    for rank, stated in enumerate(facts):
        teams.setdefault(stated[within] if within else None, []).append(rank)
    for key, title in keys.items():
        for first, *others in teams.values():
            if odd := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                theirs = [facts[rank][key] for rank in odd[:4]]
                return f"{title} differs: rank {first} has {facts[first][key]}, ranks {odd} have {theirs}"
    return None


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
