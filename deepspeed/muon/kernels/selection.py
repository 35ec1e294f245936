# SPDX-License-Identifier: Apache-2.0
"""Which table of operations a run has: the best for its devices that is to be had on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed.muon.kernels import native, reference
from deepspeed.muon.kernels.table import Operations

#: Why a device type has no operations of its own, by device type; ``None`` where it has them.
Missing = dict[str, str | None]


def missing(asked: str, device_types: Iterable[str]) -> Missing:
    """What keeps this process from the faster operations; builds those of the CPU at the first call.

    Args:
        asked: ``kernels`` of the config.
        device_types: of all tensors of a step.
    """
    if asked == "torch":
        return dict.fromkeys(device_types, "optimizer.params.kernels")
    return {kind: native.unavailable() if kind == "cpu" else "plain PyTorch there" for kind in device_types}


def choose(missing: Mapping[str, str | None]) -> Operations:
    """The table for these devices."""
    return native.operations() if "cpu" in missing and missing["cpu"] is None else reference.OPERATIONS


def describe(table: Operations, missing: Mapping[str, str | None]) -> str:
    """The table's name, and why it is not a faster one."""
    reasons = [f"{kind}: {reason}" for kind, reason in missing.items() if reason]
    return f"{table.name} ({'; '.join(reasons)})" if reasons else table.name
