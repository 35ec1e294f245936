# SPDX-License-Identifier: Apache-2.0
"""Bind the optimizer to an engine: compare the ranks, read ZeRO's layout, plan the exchange, create the state."""

from __future__ import annotations

import functools
import json
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed.muon.config.types import GROUP_KEYS
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.kernels import selection
from deepspeed.muon.log import log_if_slow
from deepspeed.muon.math.choice import Rates, lowest_rates
from deepspeed.muon.monitor import Recorder
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.step.binding import StepContext
from deepspeed.muon.step.partition_step import short_hash
from deepspeed.muon.tuning import Candidates, Tuning, has_bf16, may_time
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.checkpoint.compatibility import split_hashes_of_all_stages
from deepspeed.muon.zero.checkpoint.universal import support_universal_checkpoints
from deepspeed.muon.zero.consensus import Facts, agree, differences
from deepspeed.muon.zero.refusals import refuse_qk_clip
from deepspeed.muon.zero.startup_log import log_startup
from deepspeed.muon.zero.threads import limited_threads, threads_per_rank, usable_cpus
from deepspeed.muon.zero.tp_ranks import grid_of, stage_number
from deepspeed.muon.zero.wrappers.registry import adapter_for
from deepspeed.muon.zero.wrappers.tensor_parallel import partitions_over_tp

#: Keys of a parameter group that must be equal on all ranks of a stage. Keys that a user adds are not compared.
COMPARED_KEYS = (*GROUP_KEYS, "name", "moe", "use_muon", "lr_ratio")


def agree_on_settings(engine: Any, optimizer: MuonWithAuxAdam) -> Facts:
    """Compare the package's version, config and parameters on all ranks; return what they share. A collective.

    A *stage* below is a pipeline stage or, under ``tp_mode: shard``, one tensor-parallel rank's shards of a pipeline
    stage (:func:`stage_number`).

    Returns:
        - ``bf16``: whether the devices of all ranks have bf16 instructions.
        - ``may_time``: whether kernels may be chosen by timing them. It is false if one rank is in deterministic mode.
        - ``shapes``: ``[rows, columns, count]`` for each shape of Muon's matrices. ``count``: number of matrices of
          this shape in the stage that has the most.
        - ``ns_methods``: the values of ``ns_method`` that any parameter group uses.
        - ``groups``: the largest number of parameter groups in a stage.
        - ``matrices``: the number of Muon's matrices in the whole model.
        - ``first_ranks``: the lowest rank of each stage.
        - ``threads``: how many threads a rank may use on the CPU.
        - ``monitor``: whether DeepSpeed's monitor is enabled on rank 0.

    Raises:
        DisagreementError: the ranks differ, or some do not respond.
        MuonConfigError: a key in ``optimizer.params`` has no effect on the model.
    """
    agreed = agree(lambda: _facts(engine, optimizer), _judge_settings)
    if agreed["unused_options"]:
        raise MuonConfigError("\n".join(agreed["unused_options"]))
    return agreed


def bind_engine(engine: Any) -> None:
    """Prepare an engine's optimizer for its first step, once DeepSpeed has wrapped the optimizer; a collective.

    Read how ZeRO shards the parameters, plan which rank orthogonalizes which matrix, and create the optimizer's state.

    Raises:
        UnsupportedError: deepspeed-muon does not support the engine's ZeRO wrapper or tensor-parallel groups, or
            ``qk_clip`` in this engine.
        DisagreementError: the ranks differ in version, config or plan, or some do not respond.
    """
    optimizer = engine.basic_optimizer
    slow = functools.partial(log_if_slow, is_logging_rank=engine.global_rank == 0)
    with slow("comparing the settings of all ranks"):
        agreed = agree_on_settings(engine, optimizer)
    if optimizer.qk_clip:
        refuse_qk_clip(engine)
    grid = grid_of(engine)
    peers, muon_of_all_stages = None, None
    if engine.pipeline_parallelism:
        peers = grid.group if grid else engine.mpu.get_data_parallel_group()
        muon_of_all_stages = split_hashes_of_all_stages(optimizer)
    adapter = engine.muon_adapter = adapter_for(engine, optimizer)
    is_finite = adapter.watch_gradients()
    adapter.prepare(agreed["groups"])
    partitions = partitions_over_tp(adapter, grid)
    device = torch.device(get_accelerator().current_device_name())  # also if ZeRO offloads the shards
    tensors = [tensor for partition in partitions for tensor in partition.tensors]
    kinds = sorted({device.type, *(tensor.device.type for tensor in tensors)})
    with slow("building or loading the kernels"):
        unavailable = agree(lambda: selection.unavailable_kernels(optimizer.config.kernels, kinds), _judge_kernels)
    optimizer.context = StepContext(
        is_logging=engine.global_rank == 0,
        kernels=selection.choose(unavailable),
        unavailable=unavailable,
        threads=agreed["threads"],
        peers=peers,
        muon_of_all_stages=muon_of_all_stages,
        is_stepped_in_parts=True,
        is_finite=is_finite,
    )
    world_size = max((p.world_size for p in partitions), default=1)
    with slow("choosing dtype, method and kernels of Newton-Schulz"), limited_threads(agreed["threads"]):
        tuning = choose_newton_schulz(optimizer, agreed, device, world_size)
    with slow("planning the exchange and allocating the state"):
        optimizer.bind(partitions, tuning, device)
    with slow("compiling and tuning the kernels, and comparing the plans of all ranks,"):
        prepare_plans(engine)
    is_recorded = agreed["monitor"] and optimizer.config.monitor_interval > 0
    engine._muon_recorder = Recorder(optimizer, get_accelerator().synchronize) if is_recorded else None
    optimizer.saved_form.is_convertible = True  # for DeepSpeed's converter, which reads AdamW's names only
    adapter.patch_state_access()
    support_universal_checkpoints(adapter)
    if engine.global_rank in agreed["first_ranks"]:
        log_startup(adapter, tuning, agreed["matrices"])


def choose_newton_schulz(optimizer: MuonWithAuxAdam, agreed: Facts, device: torch.device, world_size: int) -> Tuning:
    """Choose the dtype, method and kernels of Newton-Schulz, the same on all ranks; a collective.

    ``agreed``: the result of :func:`agree_on_settings`. ``device``: where Newton-Schulz runs. ``world_size``: the
    number of ranks that share the work.

    Raises:
        DisagreementError: timing the candidates failed on some rank. All ranks raise this.
    """
    shapes = Counter({(rows, cols): count for rows, cols, count in agreed["shapes"]})
    methods, tables = set(agreed["ns_methods"]), optimizer.kernels_on(device)

    def slowest(measure: Callable[[], Rates]) -> Rates:  # in each step all ranks wait for the slowest one
        return agree(lambda: {"rates": measure()}, lambda facts: lowest_rates([stated["rates"] for stated in facts]))

    return Candidates.from_config(optimizer.config, tables, methods, device, agreed["bf16"]).choose(
        shapes, world_size, agreed["may_time"], is_logging_rank=optimizer.context.is_logging, slowest=slowest
    )


def prepare_plans(engine: Any) -> None:
    """Check that the ranks have the same plan, which says which ranks orthogonalize which matrix; a collective.

    Also compile the kernels. Call it after each call of ``MuonWithAuxAdam.bind``.

    Raises:
        DisagreementError: ranks that hold the same parameters have different plans or choices for Newton-Schulz.
    """
    optimizer = engine.basic_optimizer
    pinned = [group["ns_choice"] for group in optimizer.param_groups if group["use_muon"]]
    stated = {"stage": stage_number(engine, optimizer), "choice": pinned, "plan": optimizer.digest()}
    texts = {
        "choice": "the choice of dtype, methods and kernels of Newton-Schulz",
        "plan": "ranks {ranks} have planned another exchange than rank {first}; call load_checkpoint, and whatever "
        "else changes the optimizer, on all ranks",
    }

    def state() -> Facts:
        optimizer.warm_up()  # here, because a rank may take minutes until it sends its facts
        return stated

    agree(state, lambda facts: differences(facts, texts, within="stage"))


def _facts(engine: Any, optimizer: MuonWithAuxAdam) -> Facts:
    groups = [{key: value for key, value in g.items() if key in COMPARED_KEYS} for g in optimizer.param_groups]
    routes = sorted(f"{s.name}{s.whole}{s.use_muon}{s.blocks}" for s in optimizer.specs.values())
    return {
        "version": __version__,
        "config": optimizer.config.digest(),
        "stage": stage_number(engine, optimizer),
        "groups": short_hash(json.dumps(groups)),
        "routes": short_hash("".join(routes)),
        "order": short_hash("\n".join(s.name for s in optimizer.specs.values())),
        "bf16": has_bf16(get_accelerator().device_name(), get_accelerator().is_bf16_supported()),
        "shapes": [[*shape, count] for shape, count in optimizer.shapes.items()],
        "ns_methods": sorted(optimizer.ns_methods),
        "may_time": may_time(),
        "host": socket.gethostname(),
        "cpus": usable_cpus(),
        "group_count": len(groups),
        "matrices": sum(len(spec.blocks) for spec in optimizer.specs.values()),
        "monitor": engine.monitor.enabled,
        "unused_options": optimizer.unused_options,
    }


def _judge_settings(facts: list[Facts]) -> Facts:
    """Compare all ranks' settings; return :func:`agree_on_settings`'s dict, or ``{"error": text}`` if they differ."""
    of_all = {
        "version": "the deepspeed-muon version",
        "config": "ranks {ranks} have other optimizer.params than rank {first}; read one config on all ranks",
    }
    of_parameters = {
        "routes": "ranks {ranks} do not send the same parameters to Muon as rank {first}, or split them differently; "
        "build the same model with the same options on every rank",
        "groups": "the parameter groups of ranks {ranks} have other settings than those of rank {first}; pass the same "
        "groups on every rank",
        "order": "ranks {ranks} pass the parameters in another order than rank {first}; pass a list, because a set has "
        "a different order on each rank",
    }
    if error := differences(facts, of_all) or differences(facts, of_parameters, within="stage"):
        return error
    first_ranks = {stated["stage"]: rank for rank, stated in reversed(list(enumerate(facts)))}
    stages = [facts[rank] for _, rank in sorted(first_ranks.items())]
    counted: Counter[tuple[int, int]] = Counter()
    for stated in stages:
        counted |= Counter({(rows, cols): count for rows, cols, count in stated["shapes"]})
    return {
        "bf16": all(stated["bf16"] for stated in facts),
        "may_time": all(stated["may_time"] for stated in facts),
        "threads": threads_per_rank([stated["host"] for stated in facts], [stated["cpus"] for stated in facts]),
        "ns_methods": sorted({method for stated in stages for method in stated["ns_methods"]}),
        "shapes": [[*shape, count] for shape, count in counted.items()],
        "groups": max(stated["group_count"] for stated in stages),
        "matrices": sum(stated["matrices"] for stated in stages),
        "first_ranks": sorted(first_ranks.values()),
        "monitor": facts[0]["monitor"],  # one answer for all, because a record is a collective; rank 0 writes
        "unused_options": [
            f"stage {stated['stage']}: {stated['unused_options'][option]}"
            for option in stages[0]["unused_options"]
            if all(option in stated["unused_options"] for stated in stages)
            for stated in stages
        ],
    }


def _judge_kernels(facts: list[Facts]) -> Facts:
    """Merge the ranks' dicts {device type: why fast kernels cannot be used, or ``None``} into one.

    A kernel that one rank cannot use is not used on any rank: ``{"cpu": "rank 1: there is no C++ compiler"}``.
    """
    unavailable: Facts = {}
    for rank, stated in enumerate(facts):
        for kind, reason in stated.items():
            unavailable[kind] = unavailable.get(kind) or (f"rank {rank}: {reason}" if reason else None)
    return dict(sorted(unavailable.items()))
