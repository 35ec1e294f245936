# SPDX-License-Identifier: Apache-2.0
"""Replacements for ``save_checkpoint`` and ``load_checkpoint`` that succeed or fail on all ranks alike.

Saving: files go through :class:`SafeFiles`; a failure on one rank is an error on all.
Loading: every rank checks its files before any engine is changed; if one finds a problem, all raise the same error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import CheckpointError, logger
from deepspeed.muon.exchange.groups import gathered
from deepspeed.muon.zero.checkpoint.engine import SafeFiles
from deepspeed.muon.zero.checkpoint.fit import fitting_zero_state, loads_states, misfit
from deepspeed.muon.zero.checkpoint.states_by_name import load_by_name
from deepspeed.muon.zero.consensus import differences, raise_on_all_ranks
from deepspeed.muon.zero.refusals import refuse_universal
from deepspeed.muon.zero.scheduler import apply_schedule
from deepspeed.muon.zero.wrappers.norms_and_scale import keeping_scaler

#: The most problems or tags that one error lists.
MAX_LISTED = 4
#: The section of a ds_config that allows a load by parameter names.
MATCH = '"checkpoint": {"muon_changed_model": "match"}'
#: Arguments of ``save_checkpoint`` and ``load_checkpoint`` that must be equal on all ranks.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip
#: The tag of a load under way; "" if it is of a universal checkpoint, ``None`` without a load of Muon's.
_gathered_tag: ContextVar[str | None] = ContextVar("_gathered_tag", default=None)


def configure_checkpointing(original: Callable, engine: Any) -> None:
    """Replace ``DeepSpeedEngine._configure_checkpointing``: put :class:`SafeFiles` around the default engine."""
    original(engine)
    if type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine":  # not one that the config or script names
        is_first = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
        engine.checkpoint_engine = SafeFiles(engine.checkpoint_engine, engine.global_rank, is_first)


def fp32_weights(original: Callable, folder: str, tag: str | None = None, **options: Any) -> Any:
    """Replace ``get_fp32_state_dict_from_zero_checkpoint``: read the tag that is being loaded, not the latest one.

    A load of a universal checkpoint calls it too, and ignores the result.
    """
    of_load = _gathered_tag.get()
    return {} if of_load == "" else original(folder, tag=tag or of_load, **options)


def _arguments(original: Callable, engine: Any, args: tuple, options: dict[str, Any]) -> dict[str, Any]:
    call = inspect.signature(original).bind(engine, *args, **options)
    call.apply_defaults()
    return call.arguments


def _compare_arguments(engine: Any, call: str, arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError on all ranks if they pass different arguments to the function ``call``; a collective."""
    values = {name: value for name, value in arguments.items() if name in COMMON}
    for name in {"save_dir", "load_dir"} & values.keys():
        values[name] = str(Path(values[name]).absolute()) if values[name] else ""
        if engine.use_node_local_storage():
            values[name] = bool(values[name])  # nodes may have different folders
    values["tag"] = None if values["tag"] is None else str(values["tag"])
    if "custom_load_fn" in values:
        values["custom_load_fn"] = values["custom_load_fn"] is not None
    texts = {name: f"{call}: the argument {name}" for name in values}
    if verdict := differences(gathered(values), texts):
        raise CheckpointError(f"{verdict['error']}; pass the same value on all ranks. Nothing was written or changed")


def _micro_batches_done(engine: Any) -> int:
    """Return how many micro-batches of the current step have run; 0 if the script itself decides when to step."""
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if not is_managed or engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()


# ---- saving -----------------------------------------------------------------------------------------------------


def save_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.save_checkpoint``: with :class:`SafeFiles`, succeed on all ranks or on none.

    Raises:
        CheckpointError: on all ranks, if the save failed on one of them. The files of this save are removed,
            ``latest`` names no incomplete checkpoint, and the engine can continue training and save again.
    """
    arguments = _arguments(original, engine, args, kwargs)
    if arguments["tag"] is None:
        arguments["tag"] = f"global_step{engine.global_steps}"
    _compare_arguments(engine, "save_checkpoint", arguments)
    if not arguments["save_dir"]:
        return original(**arguments)  # raises DeepSpeed's error, on all ranks
    _warn_of_unfinished_step(engine)
    _warn_of_different_client_states(engine, arguments["client_state"])
    _warn_of_frozen(engine, arguments["exclude_frozen_parameters"])
    files = engine.checkpoint_engine
    with engine.basic_optimizer.whole_state():
        if not isinstance(files, SafeFiles):  # it writes later, or in slices
            return original(**arguments)
        files.names_latest, arguments["save_latest"] = arguments["save_latest"], False
        with files.errors_kept():
            return original(**arguments)
        # The other ranks wait in collectives: at stage 3 in the last one of DeepSpeed's save, then in ``commit``.
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        return files.commit()


def _warn_of_different_client_states(engine: Any, state: Any) -> None:
    """Warn if ranks pass different ``client_state``, except at stage 3, where every rank's is saved; a collective."""
    plain = (str, bytes, int, float, bool, type(None))
    facts = {
        str(key): value if isinstance(value, plain) else type(value).__name__ for key, value in (state or {}).items()
    }
    found = gathered(facts)
    differing = [rank for rank, other in enumerate(found) if other != found[0]]
    if differing and engine.zero_optimization_stage() != 3 and engine.global_rank == 0:
        logger.warning(
            f"deepspeed-muon: the client_state of ranks {differing} differs from that of rank 0. At ZeRO stages 0 to 2 "
            "DeepSpeed saves the client_state of only one rank and loads it on all ranks; before the save, "
            "gather what all ranks need into it"
        )


def _warn_of_unfinished_step(engine: Any) -> None:
    done, total = _micro_batches_done(engine), engine.gradient_accumulation_steps()
    if done and engine.global_rank == 0:
        logger.warning(
            f"deepspeed-muon: this checkpoint is saved after micro-batch {done} of {total} and does not contain the "
            "gradients since the last step; a resumed run begins this step again, so give it these "
            f"{done} micro-batches once more"
        )


def _warn_of_frozen(engine: Any, are_excluded: bool) -> None:
    """Warn once, at stage 1, that DeepSpeed's ``zero_to_fp32`` will leave out frozen parameters."""
    adapter = engine.muon_adapter
    if engine.zero_optimization_stage() != 1 or are_excluded or adapter.has_warned_of_frozen:
        return
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    adapter.has_warned_of_frozen = True
    if frozen and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: at ZeRO stage 1 DeepSpeed's zero_to_fp32 leaves out frozen parameters, here "
            f"{len(frozen)} (first: {frozen[0]}); take them from mp_rank_*_model_states.pt, or use stage 2"
        )


# ---- loading ----------------------------------------------------------------------------------------------------


def load_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.load_checkpoint``: load only if the files of all ranks fit the engine.

    Raises:
        CheckpointError: on all ranks, with the same message, if a file is missing or unreadable or does not fit. The
            engine is unchanged.
    """
    arguments = _arguments(original, engine, args, kwargs)
    _compare_arguments(engine, "load_checkpoint", arguments)
    may_change = (engine._config._param_dict.get("checkpoint") or {}).get("muon_changed_model") == "match"
    if engine.zero_optimization_stage() == 3 and arguments["load_module_only"]:
        # With load_module_only and optimizer states DeepSpeed would load nothing.
        arguments["load_optimizer_states"] = False
    wants_states, rates = loads_states(arguments), [group["lr"] for group in engine.basic_optimizer.param_groups]
    with _reading_once(engine):
        if by_name := _find(engine, arguments, may_change):
            load_schedule = engine.lr_scheduler is not None and loads_states(arguments, "lr_scheduler")
            result: tuple[Any, Any] = load_by_name(engine, arguments, wants_states, load_schedule)
        else:
            with keeping_scaler(engine.optimizer):
                result = original(**arguments)
    if result[0] is not None:
        _finish(engine, has_rates=wants_states and not by_name)
        _warn_of_rates(engine, rates)
        wrapper, is_stage_0 = engine.muon_adapter.wrapper, not engine.zero_optimization()
        if is_stage_0 and not arguments["load_optimizer_states"] and hasattr(wrapper, "refresh_fp32_params"):
            wrapper.refresh_fp32_params()  # under ZeRO DeepSpeed does it; or the next step would undo the load
    return result


def _find(engine: Any, arguments: dict[str, Any], may_change: bool) -> bool:
    """Find the checkpoint, set ``arguments["tag"]``, and return whether it must be loaded by parameter names.

    A collective. ``may_change``: whether a load by names is allowed.

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
    """Begin the step again. ``has_rates``: whether the groups have the checkpoint's learning rates."""
    # Gradients of an unfinished step belong to the weights from before the load.
    engine.micro_steps -= _micro_batches_done(engine)
    engine.muon_adapter.drop_gradients()
    if not has_rates:
        apply_schedule(engine)


@contextmanager
def _reading_once(engine: Any) -> Iterator[None]:
    """Return a context for a load, in which each file is read once, and whose end forgets what it has read."""
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
    """Return (the tag to load, or ``None`` if there is none, whether it must be loaded by parameter names).

    A collective. ``may_change``: whether a load by names is allowed.

    Raises:
        CheckpointError: on all ranks, with the problems of all, if the checkpoint cannot be loaded.
    """
    found = gathered(_own_view(engine, arguments))
    tag, is_changed = found[0][0], any(other for *_, other in found)
    ranks: dict[str, list[int]] = {}
    for rank, (_, damage, other) in enumerate(found):
        for text in filter(None, (damage, other if not may_change else None)):
            ranks.setdefault(text, []).append(rank)
    listed = [text if len(who) == len(found) else f"{text} (found by ranks {who})" for text, who in ranks.items()]
    if not listed and any(other != tag for other, *_ in found):
        listed = [f"the ranks see different tags: {[other for other, *_ in found][:MAX_LISTED]}"]
    if not listed:
        return tag, is_changed
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    text = "; ".join(listed[:MAX_LISTED]) + more
    if is_changed and not any(damage for _, damage, _ in found):
        text += f". To load what both runs have, by parameter names, set {MATCH} in ds_config.json"
    folder = Path(arguments["load_dir"], tag or "")
    raise CheckpointError(f"the checkpoint {folder} cannot be loaded, and nothing was changed: {text}")


def _own_view(engine: Any, arguments: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Return this rank's (tag, damage, why the checkpoint does not fit), each ``None`` if there is none."""
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
    """Return the tag of the universal checkpoint to load, from ``arguments`` or the file ``latest_universal``."""
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
    """Return the tag that is written in the file ``name`` of a checkpoint folder; ``None`` if there is no such file."""
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
