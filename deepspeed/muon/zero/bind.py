# SPDX-License-Identifier: Apache-2.0
"""Binds the optimizer to an engine: layout, state, agreement of the ranks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import partial
from typing import Any

import torch

from deepspeed.muon.errors import MuonConfigError, UnsupportedError
from deepspeed.muon.exchange import watchdog
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.kernels import selection
from deepspeed.muon.math.newton_schulz import bf16_is_fast, resolve_dtype
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.checkpoint.nvme_load import keep_resumable
from deepspeed.muon.zero.checkpoint.state_keys import keep_convertible
from deepspeed.muon.zero.checkpoint.universal import read_universal
from deepspeed.muon.zero.consensus import consult, differences
from deepspeed.muon.zero.methods import compare_plans, shapes_to_measure, tune
from deepspeed.muon.zero.monitor import set_up_monitor
from deepspeed.muon.zero.nvme import create_states
from deepspeed.muon.zero.refusals import refuse_engine, refuse_unsupported
from deepspeed.muon.zero.startup_log import log_startup
from deepspeed.muon.zero.state_access import keep_accessible
from deepspeed.muon.zero.wrappers import stage0, stage3, stage12
from deepspeed.muon.zero.wrappers.experts import holders
from deepspeed.muon.zero.wrappers.grad_norm import NormWatch, is_valid, on_all_ranks, once_per_step
from deepspeed.muon.zero.wrappers.pipeline_stages import sum_as_many_norms
from deepspeed.muon.zero.wrappers.stock_muon import keep_clear_of_stocks_muon
from deepspeed.muon.zero.wrappers.tensor_parallel import joined, matrix_share


def agree(optimizer: MuonWithAuxAdam) -> dict[str, Any]:
    """The verdict on version, config and routing, and what all stages of a pipeline have to know of each other.

    ``bf16``: whether all ranks are fast in it. ``shapes``: the matrices whose methods are to be measured.
    ``groups``: the most parameter groups that a stage has. ``matrices``: of all stages. ``firsts``: of each stage, the
    first rank.
    Called before the engine wraps the optimizer too, as the collectives of ZeRO's construction follow the routing.

    Raises:
        DisagreementError: the ranks differ, or some are silent.
        MuonConfigError: a wish of the config that no stage follows.
    """
    verdict = consult(_facts(optimizer), _judge_settings)
    if verdict["idle"]:
        raise MuonConfigError("\n".join(verdict["idle"]))
    return verdict


def bind_engine(engine: Any) -> None:
    """Called once the engine has wrapped the optimizer.

    Raises:
        UnsupportedError: a wrapper, or a combination, that is not supported.
        DisagreementError: the ranks do not run the same version, config and plan.
    """
    refuse_unsupported(engine._config, engine.basic_optimizer.config.momentum_dtype)
    refuse_engine(engine)
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    verdict = agree(optimizer)
    partitions = joined(_partitions(engine, optimizer), optimizer, engine)
    if type(wrapper).__name__ == "DeepSpeedZeroOptimizer":
        sum_as_many_norms(wrapper, verdict["groups"])
        keep_clear_of_stocks_muon(wrapper)
    create_states(wrapper, optimizer)
    ns_dtype, device = resolve_dtype(optimizer.config.ns_dtype, verdict["bf16"]), _compute_device()
    kinds = {device.type, *(tensor.device.type for partition in partitions for tensor in partition.tensors)}
    lacking = consult(selection.missing(optimizer.config.kernels, sorted(kinds)), _judge_kernels)
    optimizer.kernels = selection.choose(lacking)
    tune(optimizer, verdict["shapes"], ns_dtype, device)
    optimizer.bind(partitions, ns_dtype, device)
    set_up_monitor(engine, compare_plans(optimizer, monitor=engine.monitor.enabled)["monitor"])
    keep_accessible(wrapper, optimizer)
    keep_resumable(engine, optimizer)
    keep_convertible(wrapper, optimizer)
    read_universal(engine, optimizer)
    optimizer.report_skip = once_per_step(engine, optimizer.report_skip)
    watchdog.start_watchdog()
    if engine.global_rank in verdict["firsts"]:
        log_startup(engine, optimizer, lacking, verdict["matrices"])


def _partitions(engine: Any, optimizer: MuonWithAuxAdam) -> list[Partition]:
    """The layout, by the wrapper's kind, and with it the source of the finiteness check."""
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if wrapper is optimizer or kind == "FP16_UnfusedOptimizer":
        if engine.has_moe_layers:
            optimizer.is_finite = on_all_ranks(optimizer.is_finite)
        return stage0.partitions(wrapper, optimizer, partial(holders, engine))
    if kind == "BF16_Optimizer":
        optimizer.is_finite = lambda: is_valid(wrapper._global_grad_norm)
        return stage12.partitions(wrapper, optimizer)
    if kind == "DeepSpeedZeroOptimizer":
        optimizer.is_finite = NormWatch(wrapper)
        return stage12.partitions(wrapper, optimizer)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        optimizer.is_finite = NormWatch(wrapper)
        return stage3.partitions(wrapper, optimizer)
    raise UnsupportedError(f"deepspeed-muon does not know the optimizer wrapper {kind}")


def _compute_device() -> torch.device:
    """Newton-Schulz and the exchange run on the accelerator, wherever ZeRO keeps the shards."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _facts(optimizer: MuonWithAuxAdam) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    routes = sorted(f"{s.name}{s.whole}{s.use_muon}{s.blocks}" for s in optimizer.specs.values())
    return {
        "version": __version__,
        "config": optimizer.config.digest(),
        "stage": matrix_share(optimizer),
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16],
        "routes": hashlib.sha256("".join(routes).encode()).hexdigest()[:16],
        "bf16": bf16_is_fast(_compute_device().type, get_accelerator().is_bf16_supported()),
        "shapes": [[*shape, count] for shape, count in shapes_to_measure(optimizer).items()],
        "group_count": len(groups),
        "matrices": sum(len(spec.blocks) for spec in optimizer.specs.values()),
        "idle": optimizer.unused_options,
    }


def _judge_settings(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Ranks of one stage hold the same parameters; the rest is the same on all ranks."""
    error = differences(facts, {"version": "the deepspeed-muon version", "config": "optimizer.params"})
    of_parameters = {"routes": "the routing", "groups": "the settings of parameter groups"}
    if error := error or differences(facts, of_parameters, within="stage"):
        return {"error": error}
    firsts = {stated["stage"]: rank for rank, stated in reversed(list(enumerate(facts)))}
    stages = [facts[rank] for _, rank in sorted(firsts.items())]
    counted: Counter[tuple[int, int]] = Counter()
    for stated in stages:
        counted |= Counter({(rows, cols): count for rows, cols, count in stated["shapes"]})
    return {
        "bf16": all(stated["bf16"] for stated in facts),
        "shapes": [[*shape, count] for shape, count in counted.items()],
        "groups": max(stated["group_count"] for stated in stages),
        "matrices": sum(stated["matrices"] for stated in stages),
        "firsts": sorted(firsts.values()),
        "idle": [
            f"stage {stated['stage']}: {stated['idle'][wish]}"
            for wish in stages[0]["idle"]
            if all(wish in stated["idle"] for stated in stages)
            for stated in stages
        ],
    }


def _judge_kernels(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What any rank lacks, all do without."""
    return {kind: _first_reason(facts, kind) for kind in sorted({kind for stated in facts for kind in stated})}


def _first_reason(facts: list[dict[str, Any]], kind: str) -> str | None:
    return next((f"rank {rank}: {stated[kind]}" for rank, stated in enumerate(facts) if stated.get(kind)), None)
