# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: shards to their owner, matrices orthogonalized there, shards of the result back.

The only file with collectives. Bucket k + 1 travels while bucket k is orthogonalized and while the
result of bucket k - 1 travels back, so at most three buckets are in memory.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.orthogonalize import Workspace
from deepspeed.muon.plan import Bucket, Plan


@dataclass
class Transit:
    """The buffers of one bucket in flight, all in the exchange dtype on the exchange device.

    ``matrices``: flat, the matrices that this rank owns. ``outbox``: flat, the runs that other ranks own,
    by owner; after the way back it holds the orthogonalized runs in the same places. ``inbox``: flat, the
    runs of owned matrices that other ranks hold.
    """

    bucket: Bucket
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    pending: Any = None

    def wait(self) -> None:
        """Wait for the collective under way."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def unpack(self) -> None:
        """Put received runs into their matrices."""
        for source, target, length in self.bucket.received:
            self.matrices[target : target + length].copy_(self.inbox[source : source + length])

    def pack(self) -> None:
        """Take the runs of other ranks out of the matrices."""
        for source, target, length in self.bucket.received:
            self.inbox[source : source + length].copy_(self.matrices[target : target + length])


class Exchange:
    """Moves the buckets of a plan among the ranks of one process group.

    Args:
        group: the ranks that share the partition; ``None`` where one rank holds every matrix whole.
        dtype: what travels and what Newton-Schulz computes in, bf16 or fp32.
        device: where Newton-Schulz runs and what the collectives carry.
    """

    def __init__(self, group: Any, dtype: torch.dtype, device: torch.device, work: Workspace) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device
        self._work = work

    def run(
        self,
        plan: Plan,
        prepare: Callable[[Transit], None],
        compute: Callable[[Transit], None],
        apply: Callable[[Transit], None],
        phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ) -> None:
        """Carry every bucket through prepare, the way there, compute, the way back, and apply.

        ``phase`` is entered around each of them, by name; ``exchange`` is the time spent waiting.
        """
        lag = 1 if self.communicates(plan) else 0
        transits = [self._open(k % (2 * lag + 1), bucket) for k, bucket in enumerate(plan.buckets)]
        for k in range(len(transits) + 2 * lag):
            if k < len(transits):
                with phase("prepare"):
                    prepare(transits[k])
                self._send(transits[k])
            if lag <= k < len(transits) + lag:
                self._at_owner(transits[k - lag], compute, phase)
            if k >= 2 * lag:
                behind = transits[k - 2 * lag]
                with phase("exchange"):
                    behind.wait()
                with phase("apply"):
                    apply(behind)

    def _at_owner(
        self, now: Transit, compute: Callable[[Transit], None], phase: Callable[[str], AbstractContextManager]
    ) -> None:
        with phase("exchange"):
            now.wait()
            now.unpack()
        with phase("newton_schulz"):
            compute(now)
        now.pack()
        self._send_back(now)

    def communicates(self, plan: Plan) -> bool:
        """Whether any matrix of the plan leaves the rank that holds it."""
        return self.group is not None and any(bucket.travels for bucket in plan.buckets)

    def _open(self, slot: int, bucket: Bucket) -> Transit:
        def get(name: str, numel: int) -> Tensor:
            return self._work.get(f"{name}{slot}", (numel,), self.dtype, self.device)

        matrices = get("matrices", bucket.matrix_elements)
        return Transit(
            bucket, matrices, get("outbox", sum(bucket.send_counts)), get("inbox", sum(bucket.receive_counts))
        )

    def _send(self, transit: Transit) -> None:
        bucket = transit.bucket
        if bucket.travels:
            transit.pending = self._all_to_all(transit.inbox, transit.outbox, bucket.receive_counts, bucket.send_counts)

    def _send_back(self, transit: Transit) -> None:
        bucket = transit.bucket
        if bucket.travels:
            transit.pending = self._all_to_all(transit.outbox, transit.inbox, bucket.send_counts, bucket.receive_counts)

    def _all_to_all(self, received: Tensor, sent: Tensor, received_counts: tuple, sent_counts: tuple) -> Any:
        from deepspeed import comm  # type: ignore[attr-defined]

        return comm.all_to_all_single(
            received,
            sent,
            list(received_counts),
            list(sent_counts),
            group=self.group,
            async_op=True,
            log_name="muon_exchange",
        )


class DisagreementError(RuntimeError):
    """The ranks of one job do not run the same optimizer; the message names the ranks."""


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


def differences(facts: list[dict[str, Any]], keys: dict[str, str]) -> str | None:
    """An error text that names the ranks which differ from rank 0, or ``None``.

    Args:
        keys: fact -> what to call it in the message.
    """
    for key, title in keys.items():
        odd = [rank for rank, stated in enumerate(facts) if stated[key] != facts[0][key]]
        if odd:
            return f"{title} differs: rank 0 has {facts[0][key]}, ranks {odd} have {[facts[r][key] for r in odd[:4]]}"
    return None
