# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks.

:func:`agree` compares the ranks before anything is built, through the rendezvous store. A rank that runs another
optimizer would not join a collective; if it does not answer, the other ranks raise an error that names it.
:func:`raise_on_all_ranks` runs work that may fail on one rank. If it fails, all ranks raise, because the others would
wait for that rank in their next collective.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from deepspeed.muon.errors import DisagreementError
from deepspeed.muon.exchange.groups import gathered, ranks_by_value

Facts = dict[str, Any]
Reduce = Callable[[list[Facts]], Facts]
Result = TypeVar("Result")

#: Seconds that a rank may take to send its facts after its first sign of life: compiling the C++ kernels takes minutes
#: on a slow node.
MAX_PREPARATION_SECONDS = 1800.0

#: Comparisons are numbered from 0. This is the first that may not have ended; equal on all ranks.
_open_comparison = 0


def agree(local_facts: Callable[[], Facts], reduce: Reduce) -> Facts:
    """Send every rank's facts to rank 0, and return ``reduce(all facts)`` on every rank; a collective.

    The facts of a rank are a dict of JSON values, such as its settings. They travel through torch's rendezvous store.

    Args:
        local_facts: returns this rank's facts. The call may take minutes, and may raise.
        reduce: called on rank 0 only, with a list of every rank's facts. If the dict it returns has the key ``error``,
            all ranks raise DisagreementError with that text.

    Raises:
        DisagreementError: ``reduce`` returned an error, ``local_facts`` raised on some rank, or a rank did not respond
            for ``DS_MUON_BIND_TIMEOUT`` seconds (120 by default).
    """
    is_single = not torch.distributed.is_initialized()
    result = reduce([local_facts()]) if is_single else _agree_through_store(local_facts, reduce)
    if "error" in result:
        raise DisagreementError(result["error"])
    return result


def _agree_through_store(local_facts: Callable[[], Facts], reduce: Reduce) -> Facts:
    """Do the work of :func:`agree` with several ranks; return the dict that ``reduce`` returned on rank 0.

    Each rank first sends an immediate sign of life, then its facts, which may take minutes to compute.

    After a failure, one rank may build its optimizer again while the other ranks are in a later call. So each rank also
    sends the name of its ``reduce`` function, by which rank 0 notices ranks in different calls. A rank skips calls that
    the others have ended without it.
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
        store.set("verdict", json.dumps(_reduce_on_rank_0(store, range(world_size), seconds, reduce)))
    elif _unset_keys(store, ["here/0"], 2 * seconds):
        for key in (f"here/{rank}", str(rank)):
            store.delete_key(key)  # rank 0 may come later, and must not read outdated facts
        raise DisagreementError(_silence([0]))
    elif _unset_keys(store, ["verdict"], 2 * seconds + MAX_PREPARATION_SECONDS):
        raise DisagreementError(
            f"rank 0 did not compare the settings of all ranks within {MAX_PREPARATION_SECONDS:.0f} s; look "
            "at rank 0's log"
        )
    _open_comparison += 1
    return json.loads(store.get("verdict"))


def _reduce_on_rank_0(store: torch.distributed.Store, ranks: range, seconds: float, reduce: Reduce) -> Facts:
    """Wait on rank 0 for the facts of all ranks (:func:`agree`), and return ``reduce(all facts)``.

    Return ``{"error": text}`` instead if that fails. ``seconds``: how long to wait for each rank's first sign of life.
    """
    if silent := _unset_keys(store, [f"here/{rank}" for rank in ranks], seconds):
        return {"error": _silence(silent)}
    if slow := _unset_keys(store, [str(rank) for rank in ranks], MAX_PREPARATION_SECONDS):
        return {
            "error": f"ranks {slow} sent no settings to rank 0 within {MAX_PREPARATION_SECONDS:.0f} s; look at their "
            "logs"
        }
    stated = [json.loads(store.get(str(rank))) for rank in ranks]
    if raised := [f"rank {rank}: {one['raised']}" for rank, one in enumerate(stated) if "raised" in one]:
        return {"error": "; ".join(raised[:4])}
    if differing := [rank for rank in ranks if stated[rank]["kind"] != stated[0]["kind"]]:
        return {
            "error": f"ranks {differing} are at another step of building the optimizer than rank 0, because a rank "
            "failed before; look for the first error in the logs of all ranks, and build it again on all of them"
        }
    try:
        return reduce([one["facts"] for one in stated])
    except (Exception, SystemExit) as error:  # the other ranks wait for the result
        return {
            "error": f"rank 0 failed to compare the settings of all ranks: {with_type(error)}; look at rank 0's log"
        }


def _unset_keys(store: torch.distributed.Store, keys: list[str], seconds: float) -> list[int]:
    """Return the indices in ``keys`` of the keys that no rank sets in the store within ``seconds``."""
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
        f"ranks {ranks} did not answer: they probably run another optimizer, such as stock DeepSpeed's Muon. Install "
        "the same deepspeed-muon on every node and unset DS_MUON_AUTOLOAD=0, or raise DS_MUON_BIND_TIMEOUT (seconds) "
        "if these ranks are only slow"
    )


def differences(facts: list[Facts], titles: dict[str, str], within: str = "") -> Facts:
    """Compare facts between ranks, and return ``{"error": text}`` that names ranks which differ; ``{}`` if none do.

    Args:
        facts: a dict for each rank, in the order of ranks.
        titles: {key of a fact to compare: text for the error}. A text that contains ``{ranks}`` and ``{first}`` is the
            whole error. Any other text is the fact's name, to which the ranks' values are added.
        within: key of a fact. Ranks are compared only with ranks that have the same value of this fact. By default all
            ranks are compared.
    """
    teams = ranks_by_value(stated.get(within) for stated in facts).values()
    for key, title in titles.items():
        for first, *others in teams:
            if differing := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                if "{ranks}" in title:
                    return {"error": title.format(ranks=differing, first=first)}
                values = [facts[rank][key] for rank in differing[:4]]
                return {
                    "error": f"{title} differs: rank {first} has {facts[first][key]}, ranks {differing} have {values}"
                }
    return {}


def raise_on_all_ranks(act: Callable[[], Result], explain: Callable[[str], Exception]) -> Result:
    """Call ``act`` on this rank and return its result; if ``act`` raises on any rank, raise on all ranks. A collective.

    Use it for work that may fail on one rank, so that the other ranks do not wait forever in their next collective.

    Args:
        act: work without collectives.
        explain: makes the exception to raise from a text such as ``rank 1: disk full``.
    """
    result, error, text = None, None, None
    try:
        result = act()
    except (Exception, SystemExit) as raised:
        # Our own errors and OSErrors are clear without their type; others, such as KeyError: 'lr', are not.
        is_ours = type(raised).__module__.startswith("deepspeed.muon")
        error, text = raised, str(raised) if is_ours or isinstance(raised, OSError) else with_type(raised)
    texts = gathered(text)
    if any(text is not None for text in texts):
        raise explain(_join_messages(texts)) from error
    return result  # type: ignore[return-value]


def with_type(error: BaseException) -> str:
    """Return an exception as text with its type, such as ``KeyError: 'lr'``."""
    return f"{type(error).__name__}: {error}"


def _join_messages(texts: list[str | None]) -> str:
    """Return the error messages of all ranks as one text, such as ``rank 0: disk full; ranks 1, 2: no such file``.

    If all ranks have the same message, return it without the ranks. ``texts``: for each rank its message, or ``None``.
    """
    if len(set(texts)) == 1:
        return str(texts[0])
    found = [(text, ranks) for text, ranks in ranks_by_value(texts).items() if text is not None]
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {str(ranks).strip('[]')}: {text}" for text, ranks in found)
