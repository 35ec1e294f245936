# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: shards to their owner, matrices orthogonalized there, shards of the result back.

The only file with collectives. Bucket k + 1 travels while bucket k is orthogonalized and while the
result of bucket k - 1 travels back, so at most three buckets are in memory. Where every rank holds every matrix,
only results travel, from each owner to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.plan import Bucket, Landing, Plan
from deepspeed.muon.staging import Staging
from deepspeed.muon.stalls import Flight, Flights
from deepspeed.muon.workspace import Workspace


@dataclass
class Transit:
    """The buffers of one bucket in flight, all in the exchange dtype on the exchange device.

    ``matrices``: flat, the matrices that this rank owns. ``outbox``: flat, the runs that other ranks own,
    by owner; after the way back it holds the orthogonalized runs in the same places. ``inbox``: flat, the
    runs of owned matrices that other ranks hold. ``number``: which bucket of how many, for messages.
    ``near``: one slice of them per run. ``places``: the same slices, or in their stead memory where the shards
    lie: ``prepare`` fills them, and ``apply`` finds the result there.
    """

    bucket: Bucket
    number: str
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    near: list[Tensor]
    places: list[Tensor]
    pending: list[Flight] = field(default_factory=list)
    #: The last copy between host and accelerator, where there is any.
    copied: Any = None

    def wait(self) -> None:
        """Wait for the collectives under way."""
        while self.pending:
            self.pending.pop().wait()

    def unpack(self) -> None:
        """Put received runs into their matrices."""
        for landing in self.bucket.received:
            matrix, run = self._ends(landing)
            matrix.copy_(run)

    def pack(self) -> None:
        """Take the runs of other ranks out of the matrices."""
        for landing in self.bucket.received:
            matrix, run = self._ends(landing)
            run.copy_(matrix)

    def _ends(self, landing: Landing) -> tuple[Tensor, Tensor]:
        """Received elements in their matrix, and as they travel, both [rows, cols]."""
        size = landing.rows, landing.cols
        matrix = torch.as_strided(self.matrices[landing.target :], size, (landing.pitch, 1))
        return matrix, self.inbox[landing.source : landing.source + landing.rows * landing.cols].view(size)


class Exchange:
    """Moves the buckets of a plan among the ranks of one process group.

    Args:
        group: the ranks that share the partition; ``None`` where one rank holds every matrix whole.
        dtype: what travels and what Newton-Schulz computes in, bf16 or fp32.
        device: where Newton-Schulz runs and what the collectives carry.
        name: of the parameter group, for messages.
        staging: where the shards lie in the host's memory and ``device`` is an accelerator.
    """

    def __init__(
        self,
        group: Any,
        dtype: torch.dtype,
        device: torch.device,
        work: Workspace,
        name: str,
        staging: Staging | None = None,
    ) -> None:
        self.group = group
        self._staging = staging
        self._flights = Flights(name)
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
        lag = 1 if self._staging or self.communicates(plan) else 0
        transits = [self._open(plan, k, slot=k % (2 * lag + 1)) for k in range(len(plan.buckets))]
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
                    if behind.copied is not None:
                        behind.copied.synchronize()
                with phase("apply"):
                    apply(behind)

    def _at_owner(
        self, now: Transit, compute: Callable[[Transit], None], phase: Callable[[str], AbstractContextManager]
    ) -> None:
        with phase("exchange"):
            now.wait()
            if now.copied is not None:
                now.copied.wait()
            now.unpack()
        with phase("newton_schulz"):
            compute(now)
        now.pack()
        self._send_back(now)

    def communicates(self, plan: Plan) -> bool:
        """Whether any matrix of the plan leaves the rank that holds it."""
        return self.group is not None and any(bucket.travels for bucket in plan.buckets)

    def _open(self, plan: Plan, index: int, slot: int) -> Transit:
        bucket = plan.buckets[index]

        def get(name: str, numel: int) -> Tensor:
            return self._work.get(f"{name}{slot}", (numel,), self.dtype, self.device)

        matrices = get("matrices", bucket.matrix_elements)
        outbox, inbox = get("outbox", sum(bucket.send_counts)), get("inbox", sum(bucket.receive_counts))
        near = [(matrices if run.in_place else outbox)[run.at : run.at + run.length] for run in bucket.runs]
        places = near if self._staging is None else self._staging.places(near, self._work, slot)
        return Transit(bucket, f"{index + 1} of {len(plan.buckets)}", matrices, outbox, inbox, near, places)

    def _send(self, transit: Transit) -> None:
        if self._staging is None:
            return self._launch(transit, back=False)
        with self._staging.way_up():
            transit.copied = self._staging.copy(transit.places, transit.near)
            self._launch(transit, back=False)

    def _send_back(self, transit: Transit) -> None:
        if self._staging is None:
            return self._launch(transit, back=True)
        with self._staging.way_down():
            self._launch(transit, back=True)
            transit.wait()
            transit.copied = self._staging.copy(transit.near, transit.places)

    def _launch(self, transit: Transit, back: bool) -> None:
        bucket = transit.bucket
        if bucket.replicated and back:
            transit.pending = [self._start(transit, *call) for call in self._broadcasts(transit)]
        elif bucket.travels and not bucket.replicated:
            ends = (transit.inbox, list(bucket.receive_counts)), (transit.outbox, list(bucket.send_counts))
            (received, into), (sent, out_of) = reversed(ends) if back else ends
            transit.pending = [self._start(transit, "all_to_all_single", received, sent, into, out_of)]

    def _broadcasts(self, transit: Transit) -> Iterator[tuple[str, Tensor, int]]:
        """Each owner's results, to all. An all-gather would want equal parts, and gloo's copies them twice."""
        from deepspeed import comm  # type: ignore[attr-defined]

        rank = comm.get_rank(group=self.group)
        for owner, part in enumerate(transit.outbox.split(transit.bucket.send_counts)):
            results = transit.matrices if owner == rank else part
            if results.numel():
                yield "broadcast", results, comm.get_global_rank(self.group, owner)

    def _start(self, transit: Transit, collective: str, *arguments: Any) -> Flight:
        from deepspeed import comm  # type: ignore[attr-defined]

        call = partial(getattr(comm, collective), *arguments)
        launch = partial(call, group=self.group, async_op=True, log_name="muon_exchange")
        return self._flights.start(transit.number, transit.bucket.names, launch)
