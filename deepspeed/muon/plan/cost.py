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
CPU_INTRA_NODE, ACCELERATOR_INTRA_NODE = 200.0, 1000.0
CPU_CALL, ACCELERATOR_CALL = 5e7, 8e9


class OwnerCost(NamedTuple):
    """What each owner of a matrix has to do: operations, and the bytes and collectives between the owners."""

    flops: float
    nbytes: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class CostModel:
    """Operations per matrix, and how many of them one byte of the exchange is worth.

    Args:
        of_owner: by rows, columns and number of owners of the whole matrix.
        device_type: where Newton-Schulz runs.
        intra_node: ranks of the sets of neighbours that share a node (:func:`deepspeed.muon.plan.owners.neighbours`).
    """

    of_owner: Callable[[int, int, int], OwnerCost]
    flops_per_byte: float
    bytes_per_element: int
    device_type: str = "cpu"
    intra_node: int = 1

    def flops(self, rows: int, cols: int) -> float:
        """Return the operations of a matrix with one owner."""
        return self.of_owner(rows, cols, 1).flops

    def total(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the operations of matrices of these rows and columns, of one owner each."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def bytes_as_flops(self, elements: int) -> float:
        """Return the operations worth the bytes of ``elements`` elements, to the owner and back."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    def owner_cost(self, rows: int, cols: int, owners: int) -> float:
        """Return the operations of each owner of a matrix, with those worth what the owners send to each other."""
        part, is_cpu = self.of_owner(rows, cols, owners), self.device_type == "cpu"
        intra_node = CPU_INTRA_NODE if is_cpu else ACCELERATOR_INTRA_NODE
        per_byte = intra_node if owners <= self.intra_node else self.flops_per_byte
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
    intra_node: int = 1,
) -> CostModel:
    """Return the cost model of one group.

    Args:
        method: of Newton-Schulz, by rows and columns.
        dtype: of Newton-Schulz, which decides how often ``gram`` restarts.
        wire_bytes: per element of the exchange.
        device_type: ``cpu``, or an accelerator's.
        intra_node: as in :class:`CostModel`.
    """

    @functools.cache
    def of_owner(rows: int, cols: int, owners: int) -> OwnerCost:
        name = method(rows, cols)
        operations = flops(rows, cols, schedule, name, dtype, owners=owners)
        if owners == 1:
            return OwnerCost(operations)
        nbytes, calls = traffic(rows, cols, schedule, name, dtype, owners)
        return OwnerCost(operations, nbytes, calls)

    flops_per_byte = CPU_FLOPS_PER_BYTE if device_type == "cpu" else ACCELERATOR_FLOPS_PER_BYTE
    return CostModel(of_owner, flops_per_byte, wire_bytes, device_type, intra_node)
