# SPDX-License-Identifier: Apache-2.0
"""A table of kernels: one implementation of every operation in which a step spends its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.workspace import Workspace


class Symmetric(NamedTuple):
    """A batch of symmetric matrices ``[batch, k, k]``: ``diagonal + rest`` in 16 bits, only ``rest`` in fp32.

    In Newton-Schulz they are a multiple of I plus something smaller. bf16 would round all entries of such a diagonal
    alike and so shift every eigenvalue, so 16-bit matrices store their diagonals separately, in fp32.

    ``rest``: ``[batch, k, k]``, contiguous, bf16, fp16 or fp32; zero on its diagonal if that is stored separately.
    ``diagonal``: fp32, ``[batch, k]`` if stored separately, otherwise the empty ``[batch, 0]``.
    """

    rest: Tensor
    diagonal: Tensor

    @property
    def is_whole(self) -> bool:
        """Return whether ``rest`` includes the diagonal."""
        return self.diagonal.size(-1) == 0


def base_of(x: Tensor) -> tuple[Tensor, bool]:
    """Return (``x``, False) if ``x`` is contiguous; (``x.mT``, True) if ``x.mT`` is contiguous."""
    return (x, False) if x.is_contiguous() else (x.mT, True)


def symmetric_of(name: str, x: Tensor, work: Workspace) -> Symmetric:
    """Return uninitialized scratch memory for X X^T of each matrix X in ``x``, ``[batch, rows, cols]``."""
    batch, size = x.size(0), x.size(-2)
    rest = work.get(name, (batch, size, size), x.dtype, x.device)
    apart = 0 if x.dtype == torch.float32 else size
    return Symmetric(rest, work.get(f"{name} diagonal", (batch, apart), torch.float32, x.device))


class Scalars(NamedTuple):
    """The scalars of a product ``alpha A B + beta A + shift I``."""

    alpha: float = 1.0
    beta: float = 0.0
    shift: float = 0.0


#: The scalars of the product ``A B``.
PLAIN = Scalars()


class Tiles(NamedTuple):
    """Contiguous pieces of a shard ("runs"), split into tiles, each of which one program of a kernel processes.

    ``table``: int64, on the kernel's device, ``[tiles, 3]``: the start of each tile in the shard, its start in the
    tensor that the operation writes or reads next to the shard, and its length, in elements. ``are_aligned``: whether
    the starts of all runs in both tensors, and their lengths, are multiples of 16 elements.
    """

    table: Tensor
    are_aligned: bool


@dataclass(frozen=True)
class RunOperations:
    """Kernels that do ``advance`` and ``apply_`` for many contiguous pieces ("runs") of two flat tensors in one launch.

    The bits are the same as with one launch for each run.

    Args:
        fits: returns whether the kernels support a tensor's device, dtype and layout.
        tiles: makes :class:`Tiles` from (start in the shard, start in the other tensor, length) of each run.
        advance: see :func:`deepspeed.muon.kernels.reference.advance_runs`.
        apply_: see :func:`deepspeed.muon.kernels.reference.apply_runs_`.
    """

    fits: Callable[[Tensor], bool]
    tiles: Callable[[Sequence[tuple[int, int, int]], torch.device], Tiles]
    advance: Callable[..., None]
    apply_: Callable[..., None]


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation; the functions of the same names in ``reference.py`` describe them.

    The result for an element depends on that element only, not on where a slice begins, on its length or on the number
    of threads. So bits do not depend on how a matrix is distributed over ranks.
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
    #: Whether each matrix is a slice of one whose other slices are on other ranks. Every operation is then a
    #: collective, and all ranks must call it with the same number of matrices.
    is_slice: bool = False
    #: ``None`` on devices where launches are cheap; each run then has its own launch.
    runs: RunOperations | None = None
