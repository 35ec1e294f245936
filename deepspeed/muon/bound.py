# SPDX-License-Identifier: Apache-2.0
"""Everything that the steps of one Muon partition need, computed once, and what the ranks have agreed on before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.groups import Agreed, processes
from deepspeed.muon.exchange.owner_set import neighbours_in
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.gradients import GradientProbe
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.selection import Unavailable
from deepspeed.muon.kernels.table import Operations, RunOperations, Tiles
from deepspeed.muon.math.choice import Choice, shape_key
from deepspeed.muon.math.newton_schulz import DTYPES, name_of
from deepspeed.muon.math.rules import Rules
from deepspeed.muon.math.scale import scale_factor
from deepspeed.muon.plan.bucket import Bucket
from deepspeed.muon.plan.cost import cost_model
from deepspeed.muon.plan.launches import Span, calls_of, spans_of
from deepspeed.muon.plan.plan import Plan, plan_partition, without_collector
from deepspeed.muon.plan.program import NewtonSchulz, Program, program_of
from deepspeed.muon.tuning import method_of, with_products


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Hold what is agreed; made once, when the optimizer is bound, for an engine by :mod:`deepspeed.muon.zero.bind`.

    Args:
        is_logging: this process logs what all of them know.
        kernels: of a step, but for the products of Newton-Schulz; equal on all ranks.
        unavailable: device type -> why its fast kernels cannot be used.
        ranks_per_node: neighbouring ranks that share a node, as far as known; unless the config says so only they own
            a matrix together.
        peers: process group of the ranks that train the same layers; ``None``: all.
        muon_of_all_stages: in a pipeline, the parameters of all stages that go to Muon, by name, and a hash of how each
            is cut, if any.
        is_stepped_in_parts: whether calls of ``step`` are parts of an engine's step, which calls the optimizer's
            ``begin_step`` before them and releases its workspace after.
        is_finite: whether the gradient of the current step is finite, by the wrapper around the optimizer; ``None``:
            the optimizer looks at its gradients, which are the same on all ranks.
    """

    is_logging: bool = True
    kernels: Operations = reference.OPERATIONS
    unavailable: Unavailable = field(default_factory=dict)
    ranks_per_node: int = 1
    peers: Any = None
    muon_of_all_stages: dict[str, str] | None = None
    is_stepped_in_parts: bool = False
    is_finite: Callable[[], Agreed] | None = None


class Call(NamedTuple):
    """Runs of one bucket that are updated together: of one tensor, in one buffer, with one scale.

    ``runs``: their indices. ``spans``: their elements; none of a run on a grid. ``tiles``: the spans for one kernel;
    ``None``: one kernel launch per span.
    """

    runs: tuple[int, ...]
    tensor: int
    in_place: bool
    scale: float
    spans: list[Span]
    tiles: Tiles | None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One partition of the Muon half, and what its steps have in common.

    Args:
        newton_schulz: its schedule, methods and dtype, which also decide what several owners of a matrix send each
            other.
        kernels: of Newton-Schulz, by rows and columns of the matrix, each found once.
        elementwise: kernels of everything except the products of Newton-Schulz; equal on all ranks.
        multi_run_kernels: update all runs of a call in one launch; ``None``: one launch per span.
        scale: of the update, by rows and columns of the matrix.
        settings: of the parameter group, and how Newton-Schulz runs.
        sharers: ranks that plan the same matrices.
        owner_counts: by the shape of a matrix, which a checkpoint pins, so that a resumed run keeps its bits.
    """

    config: MuonConfig
    partition: Partition
    plan: Plan
    exchange: Exchange
    newton_schulz: NewtonSchulz
    kernels: Callable[[int, int], Operations]
    elementwise: Operations
    multi_run_kernels: RunOperations | None
    scale: Callable[[int, int], float]
    settings: str
    sharers: int
    owner_counts: dict[str, int]

    @cached_property
    def rules(self) -> Rules | None:
        """Return the update rules beyond plain Muon; ``None`` without any."""
        return self.config.rules or None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the products of Newton-Schulz."""
        return DTYPES[self.newton_schulz.dtype]

    @cached_property
    def gradients(self) -> GradientProbe:
        """Find the matrices that have no gradient in a step."""
        return GradientProbe(self.partition, self.plan, self.exchange)

    @cached_property
    def program(self) -> Program:
        """Return what this rank does in a step."""
        is_staged = self.exchange.staging is not None
        return program_of(self.plan, name_of(self.exchange.dtype), is_staged, self.newton_schulz)

    @cached_property
    def digest(self) -> str:
        """Return a hash of all from which the programs of the ranks follow, and of what decides their bits."""
        wire, travels = name_of(self.exchange.dtype), self.plan.travels(self.exchange.staging is not None)
        how = self.newton_schulz.dtype, self.newton_schulz.device_type
        plan = self.plan.of_all
        facts = plan.digest, plan.slots(travels), plan.set_sizes, wire, how, self.settings
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @cached_property
    def calls(self) -> list[list[Call]]:
        """Return the calls of each bucket."""
        return [[self._call(bucket, runs) for runs in calls_of(bucket, self.scale)] for bucket in self.plan.buckets]

    def _call(self, bucket: Bucket, indices: tuple[int, ...]) -> Call:
        first, tiles = bucket.runs[indices[0]], None
        spans = spans_of(bucket, indices, staged=self.exchange.staging is not None)
        if self.multi_run_kernels is not None and spans:
            tiles = self.multi_run_kernels.tiles(spans, self.partition.tensors[first.tensor].device)
        rows, cols = first.shape
        return Call(indices, first.tensor, first.in_place, self.scale(rows, cols), spans, tiles)


@without_collector()
def bind_partition(
    partition: Partition,
    group: Mapping[str, Any],
    *,
    config: MuonConfig,
    choice: Choice,
    context: StepContext,
    tables: Mapping[str, Operations],
    exchange: Exchange,
) -> Bound:
    """Plan a partition of the Muon half.

    Args:
        group: its parameter group, in which a checkpoint may have pinned the numbers of owners.
        choice: how Newton-Schulz runs.
        context: what the ranks have agreed on.
        tables: which the products of Newton-Schulz are chosen from, by name.
        exchange: among the ranks of the partition.
    """
    method = partial(method_of, choice, group["ns_method"])
    near = neighbours_in(partition.group, context.ranks_per_node) if processes() > 1 else 1
    cost = cost_model(method, config.schedule, choice.dtype, exchange.dtype.itemsize, exchange.device.type, near)
    pinned = group.get("owner_counts", {})
    # Each rank of the partition counts its share of the matrices without a gradient, also where no work is shared.
    sharers = partition.world_size
    planned = plan_partition(partition.planned, sharers, cost, config.bucket_bytes, pinned, config.most_owners)
    if planned.world_size < sharers:  # each rank does all the work
        partition = replace(partition, shards=planned.shards, planned=planned.shards, group=None, rank=0, world_size=1)
        exchange = replace(exchange, group=None)
    counts = zip(planned.items, planned.counts, strict=True)
    owner_counts = pinned | {shape_key(*item.shape): count for item, count in counts if count > 1}
    # What decides the bits of a group's update; the same before and after its numbers of owners are pinned.
    settings = sorted((key, value) for key, value in {**group, "owner_counts": owner_counts}.items() if key != "params")
    # Kernels for many runs take the shards themselves, so none where these are staged in other buffers.
    runs = context.kernels.runs if exchange.staging is None else None
    return Bound(
        config=config,
        partition=partition,
        plan=planned.view(partition.rank),
        exchange=exchange,
        newton_schulz=NewtonSchulz(
            schedule=config.schedule,
            method=cache(method),
            dtype=choice.dtype,
            device_type=exchange.device.type,
        ),
        kernels=cache(partial(with_products, context.kernels, tables, choice)),
        elementwise=context.kernels,
        multi_run_kernels=runs if runs and all(map(runs.fits, partition.tensors)) else None,
        scale=cache(partial(scale_factor, group["adjust_lr_fn"], rms_scale=config.rms_scale)),
        settings=repr((choice.pinned(), settings)),
        sharers=sharers,
        owner_counts=owner_counts,
    )
