# SPDX-License-Identifier: Apache-2.0
"""Check whether a checkpoint fits an engine, before anything is loaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.exchange.groups import union
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.log import logger
from deepspeed.muon.matrices.pipeline import stages_of
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import (
    WEIGHTS_ALONE,
    conversion,
    muon_names,
    routing_difference,
    saved_groups,
    split_hashes,
)
from deepspeed.muon.step.partition_step import short_hash
from deepspeed.muon.zero.checkpoint.safe_load import read_model, read_states
from deepspeed.muon.zero.tp_ranks import tp_rank


def loads_states(arguments: Mapping[str, Any], kind: str = "optimizer") -> bool:
    """Return whether ``load_checkpoint(**arguments)`` loads the states of ``kind``, "optimizer" or "lr_scheduler"."""
    return arguments[f"load_{kind}_states"] and not arguments["load_module_only"]


def engine_fingerprint(engine: Any, exclude_frozen: bool = False) -> dict[str, Any]:
    """Return facts about an engine as JSON values. A save records them, and a load compares them with its own engine's.

    Ranks that hold the same part of the model (see :func:`model_share`) get the same result. Some of its keys:
    ``shapes``: {name: shape} of parameters and persistent buffers, without frozen parameters if ``exclude_frozen``.
    ``groups``: for each parameter group, the settings that a load compares.
    ``layout``: a hash of the positions of all parameters in the flat tensors of all ranks.
    ``params``: at stage 0 only, a list of parameter names for each group.
    """
    optimizer: MuonWithAuxAdam = engine.basic_optimizer
    names = {"matrices": sorted(muon_names(optimizer))}
    groups = [group | names if group["use_muon"] else group for group in optimizer.param_groups]
    kept = ("use_muon", "ns_choice", "ns_methods", "owner_counts", "matrices")
    is_stage_0 = not engine.zero_optimization()
    return {
        "stage": engine.zero_optimization_stage(),
        "wrapper": engine.muon_adapter.CLASS,
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        "world_size": engine.seq_dp_world_size,
        "scheduler": engine.lr_scheduler is not None,
        "shapes": _shapes(engine.module, exclude_frozen),
        "groups": [{key: group[key] for key in kept if key in group} for group in groups],
        "layout": _layout(optimizer.all_partitions),
    } | ({"params": _names_by_group(optimizer)} if is_stage_0 else {})


def model_share(engine: Any) -> tuple[int, int]:
    """Return (i, n): this rank holds part i of the model's n parts (pipeline stages x tensor-parallel ranks)."""
    rank, size = tp_rank(engine)
    return engine.basic_optimizer.stage * size + rank, stages_of(engine.module) * size


def _shapes(module: torch.nn.Module, exclude_frozen: bool) -> dict[str, list[int]]:
    params = dict(module.named_parameters(remove_duplicate=False))
    frozen = {name for name, param in params.items() if exclude_frozen and not param.requires_grad}
    return {
        name: list(getattr(params.get(name, value), "ds_shape", value.shape))
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and name not in frozen
    }


def _names_by_group(optimizer: MuonWithAuxAdam) -> list[list[str]]:
    """Return a list of parameter names for each group at stage 0, in the order of the states in ``state_dict()``."""
    partitions = sorted(optimizer.all_partitions, key=lambda partition: partition.index)
    return [[shard.spec.name for shard in partition.shards] for partition in partitions]


def _layout(partitions: list[Partition]) -> str:
    lines = sorted(
        (partition.index, order, shard.spec.name, shard.placement.origin, shard.placement.span, shard.placement.base)
        for partition in partitions
        for order, shard in enumerate(partition.shards)
    )
    return short_hash(json.dumps(lines))


def split_hashes_of_all_stages(optimizer: MuonWithAuxAdam) -> dict[str, str]:
    """Return {parameter name: hash of how it is split into matrices} for Muon's parameters in all pipeline stages.

    A collective.
    """
    return dict(sorted(json.loads(line) for line in union(map(json.dumps, split_hashes(optimizer).items()))))


def checkpoint_fingerprint(engine: Any, arguments: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return those facts of :func:`engine_fingerprint` that DeepSpeed's own checkpoint files contain.

    Call it if there is no :mod:`manifest`. It opens the files that this rank would load, but reads no tensor. One more
    key, ``order``, has the names and shapes of the parameters in their order; at stage 0 only their sizes. If the files
    contain only some of the shapes, the key is ``partial_shapes`` instead of ``shapes``; a pipeline has neither.

    Args:
        arguments: {name of an argument of ``load_checkpoint``: value}.

    Raises:
        CheckpointError: a file is missing or unreadable, or the engine has stage 0 and the checkpoint stage 1 to 3.
    """
    folder = arguments["load_dir"]
    model = _opened(read_model, engine._get_ckpt_name(folder, tag))
    saved = {"world_size": model["dp_world_size"], "scheduler": model["lr_scheduler"] is not None}
    if engine.zero_optimization_partition_weights():
        saved["partial_shapes"] = {n: list(s) for group in model["param_shapes"] for n, s in group.items()}
    elif model["module"] is not None:  # a pipeline saves each layer in its own file
        key = "partial_shapes" if engine.has_moe_layers else "shapes"  # each expert has its own file
        saved[key] = {n: list(v.shape) for n, v in model["module"].items() if isinstance(v, torch.Tensor)}
    if loads_states(arguments):
        zero = engine.zero_optimization() and _opened(read_states, engine._get_zero_ckpt_name(folder, tag))
        states = zero["optimizer_state_dict"] if zero else model["optimizer"]
        if states is None:
            raise CheckpointError(
                f"the checkpoint was saved at ZeRO stage 1, 2 or 3, this run has stage 0; load {WEIGHTS_ALONE}"
            )
        saved["groups"] = saved_groups(states)
        saved["order"] = _order(model["param_shapes"]) if zero else _sizes_of(states)
    return saved


def _order(param_shapes: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return [[name, shape] for each parameter], in flattened order, from [{name: shape} for each group]."""
    return [[name, list(shape)] for group in param_shapes for name, shape in group.items()]


def _sizes_of(states: Mapping[str, Any]) -> list[int | None]:
    """Return [number of elements of each parameter] from saved stage-0 optimizer states; ``None`` without a state."""
    inner = states.get("optimizer_state_dict", states)
    indices = [index for group in inner["param_groups"] for index in group["params"]]
    found = [inner["state"].get(index, {}) for index in indices]
    return [state["exp_avg"].numel() if "exp_avg" in state else None for state in found]


def _order_difference(engine: Any, saved: Sequence[Any]) -> str | None:
    """Return an error message if the parameters' order differs from ``saved``, the key ``order`` of a fingerprint."""
    if engine.zero_optimization():
        current: list[Any] = _order(engine._get_zero_param_shapes())
    else:  # states have no names at stage 0, so parameters of equal size may be swapped unnoticed
        sizes = [param.numel() for group in engine.basic_optimizer.param_groups for param in group["params"]]
        current = [None if old is None else new for old, new in itertools.zip_longest(saved, sizes)]
    for place, (old, new) in enumerate(itertools.zip_longest(saved, current)):
        if old != new:
            return (
                f"the order of the parameters differs: parameter {place} of the optimizer is {old} in the checkpoint "
                f"and {new} in this run; pass model_parameters in the order and groups of the run that saved it"
            )
    return None


def _opened(read: Callable[[Path], dict[str, Any]], name: str) -> dict[str, Any]:
    file = Path(name)
    if not file.is_file():
        raise CheckpointError(
            f"{file.name} is missing: the checkpoint is damaged, or was saved at another ZeRO stage, in another "
            "precision or on another number of ranks; restore the file, or resume as the checkpoint was saved"
        )
    try:
        return read(file)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
        raise CheckpointError(f"{file.name} cannot be read: {reason}") from error


def difference(engine: Any, saved: dict[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return an error message: why a checkpoint does not fit the engine, and what to do. Return ``None`` if it fits.

    Args:
        saved: facts from :func:`engine_fingerprint`, recorded by the save, or from :func:`checkpoint_fingerprint`.
        arguments: {name of an argument of ``load_checkpoint``: value}; ``tag`` must not be ``None``.
    """
    current, folder = engine_fingerprint(engine), Path(arguments["load_dir"], arguments["tag"])
    known = {**current, **saved}
    stages = {known["stage"], current["stage"]}
    convert = conversion(folder, stages)
    if loads_states(arguments, "lr_scheduler") and current["scheduler"] and not saved["scheduler"]:
        return "it has no state of a learning-rate scheduler; pass load_lr_scheduler_states=False"
    if loads_states(arguments) and (
        text := routing_difference(engine.basic_optimizer, saved["groups"], folder, stages)
    ):
        return text
    is_strict = arguments["load_module_strict"]
    if arguments["custom_load_fn"] is None and (text := _shape_difference(saved, current["shapes"], is_strict)):
        return text
    if (known["stage"] == 3) != (current["stage"] == 3):
        return f"it was saved at ZeRO stage {known['stage']}, this run has stage {current['stage']}; {convert}"
    if not loads_states(arguments):
        # At stage 3 each rank first reads a model file named after it: more ranks than saved would not find theirs.
        if current["stage"] == 3 and known["world_size"] < current["world_size"]:
            return (
                f"it was saved on {_ranks(known['world_size'])}, and this run has {current['world_size']}: at stage 3 "
                f"even loading only its weights needs at most as many ranks as saved it; {convert}"
            )
        return None
    # At stage 0 every rank holds everything except experts, whose files are named after expert-parallel ranks.
    loads_anywhere = stages == {0} and not engine.has_moe_layers
    if known["world_size"] != current["world_size"] and not loads_anywhere:
        return f"it was saved on {_ranks(known['world_size'])}, this run has {current['world_size']}; {convert}"
    for key, title in {"wrapper": "optimizer wrapper", "dtype": "precision"}.items():
        if known[key] != current[key]:
            return f"it was saved with {title} = {known[key]}, this run has {current[key]}; {convert}"
    if "order" in saved and (text := _order_difference(engine, saved["order"])):
        return text
    if known["layout"] != current["layout"]:
        return (
            "its shards divide the parameters differently: parameter groups, their order, sub_group_size or "
            f"round_robin_gradients differ; {convert}"
        )
    return None


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _shape_difference(saved: dict[str, Any], current: dict[str, list[int]], is_strict: bool) -> str | None:
    shapes = saved.get("shapes", saved.get("partial_shapes", {}))
    for name in current:
        if shapes.get(name, current[name]) != current[name]:
            was = f"{name} has shape {shapes[name]} in the checkpoint and {current[name]} in the model"
            return f"{was}: the checkpoint belongs to another model"
    missing, extra = sorted(current.keys() - shapes.keys()), sorted(shapes.keys() - current.keys())
    if is_strict and "shapes" in saved and (missing or extra):
        return (
            f"the model has {missing[:4]}, which the checkpoint lacks, and the checkpoint has {extra[:4]}, which the "
            "model lacks: it belongs to another model; load_module_strict=False loads what both have"
        )
    return None


def warn_of_rates(engine: Any, before: Sequence[float]) -> None:
    """Warn if a load has changed the learning rates ``before`` (one for each group) and no schedule will set them."""
    groups = engine.basic_optimizer.param_groups
    changes = [
        f"{group.get('name', index)} {group['lr']:g} instead of {rate:g}"
        for index, (group, rate) in enumerate(zip(groups, before, strict=True))
        if group["lr"] != rate
    ]
    if changes and engine.lr_scheduler is None and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: without a learning-rate schedule, training continues with the checkpoint's learning "
            f"rates: {', '.join(changes)}; to change them, set lr of engine.optimizer.param_groups after the load"
        )
