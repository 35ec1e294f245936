# SPDX-License-Identifier: Apache-2.0
"""Binds the optimizer to an engine: layout, state, agreement of the ranks, one line of log."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from functools import partial
from typing import Any

import torch

from deepspeed.muon import stalls
from deepspeed.muon.explain import MuonConfigError
from deepspeed.muon.kernels import selection
from deepspeed.muon.logs import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.orthogonalize import bf16_is_fast, resolve_dtype
from deepspeed.muon.partition import Partition
from deepspeed.muon.pipeline import stages_of
from deepspeed.muon.plan import Plan
from deepspeed.muon.routing import MatrixSpec, is_lora
from deepspeed.muon.update import SCALES, update_rms
from deepspeed.muon.version import __version__
from deepspeed.muon.zero import stage0, stage3, stage12
from deepspeed.muon.zero.agreement import consult, differences
from deepspeed.muon.zero.checkpoint import keep_convertible
from deepspeed.muon.zero.experts import describe, holders
from deepspeed.muon.zero.finite import NormWatch, is_valid, on_all_ranks, once_per_step
from deepspeed.muon.zero.methods import compare_plans, shapes_to_measure, tune
from deepspeed.muon.zero.monitor import watch
from deepspeed.muon.zero.nvme import create_states
from deepspeed.muon.zero.resume import keep_resumable
from deepspeed.muon.zero.stages import sum_as_many_norms
from deepspeed.muon.zero.states import keep_accessible
from deepspeed.muon.zero.support import UnsupportedError, refuse_engine, refuse_unsupported
from deepspeed.muon.zero.tensor_parallel import joined, share_of
from deepspeed.muon.zero.universal import read_universal

#: A sub-group plan this much slower than the whole group's is worth a warning.
SLOW_SUB_GROUPS = 1.25


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
    create_states(wrapper, optimizer)
    ns_dtype, device = resolve_dtype(optimizer.config.ns_dtype, verdict["bf16"]), _compute_device()
    kinds = {device.type, *(tensor.device.type for partition in partitions for tensor in partition.tensors)}
    lacking = consult(selection.missing(optimizer.config.kernels, sorted(kinds)), _judge_kernels)
    optimizer.kernels = selection.choose(lacking)
    tune(optimizer, verdict["shapes"], ns_dtype, device)
    optimizer.bind(partitions, ns_dtype, device)
    watch(engine, compare_plans(optimizer, monitor=engine.monitor.enabled)["monitor"])
    keep_accessible(wrapper, optimizer)
    keep_resumable(engine, optimizer)
    keep_convertible(wrapper, optimizer)
    read_universal(engine, optimizer)
    optimizer.report_skip = once_per_step(engine, optimizer.report_skip)
    stalls.watch()
    if engine.global_rank in verdict["firsts"]:
        _report(engine, optimizer, lacking, verdict["matrices"])


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
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    routes = sorted(f"{s.name}{s.whole}{s.use_muon}{s.blocks}" for s in optimizer.specs.values())
    return {
        "version": __version__,
        "config": optimizer.config.digest(),
        "stage": share_of(optimizer),
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16],
        "routes": hashlib.sha256("".join(routes).encode()).hexdigest()[:16],
        "bf16": bf16_is_fast(),
        "shapes": [[*shape, count] for shape, count in shapes_to_measure(optimizer).items()],
        "group_count": len(groups),
        "matrices": sum(len(spec.blocks) for spec in optimizer.specs.values()),
        "idle": optimizer.idle,
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


def _report(engine: Any, optimizer: MuonWithAuxAdam, lacking: selection.Missing, matrices_of_all: int) -> None:
    matrices = [spec for spec in optimizer.specs.values() if spec.use_muon]
    rest = [spec for spec in optimizer.specs.values() if not spec.use_muon]
    for spec in optimizer.specs.values():
        half = "Muon" if spec.use_muon else "AdamW"
        logger.debug("deepspeed-muon: %s %s: %s, %s", spec.name, spec.shape, half, spec.reason)
    if not matrices_of_all:
        reasons = sorted({spec.reason for spec in rest})
        logger.warning("deepspeed-muon: no parameter goes to Muon; the reasons are: %s", "; ".join(reasons))
        return
    lora = [spec for spec in rest if is_lora(spec)]
    facts = (
        *_place(engine, optimizer),
        f"{sum(len(s.blocks) for s in matrices)} matrices ({_elements(matrices):,} parameters) to Muon",
        *describe(engine, optimizer),
        f"{len(rest)} tensors ({_elements(rest):,} parameters) to AdamW"
        + (f", {len(lora)} of them LoRA factors (Muon by muon_include)" if lora else ""),
        *(_steps(engine, optimizer, lacking, matrices) if matrices else ()),
    )
    logger.info("deepspeed-muon %s: %s", __version__, "; ".join(facts))
    for split, names in _splits(matrices).items():
        what = split if split.startswith("left whole") else f"split into {split}"
        logger.info("deepspeed-muon: %s: %d parameters, first %s", what, len(names), names[0])
    if not getattr(engine.optimizer, "swap_optimizer", False):  # there a sub-group bounds the memory of the buffers
        _warn_of_small_sub_groups(optimizer)


def _elements(specs: list[MatrixSpec]) -> int:
    """As many as there are before tensor parallelism cuts them."""
    return sum(math.prod(spec.whole) for spec in specs)


def _place(engine: Any, optimizer: MuonWithAuxAdam) -> tuple[str, ...]:
    """Of which share of the model the line of log speaks: each that plans for itself has a line of its own."""
    if engine.autotp_size() > 1:
        cut = f"tensor parallelism over {engine.autotp_size()} ranks"
        is_whole = optimizer.config.tp_mode == "whole"
        return (f"{cut}, matrices whole" if is_whole else f"{cut}, shards of rank {share_of(optimizer)} as matrices",)
    stages = stages_of(engine.module)
    return (f"stage {optimizer.stage + 1} of {stages} of the pipeline",) if stages > 1 else ()


def _steps(
    engine: Any, optimizer: MuonWithAuxAdam, lacking: selection.Missing, matrices: list[MatrixSpec]
) -> tuple[str, ...]:
    """How a step is done, for the line of log."""
    exchange, plans, config = optimizer.exchange, optimizer.plans, optimizer.config
    sent = sum(plan.sent_elements for plan in plans) * exchange.dtype.itemsize / 1e6
    extra = sum(2 * plan.moved_elements for plan in plans) * exchange.dtype.itemsize / 1e6
    whole = sorted((spec for spec in matrices if spec.blocks), key=lambda spec: math.prod(spec.whole))
    typical = whole[len(whole) // 2]
    rms = update_rms(config.scale, typical.blocks[0].rows, typical.blocks[0].cols, config.rms_scale)
    return (
        f"{engine.world_size // stages_of(engine.module)} ranks{_stage_0(engine, optimizer)}",
        f"{sent:.1f} MB sent per step by rank {engine.global_rank}, {extra:.1f} MB by all ranks to balance the owners",
        f"Newton-Schulz in {str(exchange.dtype).removeprefix('torch.')} on {exchange.device.type}, kernels: "
        f"{selection.describe(optimizer.kernels, lacking)}, {_methods(optimizer)}",
        f"adjust_lr_fn {config.scale} = {SCALES[config.scale][0].replace('rms_scale', f'{config.rms_scale:g}')}: "
        f"update RMS {rms:.3g} x lr for {typical.name} {list(typical.whole)}",
    )


def _splits(specs: list[MatrixSpec]) -> dict[str, list[str]]:
    """By what was done, in words, the parameters that are several matrices, or one of another shape, or could be."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        if spec.split:
            found.setdefault(spec.split, []).append(spec.name)
    return found


def _stage_0(engine: Any, optimizer: MuonWithAuxAdam) -> str:
    """How ranks that all hold everything divide the work, for the line of log."""
    if engine.world_size == 1 or engine.zero_optimization_stage() > 0 or engine.autotp_size() > 1:
        return ""
    shared = [partition.is_replicated for partition in optimizer.partitions]
    if all(shared):
        return " that share Newton-Schulz"
    return " of which each orthogonalizes " + ("the small groups itself" if any(shared) else "everything itself")


def _methods(optimizer: MuonWithAuxAdam) -> str:
    """How often ``gram`` is taken."""
    groups = [group for group in optimizer.param_groups if group["use_muon"]]
    if any(group["ns_method"] != "auto" for group in groups):
        return "ns_method " + ", ".join(sorted({group["ns_method"] for group in groups}))
    chosen = list(groups[0]["ns_methods"].values())
    return f"gram for {chosen.count('gram')} of {len(chosen)} shapes ({optimizer.config.ns_tuning} rule)"


def _warn_of_small_sub_groups(optimizer: MuonWithAuxAdam) -> None:
    """Sub-groups are stepped one by one: one with fewer matrices than ranks leaves ranks idle."""
    plans = optimizer.plans
    groups: dict[int, list[Plan]] = {}
    for partition, plan in zip(optimizer.partitions, plans, strict=True):
        groups.setdefault(partition.index, []).append(plan)
    spent = sum(max(plan.loads) for plan in plans)
    possible = sum(_load_without_sub_groups(group) for group in groups.values())
    if spent > SLOW_SUB_GROUPS * possible:
        size = sum(partition.tensors[0].numel() for partition in optimizer.partitions)
        logger.warning(
            "deepspeed-muon: zero_optimization.sub_group_size cuts the matrices into %d sub-groups, which leaves ranks "
            "idle (%.1fx the Newton-Schulz time that is possible); write %d or more",
            len(plans),
            spent / possible,
            size,
        )


def _load_without_sub_groups(plans: list[Plan]) -> float:
    """The least that the busiest rank could have to do if the sub-groups of one group were one."""
    if len(plans) == 1:
        return max(plans[0].loads)
    return max(sum(sum(plan.loads) for plan in plans) / plans[0].world_size, *(max(plan.loads) for plan in plans))
