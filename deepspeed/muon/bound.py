# SPDX-License-Identifier: Apache-2.0
"""A partition of the Muon half that is bound: its plan, and what every step of it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.kernels.table import Operations, RunOperations, Tiles
from deepspeed.muon.plan.launches import calls_of
from deepspeed.muon.plan.plan import Bucket, Plan


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One partition of the Muon half, and what its steps have in common.

    ``dtype`` of Newton-Schulz. By rows and columns of the matrix, each found once: ``method`` and ``kernels`` of
    Newton-Schulz, and ``scale`` of the update.
    ``together``: updates all runs of a call in one kernel; ``None``: each run has its own.
    """

    partition: Partition
    plan: Plan
    exchange: Exchange
    dtype: torch.dtype
    method: Callable[[int, int], str]
    kernels: Callable[[int, int], Operations]
    scale: Callable[[int, int], float]
    together: RunOperations | None

    @cached_property
    def calls(self) -> dict[int, list[Call]]:
        """Of each bucket, by its id."""
        return {id(bucket): [*map(partial(self._call, bucket), self.calls_of(bucket))] for bucket in self.plan.buckets}

    def calls_of(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """The runs that are updated together, as indices."""
        return calls_of(bucket, self.scale, self.together is not None)

    def _call(self, bucket: Bucket, indices: tuple[int, ...]) -> Call:
        runs = [bucket.runs[index] for index in indices]
        first, tiles = runs[0], None
        if self.together is not None and first.copy.rows == 1:
            places = [(run.copy.start, run.copy.at, run.copy.numel) for run in runs]
            tiles = self.together.tiles(places, self.partition.tensors[first.tensor].device)
        return Call(indices, first.tensor, first.in_place, self.scale(*first.shape), tiles)


class Call(NamedTuple):
    """Runs of one bucket that are updated together: of one tensor, in one buffer, with one scale.

    ``runs``: their indices. ``tiles``: for one kernel; ``None``: each run has its own.
    """

    runs: tuple[int, ...]
    tensor: int
    in_place: bool
    scale: float
    tiles: Tiles | None
