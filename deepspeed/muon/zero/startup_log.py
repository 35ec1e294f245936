# SPDX-License-Identifier: Apache-2.0
"""The log at start: who does what, which parameters were split, and what would make a step faster."""

from __future__ import annotations

import math
from typing import Any

from deepspeed.muon.kernels import selection
from deepspeed.muon.log import logger
from deepspeed.muon.math.scale import SCALES, update_rms
from deepspeed.muon.matrices.pipeline import stages_of
from deepspeed.muon.matrices.routing import MatrixSpec, is_lora
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan.plan import Plan
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.experts import expert_counts
from deepspeed.muon.zero.wrappers.tensor_parallel import matrix_share

#: A sub-group plan this much slower than the whole group's is worth a warning.
SLOW_SUB_GROUPS = 1.25


def log_startup(adapter: Adapter, lacking: selection.Missing, matrices_of_all: int) -> None:
    """Log one line for this rank's share of the model, and one for each kind of split.

    Args:
        lacking: why kernels are not used, by kind.
        matrices_of_all: of all shares.
    """
    engine, optimizer = adapter.engine, adapter.optimizer
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
        *expert_counts(engine, optimizer),
        f"{len(rest)} tensors ({_elements(rest):,} parameters) to AdamW"
        + (f", {len(lora)} of them LoRA factors (Muon by muon_include)" if lora else ""),
        *(_steps(engine, optimizer, lacking, matrices) if matrices else ()),
    )
    logger.info("deepspeed-muon %s: %s", __version__, "; ".join(facts))
    for (split, is_whole), names in _splits(matrices).items():
        what = split if is_whole else f"split into {split}"
        logger.info("deepspeed-muon: %s: %d parameters, first %s", what, len(names), names[0])
    if not adapter.bounds_memory_by_sub_groups:
        _warn_of_small_sub_groups(optimizer)


def _elements(specs: list[MatrixSpec]) -> int:
    """Number of elements before tensor parallelism cuts the matrices."""
    return sum(math.prod(spec.whole) for spec in specs)


def _place(engine: Any, optimizer: MuonWithAuxAdam) -> tuple[str, ...]:
    """Which share of the model this line is about: each share that plans for itself logs its own line."""
    if engine.autotp_size() > 1:
        cut = f"tensor parallelism over {engine.autotp_size()} ranks"
        is_whole = optimizer.config.tp_mode == "whole"
        return (
            f"{cut}, matrices whole" if is_whole else f"{cut}, shards of rank {matrix_share(optimizer)} as matrices",
        )
    stages = stages_of(engine.module)
    return (f"stage {optimizer.stage + 1} of {stages} of the pipeline",) if stages > 1 else ()


def _steps(
    engine: Any, optimizer: MuonWithAuxAdam, lacking: selection.Missing, matrices: list[MatrixSpec]
) -> tuple[str, ...]:
    """How a step runs: ranks, traffic, Newton-Schulz, scale."""
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
        f"{selection.summary(optimizer.kernels, lacking)}, {_methods(optimizer)}",
        f"adjust_lr_fn {config.scale} = {SCALES[config.scale][0].replace('rms_scale', f'{config.rms_scale:g}')}: "
        f"update RMS {rms:.3g} x lr for {typical.name} {list(typical.whole)} ({config.scale_reason})",
    )


def _splits(specs: list[MatrixSpec]) -> dict[tuple[str, bool], list[str]]:
    """Names of parameters by how they are split, as text, and whether that means that they stay whole."""
    found: dict[tuple[str, bool], list[str]] = {}
    for spec in specs:
        if spec.split:
            found.setdefault((spec.split, spec.left_whole), []).append(spec.name)
    return found


def _stage_0(engine: Any, optimizer: MuonWithAuxAdam) -> str:
    """How ranks that all hold everything divide the work."""
    if engine.world_size == 1 or engine.zero_optimization_stage() > 0 or engine.autotp_size() > 1:
        return ""
    shared = [partition.is_replicated for partition in optimizer.partitions]
    if all(shared):
        return " that share Newton-Schulz"
    return " of which each orthogonalizes " + ("the small groups itself" if any(shared) else "everything itself")


def _methods(optimizer: MuonWithAuxAdam) -> str:
    """The methods of Newton-Schulz, and who chose them."""
    groups = [group for group in optimizer.param_groups if group["use_muon"]]
    if any(group["ns_method"] != "auto" for group in groups):
        return "ns_method " + ", ".join(sorted({group["ns_method"] for group in groups}))
    chosen = list(groups[0]["ns_methods"].values())
    return f"gram for {chosen.count('gram')} of {len(chosen)} shapes ({optimizer.config.ns_tuning} rule)"


def _warn_of_small_sub_groups(optimizer: MuonWithAuxAdam) -> None:
    """Sub-groups are stepped one after the other, so one with fewer matrices than ranks leaves ranks idle."""
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
    """A lower bound on the busiest rank's load if the sub-groups of one group were stepped as one."""
    if len(plans) == 1:
        return max(plans[0].loads)
    return max(sum(sum(plan.loads) for plan in plans) / plans[0].world_size, *(max(plan.loads) for plan in plans))
