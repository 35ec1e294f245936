# SPDX-License-Identifier: Apache-2.0
"""Chooses the table of operations: the fastest for a run's devices that every rank has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed.muon.kernels import native, quack, reference, triton_table
from deepspeed.muon.kernels.table import Operations

#: By device type, why it has no operations of its own; ``None`` if it has. Key ``quack``: a library for some GPUs.
Missing = dict[str, str | None]


def missing(kernels: str, device_types: Iterable[str]) -> Missing:
    """Why this process cannot use the faster operations; builds the CPU's at the first call.

    Args:
        kernels: as in the config.
        device_types: of all tensors of a step.
    """
    if kernels == "torch":
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


def product_tables(missing: Mapping[str, str | None], device_type: str) -> dict[str, Operations]:
    """The tables whose products run on a type of device, by name, plain PyTorch's first and the most special last."""
    found = {"torch": reference.OPERATIONS}
    if device_type == "cpu" and _has(missing, "cpu"):
        found["C++"] = native.operations()
    if device_type == "cuda" and _has(missing, "cuda"):
        triton = triton_table.operations(reference.OPERATIONS)
        if triton.square is not reference.OPERATIONS.square:  # AMD's GPUs get no products
            found["triton"] = triton
        if _has(missing, "quack"):
            found["quack"] = quack.operations(triton)
    return found


def summary(table: Operations, missing: Mapping[str, str | None]) -> str:
    """The table's name, and why it is not a faster one."""
    relevant = [kind for kind in missing if kind != "quack" or _has(missing, "cuda")]
    reasons = [f"{kind}: {missing[kind]}" for kind in relevant if missing[kind]]
    return f"{table.name} ({'; '.join(reasons)})" if reasons else table.name
