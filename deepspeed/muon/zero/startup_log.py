# SPDX-License-Identifier: Apache-2.0
"""The log at start: a line on what Muon and AdamW update, warnings of what slows steps down, and details at DEBUG."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import logger
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.kernels.selection import WITH_FAST_KERNELS, summary
from deepspeed.muon.layout import MatrixSpec
from deepspeed.muon.math.rules import SCALES, update_rms
from deepspeed.muon.model.fused_weights import stages_of
from deepspeed.muon.model.routing import head_note
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.scheduler import momentum_note, rate_warning, read_schedule
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.grids import expert_counts, tp_rank
from deepspeed.muon.zero.wrappers.stage3 import limit_without_cuts

#: Warn if stepping sub-groups one by one takes more than this many times as long as stepping whole groups could.
MAX_SUB_GROUP_SLOWDOWN = 1.25
REST = "print(engine.basic_optimizer.describe()) shows each parameter"
#: Advise using more threads if a rank has at least this many CPUs for each of its threads.
CPUS_PER_THREAD_TO_ADVISE = 4


def log_startup(adapter: Adapter, matrices_of_all: int, cpus_per_rank: int) -> None:
    """Log in one line what Muon and AdamW will update, and at DEBUG how a step runs and how parameters are split.

    Warn of what makes steps slower than they could be. Call this on one rank of each part of the model: of each
    pipeline stage and, under ``tp_mode: shard``, of each tensor-parallel shard.

    Args:
        adapter: the :class:`Adapter` of the engine's ZeRO wrapper.
        matrices_of_all: number of Muon's matrices in the whole model.
        cpus_per_rank: how many CPUs each rank has for itself.
    """
    engine, optimizer, specs = adapter.engine, adapter.optimizer, adapter.optimizer.specs.values()
    matrices, rest = ([spec for spec in specs if spec.use_muon == use_muon] for use_muon in (True, False))
    for spec in specs:
        half = "Muon" if spec.use_muon else "AdamW"
        logger.debug("deepspeed-muon: %s %s: %s, %s", spec.name, spec.shape, half, spec.reason)
    if not matrices_of_all:
        optimizer.warn_of_no_matrix()
        return
    lora = [spec for spec in rest if spec.is_lora]
    place, count = _line_prefix(engine, optimizer), engine.world_size // stages_of(engine.module)
    facts = (
        f"Muon updates {sum(len(s.blocks) for s in matrices)} matrices ({_elements(matrices):,} parameters)",
        *expert_counts(engine, optimizer),
        f"AdamW updates {len(rest)} tensors ({_elements(rest):,} parameters)",
        *([f"{len(lora)} of them LoRA factors (muon_lora can send them to Muon)"] if lora else ()),
        f"on {count} rank{'s' * (count > 1)}",
    )
    config = optimizer.config
    preset = [f"preset {config.preset}"] if config.preset != "none" else []
    how = (*preset, _size_of_updates(config), _where_and_in(optimizer), REST) if matrices else ()
    logger.info("deepspeed-muon %s: %s%s", __version__, place, "; ".join([", ".join(facts), *how]))
    if matrices:
        _warn_of_slow_steps(optimizer, cpus_per_rank)
        logger.debug("deepspeed-muon: %s%s", place, "; ".join(_update_phrases(optimizer, matrices)))
        logger.debug("deepspeed-muon: %s%s", place, "; ".join(_step_phrases(engine, optimizer)))
    if config.preset != "none":
        logger.debug("deepspeed-muon: %s", config.preset_summary)
    splits = defaultdict[str, list[str]](list)
    for spec in matrices:
        if spec.split:
            splits[spec.split if spec.left_whole else f"split into {spec.split}"].append(spec.name)
    for split, names in splits.items():
        logger.debug("deepspeed-muon: %s: %d parameters (first: %s)", split, len(names), names[0])
    if note := head_note(specs):
        logger.info("deepspeed-muon: %s", note)
    _warn_of_no_decay(optimizer)
    _log_schedule(engine, optimizer)
    if not adapter.is_swapped:
        _warn_of_small_sub_groups(optimizer)


def _elements(specs: list[MatrixSpec]) -> int:
    """Return how many elements the parameters in ``specs`` have, before tensor parallelism or ZeRO shards them."""
    return sum(math.prod(spec.whole) for spec in specs)


def _line_prefix(engine: Any, optimizer: MuonWithAuxAdam) -> str:
    """Return a prefix for log lines, such as ``"stage 1 of 2 of the pipeline: "``; empty without model parallelism."""
    (rank, size), stages = tp_rank(engine), stages_of(engine.module)
    is_whole = optimizer.config.tp_mode == "whole"
    how = "orthogonalizing whole matrices" if is_whole else f"orthogonalizing each shard by itself, here of rank {rank}"
    stage = f"stage {optimizer.stage + 1} of {stages} of the pipeline: " if stages > 1 else ""
    return stage + (f"tensor parallelism over {size} ranks, {how}: " if size > 1 else "")


def _update_phrases(optimizer: MuonWithAuxAdam, matrices: list[MatrixSpec]) -> tuple[str, ...]:
    """Return phrases for the log on how a step changes the weights: the RMS of an update, options such as QK-clip.

    The RMS is that of one parameter, the one of median size in ``matrices`` (the parameters that Muon updates).
    """
    config = optimizer.config
    whole = sorted((spec for spec in matrices if spec.blocks), key=lambda spec: math.prod(spec.whole))
    typical = whole[len(whole) // 2]
    rms = update_rms(config.scale, typical.blocks[0].rows, typical.blocks[0].cols, config.rms_scale)
    formula = SCALES[config.scale][0].replace("rms_scale", f"{config.rms_scale:g}")
    return (
        f"the update of {typical.name} {list(typical.whole)} has RMS {rms:.3g} x lr, by adjust_lr_fn {config.scale} = "
        + formula,
        *config.beyond_muon,
        *([f"{optimizer.qk_clip}"] if optimizer.qk_clip else ()),
    )


def _size_of_updates(config: MuonConfig) -> str:
    """Return a phrase for the log on the size of updates: their RMS, or a formula if it depends on the shape."""
    size = f"RMS {config.rms_scale:g} x lr" if config.scale == "match_rms_adamw" else f"scale {SCALES[config.scale][0]}"
    return f"updates of {size} (adjust_lr_fn {config.scale}, {config.scale_reason})"


def _where_and_in(optimizer: MuonWithAuxAdam) -> str:
    """Return a phrase for the log: on which device and in which dtype Newton-Schulz runs, and why in this dtype."""
    return f"Newton-Schulz on {optimizer.exchange.device.type} in {optimizer.ns_dtype} ({_why_dtype(optimizer)})"


def _step_phrases(engine: Any, optimizer: MuonWithAuxAdam) -> tuple[str, ...]:
    """Return phrases for the log on how a step runs: megabytes sent, kernels, methods of Newton-Schulz."""
    exchange, plans = optimizer.exchange, optimizer.plans
    methods = sorted(optimizer.ns_methods - {"auto"})
    sent = sum(plan.sent_elements for plan in plans) * exchange.dtype.itemsize / 1e6
    extra = sum(2 * plan.moved_elements for plan in plans) * exchange.dtype.itemsize / 1e6
    return (
        f"rank {engine.global_rank} sends {sent:.1f} MB per step in {optimizer.config.wire}",
        *([f"all ranks send {extra:.1f} MB more to share the work evenly"] if extra else ()),
        *_work_division(engine, optimizer),
        f"kernels: {summary(optimizer.context.kernels, optimizer.context.unavailable)}",
        *([f"ns_method {', '.join(methods)} in groups that set it"] if methods else ()),
    )


def _warn_of_slow_steps(optimizer: MuonWithAuxAdam, cpus_per_rank: int) -> None:
    """Warn of what makes a step slower than it could be: missing fast kernels, too few or too many CPU threads."""
    context, threads = optimizer.context, torch.get_num_threads()
    found = []
    lacking = any(context.unavailable.get(kind) for kind in WITH_FAST_KERNELS)
    if lacking and optimizer.config.kernels == "auto":
        found.append(f"kernels: {summary(context.kernels, context.unavailable)}")
    on_cpu = any(tensor.is_cpu for partition in optimizer.all_partitions for tensor in partition.tensors)
    per_rank = f"threads per rank: {threads}, CPUs per rank: {cpus_per_rank}"
    if on_cpu and threads > cpus_per_rank:
        found.append(f"{per_rank}; set OMP_NUM_THREADS to at most {cpus_per_rank}")
    elif on_cpu and cpus_per_rank >= CPUS_PER_THREAD_TO_ADVISE * threads:
        found.append(f"{per_rank}; set OMP_NUM_THREADS to use more, up to {cpus_per_rank}")
    for text in found:
        logger.warning("deepspeed-muon: steps are slower than they could be: %s", text)


def _why_dtype(optimizer: MuonWithAuxAdam) -> str:
    """Return in a few words why Newton-Schulz runs in its dtype."""
    dtype, is_cpu = optimizer.ns_dtype, optimizer.compute_device.type == "cpu"
    if optimizer.config.ns_dtype != "auto":
        return "set by ns_dtype"
    if dtype == "fp32":
        return "bf16 is not faster here" if is_cpu else "this accelerator lacks fp16"
    return "this CPU multiplies it fastest" if is_cpu else "as fast as bf16, and more exact"


def _work_division(engine: Any, optimizer: MuonWithAuxAdam) -> list[str]:
    """Return a list with one phrase for the log: how the ranks divide Newton-Schulz at ZeRO stage 0.

    The list is empty at other stages, on a single rank, and under tensor parallelism.
    """
    if engine.world_size == 1 or engine.zero_optimization_stage() > 0 or tp_rank(engine)[1] > 1:
        return []
    shared = [partition.is_replicated for partition in optimizer.partitions]
    if all(shared):
        return ["the ranks share Newton-Schulz"]
    alone = "the small groups" if any(shared) else "everything"
    return [f"each rank orthogonalizes {alone} itself, which takes less time than to share it"]


def _log_schedule(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Warn if the schedule overrides the learning rate in ``optimizer.params``; log how it cycles the momentum."""
    if engine.client_lr_scheduler is not None or engine.global_rank:
        return
    schedule = read_schedule({"type": engine.scheduler_name(), "params": engine.scheduler_params()})
    if text := rate_warning(schedule, optimizer.config):
        logger.warning("deepspeed-muon: %s", text)
    if text := momentum_note(schedule):
        logger.info("deepspeed-muon: %s", text)


def _warn_of_no_decay(optimizer: MuonWithAuxAdam) -> None:
    """Warn of options that change how Muon's weight decay works, if the weight decay of all Muon groups is 0."""
    decays = [group["weight_decay"] for group in optimizer.param_groups if group["use_muon"]]
    for key in ("cautious_weight_decay", "muon_weight_decay_steps"):
        if getattr(optimizer.config, key) and decays and not any(decays):
            logger.warning(
                f"deepspeed-muon: optimizer.params.{key} has no effect, because weight_decay is 0 in every Muon group; "
                "set weight_decay, or remove the key"
            )


def _warn_of_small_sub_groups(optimizer: MuonWithAuxAdam) -> None:
    """Warn if stage 3's sub-groups, which are stepped one by one, have too few matrices to keep all ranks busy."""
    plans = optimizer.plans
    groups = defaultdict[int, list[Plan]](list)
    for partition, plan in zip(optimizer.partitions, plans, strict=True):
        groups[partition.index].append(plan)
    spent = sum(max(plan.loads) for plan in plans)
    possible = 0.0
    for group in groups.values():
        # A lower bound on the busiest rank's load if the sub-groups of each group were stepped as one.
        even = sum(sum(plan.loads) for plan in group) / group[0].world_size
        possible += max(even, max(max(plan.loads) for plan in group))
    if spent > MAX_SUB_GROUP_SLOWDOWN * possible:
        size = limit_without_cuts(partition.tensors[0].numel() for partition in optimizer.partitions)
        logger.warning(
            f"deepspeed-muon: zero_optimization.sub_group_size splits the matrices into {len(plans)} sub-groups, which "
            f"leaves ranks idle: Newton-Schulz takes {spent / possible:.1f} times as long as without them; set "
            f"sub_group_size to {size} or more"
        )
