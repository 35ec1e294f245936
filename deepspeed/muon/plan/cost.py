# SPDX-License-Identifier: Apache-2.0
"""The cost model of a parameter group: operations of its Newton-Schulz against bytes on the wire."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from deepspeed.muon.math.choice import choose_method, kind_of
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import flops
from deepspeed.muon.plan.owners import CostModel, flops_per_byte


def cost_model(
    ns_method: str, schedule: Schedule, itemsize: int, device_type: str, pinned: Mapping[str, str] | None = None
) -> CostModel:
    """The cost model of one group.

    Args:
        ns_method: the group's, which may be ``auto``.
        schedule: of Newton-Schulz.
        itemsize: bytes per element of the exchange.
        device_type: ``cpu``, or an accelerator's.
        pinned: the group's ``ns_methods``; by default the shipped rule's.
    """
    kind = kind_of(device_type, itemsize)

    @functools.cache
    def cost(rows: int, cols: int) -> float:
        return flops(rows, cols, schedule, choose_method(rows, cols, ns_method, kind, pinned))

    return CostModel(cost, flops_per_byte(device_type), itemsize, device_type)
