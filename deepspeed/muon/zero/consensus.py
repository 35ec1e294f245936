# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks.

:func:`agree` compares the ranks through torch's rendezvous store, before anything is built. Collectives would hang if
a rank runs another optimizer. :func:`raise_on_all_ranks` makes an error on one rank an error on all ranks.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepspeed.muon.errors import CheckpointError, DisagreementError
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

    Facts are a dict of JSON values, such as a rank's settings. They travel through torch's rendezvous store.

    Args:
        local_facts: returns this rank's facts. It may take minutes, and may raise.
        reduce: called on rank 0 with a list of all ranks' facts. If the dict that it returns has the key ``error``, all
            ranks raise DisagreementError with that text.

    Raises:
        DisagreementError: ``reduce`` returned an error, ``local_facts`` raised on some rank, or a rank did not respond
            within ``DS_MUON_BIND_TIMEOUT`` seconds (120 by default).
    """
    is_single = not torch.distributed.is_initialized()
    result = reduce([local_facts()]) if is_single else _agree_through_store(local_facts, reduce)
    if "error" in result:
        raise DisagreementError(result["error"])
    return result


def _agree_through_store(local_facts: Callable[[], Facts], reduce: Reduce) -> Facts:
    """Do the work of :func:`agree` for several ranks; return the dict that ``reduce`` returned on rank 0."""
    global _open_comparison
    seconds = float(os.environ.get("DS_MUON_BIND_TIMEOUT", "120"))
    whole_store = torch.distributed.distributed_c10d._get_default_store()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Skip comparisons that the other ranks have ended without this rank, after a failure.
    while whole_store.check([f"deepspeed_muon/{_open_comparison}/verdict"]):
        _open_comparison += 1
    store = torch.distributed.PrefixStore(f"deepspeed_muon/{_open_comparison}", whole_store)
    store.set(f"here/{rank}", "")  # announces the facts, which may take minutes to compute
    # The kind shows rank 0 that a rank is in another comparison, after a failure.
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
    """Wait on rank 0 for the facts of all ranks, and return ``reduce(all facts)``; ``{"error": text}`` if that fails.

    ``seconds``: time for each rank to announce that it takes part. Its facts may come later.
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
            "failed before; look for the first error in the logs of all ranks, fix it, and start all ranks again"
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


def differences(facts: list[Facts], texts: dict[str, str], within: str = "") -> Facts:
    """Compare facts between ranks. Return ``{"error": text}`` that names ranks which differ; ``{}`` if all are equal.

    Args:
        facts: the facts of each rank, in the order of ranks.
        texts: {key of a fact to compare: error text}. In the text, ``{ranks}`` is replaced by the ranks that differ,
            and ``{first}`` by the rank from which they differ. A text without ``{ranks}`` only names the fact, such as
            "the version"; the error is then "the version differs: rank 0 has 1, ranks [1] have [2]".
        within: key of a fact. Only ranks with the same value of this fact are compared with one another. By default all
            ranks are compared.
    """
    teams = ranks_by_value(stated.get(within) for stated in facts).values()
    for key, text in texts.items():
        for first, *others in teams:
            if differing := [rank for rank in others if facts[rank][key] != facts[first][key]]:
                if "{ranks}" in text:
                    return {"error": text.format(ranks=differing, first=first)}
                values = [facts[rank][key] for rank in differing[:4]]
                return {
                    "error": f"{text} differs: rank {first} has {facts[first][key]}, ranks {differing} have {values}"
                }
    return {}


def raise_on_all_ranks(act: Callable[[], Result], explain: Callable[[str], Exception]) -> Result:
    """Return ``act()`` if it succeeds on every rank; if it raises on any rank, raise on all ranks. A collective.

    Use it for work that may fail on one rank, so that the other ranks do not wait forever in their next collective.
    ``act`` must not call collectives. ``explain`` makes the exception from a text such as ``rank 1: disk full``.
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
    """Join the ranks' error messages, such as ``rank 0: disk full; ranks 1, 2: no such file``.

    ``texts``: each rank's message; ``None`` for a rank without an error. If all ranks have the same message, return it.
    """
    if len(set(texts)) == 1:
        return str(texts[0])
    found = [(text, ranks) for text, ranks in ranks_by_value(texts).items() if text is not None]
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {str(ranks).strip('[]')}: {text}" for text, ranks in found)


# ---- arguments of a call -----------------------------------------------------------------------------------------

#: Arguments of ``save_checkpoint`` and ``load_checkpoint`` that must be equal on all ranks.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip


def arguments_of(original: Callable, engine: Any, args: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """Return {name: value} of all arguments of a call of the engine's method ``original``, defaults included."""
    call = inspect.signature(original).bind(engine, *args, **options)
    call.apply_defaults()
    return call.arguments


def compare_arguments(engine: Any, call: str, arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError on all ranks if they pass different arguments to the function ``call``; a collective."""
    values = {name: value for name, value in arguments.items() if name in COMMON}
    for name in {"save_dir", "load_dir"} & values.keys():
        values[name] = str(Path(values[name]).absolute()) if values[name] else ""
        if engine.use_node_local_storage():
            values[name] = bool(values[name])  # nodes may have different folders
    values["tag"] = None if values["tag"] is None else str(values["tag"])
    if "custom_load_fn" in values:
        values["custom_load_fn"] = values["custom_load_fn"] is not None
    texts = {name: f"{call}: the argument {name}" for name in values}
    if verdict := differences(gathered(values), texts):
        raise CheckpointError(f"{verdict['error']}; pass the same value on all ranks. Nothing was written or changed")
