# SPDX-License-Identifier: Apache-2.0
"""How all ranks come to one result.

:func:`compare`: before anything is built, through the rendezvous store. A rank that runs another optimizer would not
join a collective; its silence ends in an error that names it.
:func:`together`: after work on each rank that may fail. A rank that raised alone would leave the others waiting in
their next collective; here all of them raise.

Collectives are torch's own: DeepSpeed's wrapper times what its ``comms_logger`` selects, and ends the process at one
that it does not know, such as a gathering of objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from deepspeed.muon.errors import DisagreementError

Facts = dict[str, Any]
Judge = Callable[[list[Facts]], Facts]
Result = TypeVar("Result")

#: Seconds that a rank may take to state its facts once it has shown that it runs deepspeed-muon: compiling the C++
#: kernels takes minutes on a slow node.
PREPARATION = 1800.0

#: The first comparison that may not have ended, by its number; equal on all ranks.
_open_comparison = 0


def compare(state: Callable[[], Facts], judge: Judge) -> Facts:
    """Let rank 0 judge what all ranks state, with O(ranks) messages through the rendezvous store.

    Args:
        state: this rank's facts, as JSON values. It may take long, and may raise.
        judge: called on rank 0 with every rank's facts, by rank. It returns the verdict; ``error`` in it is raised on
            all ranks.

    Raises:
        DisagreementError: the judge found an error, ``state`` raised on some rank, or a rank was silent for
            ``DS_MUON_BIND_TIMEOUT`` seconds (120 by default).
    """
    is_single = not torch.distributed.is_initialized()
    verdict = judge([state()]) if is_single else _through_the_store(state, judge)
    if "error" in verdict:
        raise DisagreementError(verdict["error"])
    return verdict


def _through_the_store(state: Callable[[], Facts], judge: Judge) -> Facts:
    """Let each rank first say that it is there, then what it has to state: only the first must come soon.

    A rank whose construction failed may start over, while the others wait for it in a later comparison, or have given
    it up. What it states tells which comparison it is in, and a comparison that has ended without it is passed over.
    """
    global _open_comparison
    seconds = float(os.environ.get("DS_MUON_BIND_TIMEOUT", "120"))
    of_all = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    while of_all.check([f"deepspeed_muon/{_open_comparison}/verdict"]):
        _open_comparison += 1
    store = torch.distributed.PrefixStore(f"deepspeed_muon/{_open_comparison}", of_all)
    store.set(f"here/{rank}", "")
    stated: Facts = {"kind": judge.__qualname__}
    try:
        stated["facts"] = state()
    except (Exception, SystemExit) as error:  # the other ranks wait for this rank's facts
        stated["raised"] = with_type(error)
    store.set(str(rank), json.dumps(stated))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, range(world_size), seconds, judge)))
    elif _missing(store, ["here/0"], 2 * seconds):
        for key in (f"here/{rank}", str(rank)):
            store.delete_key(key)  # rank 0 may come later; what this rank states then counts
        raise DisagreementError(_silence([0]))
    elif _missing(store, ["verdict"], 2 * seconds + PREPARATION):
        raise DisagreementError(f"rank 0 came to no verdict within {PREPARATION:.0f} s; look at its log")
    _open_comparison += 1
    return json.loads(store.get("verdict"))


def _verdict(store: torch.distributed.Store, ranks: range, seconds: float, judge: Judge) -> Facts:
    if silent := _missing(store, [f"here/{rank}" for rank in ranks], seconds):
        return {"error": _silence(silent)}
    if slow := _missing(store, [str(rank) for rank in ranks], PREPARATION):
        return {"error": f"ranks {slow} did not get ready within {PREPARATION:.0f} s; look at their logs"}
    stated = [json.loads(store.get(str(rank))) for rank in ranks]
    if raised := [f"rank {rank}: {one['raised']}" for rank, one in enumerate(stated) if "raised" in one]:
        return {"error": "; ".join(raised[:4])}
    if odd := [rank for rank in ranks if stated[rank]["kind"] != stated[0]["kind"]]:
        return {
            "error": f"ranks {odd} build the optimizer for another time than rank 0; look for the first error in "
            "the logs of all ranks, and build it again on all of them"
        }
    try:
        return judge([one["facts"] for one in stated])
    except (Exception, SystemExit) as error:  # the other ranks wait for the verdict
        return {"error": f"rank 0 cannot compare the ranks: {with_type(error)}"}


def _missing(store: torch.distributed.Store, keys: list[str], seconds: float) -> list[int]:
    """Return the indices of the keys that nobody has set in this time."""
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


def differences(facts: list[Facts], titles: dict[str, str], within: str = "") -> Facts:
    """Return the verdict on ranks that differ from the first: an ``error`` that names them; empty if all agree.

    Args:
        titles: fact -> what the message calls it.
        within: a fact; only ranks that state the same value of it are compared with each other.
    """
    teams = _ranks_by(stated.get(within) for stated in facts).values()
    for key, title in titles.items():
        for first, *others in teams:
            if odd := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                theirs = [facts[rank][key] for rank in odd[:4]]
                return {"error": f"{title} differs: rank {first} has {facts[first][key]}, ranks {odd} have {theirs}"}
    return {}


def together(act: Callable[[], Result], explain: Callable[[str], Exception]) -> Result:
    """Return what ``act`` returns on this rank, once it has returned on all ranks.

    Args:
        act: work of this rank only. It contains no collective, and may raise anything.
        explain: makes the error that all ranks raise, from what was raised and on which ranks.
    """
    result, error, text = None, None, None
    try:
        result = act()
    except (Exception, SystemExit) as raised:
        # Errors of the system and our own speak for themselves; for others the type is half of the message.
        is_own = type(raised).__module__.startswith("deepspeed.muon")
        error, text = raised, str(raised) if is_own or isinstance(raised, OSError) else with_type(raised)
    texts = gathered(text)
    if any(text is not None for text in texts):
        raise explain(_by_text(texts)) from error
    return result  # type: ignore[return-value]


def with_type(error: BaseException) -> str:
    """Return the name of an error's type, and its text."""
    return f"{type(error).__name__}: {error}"


def _by_text(texts: list[str | None]) -> str:
    """Return each message once, with the ranks that have it; without ranks where all have the same."""
    if len(set(texts)) == 1:
        return str(texts[0])
    told = [(text, who) for text, who in _ranks_by(texts).items() if text is not None]
    return "; ".join(f"rank{'s' * (len(who) > 1)} {str(who).strip('[]')}: {text}" for text, who in told)


def _ranks_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, of the values by rank."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every rank of the group, by rank; a collective."""
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def from_rank_0(value: Any) -> Any:
    """Return the value that rank 0 has; a collective."""
    return _from(0, value)


def union(names: Iterable[str]) -> list[str]:
    """Return the names that any rank has, each once; a collective. Ranks with equal names send them once."""
    mine = list(names)
    digests = gathered(hashlib.sha256("\n".join(mine).encode()).hexdigest())
    firsts = [ranks[0] for ranks in _ranks_by(digests).values()]
    return list(dict.fromkeys(name for first in firsts for name in _from(first, mine)))


def _from(rank: int, value: Any) -> Any:
    values = [value]
    torch.distributed.broadcast_object_list(values, src=rank)
    return values[0]
