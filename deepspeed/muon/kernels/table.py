# SPDX-License-Identifier: Apache-2.0
"""The operations that a step spends its time in. Each kind of device has the best table that is built for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
    square: Callable[[Tensor, Tensor], Tensor]
    product: Callable[..., Tensor]
