# SPDX-License-Identifier: Apache-2.0
"""Choose kernels: the fastest that all ranks can use on the devices of a training run."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed.muon.kernels import native, quack, reference, triton_table
from deepspeed.muon.kernels.table import Operations

#: Device type, or ``quack`` (a library for some GPUs) -> why its fast kernels cannot be used; ``None`` if they can.
Unavailable = dict[str, str | None]


def unavailable_kernels(kernels: str, device_types: Iterable[str]) -> Unavailable:
    """Return {device type: why this process cannot use fast kernels there, or ``None`` if it can}.

    Example: ``{"cpu": None, "cuda": "triton is not installed"}``. For ``cpu`` this builds the C++ kernels if necessary.
    If Triton's kernels run on the GPU, the key ``quack`` says the same of the library quack.

    ``kernels``: the config key ``optimizer.params.kernels``; for ``torch`` nothing is built or checked.
    ``device_types``: those of all tensors of a step.
    """
    if kernels == "torch":
        return dict.fromkeys(device_types, 'optimizer.params.kernels is "torch"')
    reasons: Unavailable = {kind: _reason(kind) for kind in device_types}
    if _is_usable(reasons, "cuda"):
        reasons["quack"] = quack.unavailable()
    return reasons


def _reason(device_type: str) -> str | None:
    if device_type == "cpu":
        return native.unavailable()
    return triton_table.unavailable() if device_type == "cuda" else "only plain PyTorch supports it"


def _is_usable(unavailable: Unavailable, kind: str) -> bool:
    return kind in unavailable and unavailable[kind] is None


def choose(unavailable: Unavailable) -> Operations:
    """Return one table of the fastest usable kernels, given what :func:`unavailable_kernels` returned.

    Each call of an operation runs the kernel for the device of its tensors.
    """
    table = native.operations() if _is_usable(unavailable, "cpu") else reference.OPERATIONS
    if _is_usable(unavailable, "cuda"):
        table = triton_table.operations(table)
        if _is_usable(unavailable, "quack"):
            table = quack.operations(table)
    return table


def product_tables(unavailable: Unavailable, device_type: str) -> dict[str, Operations]:
    """Return {name: table} of the usable kernels for matrix products: ``torch``, then ``C++``, ``triton``, ``quack``.

    ``unavailable``: what :func:`unavailable_kernels` returned. ``device_type``: where the products run.
    """
    found = {"torch": reference.OPERATIONS}
    if device_type == "cpu" and _is_usable(unavailable, "cpu"):
        found["C++"] = native.operations()
    if device_type == "cuda" and _is_usable(unavailable, "cuda"):
        triton = triton_table.operations(reference.OPERATIONS)
        if triton.square is not reference.OPERATIONS.square:  # AMD's GPUs get no products
            found["triton"] = triton
        if _is_usable(unavailable, "quack"):
            found["quack"] = quack.operations(triton)
    return found


def summary(table: Operations, unavailable: Unavailable) -> str:
    """Return the name of ``table`` for the log, such as ``torch (faster kernels are not used; cpu: no compiler)``.

    ``unavailable``: what :func:`unavailable_kernels` returned.
    """
    relevant = [kind for kind in unavailable if kind != "quack" or _is_usable(unavailable, "cuda")]
    reasons = [f"{kind}: {unavailable[kind]}" for kind in relevant if unavailable[kind]]
    return f"{table.name} (faster kernels are not used; {'; '.join(reasons)})" if reasons else table.name
