# SPDX-License-Identifier: Apache-2.0
"""Carries out the program of a step: sends shards to the owners, has the matrices orthogonalized, and sends shards of
the results back. In which order, and with what in memory, is decided in :mod:`deepspeed.muon.plan.program`.
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
from deepspeed.muon.plan.program import AllToAll, Apply, Compute, Open, Prepare, Program, Send, Wait


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

    def run(self, plan: Plan, program: Program, prepare: Work, compute: Work, apply: Work, phase: Phase) -> None:
        """Carry out the program of a plan.

        ``phase`` is entered around each phase, by name; ``exchange`` is the time spent waiting.
        """
        # All storage now, the most that each takes: none is replaced while a bucket uses it, and all of it is there
        # before copies on other streams are told to follow what this memory was used for until now.
        storages = self._storages(program)
        if self.staging is not None:
            self.staging.follow_the_computation()
        buffers: dict[int, BucketBuffers] = {}
        for operation in program:
            k = operation.bucket
            match operation:
                case Open():
                    buffers[k] = self._open(plan, operation, storages[operation.storage], buffers)
                case Prepare():
                    with phase("prepare"):
                        prepare(buffers[k])
                case Send():
                    self._send(buffers[k], operation)
                case Wait():
                    with phase("exchange"):
                        self._wait(buffers[k], operation.back)
                case Compute():
                    with phase("newton_schulz"):
                        compute(buffers[k])
                    buffers[k].pack()
                case Apply():
                    with phase("apply"):
                        apply(buffers[k])

    def _storages(self, program: Program) -> dict[int, Tensor]:
        numels: dict[int, int] = {}
        for operation in program:
            if isinstance(operation, Open):
                numels[operation.storage] = max(numels.get(operation.storage, 0), operation.numel)
        return {n: self.work.get(f"bucket{n}", (numel,), self.dtype, self.device) for n, numel in numels.items()}

    def _open(self, plan: Plan, operation: Open, storage: Tensor, others: Mapping[int, BucketBuffers]) -> BucketBuffers:
        """Return the buffers of a bucket in its storage; those of ``others`` have the matrices that it may send."""
        bucket = plan.buckets[operation.bucket]
        matrices, outbox, inbox = storage[: operation.numel].split(bucket.buffer_sizes)
        if bucket.received_at is not None:
            inbox = matrices.narrow(0, bucket.received_at, sum(bucket.receive_counts))
        number = operation.storage
        return BucketBuffers(
            bucket=bucket,
            number=f"{operation.bucket + 1} of {len(plan.buckets)}",
            matrices=matrices if operation.own == operation.bucket else others[operation.own].matrices,
            outbox=outbox,
            inbox=inbox,
            host=self.staging.host_memory(bucket, self.dtype, self.work, number) if self.staging else None,
        )

    def _wait(self, buffers: BucketBuffers, back: bool) -> None:
        """Wait for what was sent. On the way back the host reads the shards next, else the accelerator the matrices."""
        buffers.wait()
        if buffers.copied is not None:
            (buffers.copied.synchronize if back else buffers.copied.wait)()
        if not back:
            buffers.unpack()

    def _send(self, buffers: BucketBuffers, operation: Send) -> None:
        if self.staging is None:
            return self._launch(buffers, operation)
        host, device = buffers.segments()
        with self.staging.beside_the_computation(operation.back):
            if not operation.back:
                buffers.copied = self.staging.copy(host, device)
            self._launch(buffers, operation)
            if operation.back:
                buffers.wait()
                buffers.copied = self.staging.copy(device, host)

    def _launch(self, buffers: BucketBuffers, operation: Send) -> None:
        """Start the collectives of one way."""
        if not operation.collectives:
            return
        from deepspeed import comm  # type: ignore[attr-defined]

        others, calls = 0, []
        for collective in operation.collectives:
            if isinstance(collective, AllToAll):
                sent, received = (buffers.inbox, buffers.outbox) if operation.back else (buffers.outbox, buffers.inbox)
                into, out_of = list(collective.received), list(collective.sent)
                calls.append(partial(comm.all_to_all_single, received, sent, into, out_of))
            else:
                is_own, numel = collective.root == comm.get_rank(group=self.group), collective.numel
                results = buffers.matrices[:numel] if is_own else buffers.outbox.narrow(0, others, numel)
                others += 0 if is_own else numel
                calls.append(partial(comm.broadcast, results, comm.get_global_rank(self.group, collective.root)))
        options = {"group": self.group, "async_op": True, "log_name": "muon_exchange"}
        launches = (partial(call, **options) for call in calls)
        buffers.pending = [self._collectives.start(buffers.number, buffers.bucket.names, launch) for launch in launches]


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
