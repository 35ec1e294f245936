# SPDX-License-Identifier: Apache-2.0
"""Which parts of a step one kernel does, and how many kernels that takes. Pure Python.

Newton-Schulz is not counted: its kernels depend on its method and not on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from deepspeed.muon.plan.bucket import Bucket

#: Of a matrix, by rows and columns: the factor of its update.
Scale = Callable[[int, int], float]


def calls_of(bucket: Bucket, scale: Scale, together: bool) -> list[tuple[int, ...]]:
    """The runs of a bucket, as indices, that one call advances and one call applies.

    ``together``: all contiguous runs of one tensor, one buffer and one scale; else each run alone.
    """
    calls: dict[tuple, list[int]] = {}
    for index, run in enumerate(bucket.runs):
        alike = (run.tensor, run.in_place, scale(*run.shape)) if together and run.copy.rows == 1 else (index,)
        calls.setdefault(alike, []).append(index)
    return [tuple(call) for call in calls.values()]


class Launches(NamedTuple):
    """Kernels of one rank's step, by phase."""

    prepare: int
    unpack: int
    pack: int
    apply: int


def launches_of(buckets: Iterable[Bucket], scale: Scale, together: bool) -> Launches:
    """Calls of each phase over all buckets; each is one kernel where a contiguous run takes one."""
    runs = copies = 0
    for bucket in buckets:
        runs += len(calls_of(bucket, scale, together))
        copies += len(bucket.scattered)
    return Launches(runs, copies, copies, runs)
