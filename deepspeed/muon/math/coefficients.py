# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz coefficient schedules, as cited data.

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

#: From here on the triples differ from step to step. You Jiacheng, published with modded-nanogpt (2025).
YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@functools.cache
def for_larger_norm(schedule: Schedule, factor: float) -> Schedule:
    """Return the schedule that acts as if its input were divided by ``factor`` first."""
    a, b, c = schedule[0]
    return ((a / factor, b / factor**3, c / factor**5), *schedule[1:])


#: Amsel et al., "The Polar Express" (arXiv 2505.16932), 5 steps, safety 2e-2, cushion 2. Its input has
#: norm 1 / 1.02, so that rounding cannot carry a singular value over one.
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

#: Cubic steps, which take a product less each; from NVIDIA's Emerging-Optimizers. Just above one it
#: changes signs, hence the norm of 1 / 1.02.
CUBIC5: Schedule = for_larger_norm(
    (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    1.02,
)

NAMED: dict[str, Schedule] = {
    "simple": (SIMPLE,),
    "you": YOU,
    "polar_express": POLAR_EXPRESS,
    "deepseek_v4": DEEPSEEK_V4,
    "cubic5": CUBIC5,
}


def schedule(coefficients: str | Schedule, steps: int | None = None) -> Schedule:
    """Return the triples to use, one per step.

    Args:
        coefficients: a name of :data:`NAMED`, or the user's triples.
        steps: number of steps, for a single triple. A schedule of several triples has a fixed length, and no other
            is accepted.

    Raises:
        ValueError: the name is unknown, or ``steps`` differs from a schedule's length.
    """
    if isinstance(coefficients, str):
        if coefficients not in NAMED:
            raise ValueError(f"unknown coefficients {coefficients!r}; known: {', '.join(sorted(NAMED))}")
        triples = NAMED[coefficients]
    else:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if len(triples) == 1:
        return triples * (DEFAULT_STEPS if steps is None else steps)
    if steps not in (None, len(triples)):
        raise ValueError(f"ns_steps is {steps}, but these coefficients are a schedule of {len(triples)} steps")
    return triples


#: The Gram iteration composes steps if errors of the Gram matrices between them move no singular value by more than
#: ``MAX_SHIFT`` after ``STEPS_AHEAD`` further steps, which show a value that diverges.
MAX_SHIFT, STEPS_AHEAD = 0.06, 3


class Rounding(NamedTuple):
    """What a dtype's rounding does to a Gram matrix, and how many steps are composed at most.

    An eigenvalue r is off by ``error * max(r, least)``: a few roundings that nothing averages out. With these numbers
    no matrix of many small ones goes astray, whatever its spectrum.
    """

    error: float
    least: float
    longest: int


#: By dtype. fp16 rounds eight times finer than bf16. fp32 composes as fp16 does: one more step would save little and
#: cost a digit, as an error at the smallest singular values grows by a^2, about 12, with each step.
ROUNDING = {"bf16": Rounding(2.0**-7, 0.0, 2), "fp16": Rounding(2.0**-10, 1.0, 3), "fp32": Rounding(2.0**-10, 1.0, 3)}


@functools.cache
def segments(schedule: Schedule, dtype: str) -> tuple[int, ...]:
    """Return the numbers of steps after which the Gram iteration forms the Gram matrix from the iterate again.

    Between restarts its small matrices drift away from the iterate. A polynomial that is steep at the largest singular
    values amplifies the drift, and the next step may then diverge.

    Args:
        dtype: of the products, a key of :data:`ROUNDING`.
    """
    found: list[int] = []
    done, rounding = 0, ROUNDING[dtype]
    while done < len(schedule):
        lengths = range(min(rounding.longest, len(schedule) - done), 1, -1)
        fitting = (length for length in lengths if _moved(schedule, done, length, rounding) <= MAX_SHIFT)
        found.append(next(fitting, 1))
        done += found[-1]
    return tuple(found)


def _moved(schedule: Schedule, first: int, length: int, rounding: Rounding) -> float:
    """The most by which errors of one sign in the Gram matrices between composed steps move a singular value."""
    composed, after = schedule[first : first + length], schedule[first + length : first + length + STEPS_AHEAD]
    worst = 0.0
    for error in (-rounding.error, rounding.error):
        for i in range(1001):
            start = value = _map(schedule[:first], i / 1000)
            square = start * start
            for triple in composed:
                factor = _factor(triple, square)
                value *= factor
                square *= factor * factor
                square += error * max(square, rounding.least)
            moved = abs(_map(after, value) - _map((*composed, *after), start))
            worst = moved if not moved <= worst else worst  # a NaN counts as far
    return worst


def _factor(triple: Triple, square: float) -> float:
    a, b, c = triple
    return a + (b + c * square) * square


def _map(schedule: Schedule, value: float) -> float:
    for triple in schedule:
        value *= _factor(triple, value * value)
    return value
