# SPDX-License-Identifier: Apache-2.0
"""Replacements for ``save_checkpoint`` and ``load_checkpoint`` that succeed or fail on all ranks alike.

Saving: files go through :class:`SafeFiles`; a failure on one rank is an error on all.
Loading: every rank checks its files before any engine is changed; if one finds damage, all raise the same error.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.exchange.groups import broadcast, gathered
from deepspeed.muon.log import logger
from deepspeed.muon.seam import Seam, replaced
from deepspeed.muon.zero.bind import prepare_plans
from deepspeed.muon.zero.checkpoint import compatibility, files, manifest, nvme_load
from deepspeed.muon.zero.checkpoint.changed_model import loading_by_name, renames_allowed
from deepspeed.muon.zero.checkpoint.files import SafeFiles, is_default_engine
from deepspeed.muon.zero.checkpoint.nvme_load import loading_with_nvme
from deepspeed.muon.zero.checkpoint.safe_load import read_model
from deepspeed.muon.zero.consensus import differences, raise_on_all_ranks
from deepspeed.muon.zero.refusals import refuse_universal
from deepspeed.muon.zero.scheduler_section import apply_schedule
from deepspeed.muon.zero.wrappers.loss_scale import keeping_scaler

#: The most problems or tags that one error lists.
MAX_LISTED = 4
#: The section of a ds_config that allows a load by parameter names.
MATCH = '"checkpoint": {"muon_changed_model": "match"}'
#: Arguments of ``save_checkpoint`` and ``load_checkpoint`` that must be equal on all ranks.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip
ENGINE, _MODEL_FILES = "deepspeed.runtime.engine", "deepspeed.runtime.state_dict_factory"
SEAMS = (
    *files.SEAMS,
    *nvme_load.SEAMS,
    Seam(_MODEL_FILES, "SDLoaderBase.check_ckpt_list"),
    Seam(ENGINE, "get_fp32_state_dict_from_zero_checkpoint"),
    Seam(ENGINE, "DeepSpeedEngine._load_checkpoint"),
)


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
    """Replace ``DeepSpeedEngine.save_checkpoint``: save through :class:`SafeFiles`, with checksums and atomically.

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
    saving = SafeFiles(engine, arguments["exclude_frozen_parameters"], names_latest=arguments["save_latest"])
    with engine.basic_optimizer.whole_state():
        if is_default_engine(engine.checkpoint_engine):
            # ``commit`` writes ``latest``: if DeepSpeed's write failed on rank 0, the others would wait in a barrier.
            arguments["save_latest"] = False
            return saving.run(lambda: original(**arguments))
        # Other checkpoint engines finish files later or in slices, so a manifest would promise too much.
        saving.leave_to_deepspeed(Path(arguments["save_dir"], str(arguments["tag"])))
        return original(**arguments)


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
    """Replace ``DeepSpeedEngine.load_checkpoint``: load only if the files of all ranks are intact and fit the engine.

    Raises:
        CheckpointError: on all ranks, with the same message, if the files of one are damaged or do not fit. The engine
            is unchanged.
    """
    arguments = _arguments(original, engine, args, kwargs)
    _compare_arguments(engine, "load_checkpoint", arguments)
    adapter, is_universal = engine.muon_adapter, engine.load_universal_checkpoint()
    renames, is_changed = renames_allowed(engine._config._param_dict.get("checkpoint")), False
    if is_universal and renames is None:
        refuse_universal(engine)
    if engine.zero_optimization_stage() == 3 and arguments["load_module_only"]:
        # With load_module_only and optimizer states DeepSpeed would load nothing.
        arguments["load_optimizer_states"] = False
    tag: str | None
    if is_universal:  # it has no save id
        tag, save_id = raise_on_all_ranks(partial(_universal_tag, engine, arguments), CheckpointError), None
        is_changed = renames is not None
    else:
        tag, save_id, is_changed = _agreed(engine, arguments, may_change=renames is not None)
    arguments["tag"] = tag
    if save_id is None and tag is not None and engine.global_rank == 0:
        why = "; DeepSpeed's converter writes none" if is_universal else ""
        logger.info(
            "deepspeed-muon: the checkpoint %s has no manifest, a list of its files with their checksums%s, so damage "
            "is not detected",
            tag,
            why,
        )

    def gather_tag(original: Callable, *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"tag": tag})  # DeepSpeed would read the tag in ``latest``

    by_name = loading_by_name(engine, arguments, renames) if is_changed and renames is not None else None
    with (
        by_name or nullcontext(lambda load: load(**arguments)) as call,
        replaced(importlib.import_module(ENGINE), get_fp32_state_dict_from_zero_checkpoint=gather_tag),
        replaced(importlib.import_module(_MODEL_FILES).SDLoaderBase, check_ckpt_list=_check_mapped),
        SafeFiles(engine).in_use() if is_default_engine(engine.checkpoint_engine) else nullcontext(),
        loading_with_nvme(engine, arguments) if engine.zero_optimization_stage() == 3 else nullcontext(),
        keeping_scaler(engine.optimizer),
    ):
        rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
        result = call(original)
    if result[0] is not None:
        # Gradients of an unfinished step belong to the weights from before the load.
        engine.micro_steps -= _micro_batches_done(engine)
        adapter.drop_gradients()
        if is_changed or not compatibility.loads_states(arguments):  # otherwise the groups have the checkpoint's rates
            apply_schedule(engine)
        prepare_plans(engine)  # the load may have changed choices of kernels and owners, which all ranks must share
        compatibility.warn_of_rates(engine, rates)
        is_stage_0 = engine.zero_optimization_stage() == 0  # under ZeRO the engine does this itself
        if not arguments["load_optimizer_states"] and is_stage_0 and hasattr(adapter.wrapper, "refresh_fp32_params"):
            adapter.wrapper.refresh_fp32_params()  # or the next step would restore the old weights
    return result


def _check_mapped(original: Callable, loader: Any) -> None:
    """Replace ``SDLoaderBase.check_ckpt_list``: memory-map the model file instead of reading all of it."""
    checkpoint_engine = loader.checkpoint_engine  # it would read the whole file into memory
    if isinstance(checkpoint_engine, SafeFiles):
        loader.checkpoint_engine = SimpleNamespace(load=lambda path, map_location: read_model(Path(path)))
    original(loader)
    loader.checkpoint_engine = checkpoint_engine


def _agreed(engine: Any, arguments: dict[str, Any], may_change: bool) -> tuple[str | None, str | None, bool]:
    """Check on all ranks what ``load_checkpoint(**arguments)`` would load; raise CheckpointError with all problems.

    Return (tag or ``None`` if no checkpoint was found, id of the save or ``None`` without a :mod:`manifest`, whether
    the checkpoint needs a load by parameter names). ``may_change``: whether a load by names is allowed.
    """
    found = gathered(_check_own_files(engine, arguments))
    ranks: dict[str, list[int]] = {}
    for rank, (_, _, damages, misfit) in enumerate(found):
        for text in [*damages, *([misfit] if misfit and not may_change else ())]:
            ranks.setdefault(text, []).append(rank)
    listed = [text if len(who) == len(found) else f"{text} (found by ranks {who})" for text, who in ranks.items()]
    seen = [(tag, save_id) for tag, save_id, *_ in found]
    if not listed and len(set(seen)) > 1:
        listed = [f"the ranks see different checkpoints, by (tag, id of the save): {seen[:MAX_LISTED]}"]
    if listed:
        is_first = engine.global_rank == 0  # one rank looks for another tag to suggest
        text = broadcast(_refusal(arguments["load_dir"], seen[0][0], listed) if is_first else None)
        if any(misfit for *_, misfit in found) and not any(damages for _, _, damages, _ in found):
            text += f". To load what both runs have, by parameter names, set {MATCH} in ds_config.json"
        raise CheckpointError(text)
    return *seen[0], any(misfit for *_, misfit in found)


def _refusal(load_dir: str, tag: str | None, problems: list[str]) -> str:
    more = f" and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    try:
        tags = [other for other in manifest.complete_tags(Path(load_dir)) if other != tag]
    except Exception:  # a tag may be deleted meanwhile, and the other ranks wait for this text
        tags = []
    advice = f"{load_dir} has no other complete checkpoint"
    if tags:
        advice = f"complete in this folder: {', '.join(tags[:MAX_LISTED])}; to load it, pass tag={tags[0]!r}"
    return (
        f"the checkpoint {Path(load_dir, tag or '')} cannot be loaded, and nothing was changed: "
        f"{'; '.join(problems[:MAX_LISTED])}{more} ({advice})"
    )


def _check_own_files(engine: Any, arguments: dict[str, Any]) -> tuple[str | None, str | None, list[str], str | None]:
    """Check this rank's files of the checkpoint that ``load_checkpoint(**arguments)`` would load.

    Return (tag or ``None`` if no checkpoint was found, id of the save or ``None`` without a :mod:`manifest`, a message
    for each damage, why the checkpoint does not fit the engine or ``None`` if it fits).
    """
    tag, header, damages, misfit = arguments["tag"], None, list[str](), None
    try:
        _refuse_moved(engine)
        tag = _latest(Path(arguments["load_dir"])) if tag is None else str(tag)
        if tag is not None:
            header = manifest.read_header(Path(arguments["load_dir"], tag))
            damages = _damages(engine, arguments, tag, header)
            misfit = None if damages else _misfit(engine, arguments, tag, header)
    except Exception as error:  # a damaged file can raise anything, and the other ranks wait for this view
        damages = [str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"]
    return tag, header["save_id"] if header else None, damages, misfit


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


def _damages(engine: Any, arguments: dict[str, Any], tag: str, header: dict[str, Any] | None) -> list[str]:
    """Return a message for each missing or damaged file of checkpoint ``tag``, among the files that this rank checks.

    ``header``: contents of ``muon_save.json``; ``None`` without this file. A wrong number of pipeline stages or
    tensor-parallel ranks gives a message too.
    """
    folder = Path(arguments["load_dir"], tag)
    if not folder.is_dir():
        return [f"there is no folder {tag}" + ("" if arguments["tag"] else ", which latest names")]
    if header is None:
        return []
    saved_count, (_, count) = len(header["structures"]), compatibility.model_share(engine)
    if saved_count != count:
        what = "parts (pipeline stages x tensor-parallel ranks)"
        return [f"it was saved with the model in {saved_count} {what}, this run has {count}; use the same numbers"]
    mine = range(engine.global_rank, header["world_size"], engine.world_size)
    return [text for rank in mine for text in manifest.damages(folder, header["save_id"], rank)]


def _misfit(engine: Any, arguments: dict[str, Any], tag: str, header: dict[str, Any] | None) -> str | None:
    """Return why the checkpoint ``tag`` does not fit the engine, as an error message; ``None`` if it fits.

    ``header``: contents of ``muon_save.json``; ``None`` without this file.
    """
    if header is not None:
        saved = header["structures"][compatibility.model_share(engine)[0]]
    else:
        try:
            saved = compatibility.checkpoint_fingerprint(engine, arguments, tag)
        except CheckpointError as error:  # its files have other names than this engine's, or are unreadable
            return str(error)
    return compatibility.difference(engine, saved, arguments | {"tag": tag})
