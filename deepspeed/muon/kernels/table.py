# SPDX-License-Identifier: Apache-2.0
"""The operations in which a step spends its time. Each type of device has a table of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.workspace import Workspace


class Symmetric(NamedTuple):
    """A batch of symmetric matrices ``[batch, k, k]``: ``diagonal + rest``, or only ``rest``.

    In Newton-Schulz they are a multiple of I plus something smaller. bf16 would round all entries of such a diagonal
    alike and so shift every eigenvalue, which is why 16-bit matrices keep their diagonals apart. Those in fp32 are
    whole.

    ``rest``: ``[batch, k, k]``, contiguous, in bf16, fp16 or fp32; zero on its diagonal if that is apart.
    ``diagonal``: fp32, ``[batch, k]`` apart, ``[batch, 0]`` of whole matrices.
    """

    rest: Tensor
    diagonal: Tensor

    @property
    def is_whole(self) -> bool:
        """Return whether ``rest`` holds the diagonal, too."""
        return self.diagonal.size(-1) == 0


def base_of(x: Tensor) -> tuple[Tensor, bool]:
    """Return the contiguous tensor that ``x`` is or is the transpose of, and whether it is the transpose."""
    return (x, False) if x.is_contiguous() else (x.mT, True)


def symmetric_of(name: str, x: Tensor, work: Workspace) -> Symmetric:
    """Return scratch for symmetric matrices as large as X X^T, ``x [batch, rows, cols]``, in its dtype."""
    batch, size = x.size(0), x.size(-2)
    rest = work.get(name, (batch, size, size), x.dtype, x.device)
    apart = 0 if x.dtype == torch.float32 else size
    return Symmetric(rest, work.get(f"{name} diagonal", (batch, apart), torch.float32, x.device))


class Scalars(NamedTuple):
    """The scalars of ``alpha A B + beta A + shift I``."""

    alpha: float = 1.0
    beta: float = 0.0
    shift: float = 0.0


#: The scalars of A B.
PLAIN = Scalars()


class Tiles(NamedTuple):
    """Runs cut for a kernel: ``table``, int64, on its device. ``are_aligned``: all numbers are multiples of 16."""

    table: Tensor
    are_aligned: bool


@dataclass(frozen=True)
class RunOperations:
    """``advance`` and ``apply_`` of many runs between two flat tensors, in one kernel and with the bits of many.

    Args:
        fits: whether they take a tensor's device, dtype and layout.
        tiles: from (place in the shard, place in the other tensor, length) of each run, and the device.
        advance: as :func:`deepspeed.muon.kernels.reference.advance_runs`.
        apply_: as :func:`deepspeed.muon.kernels.reference.apply_runs_`.
    """

    fits: Callable[[Tensor], bool]
    tiles: Callable[[Sequence[tuple[int, int, int]], torch.device], Tiles]
    advance: Callable[..., None]
    apply_: Callable[..., None]


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation, each described by its namesake in :mod:`deepspeed.muon.kernels.reference`.

    An element's result depends on the element only: not on where a slice begins, on its length or on the number of
    threads. So ranks that hold other parts of a matrix, and other numbers of ranks, get equal bits.
    """

    name: str
    advance: Callable[..., None]
    advance_rounded: Callable[..., None]
    look_ahead: Callable[..., None]
    advance_codes: Callable[..., None]
    apply_: Callable[..., None]
    copy_rounded: Callable[..., None]
    normalize: Callable[..., Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
    #: Whether ``product`` may write into one of its factors.
    in_place: bool = False
    #: Whether a matrix is a slice of one, whose other slices take part in every operation. What decides the size of an
    #: operation must then be equal on all machines.
    is_slice: bool = False
    #: ``None`` where kernel launches are cheap; runs are then launched one by one.
    runs: RunOperations | None = None
