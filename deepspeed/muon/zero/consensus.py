# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks.

:func:`agree`: before anything is built, through the rendezvous store. A rank that runs another optimizer would not join
a collective; its silence ends in an error that names it.
:func:`raise_on_all_ranks`: after work on each rank that may fail. If one rank raised, the others would wait for it in
their next collective; so all of them raise.

Collectives are torch's: DeepSpeed's wrapper times what its ``comms_logger`` selects, and ends the process at one that
it does not know, such as a gathering of objects.
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
Reduce = Callable[[list[Facts]], Facts]
Result = TypeVar("Result")

#: Seconds that a rank may take to state its facts once it has shown that it runs deepspeed-muon: compiling the C++
#: kernels takes minutes on a slow node.
MAX_PREPARATION_SECONDS = 1800.0

#: The number of the first comparison that may not have ended; equal on all ranks.
_open_comparison = 0


def agree(local_facts: Callable[[], Facts], reduce: Reduce) -> Facts:
    """Return what rank 0 makes of the facts of all ranks, after O(ranks) messages through the rendezvous store.

    Args:
        local_facts: returns this rank's facts, as JSON values. It may take long, and may raise.
        reduce: called on rank 0 with every rank's facts, by rank. An ``error`` in its result is raised on all ranks.

    Raises:
        DisagreementError: ``reduce`` found an error, ``local_facts`` raised on some rank, or a rank was silent for
            ``DS_MUON_BIND_TIMEOUT`` seconds (120 by default).
    """
    is_single = not torch.distributed.is_initialized()
    result = reduce([local_facts()]) if is_single else _through_the_store(local_facts, reduce)
    if "error" in result:
        raise DisagreementError(result["error"])
    return result


def _through_the_store(local_facts: Callable[[], Facts], reduce: Reduce) -> Facts:
    """Send two messages per rank: an immediate sign of life, then the facts, which may take minutes.

    A rank whose construction failed may start over, while the others wait for it in a later comparison, or no longer
    wait. Its facts name the kind of comparison that it is in, and it skips comparisons that ended without it.
    """
    global _open_comparison
    seconds = float(os.environ.get("DS_MUON_BIND_TIMEOUT", "120"))
    whole_store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    while whole_store.check([f"deepspeed_muon/{_open_comparison}/verdict"]):
        _open_comparison += 1
    store = torch.distributed.PrefixStore(f"deepspeed_muon/{_open_comparison}", whole_store)
    store.set(f"here/{rank}", "")
    # Ranks with another version of this package compare the first of these names too, so it must not change.
    stated: Facts = {"kind": reduce.__qualname__}
    try:
        stated["facts"] = local_facts()
    except (Exception, SystemExit) as error:  # the other ranks wait for this rank's facts
        stated["raised"] = with_type(error)
    store.set(str(rank), json.dumps(stated))
    if rank == 0:
        store.set("verdict", json.dumps(_reduced(store, range(world_size), seconds, reduce)))
    elif _missing(store, ["here/0"], 2 * seconds):
        for key in (f"here/{rank}", str(rank)):
            store.delete_key(key)  # rank 0 may come later; what this rank states then counts
        raise DisagreementError(_silence([0]))
    elif _missing(store, ["verdict"], 2 * seconds + MAX_PREPARATION_SECONDS):
        raise DisagreementError(f"rank 0 came to no verdict within {MAX_PREPARATION_SECONDS:.0f} s; look at its log")
    _open_comparison += 1
    return json.loads(store.get("verdict"))


def _reduced(store: torch.distributed.Store, ranks: range, seconds: float, reduce: Reduce) -> Facts:
    if silent := _missing(store, [f"here/{rank}" for rank in ranks], seconds):
        return {"error": _silence(silent)}
    if slow := _missing(store, [str(rank) for rank in ranks], MAX_PREPARATION_SECONDS):
        return {"error": f"ranks {slow} did not get ready within {MAX_PREPARATION_SECONDS:.0f} s; look at their logs"}
    stated = [json.loads(store.get(str(rank))) for rank in ranks]
    if raised := [f"rank {rank}: {one['raised']}" for rank, one in enumerate(stated) if "raised" in one]:
        return {"error": "; ".join(raised[:4])}
    if differing := [rank for rank in ranks if stated[rank]["kind"] != stated[0]["kind"]]:
        return {
            "error": f"ranks {differing} build the optimizer for another time than rank 0; look for the first error in "
            "the logs of all ranks, and build it again on all of them"
        }
    try:
        return reduce([one["facts"] for one in stated])
    except (Exception, SystemExit) as error:  # the other ranks wait for the result
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
    """Return an ``error`` that names the ranks that differ from the first; empty if all agree.

    Args:
        titles: fact -> what the message calls it.
        within: a fact; only ranks that state the same value of it are compared with each other.
    """
    teams = ranks_by_value(stated.get(within) for stated in facts).values()
    for key, title in titles.items():
        for first, *others in teams:
            if differing := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                values = [facts[rank][key] for rank in differing[:4]]
                return {
                    "error": f"{title} differs: rank {first} has {facts[first][key]}, ranks {differing} have {values}"
                }
    return {}


def raise_on_all_ranks(act: Callable[[], Result], explain: Callable[[str], Exception]) -> Result:
    """Return what ``act`` returns on this rank, once it has returned on all ranks; a collective.

    Args:
        act: work of this rank only. It contains no collective, and may raise anything.
        explain: makes the error that all ranks raise, from what was raised and on which ranks.
    """
    result, error, text = None, None, None
    try:
        result = act()
    except (Exception, SystemExit) as raised:
        # Errors of the system and our own need no type; for others the type is half of the message.
        is_ours = type(raised).__module__.startswith("deepspeed.muon")
        error, text = raised, str(raised) if is_ours or isinstance(raised, OSError) else with_type(raised)
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
    told = [(text, ranks) for text, ranks in ranks_by_value(texts).items() if text is not None]
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {str(ranks).strip('[]')}: {text}" for text, ranks in told)


def ranks_by_value(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value, from the values in the order of ranks."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the value of every rank of the group, by rank; a collective."""
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, source: int = 0) -> Any:
    """Return the value that rank ``source`` has; a collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=source)
    return values[0]


def union(names: Iterable[str]) -> list[str]:
    """Return the names that any rank has, each once; a collective. Ranks with equal names send them once."""
    local = list(names)
    digests = gathered(hashlib.sha256("\n".join(local).encode()).hexdigest())
    firsts = [ranks[0] for ranks in ranks_by_value(digests).values()]
    return list(dict.fromkeys(name for first in firsts for name in broadcast(local, first)))
