# SPDX-License-Identifier: Apache-2.0
"""Process groups, small collectives, and comparisons between ranks, so that all ranks decide alike.

All ranks of the world make the package's process groups together, in the same order, before any step. If DeepSpeed has
bound a process to its device, NCCL makes a group by splitting the world's communicator, which all ranks must do.

Collectives are called through torch, not through DeepSpeed: with ``comms_logger``, DeepSpeed's wrapper ends the process
at an operation that it cannot log, such as ``all_gather_object``.

:func:`agree` compares the ranks through torch's rendezvous store, before anything is built. Collectives would hang if
a rank runs another optimizer. :mod:`deepspeed.muon.zero.bind` has what ranks compare at start.
:func:`raise_on_all_ranks` makes an error on one rank an error on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NewType, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.errors import DisagreementError
from deepspeed.muon.kernels.kernel_set import has_fp64

#: An answer that is equal on all ranks. Only :func:`agreed` and :func:`same_on_all_ranks` make one.
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


def same_on_all_ranks(has_passed: bool) -> Agreed:
    """Return ``has_passed`` as an ``Agreed``, the type of answers that are equal on all ranks, without communication.

    Call this only if all ranks have checked the same numbers, such as a norm that ZeRO has reduced.
    """
    return Agreed(has_passed)


def agreed(has_passed: bool, group: Any = None) -> Agreed:
    """Return whether a check has passed on all ranks of ``group`` (``None``: all ranks); a collective.

    ``has_passed``: whether it has passed on this rank.
    """
    has_failed = torch.tensor(
        float(not has_passed), dtype=torch.float32, device=get_accelerator().current_device_name()
    )
    return Agreed(not all_maxima(has_failed, group).item())


def ranks_by_value(of_ranks: Iterable[Any]) -> dict[Any, list[int]]:
    """Return {value: ranks that have this value}. ``of_ranks``: the value of rank 0, of rank 1, and so on."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in enumerate(of_ranks):
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of ``group`` (``None``: all ranks) as a list in rank order; a collective.

    ``value``: this rank's value, which pickle must support.
    """
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, source_rank: int = 0) -> Any:
    """Return on every rank the ``value`` that ``source_rank`` passed, which pickle must support; a collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=source_rank)
    return values[0]


def union(names: Iterable[str]) -> list[str]:
    """Return the union of ``names`` over all ranks, in the same order on every rank; a collective."""
    local = list(names)
    digests = gathered(hashlib.sha256("\n".join(local).encode()).hexdigest())
    firsts = [ranks[0] for ranks in ranks_by_value(digests).values()]
    return list(dict.fromkeys(name for first in firsts for name in broadcast(local, first)))


def own_group(rank_groups: Iterable[Sequence[int]], device: torch.device) -> Any:
    """Make process groups, and return the one that contains this rank. A collective of all ranks of the world.

    ``rank_groups``: the world ranks of each group, such as ``[(0, 1), (2, 3)]``. All ranks pass the same groups, and
    each rank is in one of them. ``device``: device of the tensors that will be sent.
    """
    group: Any = torch.distributed.group.WORLD
    # In one order on all ranks, members or not: if NCCL splits the world's communicator, every rank must take part.
    for ranks in sorted({tuple(ranks) for ranks in rank_groups if len(ranks) < torch.distributed.get_world_size()}):
        new_group = torch.distributed.new_group(list(ranks), timeout=_timeout(device))
        if torch.distributed.get_rank() in ranks:
            group = new_group
            # Use it once now: some backends build a group's connections only in its first collective.
            torch.distributed.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
    return group


def _timeout(device: torch.device) -> timedelta | None:
    """Return the time limit of collectives on ``device`` in the world's group; ``None`` for torch's default."""
    world: Any = torch.distributed.group.WORLD
    return getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)


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
    elif _unset_keys(store, ["verdict"], longest := 2 * seconds + MAX_PREPARATION_SECONDS):
        raise DisagreementError(
            f"rank 0 did not compare the settings of all ranks within {longest:.0f} s; look at rank 0's log"
        )
    _open_comparison += 1
    return json.loads(store.get("verdict"))


def _reduce_on_rank_0(store: torch.distributed.Store, ranks: Sequence[int], seconds: float, reduce: Reduce) -> Facts:
    """Wait for the facts of all ranks, and return ``reduce(all facts)``; ``{"error": text}`` if that fails.

    Only rank 0 calls this. ``seconds``: time within which each rank must announce that it takes part; its facts may
    come later.
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
    """Wait until ranks have set ``keys`` in the store. Return the indices of those not set within ``seconds``."""
    deadline = time.monotonic() + seconds
    missing = []
    for index, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            missing.append(index)
    return missing


def _silence(ranks: list[int]) -> str:
    """Return the text of the error about ranks that did not announce themselves in :func:`agree`."""
    return (
        f"ranks {ranks} did not answer: they probably run another optimizer, such as stock DeepSpeed's Muon. Install "
        "the same deepspeed-muon on every node and unset DS_MUON_AUTOLOAD=0, or raise DS_MUON_BIND_TIMEOUT (seconds) "
        "if these ranks are only slow"
    )


def differences(of_ranks: list[Facts], messages: dict[str, str], within: str = "") -> Facts:
    """Compare facts between ranks. Return ``{"error": text}`` about the first fact that differs; ``{}`` if none does.

    The result is what a function ``reduce`` of :func:`agree` returns.

    Args:
        of_ranks: the facts of each rank, in the order of ranks.
        messages: {key of a fact to compare: error text}. In the text, ``{ranks}`` is replaced by the ranks that differ,
            and ``{first}`` by the rank from which they differ. A text without ``{ranks}`` only names the fact, such as
            "the version"; the error is then "the version differs: rank 0 has 1, ranks [1] have [2]", with at most four
            values.
        within: key of a fact. Only ranks with the same value of this fact are compared with one another. By default all
            ranks are compared.
    """
    teams = ranks_by_value(stated.get(within) for stated in of_ranks).values()
    for key, text in messages.items():
        for first, *others in teams:
            if differing := [rank for rank in others if of_ranks[rank][key] != of_ranks[first][key]]:
                if "{ranks}" in text:
                    return {"error": text.format(ranks=differing, first=first)}
                values = [of_ranks[rank][key] for rank in differing[:4]]
                return {
                    "error": f"{text} differs: rank {first} has {of_ranks[first][key]}, ranks {differing} have {values}"
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


def _join_messages(messages: list[str | None]) -> str:
    """Return the ranks' error messages as one text, such as ``rank 0: disk full; ranks 1, 2: no such file``.

    ``messages``: for each rank its message, or ``None`` without an error. If all ranks have the same message, return
    it without ranks.
    """
    if len(set(messages)) == 1:
        return str(messages[0])
    found = [(text, ranks) for text, ranks in ranks_by_value(messages).items() if text is not None]
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {str(ranks).strip('[]')}: {text}" for text, ranks in found)
