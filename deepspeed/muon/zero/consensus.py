# SPDX-License-Identifier: Apache-2.0
"""How all ranks come to one result.

:func:`compare`: before anything is built, through the rendezvous store. A rank that runs another optimizer would not
join a collective; here its silence ends in an error that names it.
:func:`together`: after work on each rank that may fail. A rank that raised alone would leave the others waiting in
their next collective; here all of them raise.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from deepspeed.muon.errors import DisagreementError

Facts = dict[str, Any]
Result = TypeVar("Result")

#: Seconds that a rank may take to state its facts once it has shown that it runs deepspeed-muon: compiling the C++
#: kernels takes minutes on a slow node.
PREPARATION = 1800.0

_comparisons = itertools.count()


def compare(state: Callable[[], Facts], judge: Callable[[list[Facts]], Facts]) -> Facts:
    """Let rank 0 judge what all ranks state, with O(ranks) messages through the rendezvous store.

    Args:
        state: this rank's facts, as JSON values. It may take long, and may raise.
        judge: called on rank 0 with every rank's facts, by rank. It returns the verdict; ``error`` in it is raised on
            all ranks.

    Raises:
        DisagreementError: the judge found an error, ``state`` raised on some rank, or a rank was silent for
            ``DS_MUON_BIND_TIMEOUT`` seconds (120 by default).
    """
    alone = not torch.distributed.is_initialized()
    verdict = judge([state()]) if alone else _through_the_store(state, judge)
    if "error" in verdict:
        raise DisagreementError(verdict["error"])
    return verdict


def _through_the_store(state: Callable[[], Facts], judge: Callable[[list[Facts]], Facts]) -> Facts:
    """Each rank first says that it is there, then what it has to state: only the first must come soon."""
    seconds = float(os.environ.get("DS_MUON_BIND_TIMEOUT", "120"))
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    prefix = f"deepspeed_muon/{next(_comparisons)}"
    store.set(f"{prefix}/here/{rank}", "")
    store.set(f"{prefix}/{rank}", json.dumps(_stated(state)))
    if rank == 0:
        verdict = _verdict(store, prefix, world_size, seconds, judge)
        store.set(f"{prefix}/verdict", json.dumps(verdict))
        return verdict
    if _missing(store, [f"{prefix}/here/0"], 2 * seconds):
        raise DisagreementError(_silence([0]))
    if _missing(store, [f"{prefix}/verdict"], 2 * seconds + PREPARATION):
        raise DisagreementError(f"rank 0 came to no verdict within {PREPARATION:.0f} s; look at its log")
    return json.loads(store.get(f"{prefix}/verdict"))


def _stated(state: Callable[[], Facts]) -> Facts:
    try:
        return {"facts": state()}
    except Exception as error:  # the other ranks wait for this rank's facts
        return {"raised": f"{type(error).__name__}: {error}"}


def _verdict(store: Any, prefix: str, world_size: int, seconds: float, judge: Callable[[list[Facts]], Facts]) -> Facts:
    ranks = range(world_size)
    if silent := _missing(store, [f"{prefix}/here/{rank}" for rank in ranks], seconds):
        return {"error": _silence(silent)}
    if slow := _missing(store, [f"{prefix}/{rank}" for rank in ranks], PREPARATION):
        return {"error": f"ranks {slow} did not get ready within {PREPARATION:.0f} s; look at their logs"}
    stated = [json.loads(store.get(f"{prefix}/{rank}")) for rank in ranks]
    if raised := [f"rank {rank}: {one['raised']}" for rank, one in enumerate(stated) if "raised" in one]:
        return {"error": "; ".join(raised[:4])}
    try:
        return judge([one["facts"] for one in stated])
    except Exception as error:  # the other ranks wait for the verdict
        return {"error": f"rank 0 cannot compare the ranks: {type(error).__name__}: {error}"}


def _missing(store: Any, keys: list[str], seconds: float) -> list[int]:
    """Indices of the keys that nobody has set in this time."""
    deadline = time.monotonic() + seconds
    missing = []
    for index, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            missing.append(index)
    return missing


def _silence(ranks: list[int]) -> str:
    return (
        f"ranks {ranks} did not bind deepspeed-muon: they run stock DeepSpeed's Muon or another optimizer. "
        "Install the same deepspeed-muon on every node and unset DS_MUON_AUTOLOAD=0, or raise DS_MUON_BIND_TIMEOUT "
        "if those ranks are only slow"
    )


def differences(facts: list[Facts], titles: dict[str, str], within: str | None = None) -> str | None:
    """A message that names the ranks which differ from the first, or ``None``.

    Args:
        titles: fact -> what the message calls it.
        within: a fact; only ranks that state the same value of it are compared with each other.
    """
    teams: dict[Any, list[int]] = {}
    for rank, stated in enumerate(facts):
        teams.setdefault(stated[within] if within else None, []).append(rank)
    for key, title in titles.items():
        for first, *others in teams.values():
            if odd := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                theirs = [facts[rank][key] for rank in odd[:4]]
                return f"{title} differs: rank {first} has {facts[first][key]}, ranks {odd} have {theirs}"
    return None


def together(act: Callable[[], Result], explain: Callable[[str], Exception]) -> Result:
    """What ``act`` returns on this rank, once it has returned on all ranks.

    Args:
        act: work of this rank alone. It contains no collective, and may raise anything.
        explain: makes the error for all ranks from what was raised, and on which ranks.

    Raises:
        Exception: that of ``explain``, on every rank.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as raised:
        error = raised
    texts = gathered(None if error is None else _text(error))
    if any(text is not None for text in texts):
        raise explain(_by_text(texts)) from error
    return result  # type: ignore[return-value]


def _text(error: Exception) -> str:
    """Errors of the system and our own speak for themselves; for others the type is half of the message."""
    own = type(error).__module__.startswith("deepspeed.muon")
    return str(error) if own or isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _by_text(texts: list[str | None]) -> str:
    """Each message once, with the ranks that have it; without ranks where all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if len(set(texts)) == 1:
        return next(iter(ranks))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {str(who).strip('[]')}: {text}" for text, who in ranks.items())


def gathered(value: Any) -> list[Any]:
    """The value of every rank, by rank; a collective."""
    from deepspeed import comm  # type: ignore[attr-defined]

    values = [None] * comm.get_world_size()
    comm.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """The value that rank 0 has; a collective."""
    from deepspeed import comm  # type: ignore[attr-defined]

    values = [value]
    comm.broadcast_object_list(values, src=0)
    return values[0]


def on_all_ranks(check: Callable[[], bool], group: Any = None) -> Callable[[], bool]:
    """The check, passed where all ranks of the group pass it: ranks with their own parameters have own gradients."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed import comm  # type: ignore[attr-defined]

    def agreed() -> bool:
        passed = torch.tensor(float(check()), device=get_accelerator().current_device_name())
        comm.all_reduce(passed, op=comm.ReduceOp.MIN, group=group)
        return bool(passed)

    return agreed
