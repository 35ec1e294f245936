# SPDX-License-Identifier: Apache-2.0
"""The memory of one bucket, and the copies within a rank between it and the shards."""

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
    """The buffers of one bucket in flight, in the exchange dtype on the exchange device: parts of one storage.

    Args:
        index: of the bucket in the plan; ``count``: how many there are.
        matrices: flat, the matrices that this rank owns; where only results travel, those of an earlier bucket.
        outbox: flat, the runs of other ranks' matrices, ordered by owner. Results come back to the same positions.
        inbox: flat, the runs of this rank's matrices that other ranks hold; a part of ``matrices`` where they arrive in
            order.
        host: flat, pinned memory for the runs where the shards are on the host and ``matrices`` on an accelerator;
            ``None``: both are on one device.
    """

    bucket: Bucket
    index: int
    count: int
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    host: Tensor | None = None
    pending: list[PendingCollective] = field(default_factory=list)
    #: The end of the last copy between host and accelerator, if there is one.
    copied: Any = None

    @property
    def number(self) -> str:
        """Return which bucket this is of how many, for messages."""
        return f"{self.index + 1} of {self.count}"

    def slice_of(self, index: int) -> Tensor:
        """Return what ``prepare`` fills and ``apply`` reads for a run, by its index: 1-D, on the shards' device."""
        run = self.bucket.runs[index]
        at = run.copy.at if self.host is None else self.bucket.host_places[index]
        return self.beside_the_shards(run.in_place).narrow(0, at, run.copy.numel)

    def beside_the_shards(self, in_place: bool) -> Tensor:
        """Return the buffer, on the shards' device, that has the runs ``in_place``, or the others."""
        return self._buffer(in_place) if self.host is None else self.host

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
            grid_view(self.matrices, copy).copy_(self._received(copy))

    def pack(self) -> None:
        """Copy the same elements back out of the matrices."""
        for copy in self.bucket.scattered:
            self._received(copy).copy_(grid_view(self.matrices, copy))

    def _received(self, copy: GridCopy) -> Tensor:
        shape, strides = (copy.times, copy.rows, copy.cols), (copy.at_step, copy.cols, 1)
        return torch.as_strided(self.inbox[copy.at :], shape, strides)


def copy_from_grid(tensor: Tensor, copy: GridCopy, work: Workspace, name: str) -> Tensor:
    """Return the elements on the grid, 1-D: a view if they are contiguous in a contiguous tensor, else a named copy."""
    if copy.rows == 1:
        return tensor.view(-1).narrow(0, copy.start, copy.cols)
    elements = work.get(name, (1, copy.rows, copy.cols), tensor.dtype, tensor.device)
    return elements.copy_(grid_view(tensor, copy)).view(-1)


def copy_to_grid(elements: Tensor, tensor: Tensor, copy: GridCopy) -> None:
    """Write back the copy from :func:`copy_from_grid`; does nothing for a view."""
    if copy.rows > 1:
        grid_view(tensor, copy).copy_(elements.view(1, copy.rows, copy.cols))


def grid_view(tensor: Tensor, copy: GridCopy) -> Tensor:
    """Return the elements as they lie in a contiguous tensor, a view [times, rows, cols]."""
    shape, strides = (copy.times, copy.rows, copy.cols), (copy.start_step, copy.pitch, 1)
    return torch.as_strided(tensor.view(-1)[copy.start :], shape, strides)
