# SPDX-License-Identifier: Apache-2.0
"""Chooses the table of operations: the fastest for a run's devices that every rank has."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed.muon.kernels import native, quack, reference, triton_table
from deepspeed.muon.kernels.table import Operations

#: Device type -> why its fast kernels cannot be used, ``None`` if they can. Key ``quack``: a library for some GPUs.
Unavailable = dict[str, str | None]


def unavailable_kernels(kernels: str, device_types: Iterable[str]) -> Unavailable:
    """Return why this process cannot use fast kernels; build the CPU's at the first call.

    Args:
        kernels: as in the config.
        device_types: of all tensors of a step.
    """
    if kernels == "torch":
        return dict.fromkeys(device_types, "optimizer.params.kernels")
    reasons: Unavailable = {kind: _reason(kind) for kind in device_types}
    if _has(reasons, "cuda"):
        reasons["quack"] = quack.unavailable()
    return reasons


def _reason(device_type: str) -> str | None:
    if device_type == "cpu":
        return native.unavailable()
    return triton_table.unavailable() if device_type == "cuda" else "plain PyTorch there"


def _has(unavailable: Unavailable, kind: str) -> bool:
    return kind in unavailable and unavailable[kind] is None


def choose(unavailable: Unavailable) -> Operations:
    """Return the table for these devices."""
    table = native.operations() if _has(unavailable, "cpu") else reference.OPERATIONS
    if _has(unavailable, "cuda"):
        table = triton_table.operations(table)
        if _has(unavailable, "quack"):
            table = quack.operations(table)
    return table


def product_tables(unavailable: Unavailable, device_type: str) -> dict[str, Operations]:
    """Return the tables whose products run on a type of device, by name: plain PyTorch's first, the fastest last."""
    found = {"torch": reference.OPERATIONS}
    if device_type == "cpu" and _has(unavailable, "cpu"):
        found["C++"] = native.operations()
    if device_type == "cuda" and _has(unavailable, "cuda"):
        triton = triton_table.operations(reference.OPERATIONS)
        if triton.square is not reference.OPERATIONS.square:  # AMD's GPUs get no products
            found["triton"] = triton
        if _has(unavailable, "quack"):
            found["quack"] = quack.operations(triton)
    return found


def summary(table: Operations, unavailable: Unavailable) -> str:
    """Return the table's name, and why it is not a faster one."""
    relevant = [kind for kind in unavailable if kind != "quack" or _has(unavailable, "cuda")]
    reasons = [f"{kind}: {unavailable[kind]}" for kind in relevant if unavailable[kind]]
    return f"{table.name} ({'; '.join(reasons)})" if reasons else table.name
