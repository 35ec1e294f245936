# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``, without ranks, shards or optimizers.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X again only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. All its small matrices are polynomials of R, so they are symmetric and commute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric, symmetric_of
from deepspeed.muon.kernels.workspace import Workspace, matrices_together
from deepspeed.muon.math.coefficients import Schedule, Triple, for_larger_norm, segments

METHODS = ("standard", "gram")
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


def product_order(schedule: Schedule, method: str, dtype: str) -> Iterator[str]:
    """Yield the kind of each matrix product in Newton-Schulz, in the order in which they are computed.

    A kind is the name of a field of :class:`Products`, such as ``square``. ``method``: ``standard`` or ``gram``.
    ``dtype``: dtype of the products, a key of :data:`DTYPES`, which decides when ``gram`` restarts.
    """
    step = 0
    for length in (1,) * len(schedule) if method == "standard" else segments(schedule, dtype):
        yield "square"
        for i, (_, _, c) in enumerate(schedule[step : step + length]):
            of_factor, of_gram, of_q = int(c != 0), 2 * (i + 1 < length), int(i > 0)
            yield from ["product"] * (of_factor + of_gram + of_q)
        yield "multiply"
        step += length


def products(schedule: Schedule, method: str, dtype: str) -> Products:
    """Return how many matrix products of each kind Newton-Schulz takes; arguments as for :func:`product_order`."""
    return Products(**Counter(product_order(schedule, method, dtype)))


#: If a matrix has at least this many owners, each owner computes some rows of every product of symmetric matrices, and
#: an all-gather combines the rows. Of fewer owners each computes the whole product, with kernels that need to compute
#: only one triangle of it.
SPLIT_FROM = 4


def flops(
    rows: int, cols: int, schedule: Schedule, method: str, dtype: str, symmetric: float = 1.0, owners: int = 1
) -> int:
    """Return the number of floating-point operations that each owner of a matrix makes to orthogonalize it once.

    ``owners``: number of ranks that orthogonalize the matrix together, each on a slice along the longer side.
    ``symmetric``: the fraction of a symmetric product that kernels compute: 1, or about 0.5 for one triangle. It does
    not apply to products whose rows are divided among the owners (:data:`SPLIT_FROM`).

    Example: with the schedule ``simple`` and one owner, an m x n matrix with m <= n takes 20 m^2 n + 10 m^3 operations
    by ``standard``, and by ``gram`` 12 m^2 n + 22 m^3 in bf16 or 8 m^2 n + 28 m^3 in fp16 and fp32.
    """
    m, n = sorted((rows, cols))
    count = products(schedule, method, dtype)
    is_split = owners >= SPLIT_FROM
    wide, small = (symmetric * count.square + count.multiply) / owners, count.product * (1 if is_split else symmetric)
    return int(2 * m * m * (n * wide + m * small / (owners if is_split else 1)))


def traffic(rows: int, cols: int, schedule: Schedule, method: str, dtype: str, owners: int) -> tuple[float, int]:
    """Return (bytes that each owner of a matrix sends during Newton-Schulz, number of collectives that it calls).

    ``owners``: number of ranks that orthogonalize the matrix together. They sum Gram matrices in fp32; from
    :data:`SPLIT_FROM` owners on they also gather matrix products in ``dtype``.
    """
    count, small, others = products(schedule, method, dtype), min(rows, cols), (owners - 1) / owners
    gathered = count.product if owners >= SPLIT_FROM else 0
    nbytes = small * small * others * (2 * 4 * count.square + DTYPES[dtype].itemsize * gathered)
    return nbytes, 1 + count.square + gathered


def orthogonalize(
    x: Tensor,
    schedule: Schedule,
    method: str = "standard",
    dtype: torch.dtype | None = None,
    work: Workspace | None = None,
    kernels: Operations = reference.OPERATIONS,
    gram_axis: int | None = None,
) -> Tensor:
    """Orthogonalize each matrix of a batch in place: replace every singular value by a value near one.

    Args:
        x: ``[batch, rows, cols]``, contiguous, bf16 or fp32.
        schedule: one (a, b, c) triple for each step, from :func:`deepspeed.muon.math.coefficients.schedule`.
        method: ``standard`` or ``gram``.
        dtype: dtype of the matrix products, a value of :data:`DTYPES`; ``None``: the dtype of ``x``.
        work: allocates the temporaries; ``None``: a new workspace.
        kernels: the kernels that compute the products.
        gram_axis: 0 if the Gram matrix is X X^T, 1 if it is X^T X; ``None``: the smaller of the two. If ``x`` contains
            slices of matrices, pass the axis that gives the smaller one for whole matrices.

    Returns:
        ``x``. A zero matrix stays zero. A matrix with a non-finite entry gets non-finite values.
    """
    is_gram = {"standard": False, "gram": True}[method]
    work = Workspace() if work is None else work
    dtype = x.dtype if dtype is None else dtype
    scaled, lengths = for_larger_norm(schedule, NORM), segments(schedule, name_of(dtype))
    if gram_axis is None:
        gram_axis = int(x.size(-2) > x.size(-1))
    # The owners of one matrix must split a batch in the same way, whatever the number of threads on their machines.
    threads = 1 if kernels.is_slice else None
    for part in x.split(matrices_together(x, dtype, x.size(gram_axis - 2), threads)):
        spare, start = work.get("spare", tuple(part.shape), dtype, x.device), part
        if part.dtype != dtype:
            start = work.get("iterate", tuple(part.shape), dtype, x.device)
        start = kernels.normalize(part, start, NORM)
        if gram_axis == 1:
            start, spare = start.mT, spare.mT
        if is_gram:
            found = _gram(start, spare, scaled, lengths, work, kernels)
        else:
            found = _standard(start, spare, scaled, work, kernels)
        if found.data_ptr() != part.data_ptr():
            part.copy_(found.mT if gram_axis == 1 else found)
    return x


def _standard(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace, kernels: Operations) -> Tensor:
    gram, factor = (symmetric_of(name, x, work) for name in ("gram", "factor"))
    for triple in schedule:
        kernels.square(x, gram, work)
        _polynomial(gram, triple, factor, work, kernels)
        x, spare = kernels.multiply(factor, x, spare, work), x
    return x


def _gram(
    x: Tensor, spare: Tensor, schedule: Schedule, lengths: Sequence[int], work: Workspace, kernels: Operations
) -> Tensor:
    names = ("gram", "factor", "q") if kernels.in_place else ("gram", "factor", "q", "t")
    r, factor, q, *spares = (symmetric_of(name, x, work) for name in names)
    step = 0
    # The steps of a segment multiply small matrices only, and X is multiplied once at its end, which saves products of
    # wide matrices. Each segment computes R from X again, because rounding lets the small matrices drift away from X.
    for length in lengths:
        kernels.square(x, r, work)
        for i, triple in enumerate(schedule[step : step + length]):
            _polynomial(r, triple, factor, work, kernels)
            for _ in range(2 if i + 1 < length else 0):
                r = _product(factor, r, spares, work, kernels)
            if i == 0:
                q, factor = factor, q
            else:
                q = _product(factor, q, spares, work, kernels)
        x, spare = kernels.multiply(q, x, spare, work), x
        step += length
    return x


def _product(a: Symmetric, b: Symmetric, spares: list[Symmetric], work: Workspace, kernels: Operations) -> Symmetric:
    """Return A B in one of ``spares``, the unused matrices, and append B to them. Overwrite B if there are none."""
    out = spares.pop() if spares else b
    kernels.product(a, b, out, work)
    spares += [] if out is b else [b]
    return out


def _polynomial(r: Symmetric, triple: Triple, out: Symmetric, work: Workspace, kernels: Operations) -> None:
    """Write the polynomial a I + b R + c R^2 of each symmetric matrix R to ``out``. ``triple``: (a, b, c)."""
    a, b, c = triple
    if c:
        return kernels.product(r, r, out, work, Scalars(c, b, a))
    torch.mul(r.rest, b, out=out.rest)
    torch.mul(r.diagonal, b, out=out.diagonal)
    (out.rest.diagonal(dim1=-2, dim2=-1) if out.is_whole else out.diagonal).add_(a)
