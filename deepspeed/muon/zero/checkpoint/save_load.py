# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` and ``load_checkpoint`` that fail closed.

Saving: ``latest`` is written once the files of all ranks are on disk, and a failure on one rank is an error on all.
Loading: every rank checks its files before the engine is changed; all ranks raise the same error if any finds damage.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint import compatibility
from deepspeed.muon.zero.checkpoint.file_writer import FileWriter, WrittenFile
from deepspeed.muon.zero.checkpoint.manifest import (
    HEADER,
    begin,
    complete_tags,
    damages,
    finish,
    forget,
    manifest_name,
    on_disk,
    read_header,
    write_atomically,
)
from deepspeed.muon.zero.consensus import from_rank_0, gathered, together
from deepspeed.muon.zero.methods import compare_plans
from deepspeed.muon.zero.nvme import saved_files
from deepspeed.muon.zero.seams import Seam, replaced

#: How many problems one error tells of.
TOLD = 4
#: Methods of the engine and its checkpoint engine in which a rank does work of its own during a save.
GUARDED = ("_save_checkpoint", "_save_moe_checkpoint", "_save_zero_checkpoint", "_copy_recovery_script")
_ENGINE, _CHECKPOINT_ENGINE = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine"),
)
SEAMS = (
    *(Seam(_ENGINE[0], f"{_ENGINE[1]}.{name}", "call") for name in (*GUARDED, "zero_nvme_offload_optimizer")),
    *(Seam(_CHECKPOINT_ENGINE[0], f"{_CHECKPOINT_ENGINE[1]}.{name}", "call") for name in ("save", "makedirs")),
    Seam("deepspeed.runtime.engine", "get_fp32_state_dict_from_zero_checkpoint", "call"),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine._load_checkpoint", "call"),
)


# ---- saving -----------------------------------------------------------------------------------------------------


def save_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.save_checkpoint``, with manifests, and ``latest`` only once all ranks are done.

    Raises:
        CheckpointError: on all ranks, where anything failed on one of them. Nothing of the checkpoint is left,
            ``latest`` names no incomplete one, and the engine can train on and save again.
    """
    call = inspect.signature(original).bind(engine, *args, **kwargs)
    call.apply_defaults()
    save_dir, tag = call.arguments["save_dir"], call.arguments["tag"]
    if not _is_ours(engine) or not save_dir:
        return original(engine, *args, **kwargs)
    _warn_of_unfinished_step(engine)
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    save = _Save(engine, Path(save_dir), tag)
    if type(engine.checkpoint_engine).__name__ != "TorchCheckpointEngine":
        save.leave_to_deepspeed()
        return original(engine, *args, **kwargs)
    wants_latest = call.arguments["save_latest"]
    call.arguments |= {"tag": tag, "save_latest": False}
    try:
        save.begin(call.arguments["exclude_frozen_parameters"])
        with save.guarded():
            result = original(*call.args, **call.kwargs)
        save.finish()
    except CheckpointError:
        save.clean_up()
        raise
    if wants_latest:
        save.name_latest()
    return result


class _Save:
    """One save, as one rank sees it."""

    def __init__(self, engine: Any, save_dir: Path, tag: str) -> None:
        self.engine, self.save_dir, self.tag, self.folder = engine, save_dir, tag, save_dir / tag
        rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
        #: Whether this rank writes what belongs to all.
        self.is_first = rank == 0
        self.save_id = ""
        self.begun: list[Path] = []
        self.written: list[WrittenFile] = []
        self.error: Exception | None = None

    def together(self, act: Callable[[], Any]) -> Any:
        """:func:`consensus.together` with the error of a save."""
        return together(act, self._failure)

    def _failure(self, reasons: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder} could not be saved: {reasons}. What was written of it is removed, latest "
            "names no incomplete checkpoint, and training can go on"
        )

    def leave_to_deepspeed(self) -> None:
        """Another checkpoint engine writes. A header of ours in this folder is from an older save: remove it."""
        self.together(lambda: (self.folder / HEADER).unlink(missing_ok=True) if self.is_first else None)
        if self.is_first:
            logger.warning(
                "deepspeed-muon: %s writes this checkpoint, which therefore gets no manifest and is not verified when "
                "loaded",
                type(self.engine.checkpoint_engine).__name__,
            )

    def begin(self, exclude_frozen: bool) -> None:
        """Write the header, which makes an older checkpoint of this tag incomplete."""
        self.save_id = from_rank_0(uuid.uuid4().hex)
        facts = {
            "save_id": self.save_id,
            "tag": self.tag,
            "step": self.engine.global_steps,
            "world_size": self.engine.world_size,
            "structures": self._structures(exclude_frozen),
        }

        def write() -> None:
            shutil.rmtree(saved_files(self.engine, self.folder), ignore_errors=True)
            if self.is_first:
                begin(self.folder, facts)

        self.together(write)

    def _structures(self, exclude_frozen: bool) -> list[dict[str, Any]]:
        """The facts of each share of the model, in order."""
        from deepspeed import comm  # type: ignore[attr-defined]

        engine = self.engine
        mine = self.together(lambda: compatibility.of_engine(engine, exclude_frozen))
        share, shares = compatibility.model_share(engine)
        if shares == 1:
            return [mine]
        found = gathered((share, mine) if comm.get_rank(group=engine.seq_data_parallel_group) == 0 else None)
        return [structure for _, structure in sorted((one for one in found if one), key=lambda one: one[0])]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep this rank in the collectives of DeepSpeed's save, whatever fails in its own work."""
        on_engine = dict.fromkeys(GUARDED, self._attempt) | {"zero_nvme_offload_optimizer": lambda original: False}
        on_files = {"save": self._write, "makedirs": self._attempt}
        try:
            with replaced(self.engine, **on_engine), replaced(self.engine.checkpoint_engine, **on_files):
                yield
        except Exception as error:
            self._keep(error)

    def _attempt(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:  # told to all ranks once they have all come to the end of the save
            self._keep(error)

    def _write(self, original: Callable, state_dict: Any, path: str) -> None:
        """``TorchCheckpointEngine.save``, through a :class:`FileWriter`."""
        if self.error is not None:
            return
        self.begun.append(Path(path))
        writer = FileWriter(Path(path))
        self._attempt(original, state_dict, writer)
        try:
            self.written.append(writer.finish())
        except OSError as error:
            self._keep(error)

    def _keep(self, error: Exception) -> None:
        self.error = self.error or error

    def finish(self) -> None:
        """Copy swapped files and list all files of this rank; raise what failed on any rank."""

        def write() -> None:
            if self.error is not None:
                raise self.error
            swapped = self._copy_swapped_files()
            finish(self.folder, self.engine.global_rank, self.save_id, [*self.written, *swapped])

        self.together(write)

    def _copy_swapped_files(self) -> list[WrittenFile]:
        if not self.engine.zero_nvme_offload_optimizer():
            return []
        target = saved_files(self.engine, self.folder)
        source = self.engine.optimizer.optimizer_swapper.swap_folder
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*gradient*"))
        return [on_disk(file) for file in target.rglob("*") if file.is_file()]

    def name_latest(self) -> None:
        """Write ``latest``."""

        def explain(reasons: str) -> CheckpointError:
            return CheckpointError(f"the checkpoint {self.folder} is complete, but latest does not name it: {reasons}")

        together(lambda: write_atomically(self.save_dir / "latest", self.tag) if self.is_first else None, explain)

    def clean_up(self) -> None:
        """Remove what was written, and leave no ``latest`` that names it."""
        shutil.rmtree(saved_files(self.engine, self.folder), ignore_errors=True)
        names = [manifest_name(self.engine.global_rank), *([HEADER] if self.is_first else [])]
        if forget(self.folder, self.save_id, self.begun, names):
            with suppress(OSError):
                _repoint_latest(self.save_dir, self.tag)


def _repoint_latest(save_dir: Path, lost: str) -> None:
    """A save over an older one of the same tag has destroyed it: ``latest`` names the last complete one, or is gone."""
    latest = save_dir / "latest"
    if not latest.is_file() or latest.read_text().strip() != lost:
        return
    if tags := [tag for tag in complete_tags(save_dir) if tag != lost]:
        write_atomically(latest, tags[0])
    else:
        latest.unlink()


def _is_ours(engine: Any) -> bool:
    return isinstance(getattr(engine, "basic_optimizer", None), MuonWithAuxAdam)


# ---- loading ----------------------------------------------------------------------------------------------------


def load_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.load_checkpoint``, after all ranks have checked the files.

    Raises:
        CheckpointError: the same on all ranks; the engine is as before.
    """
    call = inspect.signature(original).bind(engine, *args, **kwargs)
    call.apply_defaults()
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    if engine.zero_optimization_stage() == 3 and call.arguments["load_module_only"]:
        call.arguments["load_optimizer_states"] = False  # with this one alone DeepSpeed would load nothing
    if engine.load_universal_checkpoint():
        _say_unverified(engine, call.arguments["tag"])
        return _load(original, engine, call)
    found = gathered(_look(engine, call.arguments))
    problems = _by_text(found)
    if not problems and any((one["tag"], one["save_id"]) != (found[0]["tag"], found[0]["save_id"]) for one in found):
        problems = [f"the ranks see different checkpoints: {[(one['tag'], one['save_id']) for one in found][:TOLD]}"]
    if problems:
        is_first = engine.global_rank == 0  # it alone looks for another tag to suggest
        text = _refusal(call.arguments["load_dir"], found[0]["tag"], problems) if is_first else None
        raise CheckpointError(from_rank_0(text))
    tag = found[0]["tag"]
    if tag is not None and found[0]["save_id"] is None:
        _say_unverified(engine, tag)
    call.arguments["tag"] = tag
    with _weights_of(tag):
        return _load(original, engine, call)


def _load(original: Callable, engine: Any, call: inspect.BoundArguments) -> Any:
    adapter, arguments = engine.muon_adapter, call.arguments
    with adapter.loading(Path(arguments["load_dir"]), arguments["tag"], arguments):
        result = original(*call.args, **call.kwargs)
    if result[0] is not None:
        _begin_step_again(engine)
        compare_plans(engine.basic_optimizer)
        if not arguments["load_optimizer_states"]:
            adapter.refresh_masters()
    return result


def _weights_of(tag: str | None) -> AbstractContextManager[None]:
    """Stage 3 without optimizer states: DeepSpeed gathers the weights of ``latest``, whatever the tag."""
    module = importlib.import_module("deepspeed.runtime.engine")

    def of_tag(original: Callable, *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"tag": tag})

    return replaced(module, get_fp32_state_dict_from_zero_checkpoint=of_tag)


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
    except Exception:  # somebody deletes them meanwhile; the other ranks wait for this text
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
    except Exception as error:  # a damaged file can raise anything, and the other ranks wait for this view
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


# ---- gradient accumulation: a step that was under way at the save begins again with its first micro-batch --------


def _warn_of_unfinished_step(engine: Any) -> None:
    """Warn when a checkpoint is saved between the micro-batches of a step."""
    done, total = _position(engine), engine.gradient_accumulation_steps()
    if done and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: this checkpoint is saved after micro-batch %d of %d; the gradients since the last step "
            "are not part of it: a resumed run begins this step again: give it these %d micro-batches once more",
            done,
            total,
            done,
        )


def _begin_step_again(engine: Any) -> None:
    """Forget the micro-batches and gradients since the last step, which belong to other weights after a load."""
    engine.micro_steps -= _position(engine)
    engine.muon_adapter.drop_gradients()


def _position(engine: Any) -> int:
    """Micro-batches since the last step; 0 if the script or framework decides itself which one ends a step."""
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        return 0
    if engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()
