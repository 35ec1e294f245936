# SPDX-License-Identifier: Apache-2.0
"""Bind the optimizer to an engine: compare the ranks, read ZeRO's layout, plan communication, create the state."""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants
from torch import Tensor

from deepspeed.muon.config.schema import GROUP_KEYS
from deepspeed.muon.errors import MuonConfigError, UnsupportedError, logger
from deepspeed.muon.exchange.consensus import Facts, agree, differences, short_hash, union
from deepspeed.muon.kernels import selection
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.monitor import Recorder
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import split_hashes
from deepspeed.muon.step import StepContext
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.checkpoint import universal
from deepspeed.muon.zero.refusals import refuse_qk_clip
from deepspeed.muon.zero.startup_log import log_startup
from deepspeed.muon.zero.wrappers.adapter import Adapter, patch
from deepspeed.muon.zero.wrappers.gradient_norms import NormWatch
from deepspeed.muon.zero.wrappers.grids import grid_of, stage_number
from deepspeed.muon.zero.wrappers.stage0 import Plain, Stage0
from deepspeed.muon.zero.wrappers.stage3 import Stage3
from deepspeed.muon.zero.wrappers.stage12 import Bf16, Stage12
from deepspeed.muon.zero.wrappers.tensor_parallel import whole_over_tp

#: Keys of a parameter group that must be equal on all ranks of a stage (:func:`agree_on_settings`). Keys that a user
#: adds are not compared.
COMPARED_KEYS = (*GROUP_KEYS, "name", "moe", "use_muon", "lr_ratio")
#: A part of the start that takes at least this many seconds is logged.
SLOW = 2.0


def agree_on_settings(engine: Any, optimizer: MuonWithAuxAdam) -> Facts:
    """Check that all ranks have the same package version, config and parameters; return facts about them. A collective.

    A *stage* below is a pipeline stage or, under ``tp_mode: shard``, one tensor-parallel rank's shards of a pipeline
    stage (:func:`stage_number`).

    Returns:
        - ``group_count``: the largest number of parameter groups in a stage.
        - ``matrices``: the number of Muon's matrices in the whole model.
        - ``first_ranks``: the lowest rank of each stage.
        - ``cpus_per_rank``: how many CPUs each rank has for itself, at least 1.
        - ``monitor``: whether DeepSpeed's monitor is enabled on rank 0.

    Raises:
        DisagreementError: the ranks differ, or some do not respond.
        MuonConfigError: a key in ``optimizer.params`` has no effect on the model.
    """
    agreed = agree(lambda: _facts(engine, optimizer), _judge_settings)
    if unused := agreed.pop("unused_options"):
        raise MuonConfigError("\n".join(unused))
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
    # The second comparison: patches.py made the first one before ZeRO was built, because ZeRO's constructor calls
    # collectives, which need equal parameters on all ranks. This one sees the parameter groups as ZeRO left them, and
    # its result is needed below.
    with slow("comparing the settings of all ranks"):
        agreed = agree_on_settings(engine, optimizer)
    if optimizer.qk_clip:
        refuse_qk_clip(engine)
    grid = grid_of(engine)
    peers, muon_of_all_stages = None, None
    if engine.pipeline_parallelism:
        peers = grid.group if grid else engine.mpu.get_data_parallel_group()
        muon_of_all_stages = dict(
            sorted(json.loads(line) for line in union(map(json.dumps, split_hashes(optimizer).items())))
        )
    adapter = engine.muon_adapter = adapter_for(engine, optimizer)
    is_finite = adapter.watch_gradients()  # before prepare, which wraps ``step`` once more
    adapter.prepare(agreed["group_count"])
    partitions = adapter.partitions()
    if grid is not None and optimizer.config.tp_mode == "whole":
        partitions = whole_over_tp(adapter, grid, partitions)
    # Newton-Schulz runs there even if the shards are on the host.
    device = torch.device(get_accelerator().current_device_name())
    tensors = [tensor for partition in partitions for tensor in partition.tensors]
    kinds = sorted({device.type, *(tensor.device.type for tensor in tensors)})
    with slow("building or loading the kernels"):
        kernel_facts = agree(lambda: _kernel_facts(optimizer.config.kernels, kinds, device.type), _judge_kernels)
    optimizer.context = StepContext(
        is_logging=engine.global_rank == 0,
        kernels=selection.choose(kernel_facts["unavailable"]),
        dtype=kernel_facts["dtype"],
        unavailable=kernel_facts["unavailable"],
        peers=peers,
        muon_of_all_stages=muon_of_all_stages,
        is_stepped_in_parts=True,
        is_finite=is_finite,
        read_flags=is_finite.read if isinstance(is_finite, NormWatch) else Tensor.tolist,
        gradients_of=adapter.gradients,
    )
    with slow("planning the exchange and allocating the state"):
        optimizer.bind(partitions, device)
    with slow("comparing the plans of all ranks"):
        compare_plans(engine)
    with slow("connecting the ranks for the exchange"):
        optimizer.connect()
    is_recorded = agreed["monitor"] and optimizer.config.monitor_interval > 0
    engine._muon_recorder = Recorder(optimizer, get_accelerator().synchronize) if is_recorded else None
    # States are saved under AdamW's names, the only ones that DeepSpeed's converter reads.
    optimizer.saved_form.is_convertible = True
    adapter.patch_state_access()
    _support_universal_checkpoints(adapter)
    if engine.global_rank in agreed["first_ranks"]:
        log_startup(adapter, agreed["matrices"], agreed["cpus_per_rank"])


def _support_universal_checkpoints(adapter: Adapter) -> None:
    """Make the adapter's engine load universal checkpoints, and save the version that DeepSpeed's converter needs."""
    engine = adapter.engine
    if getattr(engine.module, constants.UNIVERSAL_CHECKPOINT_INFO, None) is None:
        info = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
        setattr(engine.module, constants.UNIVERSAL_CHECKPOINT_INFO, info)
    if hasattr(adapter.wrapper, "_load_universal_checkpoint"):  # not at stage 0
        adapter.patch("_load_universal_checkpoint", functools.partial(universal.load, adapter))
    if engine.load_universal_checkpoint():
        patch(engine, "_get_all_ckpt_names", universal.either_name)


@contextmanager
def log_if_slow(what: str, is_logging_rank: bool) -> Iterator[None]:
    """Log "``what`` took 2.3 s" if the ``with`` block takes at least :data:`SLOW` seconds and this rank logs."""
    began = time.perf_counter()
    yield
    if (took := time.perf_counter() - began) >= SLOW and is_logging_rank:
        logger.info("deepspeed-muon: %s took %.1f s", what, took)


def compare_plans(engine: Any) -> None:
    """Check that the ranks have the same plan, which says which ranks orthogonalize which matrix; a collective.

    Raises:
        DisagreementError: ranks that hold the same parameters have different plans or settings.
    """
    optimizer = engine.basic_optimizer
    texts = {
        "plan": "ranks {ranks} have planned another exchange than rank {first}; call load_checkpoint, and whatever "
        "else changes the optimizer, on all ranks",
    }
    stated = {"stage": stage_number(engine, optimizer), "plan": optimizer.digest()}
    agree(lambda: stated, lambda facts: differences(facts, texts, within="stage"))


def _facts(engine: Any, optimizer: MuonWithAuxAdam) -> Facts:
    """Return facts about this rank, such as hashes of its config and parameter groups, for :func:`_judge_settings`."""
    groups = [{key: value for key, value in g.items() if key in COMPARED_KEYS} for g in optimizer.param_groups]
    routes = sorted(f"{s.name}{s.whole}{s.use_muon}{s.blocks}" for s in optimizer.specs.values())
    return {
        "version": __version__,
        "config": optimizer.config.digest(),
        "stage": stage_number(engine, optimizer),
        "groups": short_hash(json.dumps(groups)),
        "routes": short_hash("".join(routes)),
        "order": short_hash("\n".join(s.name for s in optimizer.specs.values())),
        "machine": _machine(),
        "cpus": usable_cpus(),
        "group_count": len(groups),
        "matrices": sum(len(spec.blocks) for spec in optimizer.specs.values()),
        "monitor": engine.monitor.enabled,
        "unused_options": optimizer.unused_options,
    }


def _machine() -> str:
    """Return a text that identifies this machine: its boot id, because host names of containers may be equal."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use: all of the machine, or those that it is bound to."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpus_per_rank(machines: Sequence[str], cpus: Sequence[Sequence[int]]) -> int:
    """Return each rank's share of its machine's CPUs: at least 1, and equal for all ranks.

    Example: 2 ranks on the same 8 CPUs have 4 each.

    Args:
        machines: a name of the machine of each rank.
        cpus: the result of :func:`usable_cpus` on each rank. Ranks of one machine share the CPUs that they
            have in common.
    """
    ranks = Counter((name, cpu) for name, usable in zip(machines, cpus, strict=True) for cpu in usable)
    shares = (sum(1 / ranks[name, cpu] for cpu in usable) for name, usable in zip(machines, cpus, strict=True))
    return max(1, int(min(shares) + 1e-9))  # sums of thirds may be a little less than a whole number


def _judge_settings(of_ranks: list[Facts]) -> Facts:
    """Compare the facts of all ranks (:func:`_facts`, in rank order). Return ``{"error": message}`` if they differ.

    Otherwise return the facts that :func:`agree_on_settings` returns, and in addition ``unused_options``: a list of
    error messages about options that have no effect in any pipeline stage.
    """
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
    if error := differences(of_ranks, of_all) or differences(of_ranks, of_parameters, within="stage"):
        return error
    # Reversed, so that each stage's lowest rank stays.
    first_ranks = {local["stage"]: rank for rank, local in reversed(list(enumerate(of_ranks)))}
    stages = [of_ranks[rank] for _, rank in sorted(first_ranks.items())]
    return {
        "cpus_per_rank": cpus_per_rank([local["machine"] for local in of_ranks], [local["cpus"] for local in of_ranks]),
        "group_count": max(local["group_count"] for local in stages),
        "matrices": sum(local["matrices"] for local in stages),
        "first_ranks": sorted(first_ranks.values()),
        "monitor": of_ranks[0]["monitor"],  # one answer for all, because a record is a collective; rank 0 writes
        # If an option has no effect in any stage, a line per stage.
        "unused_options": [
            f"stage {local['stage']}: {local['unused_options'][option]}"
            for option in stages[0]["unused_options"]
            if all(option in local["unused_options"] for local in stages)
            for local in stages
        ],
    }


def _kernel_facts(setting: str, kinds: list[str], device_type: str) -> Facts:
    """Return this rank's facts about kernels, for :func:`_judge_kernels`.

    ``unavailable``: {each device type in ``kinds``: why this rank cannot use its fast kernels, or ``None``}. ``dtype``:
    in which dtype this rank would run Newton-Schulz on ``device_type``. ``setting``: the config key ``kernels``.
    """
    unavailable = selection.unavailable_kernels(setting, kinds)
    return {"unavailable": unavailable, "dtype": selection.fast_dtype(device_type, unavailable)}


def _judge_kernels(of_ranks: list[Facts]) -> Facts:
    """Merge the facts of all ranks about kernels (:func:`_kernel_facts`).

    Return for example ``{"unavailable": {"cpu": "rank 1: there is no C++ compiler"}, "dtype": "fp32"}``.
    ``unavailable``: {device type: why some rank cannot use its fast kernels, or ``None`` if all can}. ``dtype``: the
    most exact of the dtypes that the ranks would choose for Newton-Schulz.
    """
    unavailable: dict[str, str | None] = {}
    for rank, local in enumerate(of_ranks):
        for kind, reason in local["unavailable"].items():
            unavailable[kind] = unavailable.get(kind) or (f"rank {rank}: {reason}" if reason else None)
    dtype = next(name for name in DTYPES if any(local["dtype"] == name for local in of_ranks))  # the most exact
    return {"unavailable": dict(sorted(unavailable.items())), "dtype": dtype}


ADAPTERS: dict[str, type[Adapter]] = {adapter.CLASS: adapter for adapter in (Stage0, Stage12, Bf16, Stage3)}


def adapter_for(engine: Any, optimizer: MuonWithAuxAdam) -> Adapter:
    """Return a new :class:`Adapter`, the interface to the wrapper that DeepSpeed put around ``optimizer``.

    The wrapper is ZeRO's, for example. Without a wrapper, return a :class:`Plain`. Raise UnsupportedError if no adapter
    supports the wrapper's class.
    """
    if engine.optimizer is optimizer:
        return Plain(engine, optimizer)
    name = type(engine.optimizer).__name__
    if name in ADAPTERS:
        return ADAPTERS[name](engine, optimizer)
    raise UnsupportedError(
        f"deepspeed-muon does not support DeepSpeed's optimizer wrapper {name}; choose a ZeRO stage and precision with "
        f"which DeepSpeed uses one of {', '.join(ADAPTERS)}, such as zero_optimization.stage 1"
    )
