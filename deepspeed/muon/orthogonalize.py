# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``. Nothing here knows of ranks, shards or optimizers.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X anew only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. It restarts every two steps, because in bf16 the error of R grows with the
steps since R was last formed from X.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.muon.coefficients import Schedule
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.workspace import Workspace

METHODS = ("standard", "gram")
#: Steps of ``gram`` between two restarts.
RESTART_EVERY = 2


def bf16_is_fast() -> bool:
    """Whether this rank multiplies bf16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpu = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
    return cpu.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def resolve_dtype(ns_dtype: str, bf16_everywhere: bool) -> torch.dtype:
    """``auto`` is bf16 where every rank is fast in it, else fp32."""
    return torch.bfloat16 if ns_dtype == "bf16" or (ns_dtype == "auto" and bf16_everywhere) else torch.float32


def flops(rows: int, cols: int, steps: int, method: str) -> int:
    """Floating-point operations to orthogonalize one m x n matrix, m <= n, every product counted in full.

    Five steps: ``standard`` 20 m^2 n + 10 m^3, ``gram`` 14 m^2 n + 20 m^3.
    """
    m, n = sorted((rows, cols))
    if method == "standard":
        return steps * (4 * m * m * n + 2 * m**3)
    segments = _segments(steps)
    saved_products = segments[0] - 1
    large = len(segments) + steps - saved_products
    small = steps + saved_products + 2 * (steps - len(segments))
    return 2 * m * m * n * large + 2 * m**3 * small


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
    spare = work.get("spare", tuple(x.shape), x.dtype, x.device) if out is None else out
    kernels.normalize_(x)
    iterate = {"standard": _standard, "gram": _gram}[method]
    result = iterate(x, spare, schedule, work, kernels)
    target = x if out is None else out
    return result if result is target else target.copy_(result)


def _multiply(poly: Tensor, x: Tensor, beta: float, out: Tensor) -> Tensor:
    """Return ``beta X + P X``, or ``beta X + X P`` for a tall X; P is symmetric."""
    left, right = (poly, x) if x.size(-2) <= x.size(-1) else (x, poly)
    return torch.baddbmm(x, left, right, beta=beta, out=out)


def _standard(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: Operations) -> Tensor:
    size = min(x.shape[-2:])
    shape = (x.size(0), size, size)
    gram = work.get("gram", shape, x.dtype, x.device)
    poly = work.get("poly", shape, x.dtype, x.device)
    for a, b, c in schedule:
        kernels.square(x, gram)
        kernels.product(gram, gram, gram, poly, b, c)
        _multiply(poly, x, a, spare)
        x, spare = spare, x
    return x


def _segments(steps: int) -> list[int]:
    """Numbers of steps between two restarts of ``gram``."""
    return [min(RESTART_EVERY, steps - done) for done in range(0, steps, RESTART_EVERY)]


def _gram(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: Operations) -> Tensor:
    size = min(x.shape[-2:])
    shape = (x.size(0), size, size)
    r, z, p, t = (work.get(name, shape, x.dtype, x.device) for name in ("gram", "poly", "p", "t"))
    step = 0
    for segment in _segments(len(schedule)):
        kernels.square(x, r)
        # Singular values are small at first, so the product of the first factors is alpha I plus a small P,
        # and holding P alone rounds little. Later the product is near I: there each factor is applied alone.
        accumulate, alpha = step == 0, 1.0
        for i, (a, b, c) in enumerate(schedule[step : step + segment]):
            kernels.product(r, r, r, z, b, c)
            if not accumulate:
                x, spare = _multiply(z, x, a, spare), x
            elif i == 0:
                p.copy_(z)
            else:
                torch.add(z, p, alpha=a / alpha, out=t)
                p, t = kernels.product(z, p, t, t, alpha), p
            alpha *= a
            if i + 1 < segment:
                kernels.product(z, r, r, t, a)
                kernels.product(z, t, t, r, a)
        if accumulate:
            x, spare = _multiply(p, x, alpha, spare), x
        step += segment
    return x
