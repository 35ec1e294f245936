# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: sends shards to the owners, has the matrices orthogonalized, and sends shards of the results back.

Bucket k + 1 travels while bucket k is orthogonalized and the result of bucket k - 1 travels back, so at most three
buckets are in memory, and two where a matrix is larger than a bucket on an accelerator. Where every rank holds every
matrix, only results travel, from each owner to all: a bucket of own matrices is orthogonalized, then the results of its
round are sent, in as many buckets as their size asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.host_staging import Staging
from deepspeed.muon.exchange.owner_set import OwnerSet, set_of
from deepspeed.muon.exchange.watchdog import PendingCollective, PendingCollectives
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.plan.plan import Batch, Bucket, Copy, Plan


@dataclass
class BucketBuffers:
    """The buffers of one bucket in flight, in the exchange dtype on the exchange device: parts of one storage.

    Args:
        number: which bucket of how many, for messages.
        matrices: flat, the matrices that this rank owns; where only results travel, those of an earlier bucket.
        outbox: flat, the runs of other ranks' matrices, ordered by owner. Results come back to the same positions.
        inbox: flat, the runs of this rank's matrices that other ranks hold; a part of ``matrices`` where they arrive in
            order.
        host: flat, pinned memory for the runs where the shards are on the host and ``matrices`` on an accelerator;
            ``None``: both are on one device.
    """

    bucket: Bucket
    number: str
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    host: Tensor | None = None
    pending: list[PendingCollective] = field(default_factory=list)
    #: The end of the last copy between host and accelerator, if there is one.
    copied: Any = None

    def slice_of(self, index: int) -> Tensor:
        """Return what ``prepare`` fills and ``apply`` reads for a run, by its index: 1-D, on the shards' device."""
        run = self.bucket.runs[index]
        if self.host is not None:
            return self.host.narrow(0, self.bucket.host_places[index], run.copy.numel)
        return self._buffer(run.in_place).narrow(0, run.copy.at, run.copy.numel)

    def segments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the same elements in host memory and on the accelerator, in as few contiguous parts as there are."""
        assert self.host is not None
        segments = self.bucket.segments
        host = [self.host.narrow(0, part.host, part.numel) for part in segments]
        return host, [self._buffer(part.in_place).narrow(0, part.device, part.numel) for part in segments]

    def _buffer(self, in_place: bool) -> Tensor:
        return self.matrices if in_place else self.outbox

    def wait(self) -> None:
        """Wait for the pending collectives."""
        while self.pending:
            self.pending.pop().wait()

    def unpack(self) -> None:
        """Copy received elements into their matrices, unless they were received there."""
        for copy in self.bucket.scattered:
            grids(self.matrices, copy).copy_(self._received(copy))

    def pack(self) -> None:
        """Copy them back out of the matrices."""
        for copy in self.bucket.scattered:
            self._received(copy).copy_(grids(self.matrices, copy))

    def _received(self, copy: Copy) -> Tensor:
        shape, strides = (copy.times, copy.rows, copy.cols), (copy.at_step, copy.cols, 1)
        return torch.as_strided(self.inbox[copy.at :], shape, strides)


#: A phase of a step, for one bucket.
Work = Callable[[BucketBuffers], None]
#: What is entered around a phase, by its name.
Phase = Callable[[str], AbstractContextManager]


@dataclass(eq=False)
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

    group: Any
    dtype: torch.dtype
    device: torch.device
    work: Workspace
    name: str
    staging: Staging | None = None

    def __post_init__(self) -> None:
        self._collectives = PendingCollectives(self.name, self.device)

    def owner_set(self, batch: Batch, bucket: str) -> OwnerSet:
        """The ranks that own the matrices of a batch together with this one; ``bucket``: its number."""

        def run(launch: Callable[[], Any]) -> None:
            self._collectives.start(bucket, batch.names, launch).wait()

        return OwnerSet(set_of(self.group, batch.owners), batch.owners, run)

    def collect(self, held: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Vectors that one rank of the group has each, on all ranks; called by all of them together.

        Args:
            held: fp32, by name, those of this rank.
            sizes: of all, by name, in the same order on all ranks.

        Returns:
            All, on the CPU.
        """
        flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=self.device)
        vectors = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
        for name in held.keys() & sizes.keys():
            vectors[name].copy_(held[name])
        if self.group is not None:
            torch.distributed.all_reduce(flat, group=self.group)  # exact: all but one summand are zero
        return {name: vector.cpu() for name, vector in vectors.items()}

    def largest(self, values: Tensor, names: Sequence[str]) -> Tensor:
        """Return the largest of each value over the ranks of the group, in place; a collective before the first bucket.

        ``names``: of the matrices that the values belong to.
        """
        start = partial(
            torch.distributed.all_reduce, values, torch.distributed.ReduceOp.MAX, group=self.group, async_op=True
        )
        self._collectives.start("", tuple(names), start).wait()
        return values

    def run(self, plan: Plan, prepare: Work, compute: Work, apply: Work, phase: Phase) -> None:
        """Carry every bucket through prepare, the exchange to its owners, compute, the exchange back, and apply.

        Where anything is sent or staged, a line is one turn of the loop, and what is sent arrives during the next::

            prepare 0, send 0
            prepare 1, send 1       compute 0, send 0 back
            prepare 2, send 2       compute 1, send 1 back      apply 0
                                    compute 2, send 2 back      apply 1
                                                                apply 2

        With one slot less, each line begins with its apply. Where only results travel, there is no way there: all three
        phases are one line earlier in relation to prepare.

        ``phase`` is entered around each phase, by name; ``exchange`` is the time spent waiting.
        """
        slots, count = plan.slots(staged=self.staging is not None), len(plan.buckets)
        there = int(slots > 1 and not plan.is_replicated)
        to_apply = there + int(slots > 1)
        # All storage now, the most that each takes: none is replaced while a bucket uses it, and all of it is there
        # before copies on other streams are told to follow what this memory was used for until now.
        storages = self._storages(plan)
        if self.staging is not None:
            self.staging.follow_the_computation()
        in_flight: dict[int, BucketBuffers] = {}
        own = torch.empty(0, dtype=self.dtype, device=self.device)

        def finish(index: int) -> None:
            if 0 <= index < count:
                self._finish(in_flight.pop(index), apply, phase)

        for k in range(count + to_apply):
            if slots <= to_apply:
                finish(k - to_apply)
            if k < count:
                in_flight[k] = self._open(plan, k, storages[k], own)
                own = in_flight[k].matrices
                with phase("prepare"):
                    prepare(in_flight[k])
                self._send(in_flight[k], back=False)
            if k - there in in_flight:
                self._compute(in_flight[k - there], compute, phase)
            if slots > to_apply:
                finish(k - to_apply)

    def _compute(self, buffers: BucketBuffers, compute: Work, phase: Phase) -> None:
        with phase("exchange"):
            buffers.wait()
            if buffers.copied is not None:
                buffers.copied.wait()
            buffers.unpack()
        with phase("newton_schulz"):
            compute(buffers)
        buffers.pack()
        self._send(buffers, back=True)

    def _finish(self, buffers: BucketBuffers, apply: Work, phase: Phase) -> None:
        with phase("exchange"):
            buffers.wait()
            if buffers.copied is not None:
                buffers.copied.synchronize()
        with phase("apply"):
            apply(buffers)

    def _storages(self, plan: Plan) -> list[tuple[int, Tensor]]:
        """Return the number of each bucket's storage, and the storage."""
        numbers, largest = plan.storages(staged=self.staging is not None), dict[int, int]()
        for number, bucket in zip(numbers, plan.buckets, strict=True):
            largest[number] = max(largest.get(number, 0), sum(bucket.buffer_sizes))
        made = {n: self.work.get(f"bucket{n}", (numel,), self.dtype, self.device) for n, numel in largest.items()}
        return [(number, made[number]) for number in numbers]

    def _open(self, plan: Plan, index: int, storage: tuple[int, Tensor], own: Tensor) -> BucketBuffers:
        """Return the buffers of a bucket in its storage; ``own``: the matrices of the bucket before it."""
        bucket, (number, memory) = plan.buckets[index], storage
        matrices, outbox, inbox = memory[: sum(bucket.buffer_sizes)].split(bucket.buffer_sizes)
        if bucket.received_at is not None:
            inbox = matrices.narrow(0, bucket.received_at, sum(bucket.receive_counts))
        return BucketBuffers(
            bucket=bucket,
            number=f"{index + 1} of {len(plan.buckets)}",
            matrices=own if bucket.only_results else matrices,
            outbox=outbox,
            inbox=inbox,
            host=self.staging.host_memory(bucket, self.dtype, self.work, number) if self.staging else None,
        )

    def _send(self, buffers: BucketBuffers, back: bool) -> None:
        if self.staging is None:
            return self._launch(buffers, back)
        host, device = buffers.segments()
        with self.staging.beside_the_computation(back):
            if not back:
                buffers.copied = self.staging.copy(host, device)
            self._launch(buffers, back)
            if back:
                buffers.wait()
                buffers.copied = self.staging.copy(device, host)

    def _launch(self, buffers: BucketBuffers, back: bool) -> None:
        """Start the collectives of one way.

        Results that every rank gets take one broadcast per owner. An all-gather would need equal parts, and gloo's
        copies them twice.
        """
        bucket = buffers.bucket
        if not bucket.travels or (bucket.only_results and not back):
            return
        from deepspeed import comm  # type: ignore[attr-defined]

        calls = []
        if bucket.only_results:
            parts = list(buffers.outbox.split(bucket.send_counts))
            parts[comm.get_rank(group=self.group)] = buffers.matrices[: bucket.own_results]
            for owner, results in enumerate(parts):
                if results.numel():
                    calls.append(partial(comm.broadcast, results, comm.get_global_rank(self.group, owner)))
        else:
            ends = (buffers.inbox, list(bucket.receive_counts)), (buffers.outbox, list(bucket.send_counts))
            (received, into), (sent, out_of) = reversed(ends) if back else ends
            calls.append(partial(comm.all_to_all_single, received, sent, into, out_of))
        options = {"group": self.group, "async_op": True, "log_name": "muon_exchange"}
        launches = (partial(call, **options) for call in calls)
        buffers.pending = [self._collectives.start(buffers.number, bucket.names, launch) for launch in launches]


def processes() -> int:
    """How many processes of this job could exchange anything."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def join(group: Any) -> tuple[int, int]:
    """This rank's index in a process group of torch's, and the group's size. Initializes DeepSpeed's collectives."""
    from deepspeed import comm  # type: ignore[attr-defined]

    if not comm.is_initialized():
        comm.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    return comm.get_rank(group=group), comm.get_world_size(group=group)


def all_maxima(values: Tensor, group: Any) -> Tensor:
    """The largest of each value over the ranks of a group, by default all; called by all of them together."""
    if processes() > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return values


def gather(tensor: Tensor, copy: Copy, work: Workspace, name: str) -> Tensor:
    """The elements on the grid, 1-D: a view of a contiguous tensor if they are contiguous there, else a named copy."""
    if copy.rows == 1:
        return tensor.view(-1).narrow(0, copy.start, copy.cols)
    held = work.get(name, (1, copy.rows, copy.cols), tensor.dtype, tensor.device)
    return held.copy_(grids(tensor, copy)).view(-1)


def scatter(values: Tensor, tensor: Tensor, copy: Copy) -> None:
    """Write back the copy from :func:`gather`; does nothing for a view."""
    if copy.rows > 1:
        grids(tensor, copy).copy_(values.view(1, copy.rows, copy.cols))


def grids(tensor: Tensor, copy: Copy) -> Tensor:
    """The elements as they lie in a contiguous tensor, a view [times, rows, cols]."""
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.start_step, copy.pitch, 1)
    return torch.as_strided(tensor.view(-1)[copy.start :], shape, strides)
