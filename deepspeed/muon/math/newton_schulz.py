# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``. Nothing here knows of ranks, shards or optimizers.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X anew only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. All its small matrices are polynomials of R, so they are symmetric and commute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace, matrices_together
from deepspeed.muon.math.coefficients import Schedule, segments

METHODS = ("standard", "gram")


def bf16_is_fast(device_type: str, supported: bool | None = None) -> bool:
    """Whether the device on which Newton-Schulz runs multiplies bf16 matrices in hardware.

    Args:
        device_type: ``cpu``, ``cuda`` or another accelerator's.
        supported: whether that other accelerator supports bf16; by default what its module in torch says.
    """
    if device_type == "cpu":
        cpu = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
        return cpu.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if supported is None:
        ask = getattr(torch.get_device_module(device_type), "is_bf16_supported", None)
        return bool(ask and ask())
    return supported


def resolve_dtype(ns_dtype: str, bf16_everywhere: bool) -> torch.dtype:
    """``auto`` is bf16 where every rank is fast in it, else fp32."""
    return torch.bfloat16 if ns_dtype == "bf16" or (ns_dtype == "auto" and bf16_everywhere) else torch.float32


def flops(rows: int, cols: int, schedule: Schedule, method: str, symmetric: float = 1.0) -> int:
    """Floating-point operations to orthogonalize one m x n matrix, m <= n.

    The ``simple`` schedule, every product counted in full: ``standard`` 20 m^2 n + 10 m^3, ``gram`` 12 m^2 n + 22 m^3.

    Args:
        symmetric: the part of a product that is computed where its result is symmetric, 1 or about one half.
    """
    m, n = sorted((rows, cols))
    steps = len(schedule)
    if method == "standard":
        squares, multiplications, small = steps, steps, steps
    else:
        squares = multiplications = len(segments(schedule))
        small = 4 * steps - 3 * squares
    return int(2 * m * m * (n * (symmetric * squares + multiplications) + m * symmetric * small))


def orthogonalize(
    x: Tensor,
    schedule: Schedule,
    method: str = "standard",
    out: Tensor | None = None,
    work: Workspace | None = None,
    kernels: Operations = reference.OPERATIONS,
) -> Tensor:
    """Replace every singular value of each matrix by about one.

    Args:
        x: ``[batch, rows, cols]``, contiguous, bf16 or fp32; **overwritten**.
        schedule: one (a, b, c) triple per step.
        method: ``standard`` or ``gram``.
        out: receives the result, same shape and dtype as ``x``; by default ``x`` itself.
        work: where temporaries come from.
        kernels: who computes the products.

    Returns:
        ``out``. A zero matrix gives zero; a non-finite one gives non-finite values.
    """
    work = Workspace() if work is None else work
    iterate = {"standard": _standard, "gram": _gram}[method]
    target = x if out is None else out
    together = matrices_together(x)
    for part, result in zip(x.split(together), target.split(together), strict=True):
        spare = work.get("spare", tuple(part.shape), x.dtype, x.device) if out is None else result
        kernels.normalize_(part)
        found = iterate(part, spare, schedule, work, kernels)
        if found.data_ptr() != result.data_ptr():
            result.copy_(found)
    return target


def _standard(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: Operations) -> Tensor:
    gram, factor = (_symmetric(name, x, work) for name in ("gram", "factor"))
    for a, b, c in schedule:
        kernels.square(x, gram, work)
        kernels.product(gram, gram, factor, work, Scalars(c, b, a))
        x, spare = kernels.multiply(factor, x, spare, work), x
    return x


def _gram(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: Operations) -> Tensor:
    r, factor, q, t = (_symmetric(name, x, work) for name in ("gram", "factor", "q", "t"))
    step = 0
    for segment in segments(schedule):
        kernels.square(x, r, work)
        for i, (a, b, c) in enumerate(schedule[step : step + segment]):
            kernels.product(r, r, factor, work, Scalars(c, b, a))
            if i + 1 < segment:
                kernels.product(factor, r, t, work)
                kernels.product(factor, t, r, work)
            if i == 0:
                q, factor = factor, q
            else:
                kernels.product(factor, q, t, work)
                q, t = t, q
        x, spare = kernels.multiply(q, x, spare, work), x
        step += segment
    return x


def _symmetric(name: str, x: Tensor, work: Workspace) -> Symmetric:
    """Room for symmetric matrices of the smaller size of ``x``."""
    size = min(x.shape[-2:])
    rest = work.get(name, (x.size(0), size, size), x.dtype, x.device)
    return Symmetric(rest, work.get(f"{name} diagonal", (x.size(0), size), torch.float32, x.device))
