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


#: The most elements of a span of several runs, as the temporaries of an operation are as large as what it takes.
LARGEST_SPAN = 2**16


class Span(NamedTuple):
    """Elements of neighbouring runs: without a gap in the shard, from ``start`` on, and in a buffer, from ``at`` on."""

    start: int
    at: int
    numel: int


def calls_of(bucket: Bucket, scale: Scale) -> list[tuple[int, ...]]:
    """Return the runs of a bucket, as indices, that one call advances and one call applies.

    They are all contiguous runs of one tensor, one buffer and one scale; a run on a grid has a call of its own.
    """
    calls: dict[tuple, list[int]] = {}
    for index, run in enumerate(bucket.runs):
        rows, cols = run.shape
        alike = (run.tensor, run.in_place, scale(rows, cols)) if run.copy.rows == 1 else (index,)
        calls.setdefault(alike, []).append(index)
    return [tuple(call) for call in calls.values()]


def spans_of(bucket: Bucket, runs: Iterable[int], staged: bool) -> list[Span]:
    """Return the spans of the runs of a call, by index; none of a run on a grid.

    ``staged``: their buffer is the bucket's host memory.
    """
    spans: list[Span] = []
    for index in runs:
        copy = bucket.runs[index].copy
        if copy.rows > 1:
            return []
        at = bucket.host_places[index] if staged else copy.at
        last = spans[-1] if spans else None
        are_neighbours = last and (last.start + last.numel, last.at + last.numel) == (copy.start, at)
        if last and are_neighbours and last.numel + copy.numel <= LARGEST_SPAN:
            spans[-1] = last._replace(numel=last.numel + copy.numel)
        else:
            spans.append(Span(copy.start, at, copy.numel))
    return spans
