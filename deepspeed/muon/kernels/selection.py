# SPDX-License-Identifier: Apache-2.0
"""Which table of operations a run has: the best for its devices that is to be had on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed.muon.kernels import native, quack, reference, triton_table
from deepspeed.muon.kernels.table import Operations

#: Why a device type has no operations of its own, by device type; ``None`` where it has them. Beside the types
#: ``quack``, a library for some GPUs.
Missing = dict[str, str | None]


def missing(asked: str, device_types: Iterable[str]) -> Missing:
    """What keeps this process from the faster operations; builds those of the CPU at the first call.

    Args:
        asked: ``kernels`` of the config.
        device_types: of all tensors of a step.
    """
    if asked == "torch":
        return dict.fromkeys(device_types, "optimizer.params.kernels")
    reasons: Missing = {kind: _why_not(kind) for kind in device_types}
    if _has(reasons, "cuda"):
        reasons["quack"] = quack.why_not()
    return reasons


def _why_not(device_type: str) -> str | None:
    if device_type == "cpu":
        return native.unavailable()
    return triton_table.why_not() if device_type == "cuda" else "plain PyTorch there"


def _has(reasons: Mapping[str, str | None], kind: str) -> bool:
    return kind in reasons and reasons[kind] is None


def choose(missing: Mapping[str, str | None]) -> Operations:
    """The table for these devices."""
    table = native.operations() if _has(missing, "cpu") else reference.OPERATIONS
    if _has(missing, "cuda"):
        table = triton_table.operations(table)
        if _has(missing, "quack"):
            table = quack.operations(table)
    return table


def summary(table: Operations, missing: Mapping[str, str | None]) -> str:
    """The table's name, and why it is not a faster one."""
    asked = [kind for kind in missing if kind != "quack" or _has(missing, "cuda")]
    reasons = [f"{kind}: {missing[kind]}" for kind in asked if missing[kind]]
    return f"{table.name} ({'; '.join(reasons)})" if reasons else table.name
