# SPDX-License-Identifier: Apache-2.0
"""Carry out the program of a step: send shards to the owners, and shards of the results back.

:mod:`deepspeed.muon.plan.program` decides the order of operations and which buffers exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed.muon.exchange.buffers import BucketBuffers
from deepspeed.muon.exchange.host_staging import Staging
from deepspeed.muon.exchange.owner_set import OwnerSet, owner_group
from deepspeed.muon.exchange.watchdog import PendingCollectives
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.newton_schulz import name_of
from deepspeed.muon.plan.bucket import Batch
from deepspeed.muon.plan.plan import Plan
from deepspeed.muon.plan.program import Apply, Collective, Compute, Look, Open, Prepare, Program, Send, Wait

#: Name of a phase -> a context manager, entered for as long as the phase lasts.
Phase = Callable[[str], AbstractContextManager]


class Phases(Protocol):
    """The protocol of a step's computations, which :meth:`Exchange.run` calls between collectives.

    :class:`deepspeed.muon.step.partition_step.PartitionStep` implements it. The collectives send one bucket of matrices
    after another (:class:`BucketBuffers`).
    """

    def look(self, operation: Look) -> None:
        """Find the matrices whose gradient is missing or zero on all ranks, which the step skips.

        A collective, unless ``operation.collectives`` is empty.
        """

    def prepare(self, buffers: BucketBuffers) -> None:
        """Update the momentum of this rank's part of one bucket's matrices, and write the input of Newton-Schulz for
        this part to ``buffers``.
        """

    def orthogonalize(self, buffers: BucketBuffers, calls: Iterator[Collective]) -> None:
        """Orthogonalize ``buffers.matrices`` in place: the matrices of one bucket that this rank owns.

        ``calls``: the planned collectives among ranks that own matrices together, in order. All are consumed.
        """

    def apply(self, buffers: BucketBuffers) -> None:
        """Update the weights of this rank's part of one bucket's matrices with the results in ``buffers``."""


@dataclass(eq=False)
class Exchange:
    """The communication of one parameter group: it sends matrices to their owners, and the results back.

    The owner of a matrix is the rank that orthogonalizes it. Several ranks may own slices of one matrix.

    Args:
        group: process group of the ranks that share the parameters; ``None`` if each rank does all the work itself.
        dtype: dtype of the elements that are sent, bf16 or fp32.
        device: device on which Newton-Schulz and the collectives run.
        work: scratch memory, from which the buffers are allocated.
        name: name of the parameter group, for messages.
        staging: the copies between ``device`` and host memory under CPU offload; ``None`` without CPU offload.
    """

    group: Any
    dtype: torch.dtype
    device: torch.device
    work: Workspace
    name: str
    staging: Staging | None = None

    def __post_init__(self) -> None:
        self._collectives = PendingCollectives(self.name, self.device)

    def owner_set(self, batch: Batch, bucket: str, calls: Iterator[Collective]) -> OwnerSet:
        """Return the ranks, this one included, that orthogonalize the matrices of ``batch`` together.

        ``bucket``: number of the batch's bucket for messages, such as "2 of 5". ``calls``: the bucket's planned
        collectives, in order. The owner set raises RuntimeError when it makes another collective than the next one.
        """

        def call(kind: str, tensor: Tensor, launch: Callable[[], Any]) -> None:
            # A collective that the other owners do not call would hang on NCCL, so a call that is not planned raises.
            planned = next(calls, None)
            if planned is None or (planned.kind, planned.numel) != (kind, tensor.numel()):
                called = f"{kind} of {tensor.numel():,} {name_of(tensor.dtype)} elements"
                text = f"this rank must not call {called}: the plan of the step has {planned or 'no further call'} next"
                raise RuntimeError(f"{text}; this is a bug in deepspeed-muon, please report it")
            self._collectives.start(bucket, batch.names, launch).wait()

        return OwnerSet(owner_group(self.group, batch.owners), batch.owners, call)

    def gather_vectors(self, own: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return NorMuon's second moments of the matrices in ``sizes``: {matrix name: fp32 CPU vector}; a collective.

        ``own``: {matrix name: fp32 vector} of the matrices that only this rank owns. ``sizes``: {matrix name: length},
        with the same names in the same order on all ranks.
        """
        flat = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=self.device)
        vectors = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
        for name in own.keys() & sizes.keys():
            vectors[name].copy_(own[name])
        if self.group is not None:
            torch.distributed.all_reduce(flat, group=self.group)  # exact: all but one summand are zero
        return {name: vector.cpu() for name, vector in vectors.items()}

    def largest(self, values: Tensor, names: Sequence[str]) -> None:
        """Replace each element of ``values`` by its maximum over the ranks of :attr:`group`; a collective.

        ``names``: the matrices that the values belong to, for error messages.
        """
        largest = torch.distributed.ReduceOp.MAX
        launch = partial(torch.distributed.all_reduce, values, largest, group=self.group, async_op=True)
        self._collectives.start("", tuple(names), launch).wait()

    def run(self, plan: Plan, program: Program, compute: Phases, timed: Phase) -> None:
        """Run one step: carry out the operations of ``program`` in order.

        Args:
            plan: the plan that ``program`` comes from.
            compute: the computations of the step.
            timed: function of a phase's name that returns a context manager, in which the phase runs. The names are
                ``prepare``, ``exchange`` (waiting for collectives), ``newton_schulz`` and ``apply``.
        """
        # Allocate every storage now, in its final size: none is replaced while a bucket uses it, and all exist before
        # copies on other streams are made to wait for earlier uses of this memory.
        storages = self._storages(program)
        if self.staging is not None:
            self.staging.follow_the_computation()
        buffers: dict[int, BucketBuffers] = {}
        for operation in program:
            if isinstance(operation, Look):
                with timed("prepare"):
                    compute.look(operation)
                continue
            k = operation.bucket
            match operation:
                case Open():
                    buffers[k] = self._open(plan, operation, storages[operation.storage], buffers)
                case Prepare():
                    with timed("prepare"):
                        compute.prepare(buffers[k])
                case Send():
                    self._send(buffers[k], operation)
                case Wait():
                    with timed("exchange"):
                        self._wait(buffers[k], operation.back)
                case Compute():
                    with timed("newton_schulz"):
                        calls = iter(operation.collectives)
                        compute.orthogonalize(buffers[k], calls)
                        if (planned := next(calls, None)) is not None:
                            text = f"this rank must still call {planned}, which the plan of the step has next"
                            raise RuntimeError(f"{text}; this is a bug in deepspeed-muon, please report it")
                        buffers[k].pack()
                case Apply():
                    with timed("apply"):
                        compute.apply(buffers[k])

    def _storages(self, program: Program) -> dict[int, Tensor]:
        numels: dict[int, int] = {}
        for operation in program:
            if isinstance(operation, Open):
                numels[operation.storage] = max(numels.get(operation.storage, 0), operation.numel)
        return {n: self.work.get(f"bucket{n}", (numel,), self.dtype, self.device) for n, numel in numels.items()}

    def _open(self, plan: Plan, operation: Open, storage: Tensor, others: Mapping[int, BucketBuffers]) -> BucketBuffers:
        """Return the buffers of the bucket that ``operation`` opens, as views of the 1-D tensor ``storage``.

        ``others``: {bucket index: buffers} of buckets opened before. A bucket that only sends results shares
        ``matrices`` with the one of them that computes the results.
        """
        bucket = plan.buckets[operation.bucket]
        matrices, outbox, inbox = storage[: operation.numel].split(bucket.buffer_sizes)
        if bucket.direct_receive_start is not None:
            inbox = matrices.narrow(0, bucket.direct_receive_start, sum(bucket.receive_counts))
        number = operation.storage
        return BucketBuffers(
            bucket=bucket,
            index=operation.bucket,
            count=len(plan.buckets),
            matrices=matrices if operation.own == operation.bucket else others[operation.own].matrices,
            outbox=outbox,
            inbox=inbox,
            host=self.staging.host_memory(bucket, self.dtype, self.work, number) if self.staging else None,
        )

    def _wait(self, buffers: BucketBuffers, back: bool) -> None:
        """Make the current stream wait for the bucket's collectives and copies. Unpack the elements that have arrived.

        If ``back``, results arrive: the host waits for their copies, too, and nothing is unpacked.
        """
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
        if not operation.collectives:
            return
        # DeepSpeed's wrapper of torch.distributed, so that its comms_logger lists these calls as `muon_exchange`.
        from deepspeed import comm  # type: ignore[attr-defined]

        # The other owners' results are received into the send buffer, one after another in the order of the ranks.
        others = 0
        for collective in operation.collectives:
            if collective.kind == "all_to_all":
                sent, received = (buffers.inbox, buffers.outbox) if operation.back else (buffers.outbox, buffers.inbox)
                call = partial(comm.all_to_all_single, received, sent, [*collective.received], [*collective.sent])
            else:
                is_own, numel = collective.root == comm.get_rank(group=self.group), collective.numel
                results = buffers.matrices[:numel] if is_own else buffers.outbox.narrow(0, others, numel)
                others += 0 if is_own else numel
                call = partial(comm.broadcast, results, comm.get_global_rank(self.group, collective.root))
            launch = partial(call, group=self.group, async_op=True, log_name="muon_exchange")
            buffers.pending.append(self._collectives.start(buffers.number, buffers.bucket.names, launch))
