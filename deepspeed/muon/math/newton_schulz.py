# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``, without ranks, shards or optimizers.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X again only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. All its small matrices are polynomials of R, so they are symmetric and commute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace, matrices_together
from deepspeed.muon.math.coefficients import Schedule, for_larger_norm, segments

METHODS = ("standard", "gram")
#: Method -> names of its temporaries of the size of a Gram matrix.
SYMMETRIC = {"standard": ("gram", "factor"), "gram": ("gram", "factor", "q", "t")}
#: ``gram`` is used where ``standard`` needs more than this many times as many operations.
MARGIN = 1.03
#: The dtypes of the products, the most exact first.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: The Frobenius norm to which each matrix is scaled. With norm 1, entries of a very large matrix would be too small for
#: fp16's normal numbers; with 16, even the fourth power of the norm is in fp16's range. As 16 is a power of two, other
#: dtypes round as with norm 1.
NORM = 16.0


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, a key of :data:`DTYPES`: ``bf16`` for ``torch.bfloat16``."""
    return next(name for name, known in DTYPES.items() if known == dtype)


class Products(NamedTuple):
    """How many matrix products of each kind Newton-Schulz takes for one matrix X.

    ``square``: products X X^T. ``product``: products of two small symmetric matrices, such as powers of X X^T.
    ``multiply``: products P X with a small symmetric matrix P.
    """

    square: int = 0
    product: int = 0
    multiply: int = 0


def products(schedule: Schedule, method: str, dtype: str) -> Products:
    """Return how many matrix products of each kind Newton-Schulz takes.

    ``method``: ``standard`` or ``gram``. ``dtype``: dtype of the products, a key of :data:`DTYPES`, which decides when
    ``gram`` restarts.
    """
    lengths = (1,) * len(schedule) if method == "standard" else segments(schedule, dtype)
    step = product = 0
    for length in lengths:
        for i in range(len(schedule[step : step + length])):
            of_gram, of_q = 2 * (i + 1 < length), int(i > 0)
            product += 1 + of_gram + of_q
        step += length
    return Products(square=len(lengths), product=product, multiply=len(lengths))


def flops(rows: int, cols: int, schedule: Schedule, method: str, dtype: str, symmetric: float = 1.0) -> int:
    """Return the number of floating-point operations that it takes to orthogonalize a matrix once.

    ``symmetric``: the fraction of a symmetric product that kernels compute: 1, or about 0.5 for one triangle.

    Example: with the schedule ``simple``, an m x n matrix with m <= n takes 20 m^2 n + 10 m^3 operations by
    ``standard``, and by ``gram`` 12 m^2 n + 22 m^3 in bf16 or 8 m^2 n + 28 m^3 in fp16 and fp32.
    """
    m, n = sorted((rows, cols))
    count = products(schedule, method, dtype)
    return int(2 * m * m * (n * (symmetric * count.square + count.multiply) + m * symmetric * count.product))


def method_of(rows: int, cols: int, ns_method: str, schedule: Schedule, dtype: str) -> str:
    """Return the method for matrices of one shape: ``ns_method`` or, if that is ``auto``, the one of fewer operations.

    ``dtype``: dtype of the matrix products, a key of :data:`DTYPES`.
    """
    if ns_method != "auto":
        return ns_method
    standard, gram = (flops(rows, cols, schedule, method, dtype) for method in METHODS)
    return "gram" if MARGIN * gram < standard else "standard"


def exact_method(ns_method: str, dtype: str, device_type: str) -> str:
    """Return ``ns_method``, or ``standard`` in place of ``auto`` in bf16 on an accelerator.

    There the small matrices are rounded to bf16 with their diagonals, and ``gram`` has up to four times the error of
    ``standard``.
    """
    return "standard" if (ns_method, dtype) == ("auto", "bf16") and device_type != "cpu" else ns_method


def orthogonalize(
    x: Tensor,
    schedule: Schedule,
    method: str = "standard",
    dtype: torch.dtype | None = None,
    work: Workspace | None = None,
    kernels: KernelSet = kernel_set.TORCH,
) -> Tensor:
    """Orthogonalize each matrix of a batch in place: replace every singular value by a value near one.

    Args:
        x: ``[batch, rows, cols]``, contiguous, bf16 or fp32.
        schedule: one (a, b, c) triple for each step, from :func:`deepspeed.muon.math.coefficients.schedule`.
        method: ``standard`` or ``gram``.
        dtype: dtype of the matrix products, a value of :data:`DTYPES`; ``None``: the dtype of ``x``.
        work: allocates the temporaries; ``None``: a new workspace.
        kernels: the kernels that compute the products.

    Returns:
        ``x``. A zero matrix stays zero. A matrix with a non-finite entry gets non-finite values.
    """
    is_gram = {"standard": False, "gram": True}[method]
    work = Workspace() if work is None else work
    dtype = x.dtype if dtype is None else dtype
    scaled, lengths = for_larger_norm(schedule, NORM), segments(schedule, name_of(dtype))
    is_tall = x.size(-2) > x.size(-1)  # the Gram matrix is X^T X then, otherwise X X^T
    for part in x.split(matrices_together(x, dtype, len(SYMMETRIC[method]))):
        spare, start = work.get("spare", tuple(part.shape), dtype, x.device), part
        if part.dtype != dtype:
            start = work.get("iterate", tuple(part.shape), dtype, x.device)
        start = kernels.normalize(part, start, NORM)
        if is_tall:
            start, spare = start.mT, spare.mT
        if is_gram:
            found = _gram(start, spare, scaled, lengths, work, kernels)
        else:
            found = _standard(start, spare, scaled, work, kernels)
        if found.data_ptr() != part.data_ptr():
            part.copy_(found.mT if is_tall else found)
    return x


def _standard(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: KernelSet) -> Tensor:
    gram, factor = (kernels.symmetric(name, x, work) for name in SYMMETRIC["standard"])
    for a, b, c in schedule:
        kernels.square(x, gram, work)
        kernels.product(gram, gram, factor, work, alpha=c, beta=b)
        x, spare = kernels.multiply(factor, x, spare, work, shift=a), x
    return x


def _gram(
    x: Tensor, spare: Tensor, schedule: Schedule, lengths: Sequence[int], work: Workspace, kernels: KernelSet
) -> Tensor:
    r, factor, q, spare_small = (kernels.symmetric(name, x, work) for name in SYMMETRIC["gram"])
    step = 0
    # The steps of a segment multiply small matrices only, and X is multiplied once at its end, which saves products of
    # wide matrices. Each segment computes R from X again, because rounding lets the small matrices drift away from X.
    for length in lengths:
        kernels.square(x, r, work)
        for i, (a, b, c) in enumerate(schedule[step : step + length]):
            # With P = b R + c R^2 a step maps X to a X + P X.
            kernels.product(r, r, factor, work, alpha=c, beta=b)
            for _ in range(2 if i + 1 < length else 0):
                kernels.product(r, factor, spare_small, work, beta=a)
                r, spare_small = spare_small, r
            if i == 0:
                kernels.diagonal(factor).add_(a)
                q, factor = factor, q
            else:
                kernels.product(q, factor, spare_small, work, beta=a)
                q, spare_small = spare_small, q
        x, spare = kernels.multiply(q, x, spare, work), x
        step += length
    return x
