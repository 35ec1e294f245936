# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz coefficient schedules, as cited data.

One step with coefficients (a, b, c) maps every singular value s of a matrix to
``a s + b s^3 + c s^5``. A schedule is one triple per step.
"""

from __future__ import annotations

import functools

Triple = tuple[float, float, float]
Schedule = tuple[Triple, ...]

#: The default of ``ns_steps``.
DEFAULT_STEPS = 5

#: One triple, repeated for every step. Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
SIMPLE: Triple = (3.4445, -4.7750, 2.0315)

#: Here and below the triples differ from step to step. You Jiacheng, published with modded-nanogpt (2025).
YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def _for_larger_norm(schedule: Schedule, factor: float) -> Schedule:
    """The schedule that acts as if its input were divided by ``factor`` first."""
    a, b, c = schedule[0]
    return ((a / factor, b / factor**3, c / factor**5), *schedule[1:])


#: Amsel et al., "The Polar Express" (arXiv 2505.16932), 5 steps, safety 2e-2, cushion 2. Its input has
#: norm 1 / 1.02, so that rounding cannot carry a singular value over one.
POLAR_EXPRESS: Schedule = _for_larger_norm(
    (
        (8.156555, -22.483293, 15.878770),
        (4.042930, -2.808917, 0.500018),
        (3.891668, -2.772484, 0.506065),
        (3.285754, -2.368129, 0.464490),
        (2.346541, -1.709783, 0.423236),
    ),
    1.02,
)

NAMED: dict[str, Schedule] = {"simple": (SIMPLE,), "you": YOU, "polar_express": POLAR_EXPRESS}


def schedule(coefficients: str | Schedule, steps: int | None = None) -> Schedule:
    """The triples to use, one per step.

    Args:
        coefficients: a name of :data:`NAMED`, or triples given by the user.
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


#: The Gram iteration composes two steps if a relative error of ``ROUNDING`` in the Gram matrix between them moves no
#: singular value by more than ``MOVED`` after ``AHEAD`` further steps. The error stands for a few bf16 roundings that
#: nothing averages out, and the further steps show a value that diverges.
ROUNDING, MOVED, AHEAD = 2**-7, 0.06, 3


@functools.cache
def segments(schedule: Schedule) -> tuple[int, ...]:
    """Numbers of steps, one or two, after which the Gram iteration forms the Gram matrix from the iterate again.

    Between restarts its small matrices drift away from the iterate. A polynomial that is steep at the largest singular
    values amplifies the drift, and the next step may then diverge.
    """
    found: list[int] = []
    done = 0
    while done < len(schedule):
        found.append(2 if done + 1 < len(schedule) and _moved(schedule, done) <= MOVED else 1)
        done += found[-1]
    return tuple(found)


def _moved(schedule: Schedule, first: int) -> float:
    """The most by which an error of the Gram matrix after step ``first`` moves a singular value."""
    worst, after = 0.0, schedule[first + 2 : first + 2 + AHEAD]
    for i in range(1, 1001):
        between = _map(schedule[: first + 1], i / 1000)
        exact = _map((schedule[first + 1], *after), between)
        for error in (-ROUNDING, ROUNDING):
            drifted = between * _factor(schedule[first + 1], between * between * (1 + error))
            moved = abs(_map(after, drifted) - exact)
            worst = moved if not moved <= worst else worst  # a NaN counts as far
    return worst


def _factor(triple: Triple, square: float) -> float:
    a, b, c = triple
    return a + (b + c * square) * square


def _map(schedule: Schedule, value: float) -> float:
    for triple in schedule:
        value *= _factor(triple, value * value)
    return value
