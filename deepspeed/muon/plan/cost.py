# SPDX-License-Identifier: Apache-2.0
"""The cost model of a parameter group: Newton-Schulz and the exchange in one unit, floating-point operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops, traffic

#: Floating-point operations that take as long as sending one byte: for CPU cores over gloo, and for an accelerator over
#: its fabric. Moving a matrix to a rank that does not hold it must save more than this per byte.
CPU_FLOPS_PER_BYTE, ACCELERATOR_FLOPS_PER_BYTE = 200.0, 8000.0
#: The same for a byte sent within a node.
CPU_INTRA_NODE, ACCELERATOR_INTRA_NODE = 200.0, 1000.0
#: Floating-point operations that take as long as the latency of a collective within a node.
CPU_CALL, ACCELERATOR_CALL = 5e7, 8e9


class OwnerCost(NamedTuple):
    """The work of each owner of a matrix: its operations, and the bytes and collectives that it sends other owners."""

    flops: float
    nbytes: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class CostModel:
    """The cost of Newton-Schulz and of the exchange, in floating-point operations.

    Args:
        of_owner: (rows, columns, number of owners) of a whole matrix -> the work of each owner.
        flops_per_byte: operations that take as long as sending one byte.
        bytes_per_element: of what is sent.
        device_type: where Newton-Schulz runs, such as ``cpu``.
        intra_node: size of the sets of ranks that share a node, from :func:`deepspeed.muon.plan.owners.neighbours`.
    """

    of_owner: Callable[[int, int, int], OwnerCost]
    flops_per_byte: float
    bytes_per_element: int
    device_type: str = "cpu"
    intra_node: int = 1

    def flops(self, rows: int, cols: int) -> float:
        """Return the operations that orthogonalize a matrix with one owner."""
        return self.of_owner(rows, cols, 1).flops

    def total(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the operations that orthogonalize matrices of these (rows, columns), each with one owner."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def bytes_as_flops(self, elements: int) -> float:
        """Return the operations that take as long as sending this many elements to the owner and back."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    def owner_cost(self, rows: int, cols: int, owners: int) -> float:
        """Return the operations of each of the ``owners``, with what they send each other converted to operations."""
        part, is_cpu = self.of_owner(rows, cols, owners), self.device_type == "cpu"
        intra_node = CPU_INTRA_NODE if is_cpu else ACCELERATOR_INTRA_NODE
        per_byte = intra_node if owners <= self.intra_node else self.flops_per_byte
        return part.flops + per_byte * part.nbytes + self.call * part.calls

    @property
    def call(self) -> float:
        """Return the latency of one collective, in operations."""
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
        method: (rows, columns) of a matrix -> method of Newton-Schulz.
        schedule: the coefficients of Newton-Schulz, one triple per step.
        dtype: of the products of Newton-Schulz. It decides how often the method ``gram`` restarts.
        wire_bytes: bytes of each element that is sent.
        device_type, intra_node: see :class:`CostModel`.
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
