# SPDX-License-Identifier: Apache-2.0
"""Types that describe kernels: a table (:class:`Operations`) is one implementation of every operation of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.workspace import Workspace


def base_of(x: Tensor) -> tuple[Tensor, bool]:
    """Return (``x``, False) if ``x`` is contiguous, otherwise (``x.mT``, True), which must be contiguous."""
    return (x, False) if x.is_contiguous() else (x.mT, True)


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
    #: Returns room for symmetric matrices, in the form that ``square``, ``product`` and ``multiply`` take.
    symmetric: Callable[[str, Tensor, Workspace], Any]
    diagonal: Callable[[Any], Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
    #: The dtype of the fastest products on this CPU.
    fast_dtype: str = "fp32"
    #: ``None`` on devices where launches are cheap; each run then has its own launch.
    runs: RunOperations | None = None
