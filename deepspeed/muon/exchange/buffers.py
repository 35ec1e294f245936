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
    """The buffers of one bucket in flight, in the exchange's dtype and on its device; all are 1-D.

    Args:
        index: of the bucket in the plan.
        count: number of buckets in the plan.
        matrices: the matrices that this rank owns; in a bucket of results, those of an earlier bucket.
        outbox: this rank's runs of matrices that others own, by owner; their results are received into the same places.
        inbox: parts of this rank's matrices that other ranks hold; a view of ``matrices`` if they arrive in order.
        host: pinned memory for the runs under CPU offload; ``None`` if shards and ``matrices`` are on one device.
        pending: the collectives to wait for.
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
        """Return the buffer's part for run number ``index`` of the bucket, 1-D, on the shards' device.

        ``prepare`` writes the input of Newton-Schulz to it, and ``apply`` reads the result from it.
        """
        run = self.bucket.runs[index]
        at = run.copy.at if self.host is None else self.bucket.host_places[index]
        return self.beside_the_shards(run.in_place).narrow(0, at, run.copy.numel)

    def beside_the_shards(self, in_place: bool) -> Tensor:
        """Return the 1-D buffer, on the shards' device, of the runs that are ``in_place``, or of the others.

        Under CPU offload it is the host memory, otherwise the matrices or the send buffer.
        """
        return self._buffer(in_place) if self.host is None else self.host

    def segments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return (slices of host memory, slices of buffers on the accelerator), 1-D, in as few pairs as possible.

        The n-th slices of both lists are for the same elements; CPU offload copies one to the other.
        """
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
        """Copy received elements from the receive buffer into the matrices, unless they were received there."""
        for copy in self.bucket.receive_copies:
            grid_view(self.matrices, copy).copy_(self._received(copy))

    def pack(self) -> None:
        """Copy the results of what :meth:`unpack` copied into the receive buffer, from which they are sent back."""
        for copy in self.bucket.receive_copies:
            self._received(copy).copy_(grid_view(self.matrices, copy))

    def _received(self, copy: GridCopy) -> Tensor:
        shape, strides = (copy.times, copy.rows, copy.cols), (copy.at_step, copy.cols, 1)
        return torch.as_strided(self.inbox[copy.at :], shape, strides)


def copy_from_grid(tensor: Tensor, copy: GridCopy, work: Workspace, name: str) -> Tensor:
    """Return the elements of ``tensor`` on the grid that ``copy`` describes, 1-D.

    The result is a view if they are contiguous, otherwise a copy in the scratch memory ``name`` of ``work``.
    """
    if copy.rows == 1:
        return tensor.view(-1).narrow(0, copy.start, copy.cols)
    elements = work.get(name, (1, copy.rows, copy.cols), tensor.dtype, tensor.device)
    return elements.copy_(grid_view(tensor, copy)).view(-1)


def copy_to_grid(elements: Tensor, tensor: Tensor, copy: GridCopy) -> None:
    """Write ``elements`` from :func:`copy_from_grid` back to ``tensor``; does nothing if they are a view of it."""
    if copy.rows > 1:
        grid_view(tensor, copy).copy_(elements.view(1, copy.rows, copy.cols))


def grid_view(tensor: Tensor, copy: GridCopy) -> Tensor:
    """Return a view ``[times, rows, cols]`` of the elements of a contiguous ``tensor`` on the grids of ``copy``."""
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.start_step, copy.pitch, 1)
    return torch.as_strided(tensor.view(-1)[copy.start :], shape, strides)
