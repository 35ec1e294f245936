# SPDX-License-Identifier: Apache-2.0
"""Send shards to the owners of matrices, and shards of the results back.

:class:`~deepspeed.muon.step.partition_step.PartitionStep` decides when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import ExchangeError
from deepspeed.muon.exchange.buffers import BucketBuffers
from deepspeed.muon.exchange.host_staging import Staging
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.plan.plan import Plan

OUT_OF_MEMORY = (
    "NCCL keeps memory for each pair of ranks, 3.3 GB in all on eight H100s: set NCCL_MAX_P2P_NCHANNELS to 1 or 2, or "
    "leave more memory free, with a smaller micro-batch or a higher ZeRO stage"
)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The communication of one parameter group: it sends matrices to their owners, and the results back.

    The owner of a matrix is the rank that orthogonalizes it.

    Args:
        group: process group of the ranks that share the parameters; ``None`` if each rank does all the work itself.
        dtype: dtype of the elements that are sent, bf16 or fp32.
        device: device on which Newton-Schulz and the collectives run.
        work: scratch memory, from which the buffers are allocated.
        staging: the copies between ``device`` and host memory under CPU offload; ``None`` without CPU offload.
    """

    group: Any
    dtype: torch.dtype
    device: torch.device
    work: Workspace
    staging: Staging | None = None

    @property
    def is_staged(self) -> bool:
        """Return whether shards are copied between host memory and the accelerator (CPU offload)."""
        return self.staging is not None

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

    def largest(self, values: Tensor) -> None:
        """Replace each element of ``values`` by its maximum over the ranks of :attr:`group`; a collective."""
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.group)

    def connect(self) -> None:
        """Send one element from each rank to each other; a collective.

        A backend makes the connections of a group for all-to-all in the first one, for which NCCL takes gigabytes. In
        the first step torch's cache may hold that memory.

        Raises:
            ExchangeError: the first all-to-all failed, with the remedies if memory was short.
        """
        if self.group is None:
            return
        ones = torch.ones(torch.distributed.get_world_size(self.group), dtype=self.dtype, device=self.device)
        try:
            torch.distributed.all_to_all_single(torch.empty_like(ones), ones, group=self.group)
        except RuntimeError as error:
            cure = f"; {OUT_OF_MEMORY}" if "memory" in str(error) else ""
            raise ExchangeError(f"the first all-to-all among {ones.numel()} ranks failed{cure}: {error}") from error

    # ---- buffers ------------------------------------------------------------------------------------------

    def allocate(self, plan: Plan, slots: int) -> list[Tensor]:
        """Return the memory of a step: for each of ``slots``, a 1-D tensor for all buckets that use it in turn.

        All memory of a step is allocated before its first bucket: copies on other streams then wait once, for all
        earlier uses of it.
        """
        sizes = [sum(bucket.buffer_sizes) for bucket in plan.buckets]
        memory = [
            self.work.get(f"bucket{slot}", (max(sizes[slot::slots]),), self.dtype, self.device)
            for slot in range(min(slots, len(sizes)))
        ]
        if self.staging is not None:
            self.staging.follow_the_computation()
        return memory

    def open(self, plan: Plan, index: int, memory: Tensor, slot: int) -> BucketBuffers:
        """Return the buffers of bucket ``index``, as views of ``memory``, a result of :meth:`allocate` for ``slot``."""
        bucket = plan.buckets[index]
        matrices, outbox, inbox = memory[: sum(bucket.buffer_sizes)].split(bucket.buffer_sizes)
        if bucket.direct_receive_start is not None:
            inbox = matrices.narrow(0, bucket.direct_receive_start, sum(bucket.receive_counts))
        return BucketBuffers(
            bucket=bucket,
            index=index,
            matrices=matrices,
            outbox=outbox,
            inbox=inbox,
            host=self.staging.host_memory(bucket, self.dtype, self.work, slot) if self.staging else None,
        )

    # ---- the way to the owners ----------------------------------------------------------------------------

    def send(self, buffers: BucketBuffers) -> None:
        """Start to send this rank's parts of a bucket's matrices to their owners."""
        if self.staging is None:
            self._start(buffers, back=False)
            return
        host, device = buffers.segments()
        with self.staging.beside_the_computation(back=False):
            buffers.copied = self.staging.copy(host, device)
            self._start(buffers, back=False)

    def wait(self, buffers: BucketBuffers) -> None:
        """Make the current stream wait for what :meth:`send` has started, and put what has arrived in place."""
        buffers.wait()
        if buffers.copied is not None:
            buffers.copied.wait()
        buffers.unpack()

    # ---- the way back -------------------------------------------------------------------------------------

    def send_back(self, buffers: BucketBuffers) -> None:
        """Start to send the results of the matrices that this rank owns to the ranks that hold parts of them."""
        buffers.pack()
        if self.staging is None:
            self._start(buffers, back=True)
            return
        host, device = buffers.segments()
        with self.staging.beside_the_computation(back=True):
            self._start(buffers, back=True)
            buffers.wait()
            buffers.copied = self.staging.copy(device, host)

    def wait_back(self, buffers: BucketBuffers) -> None:
        """Make the current stream wait for what :meth:`send_back` has started; the host waits for copies to it, too."""
        buffers.wait()
        if buffers.copied is not None:
            buffers.copied.synchronize()

    def _start(self, buffers: BucketBuffers, back: bool) -> None:
        """Start the bucket's collective: an all-to-all or, at ZeRO stage 0, an all-gather of the results."""
        # DeepSpeed's wrapper of torch.distributed, so that its comms_logger lists these calls as `muon_exchange`.
        from deepspeed import comm  # type: ignore[attr-defined]

        bucket, options = buffers.bucket, {"group": self.group, "async_op": True, "log_name": "muon_exchange"}
        if not bucket.travels:
            return
        if part := bucket.gathered_part:
            if back:
                own = buffers.matrices.narrow(0, comm.get_rank(group=self.group) * part, part)
                buffers.pending = comm.all_gather_into_tensor(buffers.matrices, own, **options)
            return
        shard_side, owner_side = (buffers.outbox, bucket.send_counts), (buffers.inbox, bucket.receive_counts)
        (source, sent), (target, received) = (owner_side, shard_side) if back else (shard_side, owner_side)
        buffers.pending = comm.all_to_all_single(target, source, list(received), list(sent), **options)
