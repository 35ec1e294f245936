# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint on all ranks, or raise the same error on all of them and change nothing.

:func:`load_checkpoint` replaces DeepSpeed's. Every rank first checks, by the names and the structure of its files,
whether they fit the engine (:func:`misfit`). In this module ``arguments`` are those of ``load_checkpoint``, as a dict.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.utils import groups
from torch import Tensor, nn

from deepspeed.muon.errors import CheckpointError, logger
from deepspeed.muon.exchange.consensus import gathered, raise_on_all_ranks
from deepspeed.muon.saved_state import NAMES, conversion, routing_difference, saved_groups
from deepspeed.muon.zero.checkpoint.import_states import load_by_name
from deepspeed.muon.zero.checkpoint.save import SafeFiles, arguments_of, compare_arguments, micro_batches_done
from deepspeed.muon.zero.refusals import refuse_universal
from deepspeed.muon.zero.scheduler import apply_schedule

#: The most problems or tags that one error lists.
MAX_LISTED = 4
#: The section of a ds_config that allows a load by parameter names.
MATCH = '"checkpoint": {"muon_changed_model": "match"}'
#: The tag that :func:`load_checkpoint` is loading; "" if the checkpoint is universal, ``None`` outside of loads.
_gathered_tag: ContextVar[str | None] = ContextVar("_gathered_tag", default=None)
#: Names of the files with a part of the model, and with a rank's optimizer state under ZeRO.
MODEL_FILE = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states.pt")
SHARD_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states.pt")
Shapes = dict[str, tuple[int, ...]]
"""{name of a parameter or buffer: its shape}."""


def fp32_weights(original: Callable, folder: str, tag: str | None = None, **kwargs: Any) -> Any:
    """Replace ``get_fp32_state_dict_from_zero_checkpoint``: during a load, read the tag to load, not the latest one.

    Return ``{}`` during a load of a universal checkpoint, because DeepSpeed then ignores the result.
    """
    of_load = _gathered_tag.get()
    return {} if of_load == "" else original(folder, tag=tag or of_load, **kwargs)


def load_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``: load only if the files of all ranks fit the engine.

    Raises:
        CheckpointError: on all ranks, with the same message, if a file is missing or unreadable or does not fit. The
            engine is unchanged.
        ImportStateError: the same for a universal checkpoint.
        UnsupportedError: this engine cannot load universal checkpoints.
    """
    arguments = arguments_of(original, engine, args, kwargs)
    compare_arguments(engine, "load_checkpoint", arguments)
    may_change = (engine._config._param_dict.get("checkpoint") or {}).get("muon_changed_model") == "match"
    if engine.zero_optimization_stage() == 3 and arguments["load_module_only"]:
        # With load_module_only and optimizer states DeepSpeed would load nothing.
        arguments["load_optimizer_states"] = False
    wants_states, rates = loads_states(arguments), [group["lr"] for group in engine.basic_optimizer.param_groups]
    with _reading_once(engine):
        if by_name := _find(engine, arguments, may_change):
            load_schedule = engine.lr_scheduler is not None and loads_states(arguments, "lr_scheduler")
            loaded: tuple[Any, Any] = load_by_name(engine, arguments, wants_states, load_schedule)
        else:
            with _keeping_scaler(engine.optimizer):
                loaded = original(**arguments)
    if loaded[0] is not None:
        _finish(engine, has_rates=wants_states and not by_name)
        _warn_of_rates(engine, rates)
        wrapper, is_stage_0 = engine.muon_adapter.wrapper, not engine.zero_optimization()
        if is_stage_0 and not arguments["load_optimizer_states"] and hasattr(wrapper, "refresh_fp32_params"):
            wrapper.refresh_fp32_params()  # under ZeRO DeepSpeed does it; or the next step would undo the load
    return loaded


@contextmanager
def _keeping_scaler(wrapper: Any) -> Iterator[None]:
    """Return a context for loading a checkpoint: keep the wrapper's loss scaler if the saved one has another class.

    The classes differ if the checkpoint was saved in another precision.
    """
    names = ("loss_scaler", "dynamic_loss_scale")
    before = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    yield
    if before and type(wrapper.loss_scaler) is not type(before["loss_scaler"]):
        vars(wrapper).update(before)


def _find(engine: Any, arguments: dict[str, Any], may_change: bool) -> bool:
    """Find the checkpoint, set ``arguments["tag"]``, and return whether to load by parameter names; a collective.

    Such a load is necessary if the checkpoint does not fit the engine. ``may_change``: whether the config allows it.
    ``arguments``: those of ``load_checkpoint``. If weights are on NVMe, and are loaded without optimizer states, also
    set the adapter's ``weights_from`` to the saved state from which to read them.

    Raises:
        CheckpointError, UnsupportedError: on all ranks, if the checkpoint cannot be loaded.
    """
    if engine.load_universal_checkpoint():
        refuse_universal(engine)
        arguments["tag"] = raise_on_all_ranks(partial(_universal_tag, engine, arguments), CheckpointError)
        _gathered_tag.set("")
        return False
    arguments["tag"], by_name = _agreed(engine, arguments, may_change)
    _gathered_tag.set(arguments["tag"])
    adapter = engine.muon_adapter
    if arguments["tag"] is not None and adapter.uses_nvme and not by_name and not loads_states(arguments):
        read = partial(fitting_zero_state, engine, arguments)
        adapter.weights_from = raise_on_all_ranks(read, CheckpointError)
        # Otherwise DeepSpeed gathers the weights of all ranks in memory.
        arguments["load_optimizer_states"] |= adapter.weights_from is not None
    return by_name


def _finish(engine: Any, has_rates: bool) -> None:
    """Finish a load: drop the gradients of an unfinished step, and set the learning rates to the schedule's.

    ``has_rates``: whether the load has already set the parameter groups' learning rates; then leave them.
    """
    # Gradients of an unfinished step belong to the weights from before the load.
    engine.micro_steps -= micro_batches_done(engine)
    engine.muon_adapter.drop_gradients()
    if not has_rates:
        apply_schedule(engine)


@contextmanager
def _reading_once(engine: Any) -> Iterator[None]:
    """Return a context for a load: read each file only once, and forget the contents at the end."""
    files = engine.checkpoint_engine if isinstance(engine.checkpoint_engine, SafeFiles) else None
    if files:
        files.opened = {}
    try:
        yield
    finally:
        engine.muon_adapter.weights_from = None
        _gathered_tag.set(None)
        if files:
            files.opened = None


def _agreed(engine: Any, arguments: Mapping[str, Any], may_change: bool) -> tuple[str | None, bool]:
    """Return (tag to load, whether to load by parameter names), equal on all ranks; a collective.

    The tag is ``None`` if there is no checkpoint. ``arguments``: those of ``load_checkpoint``. ``may_change``: whether
    the config allows a load by parameter names, which is necessary if the checkpoint does not fit the engine.

    Raises:
        CheckpointError: on all ranks, with the problems of all, if the checkpoint cannot be loaded.
    """
    views = gathered(_own_view(engine, arguments))
    tag, is_changed = views[0][0], any(other for *_, other in views)
    found_by: dict[str, list[int]] = {}
    for rank, (_, damage, other) in enumerate(views):
        for text in filter(None, (damage, other if not may_change else None)):
            found_by.setdefault(text, []).append(rank)
    listed = [text if len(who) == len(views) else f"{text} (found by ranks {who})" for text, who in found_by.items()]
    if not listed and any(other != tag for other, *_ in views):
        listed = [f"the ranks see different tags: {[other for other, *_ in views][:MAX_LISTED]}"]
    if not listed:
        return tag, is_changed
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    text = "; ".join(listed[:MAX_LISTED]) + more
    if is_changed and not any(damage for _, damage, _ in views):
        text += f". To load what both runs have, by parameter names, set {MATCH} in ds_config.json"
    folder = Path(arguments["load_dir"], tag or "")
    raise CheckpointError(f"the checkpoint {folder} cannot be loaded, and nothing was changed: {text}")


def _own_view(engine: Any, arguments: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Return (tag to load, error message about damaged files, why the checkpoint does not fit), as this rank sees them.

    Each is ``None`` if there is none. ``arguments``: those of ``load_checkpoint``.
    """
    tag = arguments["tag"]
    try:
        _refuse_moved(engine)
        tag = _latest(Path(arguments["load_dir"])) if tag is None else str(tag)
        if tag is None:
            return None, None, None
        if not Path(arguments["load_dir"], tag).is_dir():
            return tag, f"there is no folder {tag}" + ("" if arguments["tag"] else ", which latest names"), None
        return tag, None, misfit(engine, {**arguments, "tag": tag})
    except Exception as error:  # a damaged file can raise anything, and the other ranks wait for this view
        return tag, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}", None


def _refuse_moved(engine: Any) -> None:
    """Raise CheckpointError if ``engine.offload_states()`` has moved states away; a load would lose some of them."""
    if moved := engine.muon_adapter.moved_states:
        raise CheckpointError(f"the states {', '.join(moved)} are still offloaded; call engine.reload_states() first")


def _universal_tag(engine: Any, arguments: dict[str, Any]) -> str:
    """Return the tag of the universal checkpoint to load, from ``arguments`` or the file ``latest_universal``.

    Raise CheckpointError if there is none.
    """
    _refuse_moved(engine)
    folder = Path(arguments["load_dir"])
    if tag := arguments["tag"] or _latest(folder, "latest_universal"):
        return str(tag)
    tag = _latest(folder)
    raise CheckpointError(
        f"checkpoint.load_universal is true, but {folder} has no universal checkpoint (no file latest_universal); "
        + (
            f"remove that key to load the checkpoint {tag}"
            if tag
            else "it has no other checkpoint either, so check load_dir"
        )
    )


def _latest(folder: Path, name: str = "latest") -> str | None:
    """Return the tag in the file ``name`` of a checkpoint folder; ``None`` if there is no such file.

    Raise CheckpointError if the file is empty.
    """
    file = folder / name
    if not file.is_file():
        return None
    if tag := file.read_text().strip():
        return tag
    raise CheckpointError(f"the file {name} is empty")


def _warn_of_rates(engine: Any, before: Sequence[float]) -> None:
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


# ---- whether a checkpoint fits an engine ------------------------------------------------------------------------


def loads_states(arguments: Mapping[str, Any], kind: str = "optimizer") -> bool:
    """Return whether ``load_checkpoint(**arguments)`` loads the states of ``kind``, "optimizer" or "lr_scheduler"."""
    return arguments[f"load_{kind}_states"] and not arguments["load_module_only"]


def misfit(engine: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the checkpoint that ``arguments`` name does not fit the engine, and what to do; ``None`` if it fits.

    ``arguments``: those of ``load_checkpoint``, with a tag whose folder exists. This opens the files that this rank
    would load. With DeepSpeed's default checkpoint engine ``*optim_states.pt`` is memory-mapped: no state is read.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    folder, stage = Path(arguments["load_dir"], arguments["tag"]), engine.zero_optimization_stage()
    if text := _names_difference(engine, arguments, folder):
        return text
    model_state = _read_file(engine, engine._get_ckpt_name(arguments["load_dir"], arguments["tag"]))
    if (
        loads_states(arguments, "lr_scheduler")
        and engine.lr_scheduler is not None
        and model_state["lr_scheduler"] is None
    ):
        return "it has no state of a learning-rate scheduler; pass load_lr_scheduler_states=False"
    optimizer_state = _states(engine, arguments, model_state) if loads_states(arguments) else None
    if optimizer_state is not None and (
        text := routing_difference(engine.basic_optimizer, saved_groups(optimizer_state), folder, {stage})
    ):
        return text
    if arguments["custom_load_fn"] is None and (
        text := _shape_difference(engine, model_state, folder, arguments["load_module_strict"])
    ):
        return text
    return (
        None
        if optimizer_state is None
        else _layout_difference(engine, model_state, optimizer_state, conversion(folder, {stage}))
    )


def fitting_zero_state(engine: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return this rank's saved ZeRO state if its tensors are laid out like the engine's, otherwise ``None``.

    ``arguments``: those of ``load_checkpoint``, with a tag whose folder exists.
    """
    everything = {**arguments, "load_optimizer_states": True, "load_module_only": False}
    if _names_difference(engine, everything, Path(arguments["load_dir"], arguments["tag"])):
        return None
    model_state = _read_file(engine, engine._get_ckpt_name(arguments["load_dir"], arguments["tag"]))
    optimizer_state = _states(engine, arguments, model_state)
    return None if _layout_difference(engine, model_state, optimizer_state, "") else optimizer_state


def _names_difference(engine: Any, arguments: Mapping[str, Any], folder: Path) -> str | None:
    """Return why the files in ``folder`` do not fit, judging by their names only; ``None`` if they fit.

    They must fit the engine's ZeRO stage, precision and number of ranks, and the number of parts into which pipeline
    and tensor parallelism split the model. Without any model file, return ``None``. ``arguments``: those of
    ``load_checkpoint``.
    """
    names = [file.name for file in folder.iterdir()]
    models = [name for name in names if MODEL_FILE.fullmatch(name)]
    shards = list(filter(None, map(SHARD_FILE.fullmatch, names)))
    if not models:
        return None  # it is missing, which is damage
    parts = len({name.split("mp_rank_")[1] for name in models})
    if parts != (count := engine.muon_adapter.model_parts):
        what = "parts (pipeline stages x tensor-parallel ranks)"
        return f"it was saved with the model in {parts} {what}, this run has {count}; use the same numbers"
    stage, wants_states = engine.zero_optimization_stage(), loads_states(arguments)
    saved = "3" if models[0].startswith("zero") else "1 or 2" if shards else "0"
    convert = conversion(folder, {stage, int(saved[0])})
    if (saved == "3") != (stage == 3) or (wants_states and (saved == "0") != (stage == 0)):
        return f"it was saved at ZeRO stage {saved}, this run has stage {stage}; {convert}"
    wants_states |= stage == 3 and engine.has_moe_layers  # then DeepSpeed loads weights from the same files as states
    ranks, size = len({shard[2] for shard in shards}), engine.seq_dp_world_size
    if ranks and ranks != size and wants_states:
        return f"it was saved on {ranks} rank{'s' * (ranks > 1)}, this run has {size}; {convert}"
    if ranks < size and stage == 3:  # each rank first reads a model file named after it
        return (
            f"it was saved on {ranks} rank{'s' * (ranks > 1)}, and this run has {size}: at stage 3 even loading only "
            f"its weights needs at most as many ranks as saved it; {convert}"
        )
    if shards and wants_states and bool(shards[0][1]) != engine.bfloat16_enabled():
        before, now = ("bf16", "another") if shards[0][1] else ("another", "bf16")
        return f"it was saved in {before} precision, this run has {now}; {convert}"
    return None


def _read_file(engine: Any, name: str, key: str | None = None) -> dict[str, Any]:
    """Return the contents of the checkpoint file ``name`` or, with ``key``, only this entry of the contents.

    Raise CheckpointError if the file is missing or cannot be read.
    """
    file = Path(name)
    if not file.is_file():
        raise CheckpointError(f"{file.name} is missing; restore it, or load another tag")
    try:
        contents = engine.checkpoint_engine.load(name, map_location="cpu")
        return contents[key] if key else contents
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
        raise CheckpointError(f"{file.name} cannot be read: {reason}") from error


def _states(engine: Any, arguments: Mapping[str, Any], model_state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's saved optimizer state: the ZeRO wrapper's or, at stage 0, the optimizer's own.

    ``arguments``: those of ``load_checkpoint``. ``model_state``: the contents of this rank's model file.
    """
    place = arguments["load_dir"], arguments["tag"]
    if engine.zero_optimization():
        return _read_file(engine, engine._get_zero_ckpt_name(*place), "optimizer_state_dict")
    if engine.has_moe_layers:
        rank = groups._get_expert_parallel_rank(groups._get_max_expert_size_name())
        return _read_file(engine, engine._get_optimizer_ckpt_name(*place, rank), "optimizer")
    return model_state["optimizer"]


def _shape_difference(engine: Any, model_state: Mapping[str, Any], folder: Path, is_strict: bool) -> str | None:
    """Return an error message if a parameter or buffer has another shape in the checkpoint; otherwise ``None``.

    With ``is_strict``, also return one if the checkpoint or the model lacks a parameter or buffer of the other. This is
    not checked at stage 3, with experts or in a pipeline. ``model_state``: the contents of this rank's model file.
    """
    current, is_complete = _shapes(engine.module), False
    if engine.pipeline_parallelism and not engine.has_moe_layers:  # with experts DeepSpeed saves no file of a layer
        saved, current = _shapes_of_layers(engine, folder)
    elif engine.zero_optimization_partition_weights():
        saved = {name: tuple(shape) for group in model_state["param_shapes"] for name, shape in group.items()}
    else:
        saved = {name: tuple(value.shape) for name, value in model_state["module"].items() if isinstance(value, Tensor)}
        is_complete = not engine.has_moe_layers  # each expert has its own file
    for name in current.keys() & saved.keys():
        if saved[name] != current[name]:
            return (
                f"{name} has shape {list(saved[name])} in the checkpoint and {list(current[name])} in the model: the "
                "checkpoint belongs to another model"
            )
    missing, extra = sorted(current.keys() - saved.keys()), sorted(saved.keys() - current.keys())
    if is_strict and is_complete and (missing or extra):
        return (
            f"the model has {missing[:4]}, which the checkpoint lacks, and the checkpoint has {extra[:4]}, which the "
            "model lacks: it belongs to another model; load_module_strict=False loads what both have"
        )
    return None


def _shapes(module: nn.Module) -> Shapes:
    """Return the shapes of the tensors in the module's state dict; at stage 3 those of whole parameters."""
    params = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: tuple(getattr(params.get(name, value), "ds_shape", value.shape))
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }


def _shapes_of_layers(engine: Any, folder: Path) -> tuple[Shapes, Shapes]:
    """Return (saved shapes, current shapes) of the parameters and buffers in this pipeline stage's layers."""
    saved, current = Shapes(), Shapes()
    for index, layer in enumerate(engine.module.forward_funcs):
        if hasattr(layer, "load_state_dict"):
            values = _read_file(engine, engine.module.ckpt_layer_path(str(folder), index))
            name = f"{engine.module._local_start + index}."
            saved |= {name + key: tuple(value.shape) for key, value in values.items() if isinstance(value, Tensor)}
            current |= {name + key: shape for key, shape in _shapes(layer).items()}
    return saved, current


def _layout_difference(
    engine: Any, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], convert: str
) -> str | None:
    """Return an error message if the saved optimizer state has another layout than the engine's; otherwise ``None``.

    The layout depends on the precision, the class of the wrapper, and the order, shapes and shards of the parameters.
    ``convert``: advice to convert the checkpoint, for the end of the message.
    """
    wrapper = engine.optimizer
    before, now = _precision(model_state.get("ds_config")), _precision(engine.config)
    if before and now and before != now:
        return f"it was saved in {before} precision, this run has {now}; {convert}"
    if not engine.zero_optimization():
        return _order_difference(
            *_stage0_orders(engine.basic_optimizer, optimizer_state.get("optimizer_state_dict", optimizer_state))
        )
    if ("loss_scaler" in optimizer_state) != hasattr(wrapper, "loss_scaler"):
        before, now = ("with", "without") if hasattr(wrapper, "loss_scaler") else ("without", "with")
        return f"it was saved {before} DeepSpeed's BF16_Optimizer, this run is {now} it; {convert}"
    saved, current = (
        [[(name, list(shape)) for name, shape in group.items()] for group in shapes]
        for shapes in (model_state["param_shapes"], engine._get_zero_param_shapes())
    )
    if text := _order_difference(list(itertools.chain(*saved)), list(itertools.chain(*current))):
        return text
    positions = optimizer_state.get("param_slice_mappings"), getattr(wrapper, "_param_slice_mappings", None)
    if saved != current or (None not in positions and positions[0] != positions[1]):
        return (
            "its shards divide the parameters differently: parameter groups, their order, sub_group_size or "
            f"round_robin_gradients differ; {convert}"
        )
    return None


def _precision(ds_config: Any) -> str | None:
    """Return ``"bf16"``, ``"fp16"`` or ``"fp32"``, as a ds_config (a dict) sets it; ``None`` if it is a file name."""
    if not isinstance(ds_config, Mapping):
        return None
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    return next((short for name, short in names.items() if (ds_config.get(name) or {}).get("enabled")), "fp32")


def _stage0_orders(optimizer: Any, optimizer_state: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return two lists, of the saved and of the current parameters at stage 0, in the order of the parameter groups.

    They have the parameters' names or, if no names were saved, their numbers of elements. This number is ``None`` for a
    saved parameter without a state.
    """
    if all(NAMES in group for group in optimizer_state["param_groups"]):
        names = [group[NAMES] for group in optimizer_state["param_groups"]]
        return list(itertools.chain(*names)), list(itertools.chain(*optimizer.saved_form.names_of_groups))
    entries = [
        optimizer_state["state"].get(index, {})
        for group in optimizer_state["param_groups"]
        for index in group["params"]
    ]
    saved = [entry["exp_avg"].numel() if "exp_avg" in entry else None for entry in entries]
    return saved, [param.numel() for group in optimizer.param_groups for param in group["params"]]


def _order_difference(saved: list[Any], current: list[Any]) -> str | None:
    """Return an error message if the order of the parameters differs, otherwise ``None``.

    ``saved``, ``current``: an item for each parameter: its name, (name, shape) or number of elements. ``None`` in
    ``saved`` equals any item.
    """
    for place, (old, new) in enumerate(itertools.zip_longest(saved, current)):
        if old != new and (old is not None or place >= len(saved)):
            return (
                f"the order of the parameters differs: parameter {place} of the optimizer is {old} in the checkpoint "
                f"and {new} in this run; pass model_parameters in the order and groups of the run that saved it"
            )
    return None
