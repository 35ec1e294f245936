# SPDX-License-Identifier: Apache-2.0
"""Send the parts of matrices to their owners, the ranks that orthogonalize them, and parts of the results back.

:class:`~deepspeed.muon.step.PartitionStep` calls the methods of :class:`Exchange` for one bucket after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.errors import ExchangeError
from deepspeed.muon.exchange.bucket import Bucket, GridCopy
from deepspeed.muon.exchange.consensus import all_maxima
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.kernels.kernel_set import Workspace


@dataclass
class BucketBuffers:
    """The 1-D buffers of one :class:`Bucket` during a step. A bucket is the matrices that ranks exchange together.

    A run (:class:`~deepspeed.muon.exchange.bucket.ShardRun`) is a part of a matrix that this rank's shard holds. The
    owner of a matrix is the rank that orthogonalizes it.

    Args:
        index: the bucket's index in the plan.
        matrices: the bucket's matrices that this rank owns; at ZeRO stage 0 those of all owners.
        shard_side: the runs that this rank sends, in the order of the owners of their matrices ("send buffer"). The
            result of a run returns to the same place. Runs that are ``in_place`` are in ``matrices`` instead.
        owner_side: the parts of this rank's matrices that it receives ("receive buffer"). The results are sent back
            from it. It is a view of ``matrices`` if the elements arrive in the right order.
        host: under CPU offload, pinned host memory for all runs; otherwise ``None``. The other buffers are on the
            device of Newton-Schulz. All have the dtype in which matrices are sent.
        pending: handle of the launched collective, for which :meth:`wait` waits.
        copied: event at the end of the last copy between host and accelerator; ``None`` without one.
    """

    bucket: Bucket
    index: int
    matrices: Tensor
    shard_side: Tensor
    owner_side: Tensor
    host: Tensor | None = None
    pending: Any = None
    copied: Any = None

    def slice_of(self, index: int) -> Tensor:
        """Return, as a slice of :meth:`run_buffer`, the part of a matrix that ``bucket.runs[index]`` describes.

        The 1-D slice contains this part's input before Newton-Schulz, and this part's result afterwards.
        """
        run = self.bucket.runs[index]
        at = run.copy.at if self.host is None else self.bucket.host_places[index]
        return self.run_buffer(run.in_place).narrow(0, at, run.copy.rows * run.copy.cols)

    def run_buffer(self, in_place: bool) -> Tensor:
        """Return the 1-D buffer with this rank's parts of matrices: the input of Newton-Schulz, later the results.

        Under CPU offload this is ``host``. Otherwise it is ``matrices`` for the elements that this rank keeps to
        orthogonalize them (``in_place``), and ``shard_side`` for the elements that it sends.
        """
        return self._device_buffer(in_place) if self.host is None else self.host

    def staged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return (1-D views of ``host``, 1-D views of the buffers on the accelerator), for copies under CPU offload.

        The n-th views of both lists are for the same elements, which are copied from one to the other.
        """
        assert self.host is not None
        host, device = [], []
        for in_place, spans in self.bucket.staged_spans.items():
            for start, at, numel in spans:
                host.append(self.host.narrow(0, at, numel))
                device.append(self._device_buffer(in_place).narrow(0, start, numel))
        return host, device

    def _device_buffer(self, in_place: bool) -> Tensor:
        return self.matrices if in_place else self.shard_side

    def wait(self) -> None:
        """Wait for the bucket's ``pending`` collective; on an accelerator the current stream waits, not the host."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def unpack(self) -> None:
        """Copy received elements from ``owner_side`` into ``matrices``, unless it is a view of ``matrices``."""
        for copy in self.bucket.receive_copies:
            grid_view(self.matrices, copy).copy_(packed_view(self.owner_side, copy))

    def pack(self) -> None:
        """Copy results from ``matrices`` into ``owner_side``, to send them back; the reverse of :meth:`unpack`."""
        for copy in self.bucket.receive_copies:
            packed_view(self.owner_side, copy).copy_(grid_view(self.matrices, copy))


def copy_from_grid(tensor: Tensor, copy: GridCopy, work: Workspace, name: str) -> Tensor:
    """Return the equally spaced rows of ``tensor`` that ``copy`` (:class:`GridCopy`) selects as one 1-D tensor.

    The result is a view of ``tensor`` if there is one row. Otherwise it is a copy in scratch memory of ``work``, under
    the key ``name``. ``copy.times`` must be 1.
    """
    if copy.rows == 1:
        return tensor.view(-1).narrow(0, copy.start, copy.cols)
    elements = work.get(name, (1, copy.rows, copy.cols), tensor.dtype, tensor.device)
    return elements.copy_(grid_view(tensor, copy)).view(-1)


def copy_to_grid(elements: Tensor, tensor: Tensor, copy: GridCopy) -> None:
    """Write ``elements``, a result of :func:`copy_from_grid`, back to ``tensor``, unless they are a view of it."""
    if copy.rows > 1:
        grid_view(tensor, copy).copy_(elements.view(1, copy.rows, copy.cols))


def grid_view(tensor: Tensor, copy: GridCopy) -> Tensor:
    """Return the elements of a contiguous ``tensor`` that ``copy`` selects, as a view ``[times, rows, cols]``.

    A :class:`GridCopy` selects ``times`` groups of ``rows`` equally spaced rows, which have ``cols`` elements each.
    """
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.start_step, copy.pitch, 1)
    return torch.as_strided(tensor.view(-1)[copy.start :], shape, strides)


def packed_view(buffer: Tensor, copy: GridCopy) -> Tensor:
    """Return the rows of ``copy`` in the 1-D ``buffer``, where they follow each other without gaps, as a view.

    Its shape is ``[times, rows, cols]``, so that it can be copied to or from the :func:`grid_view` of the same
    :class:`GridCopy`.
    """
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.at_step, copy.cols, 1)
    return torch.as_strided(buffer[copy.at :], shape, strides)


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in pinned host memory; ``tensor`` itself if the accelerator has no such memory."""
    return get_accelerator().pin_memory(tensor)


class Staging:
    """Makes the copies of CPU offload between host memory and the accelerator, on one stream for each direction."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        make: Any = self._accelerator.Stream or (lambda: None)  # the CPU and MPS have no streams
        self._up, self._down = make(), make()

    def host_memory(self, bucket: Bucket, dtype: torch.dtype, work: Workspace, slot: int) -> Tensor:
        """Return a 1-D tensor in pinned host memory with room for all elements of ``bucket`` in this rank's shard.

        ``slot``: a number below the number of buckets in memory at a time. Buckets with the same slot use the same
        memory, one after another.
        """
        return work.get(f"pinned{slot}", (bucket.host_elements,), dtype, torch.device("cpu"), pinned)

    def follow_the_computation(self) -> None:
        """Make later copies to the accelerator wait for all computation that is queued now.

        Call this after a step's buffers are allocated: queued computation may still use their memory.
        """
        if self._up is not None:
            self._up.wait_stream(self._accelerator.current_stream())

    def beside_the_computation(self, back: bool) -> AbstractContextManager:
        """Return a context manager that sends copies and collectives to a stream in parallel with the computation.

        ``back``: True for results on their way back to host memory; the stream then first waits for all computation
        queued so far. False for inputs on their way to the accelerator.
        """
        if back and self._down is not None:
            self._down.wait_stream(self._accelerator.current_stream())
        return self._accelerator.stream(self._down if back else self._up)

    def copy(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """Queue a copy of each tensor in ``sources`` to the one at the same index of ``targets``.

        Return an event that marks the end of the copies, or ``None`` on an accelerator without streams, where the
        copies have already ended.
        """
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=self._up is not None)
        if self._up is None:
            return None
        event = self._accelerator.Event()
        event.record()
        return event


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

    def gather_state(self, own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Collect a state of matrices, such as NorMuon's second moments, from their owners; a collective.

        Return {matrix name: fp32 CPU tensor} on every rank. ``own``: {matrix name: fp32 tensor} of the matrices that
        this rank owns. ``shapes``: {matrix name: shape of its tensor}, with the same names in the same order on all
        ranks.
        """
        sizes = [math.prod(shape) for shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        parts = {name: part.view(shapes[name]) for name, part in zip(shapes, flat.split(sizes), strict=True)}
        for name in own.keys() & shapes.keys():
            parts[name].copy_(own[name])
        if self.group is not None:
            torch.distributed.all_reduce(flat, group=self.group)  # exact: all but one summand are zero
        return {name: part.cpu() for name, part in parts.items()}

    def largest(self, values: Tensor) -> None:
        """Replace each element of ``values`` by its maximum over the ranks of :attr:`group`; a collective."""
        all_maxima(values, self.group)

    def connect(self) -> None:
        """Open the connections between the ranks of :attr:`group`: send one element from each to each; a collective.

        NCCL allocates gigabytes for them in the first all-to-all of a group. So call this before the first step, after
        which torch's cache may occupy that memory.

        Raises:
            ExchangeError: the all-to-all failed. If memory was short, the message names remedies.
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
        """Return at most ``slots`` 1-D tensors, the memory for the buffers of all buckets in a step.

        Bucket i uses tensor ``i % slots``, after bucket ``i - slots`` is done. Call this before the first bucket of a
        step: copies on other streams then wait only once for all earlier uses of the memory.
        """
        # Buckets slot, slot + slots, slot + 2 * slots ... use a slot's memory.
        sizes = [sum(bucket.buffer_sizes) for bucket in plan.buckets]
        memory = [
            self.work.get(f"bucket{slot}", (max(sizes[slot::slots]),), self.dtype, self.device)
            for slot in range(min(slots, len(sizes)))
        ]
        if self.staging is not None:
            self.staging.follow_the_computation()
        return memory

    def open(self, plan: Plan, index: int, memory: Tensor, slot: int) -> BucketBuffers:
        """Return the buffers of bucket ``index`` of ``plan``, as views of ``memory``.

        ``memory``: the tensor at index ``slot`` of what :meth:`allocate` returned.
        """
        bucket = plan.buckets[index]
        matrices, shard_side, owner_side = memory[: sum(bucket.buffer_sizes)].split(bucket.buffer_sizes)
        if bucket.direct_receive_start is not None:
            owner_side = matrices.narrow(0, bucket.direct_receive_start, sum(bucket.receive_counts))
        return BucketBuffers(
            bucket=bucket,
            index=index,
            matrices=matrices,
            shard_side=shard_side,
            owner_side=owner_side,
            host=self.staging.host_memory(bucket, self.dtype, self.work, slot) if self.staging else None,
        )

    # ---- the way to the owners ----------------------------------------------------------------------------

    def send(self, buffers: BucketBuffers) -> None:
        """Start to send this rank's parts of a bucket's matrices to their owners."""
        if self.staging is None:
            self._start(buffers, back=False)
            return
        host, device = buffers.staged()
        with self.staging.beside_the_computation(back=False):
            buffers.copied = self.staging.copy(host, device)
            self._start(buffers, back=False)

    def wait(self, buffers: BucketBuffers) -> None:
        """Make the current stream wait for what :meth:`send` has started; put received parts into their matrices."""
        buffers.wait()
        if buffers.copied is not None:
            buffers.copied.wait()  # the current stream waits, not the host
        buffers.unpack()

    # ---- the way back -------------------------------------------------------------------------------------

    def send_back(self, buffers: BucketBuffers) -> None:
        """Start to send the results of the matrices that this rank owns to the ranks that hold parts of them."""
        buffers.pack()
        if self.staging is None:
            self._start(buffers, back=True)
            return
        host, device = buffers.staged()
        with self.staging.beside_the_computation(back=True):
            self._start(buffers, back=True)
            buffers.wait()
            buffers.copied = self.staging.copy(device, host)

    def wait_back(self, buffers: BucketBuffers) -> None:
        """Make the current stream wait for what :meth:`send_back` has started.

        Under CPU offload, the host waits until the results are in its memory.
        """
        buffers.wait()
        if buffers.copied is not None:
            buffers.copied.synchronize()

    def _start(self, buffers: BucketBuffers, back: bool) -> None:
        """Start the bucket's collective: an all-to-all or, at ZeRO stage 0, an all-gather of the results.

        ``back``: True to send results back, False to send parts of matrices to their owners. Do nothing if nothing must
        be sent, such as parts at stage 0.
        """
        # DeepSpeed's wrapper of torch.distributed, so that its comms_logger lists these calls as `muon_exchange`.
        from deepspeed import comm  # type: ignore[attr-defined]

        bucket, options = buffers.bucket, {"group": self.group, "async_op": True, "log_name": "muon_exchange"}
        if not bucket.travels:
            return
        if part := bucket.gathered_part:
            if back:  # at stage 0 nothing is sent to the owners
                own = buffers.matrices.narrow(0, comm.get_rank(group=self.group) * part, part)
                buffers.pending = comm.all_gather_into_tensor(buffers.matrices, own, **options)
            return
        shard_side, owner_side = (buffers.shard_side, bucket.send_counts), (buffers.owner_side, bucket.receive_counts)
        (source, sent), (target, received) = (owner_side, shard_side) if back else (shard_side, owner_side)
        buffers.pending = comm.all_to_all_single(target, source, list(received), list(sent), **options)
