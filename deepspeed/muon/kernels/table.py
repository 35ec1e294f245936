# SPDX-License-Identifier: Apache-2.0
"""The operations that a step spends its time in. Each kind of device has the best table that is built for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Symmetric(NamedTuple):
    """A batch of symmetric matrices ``[batch, k, k]``: ``diagonal + rest``.

    In Newton-Schulz they are a multiple of I and something smaller. In bf16 the entries of such a diagonal are all
    rounded alike, which shifts every eigenvalue; so the diagonal is kept apart.

    ``rest``: ``[batch, k, k]``, contiguous, bf16 or fp32, zero on its diagonal. ``diagonal``: ``[batch, k]``, fp32.
    """

    rest: Tensor
    diagonal: Tensor


class Scalars(NamedTuple):
    """Of ``alpha A B + beta A + shift I``."""

    alpha: float = 1.0
    beta: float = 0.0
    shift: float = 0.0


#: Those of A B.
PLAIN = Scalars()


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation; what each does, its shapes and dtypes: see its twin of the same name in
    :mod:`deepspeed.muon.kernels.reference`.

    An element's result depends on nothing but the element: not on where a slice begins, how long it is or how many
    threads there are. Hence ranks that hold other parts of a matrix, and other numbers of ranks, get equal bits.
    """

    name: str
    advance: Callable[..., None]
    advance_rounded: Callable[..., None]
    apply_: Callable[..., None]
    normalize_: Callable[[Tensor], Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
