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
    """What each owner of a matrix does in a step: Newton-Schulz, and collectives with the other owners.

    ``flops``: floating-point operations. ``nbytes``: bytes that an owner sends. ``calls``: number of collectives.
    """

    flops: float
    nbytes: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class CostModel:
    """The cost of Newton-Schulz and of communication. Both are counted in floating-point operations.

    The cost of communication is the number of operations that the device could do in the same time.

    Args:
        of_owner: (rows, columns, number of owners) of a matrix -> the :class:`OwnerCost` of each owner.
        flops_per_byte: operations that take as long as sending one byte.
        bytes_per_element: bytes of each element that is sent to an owner or back.
        device_type: where Newton-Schulz runs, such as ``cpu``.
        intra_node: number of consecutive ranks that share a node.
    """

    of_owner: Callable[[int, int, int], OwnerCost]
    flops_per_byte: float
    bytes_per_element: int
    device_type: str = "cpu"
    intra_node: int = 1

    def flops(self, rows: int, cols: int) -> float:
        """Return the floating-point operations of Newton-Schulz on one (rows, cols) matrix with a single owner."""
        return self.of_owner(rows, cols, 1).flops

    def total_flops(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the floating-point operations of Newton-Schulz on matrices of all ``shapes``, each (rows, columns)."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def bytes_as_flops(self, elements: int) -> float:
        """Return the cost of sending ``elements`` elements to an owner and back, in floating-point operations."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    def owner_cost(self, rows: int, cols: int, owners: int) -> float:
        """Return the cost of a (rows, cols) matrix for each of its owners, in floating-point operations.

        It includes the communication with the other owners. ``owners``: number of owners.
        """
        part, is_cpu = self.of_owner(rows, cols, owners), self.device_type == "cpu"
        intra_node = CPU_INTRA_NODE if is_cpu else ACCELERATOR_INTRA_NODE
        per_byte = intra_node if owners <= self.intra_node else self.flops_per_byte
        return part.flops + per_byte * part.nbytes + self.latency_as_flops * part.calls

    @property
    def latency_as_flops(self) -> float:
        """Return the cost of the latency of one collective, in floating-point operations."""
        return CPU_CALL if self.device_type == "cpu" else ACCELERATOR_CALL


def cost_model(
    method: Callable[[int, int], str],
    schedule: Schedule,
    dtype: str,
    wire_bytes: int,
    device_type: str,
    intra_node: int = 1,
) -> CostModel:
    """Return the cost model of one parameter group.

    ``method``: (rows, columns) of a matrix -> method of Newton-Schulz, such as ``gram``. ``schedule``:
    coefficients of Newton-Schulz, one triple for each of its steps. ``dtype``: dtype of the matrix products, such as
    ``bf16``. ``wire_bytes``: ``bytes_per_element`` of :class:`CostModel`, which explains the other arguments.
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
