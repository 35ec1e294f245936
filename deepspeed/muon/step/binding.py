# SPDX-License-Identifier: Apache-2.0
"""Plan the step of a partition of Muon parameters, from the facts that all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import Tensor

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.groups import Agreed
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.selection import Unavailable
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.momentum_storage import Blocks
from deepspeed.muon.math.newton_schulz import exact_method, method_of
from deepspeed.muon.math.scale import scale_factor
from deepspeed.muon.plan.cost import cost_model
from deepspeed.muon.plan.plan import plan_partition, without_collector
from deepspeed.muon.step.normuon_moments import SecondMoments
from deepspeed.muon.step.partition_step import NewtonSchulz, PartitionStep


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Facts besides the config that a step depends on; :mod:`deepspeed.muon.zero.bind` finds them.

    Args:
        is_logging: whether this rank writes the log lines that would be equal on all ranks; true on one rank.
        kernels: the kernels of every operation; equal on all ranks.
        dtype: dtype of Newton-Schulz where ``ns_dtype`` is ``auto``; equal on all ranks.
        unavailable: device type -> reason why the package's fast kernels cannot be used on it.
        threads: the most threads that a step uses on the CPU; ``None``: as many as torch does.
        peers: process group of the ranks that train the same layers; ``None``: all ranks.
        muon_of_all_stages: with a pipeline, {Muon parameter of any stage: hash of how it is split into matrices}. The
            hash is empty for a parameter that is one matrix. ``None`` without a pipeline.
        is_stepped_in_parts: whether one engine step calls the optimizer's ``step`` several times. The engine then calls
            the optimizer's ``begin_step`` before the first call, and releases the workspace after the last.
        is_finite: function that returns whether the current gradients are finite on all ranks; may be a collective.
            ``None``: the optimizer checks them by itself, because they are equal on all ranks.
        read: function that returns the elements of an int32 tensor on the device; it may read more with them.
        gradients: function of a partition that the current call of ``step`` does not update. It returns the consecutive
            pieces of its flat gradient, or ``None`` if they are not in memory.
    """

    is_logging: bool = True
    kernels: Operations = reference.OPERATIONS
    dtype: str = "fp32"
    unavailable: Unavailable = field(default_factory=dict)
    threads: int | None = None
    peers: Any = None
    muon_of_all_stages: dict[str, str] | None = None
    is_stepped_in_parts: bool = False
    is_finite: Callable[[], Agreed] | None = None
    read: Callable[[Tensor], list[int]] = Tensor.tolist
    gradients: Callable[[Partition], Sequence[Tensor] | None] = lambda partition: None


@without_collector()
def bind_partition(
    partition: Partition,
    group: Mapping[str, Any],
    *,
    config: MuonConfig,
    dtype: str,
    context: StepContext,
    exchange: Exchange,
    blocks: Mapping[Tensor, Blocks],
    second_moments: SecondMoments,
) -> PartitionStep:
    """Plan the step of one :class:`Partition`. Return the :class:`PartitionStep` that carries it out.

    Args:
        partition: Muon parameters of one parameter group, and how ranks share them.
        group: the partition's parameter group.
        dtype: dtype of the matrix products of Newton-Schulz, a key of :data:`DTYPES`.
        exchange: communication among the ranks of the partition.
        blocks: tensor -> the quantization blocks of its int8 momentum; empty for other momentum dtypes.
        second_moments: NorMuon's second moments of all partitions.
    """
    newton_schulz = _newton_schulz(group, config, dtype, exchange.device.type)
    cost = cost_model(newton_schulz.method, config.schedule, dtype, exchange.dtype.itemsize, exchange.device.type)
    # The number of ranks before the partition may shrink to one below: statistics are divided by it.
    sharers, is_replicated = partition.world_size, partition.is_replicated
    planned = plan_partition(partition.planned, sharers, cost, config.bucket_bytes)
    if planned.world_size < sharers:  # each rank does all the work
        partition = replace(partition, shards=planned.shards, planned=planned.shards, group=None, rank=0, world_size=1)
        exchange = replace(exchange, group=None)
    # Kernels for many runs read the shards directly, so they cannot be used if the shards are staged in other buffers.
    runs = context.kernels.runs if exchange.staging is None else None
    return PartitionStep(
        config=config,
        partition=partition,
        plan=planned.view(partition.rank),
        exchange=exchange,
        newton_schulz=newton_schulz,
        kernels=context.kernels,
        multi_run_kernels=runs if runs and all(map(runs.fits, partition.tensors)) else None,
        scale=_scale(group, config),
        settings=_settings(group),
        sharers=sharers,
        copies=sharers if is_replicated else 1,
        blocks=blocks,
        second_moments=second_moments,
    )


def with_settings(step: PartitionStep, group: Mapping[str, Any]) -> PartitionStep:
    """Return the same planned step with the settings of ``group``, which a load may have changed."""
    return replace(
        step,
        newton_schulz=_newton_schulz(group, step.config, step.newton_schulz.dtype, step.exchange.device.type),
        scale=_scale(group, step.config),
        settings=_settings(group),
    )


def _newton_schulz(group: Mapping[str, Any], config: MuonConfig, dtype: str, device_type: str) -> NewtonSchulz:
    ns_method = exact_method(group["ns_method"], dtype, device_type)
    method = cache(partial(method_of, ns_method=ns_method, schedule=config.schedule, dtype=dtype))
    return NewtonSchulz(schedule=config.schedule, dtype=dtype, method=method)


def _scale(group: Mapping[str, Any], config: MuonConfig) -> Callable[[int, int], float]:
    return cache(partial(scale_factor, group["adjust_lr_fn"], rms_scale=config.rms_scale))


def _settings(group: Mapping[str, Any]) -> str:
    """Return a text of everything in a group that decides the bits of its update."""
    return repr(sorted((key, value) for key, value in group.items() if key != "params"))
