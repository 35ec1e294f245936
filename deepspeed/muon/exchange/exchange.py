# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: sends shards to the owners, has the matrices orthogonalized, and sends shards of the results back.

Bucket k + 1 travels while bucket k is orthogonalized and the result of bucket k - 1 travels back, so at most three
buckets are in memory. Where every rank holds every matrix, only results travel, from each owner to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.host_staging import Staging
from deepspeed.muon.exchange.watchdog import PendingCollective, PendingCollectives
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.plan.plan import Bucket, Plan, Run, Unpack


@dataclass
class BucketBuffers:
    """The buffers of one bucket in flight, in the exchange dtype on the exchange device.

    Args:
        number: which bucket of how many, for messages.
        matrices: flat, the matrices that this rank owns.
        outbox: flat, the runs of other ranks' matrices, ordered by owner. Results come back to the same positions.
        inbox: flat, the runs of this rank's matrices that other ranks hold.
        device_slices: one slice of these buffers per run.
        shard_slices: what ``prepare`` fills and ``apply`` reads, on the shards' device: pinned host memory under CPU
            offload with an accelerator, else the same tensors as ``device_slices``.
    """

    bucket: Bucket
    number: str
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    device_slices: list[Tensor]
    shard_slices: list[Tensor]
    pending: list[PendingCollective] = field(default_factory=list)
    #: The end of the last copy between host and accelerator, if there is one.
    copied: Any = None

    def wait(self) -> None:
        """Wait for the pending collectives."""
        while self.pending:
            self.pending.pop().wait()

    def unpack(self) -> None:
        """Copy received runs into their matrices."""
        for unpack in self.bucket.received:
            matrix, run = self._ends(unpack)
            matrix.copy_(run)

    def pack(self) -> None:
        """Copy the runs of other ranks out of the matrices."""
        for unpack in self.bucket.received:
            matrix, run = self._ends(unpack)
            run.copy_(matrix)

    def _ends(self, unpack: Unpack) -> tuple[Tensor, Tensor]:
        """Views of received elements in their matrix and in the inbox, both [rows, cols]."""
        size = unpack.rows, unpack.cols
        matrix = torch.as_strided(self.matrices[unpack.target :], size, (unpack.pitch, 1))
        return matrix, self.inbox[unpack.source : unpack.source + unpack.rows * unpack.cols].view(size)


class Exchange:
    """Moves the buckets of a plan among the ranks of one process group.

    Args:
        group: the ranks that share the partition; ``None`` where one rank holds every matrix whole.
        dtype: of Newton-Schulz and of what travels, bf16 or fp32.
        device: of Newton-Schulz and of the collectives.
        work: holds the buffers.
        name: of the parameter group, for messages.
        staging: copies between the shards in host memory and ``device``, if that is an accelerator.
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
        self._collectives = PendingCollectives(name)
        self.dtype = dtype
        self.device = device
        self._work = work

    def run(
        self,
        plan: Plan,
        prepare: Callable[[BucketBuffers], None],
        compute: Callable[[BucketBuffers], None],
        apply: Callable[[BucketBuffers], None],
        phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ) -> None:
        """Carry every bucket through prepare, the exchange to its owners, compute, the exchange back, and apply.

        Args:
            phase: entered around each phase, by name; ``exchange`` is the time spent waiting.
        """
        lag = 1 if self._staging or self.communicates(plan) else 0
        in_flight = [self._open(plan, k, slot=k % (2 * lag + 1)) for k in range(len(plan.buckets))]
        for k in range(len(in_flight) + 2 * lag):
            if k < len(in_flight):
                with phase("prepare"):
                    prepare(in_flight[k])
                self._send(in_flight[k])
            if lag <= k < len(in_flight) + lag:
                self._at_owner(in_flight[k - lag], compute, phase)
            if k >= 2 * lag:
                behind = in_flight[k - 2 * lag]
                with phase("exchange"):
                    behind.wait()
                    if behind.copied is not None:
                        behind.copied.synchronize()
                with phase("apply"):
                    apply(behind)

    def _at_owner(
        self,
        now: BucketBuffers,
        compute: Callable[[BucketBuffers], None],
        phase: Callable[[str], AbstractContextManager],
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

    def _open(self, plan: Plan, index: int, slot: int) -> BucketBuffers:
        bucket = plan.buckets[index]

        def get(name: str, numel: int) -> Tensor:
            return self._work.get(f"{name}{slot}", (numel,), self.dtype, self.device)

        matrices = get("matrices", bucket.matrix_elements)
        outbox, inbox = get("outbox", sum(bucket.send_counts)), get("inbox", sum(bucket.receive_counts))
        device_slices = [(matrices if run.in_place else outbox)[run.at : run.at + run.length] for run in bucket.runs]
        shard_slices = (
            device_slices if self._staging is None else self._staging.host_slices(device_slices, self._work, slot)
        )
        return BucketBuffers(
            bucket, f"{index + 1} of {len(plan.buckets)}", matrices, outbox, inbox, device_slices, shard_slices
        )

    def _send(self, buffers: BucketBuffers) -> None:
        if self._staging is None:
            return self._launch(buffers, back=False)
        with self._staging.way_up():
            buffers.copied = self._staging.copy(buffers.shard_slices, buffers.device_slices)
            self._launch(buffers, back=False)

    def _send_back(self, buffers: BucketBuffers) -> None:
        if self._staging is None:
            return self._launch(buffers, back=True)
        with self._staging.way_down():
            self._launch(buffers, back=True)
            buffers.wait()
            buffers.copied = self._staging.copy(buffers.device_slices, buffers.shard_slices)

    def _launch(self, buffers: BucketBuffers, back: bool) -> None:
        bucket = buffers.bucket
        if bucket.replicated and back:
            buffers.pending = [self._start(buffers, *call) for call in self._broadcasts(buffers)]
        elif bucket.travels and not bucket.replicated:
            ends = (buffers.inbox, list(bucket.receive_counts)), (buffers.outbox, list(bucket.send_counts))
            (received, into), (sent, out_of) = reversed(ends) if back else ends
            buffers.pending = [self._start(buffers, "all_to_all_single", received, sent, into, out_of)]

    def _broadcasts(self, buffers: BucketBuffers) -> Iterator[tuple[str, Tensor, int]]:
        """One broadcast per owner. An all-gather would need equal parts, and gloo's copies them twice."""
        from deepspeed import comm  # type: ignore[attr-defined]

        rank = comm.get_rank(group=self.group)
        for owner, part in enumerate(buffers.outbox.split(buffers.bucket.send_counts)):
            results = buffers.matrices if owner == rank else part
            if results.numel():
                yield "broadcast", results, comm.get_global_rank(self.group, owner)

    def _start(self, buffers: BucketBuffers, collective: str, *arguments: Any) -> PendingCollective:
        from deepspeed import comm  # type: ignore[attr-defined]

        call = partial(getattr(comm, collective), *arguments)
        launch = partial(call, group=self.group, async_op=True, log_name="muon_exchange")
        return self._collectives.start(buffers.number, buffers.bucket.names, launch)


def gather(tensor: Tensor, run: Run, work: Workspace, name: str) -> Tensor:
    """The run's elements, 1-D: a view of ``tensor`` if they are contiguous there, else a copy.

    Args:
        tensor: contiguous.
        work: holds the copy.
        name: of the copy.
    """
    if run.piece.rows == 1:
        return tensor.view(-1)[run.start : run.start + run.piece.numel]
    grid = _grid(tensor, run)
    return work.get(name, tuple(grid.shape), tensor.dtype, tensor.device).copy_(grid).view(-1)


def scatter(values: Tensor, tensor: Tensor, run: Run) -> None:
    """Write back the copy from :func:`gather`; does nothing for a view."""
    if run.piece.rows > 1:
        grid = _grid(tensor, run)
        grid.copy_(values.view(grid.shape))


def _grid(tensor: Tensor, run: Run) -> Tensor:
    piece = run.piece
    return torch.as_strided(tensor.view(-1)[run.start :], (piece.rows, piece.cols), (piece.stride, 1))
