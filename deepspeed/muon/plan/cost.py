# SPDX-License-Identifier: Apache-2.0
"""The cost model of a parameter group: operations of its Newton-Schulz against bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops, traffic

#: Floating-point operations that take as long as one byte on the wire: what moving a matrix to a rank that does not
#: hold it must save. For cores on gloo, and for an accelerator on its fabric.
CPU_FLOPS_PER_BYTE, ACCELERATOR_FLOPS_PER_BYTE = 200.0, 8000.0
#: The same within a node, and operations that take as long as the latency of a collective there.
CPU_NEAR, ACCELERATOR_NEAR = 200.0, 1000.0
CPU_CALL, ACCELERATOR_CALL = 5e7, 8e9


class Slice(NamedTuple):
    """Of one of several owners of a matrix: operations, and the bytes and collectives between them."""

    flops: float
    nbytes: float
    calls: int


@dataclass(frozen=True)
class CostModel:
    """Operations per matrix, and how many of them one byte of exchange is worth."""

    flops: Callable[[int, int], float]
    flops_per_byte: float
    bytes_per_element: int
    #: Where Newton-Schulz runs.
    device_type: str = "cpu"
    #: By rows, columns and number of owners of the whole matrix; ``None``: a matrix has one owner.
    sliced: Callable[[int, int, int], Slice] | None = None
    #: Of the sets of neighbouring ranks that share a node (:func:`deepspeed.muon.plan.slices.neighbours`).
    near: int = 1

    def worth(self, elements: int) -> float:
        """Operations worth the bytes of ``elements`` elements, to the owner and back."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    def of_owner(self, rows: int, cols: int, owners: int) -> Slice:
        """What each owner of a matrix has to do."""
        if owners == 1 or self.sliced is None:
            return Slice(self.flops(rows, cols), 0.0, 0)
        return self.sliced(rows, cols, owners)

    def total(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the operations of matrices of these rows and columns, of one owner each."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def price(self, rows: int, cols: int, owners: int) -> float:
        """Operations of each owner of a matrix, with those worth what owners send to each other."""
        part, near = self.of_owner(rows, cols, owners), CPU_NEAR if self.device_type == "cpu" else ACCELERATOR_NEAR
        per_byte = near if owners <= self.near else self.flops_per_byte
        return part.flops + per_byte * part.nbytes + self.call * part.calls

    @property
    def call(self) -> float:
        """Return the operations that take as long as the latency of a collective."""
        return CPU_CALL if self.device_type == "cpu" else ACCELERATOR_CALL


def cost_model(
    method: Callable[[int, int], str],
    schedule: Schedule,
    dtype: str,
    wire_bytes: int,
    device_type: str,
    near: int = 1,
) -> CostModel:
    """The cost model of one group.

    Args:
        method: of Newton-Schulz, by rows and columns.
        dtype: of Newton-Schulz, which decides how often ``gram`` restarts.
        wire_bytes: per element of the exchange.
        device_type: ``cpu``, or an accelerator's.
        near: as in :class:`CostModel`.
    """

    @functools.cache
    def cost(rows: int, cols: int) -> float:
        return flops(rows, cols, schedule, method(rows, cols), dtype)

    @functools.cache
    def of_slice(rows: int, cols: int, owners: int) -> Slice:
        name = method(rows, cols)
        sent = traffic(rows, cols, schedule, name, dtype, owners)
        return Slice(flops(rows, cols, schedule, name, dtype, owners=owners), sent.nbytes, sent.calls)

    flops_per_byte = CPU_FLOPS_PER_BYTE if device_type == "cpu" else ACCELERATOR_FLOPS_PER_BYTE
    return CostModel(cost, flops_per_byte, wire_bytes, device_type, of_slice, near)
