# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` and ``load_checkpoint`` that fail closed.

Saving: ``latest`` is written once the shards of all ranks are on disk. Loading: every rank looks at its files
before the engine is changed, and all ranks raise the same error where any of them finds damage.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint import compatibility
from deepspeed.muon.zero.checkpoint.manifest import (
    HEADER,
    begin,
    complete_tags,
    damages,
    finish,
    read_header,
    write_atomically,
)
from deepspeed.muon.zero.consensus import from_rank_0, gathered
from deepspeed.muon.zero.methods import compare_plans
from deepspeed.muon.zero.nvme import saved_files

#: So many problems are told in one error.
TOLD = 4


def save_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.save_checkpoint``, with manifests, and ``latest`` only once all ranks are done.

    Raises:
        CheckpointError: on all ranks, where one could not write its manifest.
    """
    call = inspect.signature(original).bind(engine, *args, **kwargs)
    call.apply_defaults()
    save_dir, tag = call.arguments["save_dir"], call.arguments["tag"]
    if not _is_ours(engine) or not save_dir:
        return original(engine, *args, **kwargs)
    warn_of_unfinished_step(engine)
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    folder = Path(save_dir, tag)
    shutil.rmtree(saved_files(engine, folder), ignore_errors=True)  # stock refuses to copy over an older save
    writes_header = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
    if type(engine.checkpoint_engine).__name__ != "TorchCheckpointEngine":
        if writes_header:
            _leave_to_stock(engine, folder)
        return original(engine, *args, **kwargs)
    wants_latest = call.arguments["save_latest"]
    call.arguments |= {"tag": tag, "save_latest": False}
    save_id = from_rank_0(uuid.uuid4().hex)
    facts = {"save_id": save_id, "tag": tag, "step": engine.global_steps, "world_size": engine.world_size}
    facts["structures"] = _structures(engine, call.arguments["exclude_frozen_parameters"])
    _together(folder, lambda: begin(folder, facts) if writes_header else None)
    with _recorded(engine.checkpoint_engine) as written:
        result = original(*call.args, **call.kwargs)
    written += [file for file in saved_files(engine, folder).rglob("*") if file.is_file()]
    _together(folder, lambda: finish(folder, engine.global_rank, save_id, written))
    _together(
        folder, lambda: write_atomically(Path(save_dir, "latest"), tag) if wants_latest and writes_header else None
    )
    return result


def _structures(engine: Any, exclude_frozen: bool) -> list[dict[str, Any]]:
    """Of each share of the model."""
    from deepspeed import comm  # type: ignore[attr-defined]

    mine = compatibility.of_engine(engine, exclude_frozen)
    share, shares = compatibility.model_share(engine)
    if shares == 1:
        return [mine]
    found = gathered((share, mine) if comm.get_rank(group=engine.seq_data_parallel_group) == 0 else None)
    return [structure for _, structure in sorted((one for one in found if one), key=lambda one: one[0])]


def _is_ours(engine: Any) -> bool:
    return isinstance(getattr(engine, "basic_optimizer", None), MuonWithAuxAdam)


def _leave_to_stock(engine: Any, folder: Path) -> None:
    (folder / HEADER).unlink(missing_ok=True)
    logger.warning(
        "deepspeed-muon: %s writes this checkpoint, which therefore gets no manifest and is not verified when loaded",
        type(engine.checkpoint_engine).__name__,
    )


@contextmanager
def _recorded(checkpoint_engine: Any) -> Iterator[list[Path]]:
    """The files that this rank's checkpoint engine writes meanwhile."""
    files: list[Path] = []
    save = checkpoint_engine.save

    def recording(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        files.append(Path(path))
        return save(state_dict, path, *args, **kwargs)

    checkpoint_engine.save = recording
    try:
        yield files
    finally:
        del checkpoint_engine.save


def _together(folder: Path, act: Callable[[], None]) -> None:
    """Act on every rank, then wait for all; where one fails, all raise."""
    problem = None
    try:
        act()
    except OSError as error:
        problem = str(error)
    if failed := {rank: text for rank, text in enumerate(gathered(problem)) if text}:
        raise CheckpointError(f"the checkpoint {folder} could not be completed, and latest is as before: {failed}")


def load_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.load_checkpoint``, after a look at the files by all ranks.

    Raises:
        CheckpointError: the same on all ranks; the engine is as before.
    """
    call = inspect.signature(original).bind(engine, *args, **kwargs)
    call.apply_defaults()
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    if engine.zero_optimization_stage() == 3 and call.arguments["load_module_only"]:
        call.arguments["load_optimizer_states"] = False  # stock loads nothing where this one alone is asked for
    if engine.load_universal_checkpoint():
        _say_unverified(engine, call.arguments["tag"])
        return _loaded(engine, original(*call.args, **call.kwargs), call.arguments)
    found = gathered(_look(engine, call.arguments))
    problems = _by_text(found)
    if not problems and any((one["tag"], one["save_id"]) != (found[0]["tag"], found[0]["save_id"]) for one in found):
        problems = [f"the ranks see different checkpoints: {[(one['tag'], one['save_id']) for one in found][:TOLD]}"]
    if problems:
        is_first = engine.global_rank == 0  # which alone looks for what could be loaded instead
        text = _refusal(call.arguments["load_dir"], found[0]["tag"], problems) if is_first else None
        raise CheckpointError(from_rank_0(text))
    tag = found[0]["tag"]
    if tag is not None and found[0]["save_id"] is None:
        _say_unverified(engine, tag)
    call.arguments["tag"] = tag
    with _weights_of(tag):
        return _loaded(engine, original(*call.args, **call.kwargs), call.arguments)


def _loaded(engine: Any, result: Any, arguments: dict[str, Any]) -> Any:
    if result[0] is not None:
        begin_step_again(engine)
        compare_plans(engine.basic_optimizer)
        if engine.zero_optimization_stage() == 0 and not arguments["load_optimizer_states"]:
            # Else the next step would put back the weights from before.
            getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
    return result


@contextmanager
def _weights_of(tag: str | None) -> Iterator[None]:
    """Stage 3 without optimizer states: stock gathers the weights of ``latest``, whatever the tag."""
    module = importlib.import_module("deepspeed.runtime.engine")
    gather = module.get_fp32_state_dict_from_zero_checkpoint
    module.get_fp32_state_dict_from_zero_checkpoint = functools.partial(gather, tag=tag)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.get_fp32_state_dict_from_zero_checkpoint = gather  # type: ignore[attr-defined]


def _say_unverified(engine: Any, tag: str | None) -> None:
    if engine.global_rank == 0:
        logger.info(
            "deepspeed-muon: the checkpoint %s has no manifest and is not verified", tag or "named in latest_universal"
        )


def _by_text(found: list[dict[str, Any]]) -> list[str]:
    """Each problem once, with the ranks that found it."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(found):
        for text in one["problems"]:
            ranks.setdefault(text, []).append(rank)
    return [text if len(who) == len(found) else f"{text} (found by ranks {who})" for text, who in ranks.items()]


def _refusal(load_dir: str, tag: str | None, problems: list[str]) -> str:
    more = f" and {len(problems) - TOLD} more" if len(problems) > TOLD else ""
    try:
        tags = [other for other in complete_tags(Path(load_dir)) if other != tag]
    except OSError:  # somebody deletes them meanwhile; the other ranks wait for this text
        tags = []
    advice = f"complete there: {', '.join(tags[:TOLD])}; pass tag={tags[0]!r}" if tags else "no other is complete there"
    return (
        f"the checkpoint {Path(load_dir, tag or '')} cannot be loaded, and nothing was changed: "
        f"{'; '.join(problems[:TOLD])}{more} ({advice})"
    )


def _look(engine: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """This rank's view: the tag, the id of the save, and what is wrong with it."""
    view: dict[str, Any] = {"tag": arguments["tag"], "save_id": None, "problems": []}
    try:
        if view["tag"] is None:
            view["tag"] = _latest(Path(arguments["load_dir"]))
        if view["tag"] is not None:
            view["problems"] = _misfits(engine, arguments, view)
    except CheckpointError as error:
        view["problems"] = [str(error)]
    except Exception as error:  # a file of unexpected contents: the other ranks have to hear of it
        view["problems"] = [f"{type(error).__name__}: {error}"]
    return view


def _latest(folder: Path) -> str | None:
    file = folder / "latest"
    if not file.is_file():
        return None
    if tag := file.read_text().strip():
        return tag
    raise CheckpointError("latest is empty")


def _misfits(engine: Any, arguments: dict[str, Any], view: dict[str, Any]) -> list[str]:
    view["tag"] = str(view["tag"])
    folder = Path(arguments["load_dir"], view["tag"])
    if not folder.is_dir():
        return [f"there is no folder {view['tag']}" + ("" if arguments["tag"] else ", which latest names")]
    request = compatibility.Request(
        shapes=arguments["custom_load_fn"] is None,
        strict=arguments["load_module_strict"],
        optimizer_states=arguments["load_optimizer_states"] and not arguments["load_module_only"],
        scheduler_states=arguments["load_lr_scheduler_states"] and not arguments["load_module_only"],
    )
    header = read_header(folder)
    if header is None:
        saved = compatibility.of_files(engine, arguments["load_dir"], view["tag"], request.optimizer_states)
    else:
        view["save_id"] = header["save_id"]
        there, (share, here) = len(header["structures"]), compatibility.model_share(engine)
        if there != here:
            what = "stages of a pipeline, or ranks of tensor parallelism"
            return [f"it was saved with the model divided into {there} {what}, this run has {here}; use as many"]
        saved = header["structures"][share]
        mine = range(engine.global_rank, header["world_size"], engine.world_size)
        if found := [text for rank in mine for text in damages(folder, header["save_id"], rank)]:
            return found
    text = compatibility.difference(engine, saved, compatibility.of_engine(engine), request)
    return [text] if text else []


def warn_of_unfinished_step(engine: Any) -> None:
    """Say so where a checkpoint is saved between the micro-batches of a step."""
    done, total = _position(engine), engine.gradient_accumulation_steps()
    if done and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: this checkpoint is saved after micro-batch %d of %d; the gradients since the last step "
            "are not part of it: a resumed run begins this step again: give it these %d micro-batches once more",
            done,
            total,
            done,
        )


def begin_step_again(engine: Any) -> None:
    """Forget the micro-batches and gradients since the last step, which belong to other weights after a load."""
    engine.micro_steps -= _position(engine)
    engine.zero_grad()
    wrapper = engine.optimizer
    if hasattr(wrapper, "zero_grad"):
        wrapper.zero_grad(set_to_none=True)
    for name in ("averaged_gradients", "all_grad_tensors"):
        getattr(wrapper, name, {}).clear()
    if type(wrapper).__name__ == "DeepSpeedZeroOptimizer":
        wrapper.micro_step_id = -1  # counted up before the first micro-batch, which replaces what is accumulated


def _position(engine: Any) -> int:
    """Micro-batches since the last step; 0 where a script or framework says itself which one ends a step."""
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        return 0
    if engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()
