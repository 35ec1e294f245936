# SPDX-License-Identifier: Apache-2.0
"""Coefficient schedules of Newton-Schulz, from publications.

One step with coefficients (a, b, c) maps every singular value s of a matrix to
``a s + b s^3 + c s^5``. A schedule is one triple per step.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

Triple = tuple[float, float, float]
Schedule = tuple[Triple, ...]

#: The default of ``ns_steps``.
DEFAULT_STEPS = 5

#: One triple, repeated for every step. Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
SIMPLE: Triple = (3.4445, -4.7750, 2.0315)


@functools.cache
def for_larger_norm(schedule: Schedule, factor: float) -> Schedule:
    """Return Newton-Schulz coefficients that map each matrix X to what ``schedule`` maps X / ``factor`` to."""
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
    """The rounding error of a Gram matrix in one dtype, as :func:`segments` assumes it.

    An eigenvalue r is off by ``error * max(r, least)``. ``longest``: largest number of steps without a restart, which
    computes the Gram matrix again.
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
    found: list[int] = []
    done, rounding = 0, ROUNDING[dtype]
    while done < len(schedule):
        lengths = range(min(rounding.longest, len(schedule) - done), 1, -1)
        fitting = (length for length in lengths if _max_shift(schedule, done, length, rounding) <= MAX_SHIFT)
        found.append(next(fitting, 1))
        done += found[-1]
    return tuple(found)


def _max_shift(schedule: Schedule, first: int, length: int, rounding: Rounding) -> float:
    """Return how far rounding can move singular values in some steps without a restart; huge or NaN if they diverge.

    ``first``, ``length``: index of the first of these steps, and their number.
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


def _factor(triple: Triple, square: float) -> float:
    a, b, c = triple
    return a + (b + c * square) * square


def _map(schedule: Schedule, value: float) -> float:
    for triple in schedule:
        value *= _factor(triple, value * value)
    return value
