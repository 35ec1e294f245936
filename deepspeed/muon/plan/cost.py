# SPDX-License-Identifier: Apache-2.0
"""The cost model of a parameter group: operations of its Newton-Schulz against bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.muon.math.choice import counted_method
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops

#: Floating-point operations that take as long as one byte on the wire: what moving a matrix to a rank that does not
#: hold it must save. For cores on gloo, and for an accelerator on its fabric.
CPU_FLOPS_PER_BYTE, ACCELERATOR_FLOPS_PER_BYTE = 200.0, 8000.0


@dataclass(frozen=True)
class CostModel:
    """Operations per matrix, and how many of them one byte of exchange is worth."""

    flops: Callable[[int, int], float]
    flops_per_byte: float
    bytes_per_element: int
    #: Where Newton-Schulz runs.
    device_type: str = "cpu"

    def worth(self, elements: int) -> float:
        """Operations worth the bytes of ``elements`` elements, to the owner and back."""
        return self.flops_per_byte * 2 * self.bytes_per_element * elements


def cost_model(
    method: Callable[[int, int], str], schedule: Schedule, dtype: str, wire_bytes: int, device_type: str
) -> CostModel:
    """The cost model of one group.

    Args:
        method: of Newton-Schulz, by rows and columns.
        dtype: of Newton-Schulz, which decides how often ``gram`` restarts.
        wire_bytes: per element of the exchange.
        device_type: ``cpu``, or an accelerator's.
    """

    @functools.cache
    def cost(rows: int, cols: int) -> float:
        return flops(rows, cols, schedule, method(rows, cols), dtype)

    flops_per_byte = CPU_FLOPS_PER_BYTE if device_type == "cpu" else ACCELERATOR_FLOPS_PER_BYTE
    return CostModel(cost, flops_per_byte, wire_bytes, device_type)


def counted_cost(ns_method: str, schedule: Schedule, dtype: str, wire_bytes: int, device_type: str) -> CostModel:
    """:func:`cost_model` where nothing was measured: under ``auto`` the methods of fewer operations."""
    method = functools.partial(counted_method, ns_method=ns_method, schedule=schedule, dtype=dtype)
    return cost_model(method, schedule, dtype, wire_bytes, device_type)
