# SPDX-License-Identifier: Apache-2.0
"""The buffers of one bucket, and the copies within a rank between them and the shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.plan.bucket import Bucket, GridCopy


@dataclass
class BucketBuffers:
    """The 1-D buffers of one :class:`Bucket` during a step. A bucket is the matrices that ranks exchange together.

    A run (:class:`~deepspeed.muon.plan.bucket.ShardRun`) is a part of a matrix that this rank's shard holds.

    Args:
        index: the bucket's index in the plan.
        matrices: the bucket's matrices that this rank owns, which means that it orthogonalizes them; at ZeRO stage 0
            those of all owners.
        outbox: the send buffer: the runs that are not ``in_place``, in the order of the ranks that own their matrices.
            The result of a run returns to the same place.
        inbox: the receive buffer: what ranks send of this rank's matrices. It is a view of ``matrices`` if the elements
            arrive in the right order.
        host: under CPU offload, pinned host memory for all runs; otherwise ``None``. The other buffers are on the
            device of Newton-Schulz. All have the dtype in which matrices are sent.
        pending: handle of the launched collective, for which :meth:`wait` waits.
        copied: event at the end of the last copy between host and accelerator; ``None`` without one.
    """

    bucket: Bucket
    index: int
    matrices: Tensor
    outbox: Tensor
    inbox: Tensor
    host: Tensor | None = None
    pending: Any = None
    copied: Any = None

    def slice_of(self, index: int) -> Tensor:
        """Return, as a slice of :meth:`shard_side_buffer`, the part of a matrix that ``bucket.runs[index]`` describes.

        The 1-D slice contains this part's input before Newton-Schulz, and this part's result afterwards.
        """
        run = self.bucket.runs[index]
        at = run.copy.at if self.host is None else self.bucket.host_places[index]
        return self.shard_side_buffer(run.in_place).narrow(0, at, run.copy.numel)

    def shard_side_buffer(self, in_place: bool) -> Tensor:
        """Return the bucket's 1-D buffer that gets this rank's input of Newton-Schulz and, later, the results for it.

        Under CPU offload this is ``host``. Otherwise it is ``matrices`` for the elements that this rank keeps to
        orthogonalize them (``in_place``), and ``outbox`` for the elements that it sends.
        """
        return self._buffer(in_place) if self.host is None else self.host

    def segments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return (1-D views of ``host``, 1-D views of the accelerator's buffers), for copies under CPU offload.

        The n-th views of both lists stand for the same elements.
        """
        assert self.host is not None
        segments = self.bucket.segments
        host = [self.host.narrow(0, part.host, part.numel) for part in segments]
        return host, [self._buffer(part.in_place).narrow(0, part.device, part.numel) for part in segments]

    def _buffer(self, in_place: bool) -> Tensor:
        return self.matrices if in_place else self.outbox

    def wait(self) -> None:
        """Wait for the bucket's ``pending`` collective; on an accelerator the current stream waits, not the host."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

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
    """Return the equally spaced rows of ``tensor`` that ``copy`` (:class:`GridCopy`) selects, joined to a 1-D tensor.

    The result is a view of ``tensor`` if there is one row. Otherwise it is a copy in ``work``, under the key ``name``.
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
