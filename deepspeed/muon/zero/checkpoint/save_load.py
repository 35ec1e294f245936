# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` and ``load_checkpoint`` that fail closed.

Saving: ``latest`` is written once the files of all ranks are on disk, and a failure on one rank is an error on all.
Loading: every rank checks its files before the engine is changed; all ranks raise the same error if any finds damage.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import Seam, replaced
from deepspeed.muon.zero.checkpoint import compatibility, manifest
from deepspeed.muon.zero.choice import compare_plans
from deepspeed.muon.zero.consensus import from_rank_0, gathered, together
from deepspeed.muon.zero.nvme import saved_files
from deepspeed.muon.zero.wrappers.loss_scale import own_scaler

#: How many problems one error tells of.
TOLD = 4
#: Methods of the engine and its checkpoint engine in which a rank does work of its own during a save.
GUARDED = ("_save_checkpoint", "_save_moe_checkpoint", "_save_zero_checkpoint", "_copy_recovery_script")
ENGINE = "deepspeed.runtime.engine"
_FILES = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
SEAMS = (
    *(Seam(ENGINE, f"DeepSpeedEngine.{name}", "call") for name in (*GUARDED, "zero_nvme_offload_optimizer")),
    *(Seam(_FILES, f"TorchCheckpointEngine.{name}", "call") for name in ("save", "makedirs", "load")),
    Seam(ENGINE, "get_fp32_state_dict_from_zero_checkpoint", "call"),
    Seam(ENGINE, "DeepSpeedEngine._load_checkpoint", "call"),
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
    _warn_of_frozen(engine, call.arguments["exclude_frozen_parameters"])
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    save = _Save(engine, Path(save_dir), tag)
    if type(engine.checkpoint_engine).__name__ != "TorchCheckpointEngine":
        save.leave_to_deepspeed()
        with engine.basic_optimizer.whole_state():
            return original(engine, *args, **kwargs)
    wants_latest = call.arguments["save_latest"]
    call.arguments |= {"tag": tag, "save_latest": False}
    try:
        save.begin(call.arguments["exclude_frozen_parameters"])
        with engine.basic_optimizer.whole_state(), save.guarded():
            result = original(*call.args, **call.kwargs)
        save.together(save.finish)
    except CheckpointError:
        save.clean_up()
        raise
    if wants_latest:
        unnamed = f"the checkpoint {save.folder} is complete, but latest does not name it: "
        together(save.name_latest, lambda reasons: CheckpointError(unnamed + reasons))
    return result


class _Save:
    """One save, as one rank sees it."""

    def __init__(self, engine: Any, save_dir: Path, tag: str) -> None:
        self.engine, self.save_dir, self.tag, self.folder = engine, save_dir, tag, save_dir / tag
        rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
        #: Whether this rank writes what belongs to all.
        self.is_first = rank == 0
        self.save_id = ""
        #: Those that this rank has begun to write.
        self.files: list[Path] = []
        self.error: Exception | None = None

    def together(self, act: Callable[[], Any]) -> Any:
        """:func:`consensus.together` with the error of a save."""

        def failure(reasons: str) -> CheckpointError:
            return CheckpointError(
                f"the checkpoint {self.folder} could not be saved: {reasons}. What was written of it is removed, "
                "latest names no incomplete checkpoint, and training can go on"
            )

        return together(act, failure)

    def leave_to_deepspeed(self) -> None:
        """Another checkpoint engine writes. A header of ours in this folder is from an older save: remove it."""
        self.together(lambda: (self.folder / manifest.HEADER).unlink(missing_ok=True) if self.is_first else None)
        if self.is_first:
            logger.warning(
                "deepspeed-muon: %s writes this checkpoint, which therefore gets no manifest and is not verified when "
                "loaded",
                type(self.engine.checkpoint_engine).__name__,
            )

    def begin(self, exclude_frozen: bool) -> None:
        """Write the header, which makes an older checkpoint of this tag incomplete."""
        self.save_id = from_rank_0(uuid.uuid4().hex)
        facts = {"save_id": self.save_id, "tag": self.tag, "step": self.engine.global_steps}
        facts |= {"world_size": self.engine.world_size, "structures": self._structures(exclude_frozen)}

        def write() -> None:
            shutil.rmtree(saved_files(self.engine, self.folder), ignore_errors=True)
            if self.is_first:
                manifest.begin(self.folder, facts)

        self.together(write)

    def _structures(self, exclude_frozen: bool) -> list[dict[str, Any]]:
        """The facts of each share of the model, in order."""
        from deepspeed import comm  # type: ignore[attr-defined]

        mine = self.together(lambda: compatibility.of_engine(self.engine, exclude_frozen))
        share, shares = compatibility.model_share(self.engine)
        if shares == 1:
            return [mine]
        speaks = comm.get_rank(group=self.engine.seq_data_parallel_group) == 0
        found = gathered((share, mine) if speaks else None)
        return [structure for _, structure in sorted(filter(None, found))]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep this rank in the collectives of DeepSpeed's save, whatever fails in its own work."""
        on_engine = dict.fromkeys(GUARDED, self._attempt) | {"zero_nvme_offload_optimizer": lambda original: False}
        on_files = {"save": self._write, "makedirs": self._attempt}
        try:
            with replaced(self.engine, **on_engine), replaced(self.engine.checkpoint_engine, **on_files):
                yield
        except Exception as error:
            self.error = self.error or error

    def _attempt(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:  # told to all ranks once they have all come to the end of the save
            self.error = self.error or error

    def _write(self, original: Callable, state_dict: Any, path: str) -> None:
        """``TorchCheckpointEngine.save``, after whose first error everything is accepted and thrown away.

        ``torch.save`` writes from C++, where a second failure, in closing the archive after a failed write, ends the
        process.
        """
        if self.error is not None:
            return
        self.files.append(Path(path))
        file = self._attempt(open, path, "wb")

        def write(data: Any) -> int:
            view = memoryview(data).cast("B")
            if self.error is None:
                self._attempt(file.write, view)
            return len(view)

        self._attempt(original, state_dict, SimpleNamespace(write=write, flush=lambda: None))
        if file is not None:
            self._attempt(file.close)
        if isinstance(self.error, OSError):
            self.error.filename = path

    def finish(self) -> None:
        """List all files of this rank; raise what has failed on it."""
        if self.error is not None:
            raise self.error
        manifest.finish(self.folder, self.engine.global_rank, self.save_id, self.files)

    def name_latest(self) -> None:
        """Write ``latest``, on one rank."""
        if self.is_first:
            manifest.write_atomically(self.save_dir / "latest", self.tag)

    def clean_up(self) -> None:
        """Remove what was written, and leave no ``latest`` that names it."""
        for file in self.files:
            with suppress(OSError):
                file.unlink(missing_ok=True)
        manifest.forget(self.folder / manifest.manifest_name(self.engine.global_rank), self.save_id)
        was_begun = self.is_first and manifest.forget(self.folder / manifest.HEADER, self.save_id)
        with suppress(OSError):
            self.folder.rmdir()  # only where nothing else is in it
        with suppress(OSError):
            if was_begun:
                _repoint_latest(self.save_dir, self.tag)


def _repoint_latest(save_dir: Path, lost: str) -> None:
    """A save over an older one of the same tag has destroyed it: ``latest`` names the last complete one, or is gone."""
    latest = save_dir / "latest"
    if not latest.is_file() or latest.read_text().strip() != lost:
        return
    if tags := [tag for tag in manifest.complete_tags(save_dir) if tag != lost]:
        manifest.write_atomically(latest, tags[0])
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
    adapter, arguments, is_universal = engine.muon_adapter, call.arguments, engine.load_universal_checkpoint()
    if engine.zero_optimization_stage() == 3 and arguments["load_module_only"]:
        arguments["load_optimizer_states"] = False  # with this one alone DeepSpeed would load nothing
    tag, save_id = _universal(engine, arguments) if is_universal else _agreed(engine, arguments)
    arguments["tag"] = tag
    if save_id is None and tag is not None and engine.global_rank == 0:
        why = " (DeepSpeed's converter writes none)" if is_universal else ""
        logger.info("deepspeed-muon: the checkpoint %s has no manifest%s and is not verified", tag, why)

    def of_tag(original: Callable, *args: Any, **options: Any) -> Any:
        """Stage 3 without optimizer states: DeepSpeed gathers the weights of ``latest``, whatever the tag."""
        return original(*args, **options | {"tag": tag})

    with (
        replaced(importlib.import_module(ENGINE), get_fp32_state_dict_from_zero_checkpoint=of_tag),
        adapter.loading(Path(arguments["load_dir"]), tag, arguments),
        own_scaler(engine.optimizer),
    ):
        rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
        result = original(*call.args, **call.kwargs)
    if result[0] is not None:
        # What micro-batches since the last step have left belongs to other weights.
        engine.micro_steps -= _position(engine)
        adapter.drop_gradients()
        compare_plans(engine)
        compatibility.warn_of_rates(engine, rates)
        if not arguments["load_optimizer_states"]:
            adapter.refresh_masters()
    return result


def _agreed(engine: Any, arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    """The tag to load and the id of its save, if any. Raises on all ranks what one of them has found to be wrong."""
    found = gathered(_look(engine, arguments))
    ranks: dict[str, list[int]] = {}
    for rank, (_, _, problems) in enumerate(found):
        for text in problems:
            ranks.setdefault(text, []).append(rank)
    told = [text if len(who) == len(found) else f"{text} (found by ranks {who})" for text, who in ranks.items()]
    seen = [(tag, save_id) for tag, save_id, _ in found]
    if not told and len(set(seen)) > 1:
        told = [f"the ranks see different checkpoints: {seen[:TOLD]}"]
    if told:
        is_first = engine.global_rank == 0  # it alone looks for another tag to suggest
        raise CheckpointError(from_rank_0(_refusal(arguments["load_dir"], seen[0][0], told) if is_first else None))
    return seen[0]


def _refusal(load_dir: str, tag: str | None, problems: list[str]) -> str:
    more = f" and {len(problems) - TOLD} more" if len(problems) > TOLD else ""
    try:
        tags = [other for other in manifest.complete_tags(Path(load_dir)) if other != tag]
    except Exception:  # somebody deletes them meanwhile; the other ranks wait for this text
        tags = []
    advice = f"{load_dir} has no other complete checkpoint"
    if tags:
        advice = f"complete there: {', '.join(tags[:TOLD])}; pass tag={tags[0]!r}"
    return (
        f"the checkpoint {Path(load_dir, tag or '')} cannot be loaded, and nothing was changed: "
        f"{'; '.join(problems[:TOLD])}{more} ({advice})"
    )


def _look(engine: Any, arguments: dict[str, Any]) -> tuple[str | None, str | None, list[str]]:
    """This rank's view: the tag, the id of the save, and what is wrong with it."""
    tag, header, problems = arguments["tag"], None, []
    try:
        _refuse_moved(engine)
        tag = _latest(Path(arguments["load_dir"])) if tag is None else str(tag)
        if tag is not None:
            header = manifest.read_header(Path(arguments["load_dir"], tag))
            problems = _misfits(engine, arguments, tag, header)
    except Exception as error:  # a damaged file can raise anything, and the other ranks wait for this view
        problems = [str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"]
    return tag, header["save_id"] if header else None, problems


def _refuse_moved(engine: Any) -> None:
    """Refuse a load while states are away: DeepSpeed would fill some of them and lose others."""
    if moved := engine.muon_adapter.moved_states:
        raise CheckpointError(f"{', '.join(moved)} are away after offload_states(); call engine.reload_states() first")


def _universal(engine: Any, arguments: dict[str, Any]) -> tuple[str, None]:
    """The tag that is given, or of what was converted last; a universal checkpoint has no id of a save."""

    def find() -> str:
        _refuse_moved(engine)
        folder = Path(arguments["load_dir"])
        if tag := arguments["tag"] or _latest(folder, "latest_universal"):
            return str(tag)
        tag = _latest(folder)
        raise CheckpointError(
            f"checkpoint.load_universal is true, but {folder} has no universal checkpoint (latest_universal); "
            + (f"remove it to load the checkpoint {tag}" if tag else "it has no other checkpoint either")
        )

    return together(find, CheckpointError), None


def _latest(folder: Path, name: str = "latest") -> str | None:
    file = folder / name
    if not file.is_file():
        return None
    if tag := file.read_text().strip():
        return tag
    raise CheckpointError(f"{name} is empty")


def _misfits(engine: Any, arguments: dict[str, Any], tag: str, header: dict[str, Any] | None) -> list[str]:
    """Messages about damaged files, else the first about a checkpoint that does not fit."""
    folder = Path(arguments["load_dir"], tag)
    if not folder.is_dir():
        return [f"there is no folder {tag}" + ("" if arguments["tag"] else ", which latest names")]
    if header is None:
        saved = compatibility.of_files(engine, arguments, tag)
    else:
        there, (share, here) = len(header["structures"]), compatibility.model_share(engine)
        if there != here:
            what = "stages of a pipeline, or ranks of tensor parallelism"
            return [f"it was saved with the model divided into {there} {what}, this run has {here}; use as many"]
        saved = header["structures"][share]
        mine = range(engine.global_rank, header["world_size"], engine.world_size)
        if found := [text for rank in mine for text in manifest.damages(folder, header["save_id"], rank)]:
            return found
    return list(itertools.islice(compatibility.differences(engine, saved, arguments | {"tag": tag}), 1))


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


def _warn_of_frozen(engine: Any, are_excluded: bool) -> None:
    """Warn, once, that DeepSpeed saves what ``zero_to_fp32`` needs for frozen parameters at stages 2 and 3 only."""
    adapter = engine.muon_adapter
    if engine.zero_optimization_stage() != 1 or are_excluded or adapter.has_warned_of_frozen:
        return
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    adapter.has_warned_of_frozen = True
    if frozen and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: at ZeRO stage 1 DeepSpeed's zero_to_fp32 leaves out frozen parameters, here %d, first %s; "
            "they are in this checkpoint's mp_rank_*_model_states.pt, or use stage 2",
            len(frozen),
            frozen[0],
        )


def _position(engine: Any) -> int:
    """Micro-batches since the last step; 0 if the script or framework decides itself which one ends a step."""
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if not is_managed or engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()
