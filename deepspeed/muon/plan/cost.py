# SPDX-License-Identifier: Apache-2.0
"""The cost model of a parameter group: Newton-Schulz and the exchange in one unit, floating-point operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops

#: Floating-point operations that take as long as sending one byte: for CPU cores over gloo, and for an accelerator over
#: its fabric. Moving a matrix to a rank that does not hold it must save more than this per byte.
CPU_FLOPS_PER_BYTE, ACCELERATOR_FLOPS_PER_BYTE = 200.0, 8000.0
#: Floating-point operations that take as long as the latency of a collective within a node.
CPU_CALL, ACCELERATOR_CALL = 5e7, 8e9


@dataclass(frozen=True)
class CostModel:
    """The cost of Newton-Schulz and of communication. Both are counted in floating-point operations.

    The cost of communication is the number of operations that the device could do in the same time.

    Args:
        flops: (rows, columns) of a matrix -> the operations of Newton-Schulz on it.
        flops_per_byte: operations that take as long as sending one byte.
        bytes_per_element: bytes of each element that is sent to an owner or back.
        device_type: where Newton-Schulz runs, such as ``cpu``.
    """

    flops: Callable[[int, int], float]
    flops_per_byte: float
    bytes_per_element: int
    device_type: str = "cpu"

    def total_flops(self, shapes: Iterable[tuple[int, int]]) -> float:
        """Return the floating-point operations of Newton-Schulz on matrices of all ``shapes``, each (rows, columns)."""
        return sum(self.flops(rows, cols) for rows, cols in shapes)

    def bytes_as_flops(self, elements: int) -> float:
        """Return the cost of sending ``elements`` elements to an owner and back, in floating-point operations."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements

    @property
    def latency_as_flops(self) -> float:
        """Return the cost of the latency of one collective, in floating-point operations."""
        return CPU_CALL if self.device_type == "cpu" else ACCELERATOR_CALL


def cost_model(
    method: Callable[[int, int], str], schedule: Schedule, dtype: str, wire_bytes: int, device_type: str
) -> CostModel:
    """Return the cost model of one parameter group.

    ``method``: (rows, columns) of a matrix -> method of Newton-Schulz, such as ``gram``. ``schedule``:
    coefficients of Newton-Schulz, one triple for each of its steps. ``dtype``: dtype of the matrix products, such as
    ``bf16``. ``wire_bytes``: ``bytes_per_element`` of :class:`CostModel`, which explains ``device_type``.
    """

    @functools.cache
    def of_matrix(rows: int, cols: int) -> float:
        return flops(rows, cols, schedule, method(rows, cols), dtype)

    flops_per_byte = CPU_FLOPS_PER_BYTE if device_type == "cpu" else ACCELERATOR_FLOPS_PER_BYTE
    return CostModel(of_matrix, flops_per_byte, wire_bytes, device_type)
