# SPDX-License-Identifier: Apache-2.0
"""The buffers of one bucket, and the copies within a rank between them and the shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.watchdog import PendingCollective
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.plan.bucket import Bucket, GridCopy


@dataclass
class BucketBuffers:
    """The 1-D buffers of one bucket while it is sent. A run is one contiguous piece of a matrix on this rank.

    All buffers except ``host`` have the dtype and device of the :class:`~deepspeed.muon.exchange.exchange.Exchange`.

    Args:
        index: the bucket's index in the plan.
        count: number of buckets in the plan.
        matrices: the bucket's matrices that this rank owns. A bucket that only sends results uses the ``matrices`` of
            the earlier bucket that computed them.
        outbox: the send buffer: this rank's runs of matrices that other ranks own, in the order of these ranks. The
            result of each run is received into the run's place.
        inbox: the receive buffer: runs of this rank's matrices, from other ranks. It is a view of ``matrices`` if the
            runs arrive in the order in which ``matrices`` stores them.
        host: pinned host memory for the runs under CPU offload, otherwise ``None``.
        pending: the launched collectives of this bucket that :meth:`wait` waits for.
    """

    bucket: Bucket
    index: int
    count: int
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    host: Tensor | None = None
    pending: list[PendingCollective] = field(default_factory=list)
    #: Event at the end of the last copy between host and accelerator; ``None`` without one.
    copied: Any = None

    @property
    def number(self) -> str:
        """Return the bucket's number for messages, such as "2 of 5"."""
        return f"{self.index + 1} of {self.count}"

    def slice_of(self, index: int) -> Tensor:
        """Return the slice for the bucket's run number ``index``: a 1-D view on the device of this rank's shards.

        Before Newton-Schulz it is filled with the run's input; afterwards it has the run's result.
        """
        run = self.bucket.runs[index]
        at = run.copy.at if self.host is None else self.bucket.host_places[index]
        return self.shard_side_buffer(run.in_place).narrow(0, at, run.copy.numel)

    def shard_side_buffer(self, in_place: bool) -> Tensor:
        """Return the 1-D buffer from which the bucket's runs are copied to and from this rank's shards.

        Under CPU offload this is ``host``. Otherwise it is ``matrices`` for runs that this rank owns (``in_place``),
        and ``outbox`` for runs that other ranks own.
        """
        return self._buffer(in_place) if self.host is None else self.host

    def segments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return two lists of 1-D views for the copies of CPU offload: of ``host``, and of the accelerator's buffers.

        The n-th views of both lists are for the same elements. The lists are as short as possible. Call this only
        under CPU offload.
        """
        assert self.host is not None
        segments = self.bucket.segments
        host = [self.host.narrow(0, part.host, part.numel) for part in segments]
        return host, [self._buffer(part.in_place).narrow(0, part.device, part.numel) for part in segments]

    def _buffer(self, in_place: bool) -> Tensor:
        return self.matrices if in_place else self.outbox

    def wait(self) -> None:
        """Wait for the bucket's ``pending`` collectives, and empty that list."""
        while self.pending:
            self.pending.pop().wait()

    def unpack(self) -> None:
        """Copy received elements from ``inbox`` into ``matrices``, unless ``inbox`` is a view of ``matrices``."""
        for copy in self.bucket.receive_copies:
            grid_view(self.matrices, copy).copy_(self._received(copy))

    def pack(self) -> None:
        """Copy results from ``matrices`` into ``inbox``, to send them back; the reverse of :meth:`unpack`."""
        for copy in self.bucket.receive_copies:
            self._received(copy).copy_(grid_view(self.matrices, copy))

    def _received(self, copy: GridCopy) -> Tensor:
        shape, strides = (copy.times, copy.rows, copy.cols), (copy.at_step, copy.cols, 1)
        return torch.as_strided(self.inbox[copy.at :], shape, strides)


def copy_from_grid(tensor: Tensor, copy: GridCopy, work: Workspace, name: str) -> Tensor:
    """Return the elements of ``tensor`` that ``copy`` selects (rows at a constant distance), as a 1-D tensor.

    The result is a view if the elements are contiguous. Otherwise it is a copy in the buffer ``name`` of ``work``.
    """
    if copy.rows == 1:
        return tensor.view(-1).narrow(0, copy.start, copy.cols)
    elements = work.get(name, (1, copy.rows, copy.cols), tensor.dtype, tensor.device)
    return elements.copy_(grid_view(tensor, copy)).view(-1)


def copy_to_grid(elements: Tensor, tensor: Tensor, copy: GridCopy) -> None:
    """Write ``elements``, returned by :func:`copy_from_grid`, back to ``tensor``, unless they are a view of it."""
    if copy.rows > 1:
        grid_view(tensor, copy).copy_(elements.view(1, copy.rows, copy.cols))


def grid_view(tensor: Tensor, copy: GridCopy) -> Tensor:
    """Return a view of the elements of a contiguous ``tensor`` that ``copy`` selects: ``[times, rows, cols]``."""
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.start_step, copy.pitch, 1)
    return torch.as_strided(tensor.view(-1)[copy.start :], shape, strides)
