# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``, without ranks, shards or optimizers.

One step with coefficients (a, b, c) maps every singular value s of a matrix to ``a s + b s^3 + c s^5``. A schedule is
one triple per step.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X again only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. All its small matrices are polynomials of R, so they are symmetric and commute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace, matrices_together

Triple = tuple[float, float, float]
Schedule = tuple[Triple, ...]

#: The default of ``ns_steps``.
DEFAULT_STEPS = 5

#: One triple, repeated for every step. Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
SIMPLE: Triple = (3.4445, -4.7750, 2.0315)


@functools.cache
def for_larger_norm(schedule: Schedule, factor: float) -> Schedule:
    """Return Newton-Schulz coefficients for inputs whose norm is ``factor`` times that which ``schedule`` expects.

    They map a matrix X to what ``schedule`` maps X / ``factor`` to.
    """
    a, b, c = schedule[0]
    return ((a / factor, b / factor**3, c / factor**5), *schedule[1:])


#: In this and the next schedule, triples differ from step to step. Amsel et al., "The Polar Express"
#: (arXiv 2505.16932), 5 steps, safety 2e-2, cushion 2. Its input has norm 1 / 1.02, so that rounding cannot carry a
#: singular value over one.
POLAR_EXPRESS: Schedule = for_larger_norm(
    (
        (8.156555, -22.483293, 15.878770),
        (4.042930, -2.808917, 0.500018),
        (3.891668, -2.772484, 0.506065),
        (3.285754, -2.368129, 0.464490),
        (2.346541, -1.709783, 0.423236),
    ),
    1.02,
)

#: DeepSeek-V4 (2026), section 2.4: eight steps that are steep at zero, and two that converge to one.
DEEPSEEK_V4: Schedule = (SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2

#: Value of the config key ``ns_coefficients`` -> schedule; a single triple is repeated for every step.
NAMED: dict[str, Schedule] = {
    "simple": (SIMPLE,),
    "polar_express": POLAR_EXPRESS,
    "deepseek_v4": DEEPSEEK_V4,
}


def schedule(coefficients: str | Schedule, steps: int | None = None) -> Schedule:
    """Return the coefficients of Newton-Schulz: one (a, b, c) triple for each step.

    Args:
        coefficients: a key of :data:`NAMED`, such as ``simple``, or a sequence of (a, b, c) triples.
        steps: how often to repeat a single triple; ``None``: :data:`DEFAULT_STEPS` times. With several triples, it must
            be ``None`` or their number.

    Raises:
        ValueError: the name is unknown, or there are several triples and ``steps`` is another number.
    """
    if isinstance(coefficients, str):
        if coefficients not in NAMED:
            names = ", ".join(sorted(NAMED))
            raise ValueError(
                f"coefficients is {coefficients!r}, but there are no Newton-Schulz coefficients of this name; pass one "
                f"of {names}, or a list of (a, b, c) triples"
            )
        triples = NAMED[coefficients]
    else:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if len(triples) == 1:
        return triples * (DEFAULT_STEPS if steps is None else steps)
    if steps not in (None, len(triples)):
        raise ValueError(
            f"ns_steps is {steps}, but ns_coefficients has triples for {len(triples)} steps; remove ns_steps"
        )
    return triples


#: The Gram iteration makes several steps without a restart if rounding errors of the Gram matrices between these steps
#: move no singular value by more than ``MAX_SHIFT``. The shift is computed after ``STEPS_AHEAD`` further steps, because
#: a diverging value shows only then.
MAX_SHIFT, STEPS_AHEAD = 0.06, 3


class Rounding(NamedTuple):
    """The rounding error that :func:`segments` assumes for a Gram matrix in one dtype.

    An eigenvalue r is off by ``error * max(r, least)``. ``longest``: largest number of steps between two restarts. A
    restart computes the Gram matrix X X^T from the iterate X again, which removes accumulated rounding errors.
    """

    error: float
    least: float
    longest: int


#: Name of a dtype -> its rounding. With these values, none of many small random matrices diverges, whatever its
#: singular values. fp16 rounds eight times finer than bf16. With fp32 as many steps are made without a restart as with
#: fp16: one more would save little and cost a digit, because the error at the smallest singular values grows by a^2,
#: about 12, per step.
ROUNDING = {"bf16": Rounding(2.0**-7, 0.0, 2), "fp16": Rounding(2.0**-10, 1.0, 3), "fp32": Rounding(2.0**-10, 1.0, 3)}


@functools.cache
def segments(schedule: Schedule, dtype: str) -> tuple[int, ...]:
    """Return the numbers of steps between restarts of method ``gram``, such as ``(2, 2, 1)`` for five steps.

    A restart computes the Gram matrix X X^T from X again. Each number is the largest, up to ``longest`` of
    :class:`Rounding`, for which rounding moves no singular value by more than :data:`MAX_SHIFT`; if there is none, 1.
    ``dtype``: dtype of the matrix products, a key of :data:`ROUNDING`.
    """
    lengths: list[int] = []
    done, rounding = 0, ROUNDING[dtype]
    while done < len(schedule):
        possible = range(min(rounding.longest, len(schedule) - done), 1, -1)
        fitting = (length for length in possible if _max_shift(schedule, done, length, rounding) <= MAX_SHIFT)
        lengths.append(next(fitting, 1))
        done += lengths[-1]
    return tuple(lengths)


def _max_shift(schedule: Schedule, first: int, length: int, rounding: Rounding) -> float:
    """Return how far rounding can move a singular value in ``length`` steps without a restart, from step ``first`` on.

    The result is huge or NaN if singular values diverge.
    """
    composed, after = schedule[first : first + length], schedule[first + length : first + length + STEPS_AHEAD]
    worst = 0.0
    for error in (-rounding.error, rounding.error):  # assume that all errors have the same sign
        for i in range(1001):
            start = value = _map(schedule[:first], i / 1000)
            square = start * start
            for triple in composed:
                factor = _factor(triple, square)
                value *= factor
                square *= factor * factor
                square += error * max(square, rounding.least)
            moved = abs(_map(after, value) - _map((*composed, *after), start))
            worst = moved if not moved <= worst else worst  # NaN counts as the largest
    return worst


def _factor(triple: Triple, squared: float) -> float:
    """Return the factor by which one step multiplies a singular value whose square is ``squared``."""
    a, b, c = triple
    return a + (b + c * squared) * squared


def _map(schedule: Schedule, singular_value: float) -> float:
    """Return what the steps of ``schedule`` map a singular value to, in exact arithmetic."""
    for triple in schedule:
        singular_value *= _factor(triple, singular_value * singular_value)
    return singular_value


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
    """Return how many matrix products of each kind Newton-Schulz takes for one matrix.

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
    """Return the number of floating-point operations that it takes to orthogonalize a rows x cols matrix.

    ``symmetric``: the fraction of a product that kernels compute if its result is symmetric: 1, or about 0.5 for one
    triangle. The other arguments are those of :func:`products`.

    Example: with the schedule ``simple``, an m x n matrix with m <= n takes 20 m^2 n + 10 m^3 operations by
    ``standard``, and by ``gram`` 12 m^2 n + 22 m^3 in bf16 or 8 m^2 n + 28 m^3 in fp16 and fp32.
    """
    m, n = sorted((rows, cols))
    count = products(schedule, method, dtype)
    return int(2 * m * m * (n * (symmetric * count.square + count.multiply) + m * symmetric * count.product))


def method_of(rows: int, cols: int, ns_method: str, schedule: Schedule, dtype: str) -> str:
    """Return the method for rows x cols matrices: ``ns_method`` or, if that is ``auto``, the one with fewer operations.

    If the numbers of operations differ by less than 3 %, ``auto`` means ``standard``. ``dtype``: dtype of the matrix
    products, a key of :data:`DTYPES`.
    """
    if ns_method != "auto":
        return ns_method
    standard, gram = (flops(rows, cols, schedule, method, dtype) for method in METHODS)
    return "gram" if MARGIN * gram < standard else "standard"


def exact_method(ns_method: str, dtype: str, keeps_diagonals: bool) -> str:
    """Return ``ns_method``, but ``standard`` instead of ``auto`` where ``gram`` is not exact enough.

    That is the case if ``dtype``, the dtype of the matrix products, is bf16 and ``keeps_diagonals`` is false: the
    diagonals of Gram matrices are then rounded to bf16 too, and ``gram`` has up to four times the error of
    ``standard``. ``keeps_diagonals``: whether the products run on a CPU with a :class:`KernelSet` that keeps these
    diagonals in fp32.
    """
    return "standard" if (ns_method, dtype) == ("auto", "bf16") and not keeps_diagonals else ns_method


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
        schedule: one (a, b, c) triple for each step, from :func:`schedule`.
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
            result = _gram(start, spare, scaled, lengths, work, kernels)
        else:
            result = _standard(start, spare, scaled, work, kernels)
        if result.data_ptr() != part.data_ptr():
            part.copy_(result.mT if is_tall else result)
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
