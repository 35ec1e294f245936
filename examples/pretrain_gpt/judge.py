# SPDX-License-Identifier: Apache-2.0
"""Statistics of the experiments: a difference seed by seed, its 95 % interval, and what it shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

from losslog import Row

#: 97.5 % quantiles of Student's t distribution, by degrees of freedom from 1.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True)
class Difference:
    """Differences of paired losses, their mean and its 95 % interval; a single pair has no interval (NaN)."""

    pairs: tuple[float, ...]
    mean: float
    low: float = math.nan
    high: float = math.nan

    @property
    def verdict(self) -> str:
        """What the interval shows, in words."""
        if math.isnan(self.low):
            return "one seed only"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "no gain shown"


def paired(losses: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compare final losses with those of the baseline on the same seeds, in the same order."""
    pairs = tuple(loss - base for loss, base in zip(losses, baseline, strict=True))
    if len(pairs) < 2:
        return Difference(pairs, pairs[0])
    if not all(map(math.isfinite, pairs)):
        return Difference(pairs, math.inf, math.inf, math.inf)
    degrees = len(pairs) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else T_QUANTILES[-1]
    half = quantile * stdev(pairs) / len(pairs) ** 0.5
    return Difference(pairs, mean(pairs), mean(pairs) - half, mean(pairs) + half)


def steps_to(rows: Sequence[Row], target: float) -> float:
    """Return the step at which the held-out loss first reaches `target`, between evaluations; NaN if it never does."""
    before = None
    for row in rows:
        if row.held_out <= target:
            if before is None:
                return row.step
            return float(np.interp(-target, [-before.held_out, -row.held_out], [before.step, row.step]))
        before = row
    return math.nan
