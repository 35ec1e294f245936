# SPDX-License-Identifier: Apache-2.0
"""Types that describe kernels: a table (:class:`Operations`) is one implementation of every operation of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.workspace import Workspace


class Symmetric(NamedTuple):
    """A batch of symmetric matrices, ``diagonal + rest``. Those in 16 bits have their diagonals in fp32.

    ``rest``: ``[batch, k, k]``, contiguous, bf16, fp16 or fp32. ``diagonal``: fp32, ``[batch, k]``, and ``rest`` has
    zeros there. If ``diagonal`` is empty, ``[batch, 0]``, as for fp32 matrices, ``rest`` is the whole matrix.
    """

    # In Newton-Schulz a matrix is a multiple of I plus something smaller. bf16 would round all entries of such a
    # diagonal alike, and so shift every eigenvalue.
    rest: Tensor
    diagonal: Tensor

    @property
    def is_whole(self) -> bool:
        """Return whether ``rest`` is the whole matrix, and ``diagonal`` is empty."""
        return self.diagonal.size(-1) == 0


def base_of(x: Tensor) -> tuple[Tensor, bool]:
    """Return (``x``, False) if ``x`` is contiguous, otherwise (``x.mT``, True), which must be contiguous."""
    return (x, False) if x.is_contiguous() else (x.mT, True)


def symmetric_of(name: str, x: Tensor, work: Workspace) -> Symmetric:
    """Return an uninitialized :class:`Symmetric` for ``X X^T`` of each matrix X in ``x``, ``[batch, rows, cols]``.

    ``work`` owns its memory, which another call with the same ``name`` may reuse.
    """
    batch, size = x.size(0), x.size(-2)
    rest = work.get(name, (batch, size, size), x.dtype, x.device)
    apart = 0 if x.dtype == torch.float32 else size
    return Symmetric(rest, work.get(f"{name} diagonal", (batch, apart), torch.float32, x.device))


class Scalars(NamedTuple):
    """The scalars of the product ``alpha A B + beta A + shift I``."""

    alpha: float = 1.0
    beta: float = 0.0
    shift: float = 0.0


#: The scalars of the product ``A B``.
PLAIN = Scalars()


class Tiles(NamedTuple):
    """Runs, split into tiles, each for one GPU program. A run is a contiguous piece of a rank's flat ZeRO shard.

    ``table``: int64, ``[tiles, 3]``, on the kernel's device: (start in the shard, start in the other tensor, length) of
    each tile, in elements. The other tensor is the ``out`` of ``advance`` or the ``update`` of ``apply_``.
    ``are_aligned``: whether all starts and lengths of runs are multiples of 16.
    """

    table: Tensor
    are_aligned: bool


@dataclass(frozen=True)
class RunOperations:
    """The kernels that do ``advance`` and ``apply_`` for many runs (see :class:`Tiles`) of a flat shard in one launch.

    ``fits(tensor)`` returns whether they support its device, dtype and layout. ``tiles``, ``advance_runs`` and
    ``apply_runs_`` in ``reference.py`` describe the other fields. One launch for each run gives the same bits.
    """

    fits: Callable[[Tensor], bool]
    tiles: Callable[[Sequence[tuple[int, int, int]], torch.device], Tiles]
    advance: Callable[..., None]
    apply_: Callable[..., None]


@dataclass(frozen=True)
class Operations:
    """A table of kernels: one implementation, such as Triton's, of every operation in which a step spends its time.

    The functions of the same names in ``reference.py`` describe the operations. An elementwise result depends only on
    its element, not on where a slice begins, its length or the number of threads, so bits do not depend on how a matrix
    is distributed over ranks.
    """

    name: str
    advance: Callable[..., None]
    advance_rounded: Callable[..., None]
    advance_codes: Callable[..., None]
    apply_: Callable[..., None]
    copy_rounded: Callable[..., None]
    normalize: Callable[..., Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
    #: ``None`` on devices where launches are cheap; each run then has its own launch.
    runs: RunOperations | None = None
