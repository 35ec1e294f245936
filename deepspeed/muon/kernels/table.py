# SPDX-License-Identifier: Apache-2.0
"""The operations in which a step spends its time. Each type of device has a table of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Symmetric(NamedTuple):
    """A batch of symmetric matrices ``[batch, k, k]``: ``diagonal + rest``.

    In Newton-Schulz they are a multiple of I plus something smaller. bf16 would round all entries of such a diagonal
    alike and so shift every eigenvalue, which is why the diagonal is kept apart.

    ``rest``: ``[batch, k, k]``, contiguous, in bf16, fp16 or fp32, zero on its diagonal. ``diagonal``: ``[batch, k]``,
    fp32.
    """

    rest: Tensor
    diagonal: Tensor


class Scalars(NamedTuple):
    """The scalars of ``alpha A B + beta A + shift I``."""

    alpha: float = 1.0
    beta: float = 0.0
    shift: float = 0.0


#: The scalars of A B.
PLAIN = Scalars()


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation; the functions of the same names in
    :mod:`deepspeed.muon.kernels.reference` say what each does, with shapes and dtypes.

    An element's result depends on the element alone: not on where a slice begins, on its length or on the number of
    threads. So ranks that hold other parts of a matrix, and other numbers of ranks, get equal bits.
    """

    name: str
    advance: Callable[..., None]
    advance_rounded: Callable[..., None]
    apply_: Callable[..., None]
    normalize: Callable[..., Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
