# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` and ``load_checkpoint`` that fail closed.

Saving: each rank writes files of its own, which replace an older checkpoint's once those of all ranks are on disk; then
``latest`` is written. A failure on one rank is an error on all.
Loading: every rank checks its files before the engine is changed; all ranks raise the same error if any finds damage.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import Seam, replaced
from deepspeed.muon.zero.checkpoint import compatibility, durable, manifest
from deepspeed.muon.zero.checkpoint.safe_load import is_torchs, mapped_states, read_model
from deepspeed.muon.zero.choice import compare_plans
from deepspeed.muon.zero.consensus import differences, from_rank_0, gathered, together
from deepspeed.muon.zero.nvme import saved_files
from deepspeed.muon.zero.refusals import refuse_universal
from deepspeed.muon.zero.wrappers.loss_scale import own_scaler

#: How many problems one error tells of.
TOLD = 4
#: Files of DeepSpeed's checkpoints, in any layout.
STATES = ("*model_states.pt", "*optim_states.pt")
#: Arguments of a save and a load that all ranks must pass alike.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip
#: Methods of the engine and its checkpoint engine in which a rank does work of its own during a save.
GUARDED = ("_save_checkpoint", "_save_moe_checkpoint", "_save_zero_checkpoint", "_copy_recovery_script")
ENGINE = "deepspeed.runtime.engine"
_FILES = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
_MODEL_FILES = "deepspeed.runtime.state_dict_factory"
SEAMS = (
    *(Seam(ENGINE, f"DeepSpeedEngine.{name}", "call") for name in (*GUARDED, "zero_nvme_offload_optimizer")),
    *(Seam(_FILES, f"TorchCheckpointEngine.{name}", "call") for name in ("save", "makedirs", "load")),
    Seam(_MODEL_FILES, "SDLoaderBase.check_ckpt_list", "call"),
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
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    _compare_arguments(engine, "save_checkpoint", call.arguments)
    save_dir, tag = call.arguments["save_dir"], call.arguments["tag"]
    if not save_dir:
        return original(engine, *args, **kwargs)  # raises DeepSpeed's error, on all ranks
    _warn_of_unfinished_step(engine)
    _warn_of_different_client_states(engine, call.arguments["client_state"])
    _warn_of_frozen(engine, call.arguments["exclude_frozen_parameters"])
    tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
    save = _Save(engine, Path(save_dir), tag)
    if not is_torchs(engine.checkpoint_engine):
        save.leave_to_deepspeed()
        with engine.basic_optimizer.whole_state():
            return original(engine, *args, **kwargs)
    wants_latest = call.arguments["save_latest"]
    call.arguments |= {"tag": tag, "save_latest": False}
    try:
        save.begin(call.arguments["exclude_frozen_parameters"])
        with engine.basic_optimizer.whole_state(), save.guarded():
            result = original(*call.args, **call.kwargs)
        save.commit()
        if wants_latest:
            unnamed = f"the checkpoint {save.folder} is complete, but latest does not name it: "
            together(save.name_latest, lambda reasons: _Unnamed(unnamed + reasons))
    except _Unnamed:
        raise
    except CheckpointError:
        save.clean_up()
        raise
    finally:
        save.close()
    return result


class _Unnamed(CheckpointError):
    """The checkpoint is complete; ``latest`` could not be written."""


def _compare_arguments(engine: Any, call: str, arguments: Mapping[str, Any]) -> None:
    """Raise the same CheckpointError on all ranks if they call a save or a load with different arguments."""
    values = {name: value for name, value in arguments.items() if name in COMMON}
    for name in {"save_dir", "load_dir"} & values.keys():
        values[name] = str(Path(values[name]).absolute()) if values[name] else ""
        if engine.use_node_local_storage():
            values[name] = bool(values[name])  # nodes may have different folders
    values["tag"] = None if values["tag"] is None else str(values["tag"])
    if call == "save_checkpoint" and values["tag"] is None:
        values["tag"] = f"global_step{engine.global_steps}"
    if "custom_load_fn" in values:
        values["custom_load_fn"] = values["custom_load_fn"] is not None
    titles = {name: f"{call}: the argument {name}" for name in values}
    if verdict := differences(gathered(values), titles):
        raise CheckpointError(f"{verdict['error']}; pass the same on all ranks. Nothing was written or changed")


def _warn_of_different_client_states(engine: Any, state: Any) -> None:
    """Warn where one rank's ``client_state`` is saved and others differ from it: at stage 3 each rank saves its own."""
    plain = (str, bytes, int, float, bool, type(None))
    facts = {
        str(key): value if isinstance(value, plain) else type(value).__name__ for key, value in (state or {}).items()
    }
    found = gathered(facts)
    odd = [rank for rank, other in enumerate(found) if other != found[0]]
    if odd and engine.zero_optimization_stage() != 3 and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: client_state of ranks %s differs from that of rank 0. At ZeRO stages 0 to 2 DeepSpeed "
            "saves that of one rank per share of the model, and loads it on all: gather what all ranks need before the "
            "save",
            odd,
        )


class _Save:
    """One save, as one rank sees it."""

    def __init__(self, engine: Any, save_dir: Path, tag: str) -> None:
        self.engine, self.save_dir, self.tag, self.folder = engine, save_dir, tag, save_dir / tag
        is_local = engine.use_node_local_storage()
        #: Ranks of one node see the same files; without storage of its own, all ranks do.
        self.node = engine.global_rank - engine.local_rank if is_local else 0
        #: Whether this rank writes what belongs to all.
        self.is_first = (engine.local_rank if is_local else engine.global_rank) == 0
        self.save_id = ""
        self.facts: dict[str, Any] = {}
        #: What this rank has begun to write: the file, and the one of its own that becomes it.
        self.files: dict[Path, Path] = {}
        #: Files of which this rank's version is the one that counts.
        self.kept: list[Path] = []
        self.error: BaseException | None = None
        self.is_placing = self.is_overtaken = False
        self._lock: int | None = None
        self._threads = ThreadPoolExecutor(4, "muon-save")
        self._syncs: dict[Path, Future] = {}

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
        self.together(lambda: self._header.unlink(missing_ok=True) if self.is_first else None)
        if self.is_first:
            logger.warning(
                "deepspeed-muon: %s writes this checkpoint, which therefore gets no manifest and is not verified when "
                "loaded",
                type(self.engine.checkpoint_engine).__name__,
            )

    def begin(self, exclude_frozen: bool) -> None:
        """Lock the folder. A header makes what a killed save leaves incomplete; an older checkpoint keeps its own."""
        self.save_id = from_rank_0(uuid.uuid4().hex)
        nodes = gathered(self.node)
        self.facts = {"save_id": self.save_id, "tag": self.tag, "step": self.engine.global_steps}
        self.facts |= {"world_size": self.engine.world_size, "structures": self._structures(exclude_frozen)}
        self.facts["ranks"] = [rank for rank, node in enumerate(nodes) if node == self.node]

        def prepare() -> None:
            if self.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = durable.lock(self.folder)
                if not self._states():
                    manifest.begin(self.folder, self.facts)

        self.together(prepare)

    def _states(self) -> list[Path]:
        """Return the files of any checkpoint in the folder."""
        return [file for pattern in STATES for file in self.folder.glob(pattern)]

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
        on_states = {"host_zeros": partial(durable.zeros_on_disk, self.folder)}
        try:
            with (
                replaced(self.engine, **on_engine),
                replaced(self.engine.checkpoint_engine, **on_files),
                replaced(self.engine.basic_optimizer, **on_states),
            ):
                yield
        except (Exception, SystemExit) as error:
            self.error = self.error or error

    def _attempt(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (Exception, SystemExit) as error:  # told to all ranks once they have all come to the end of the save
            self.error = self.error or error

    def _write(self, original: Callable, state_dict: Any, path: str) -> None:
        """``TorchCheckpointEngine.save``, after whose first error everything is accepted and thrown away.

        ``torch.save`` writes from C++, where a second failure, in closing the archive after a failed write, ends the
        process.
        """
        if self.error is not None:
            return
        final = Path(path)
        temporary = final.with_name(f"{final.name}.{self.save_id}.{self.engine.global_rank}{durable.TEMPORARY}")
        if final in self._syncs:  # the second version of a file counts
            self._attempt(self._syncs.pop(final).result)
        self.files[final] = temporary
        file = self._attempt(durable.SyncedFile, temporary, self._threads)

        def write(data: Any) -> int:
            view = memoryview(data).cast("B")
            if self.error is None:
                self._attempt(file.write, view)
            return len(view)

        self._attempt(original, state_dict, SimpleNamespace(write=write, flush=lambda: None))
        if file is not None:
            self._syncs[final] = file.finish()
        if isinstance(self.error, OSError):
            self.error.filename = path

    def commit(self) -> None:
        """Put what all ranks have written in the place of what the folder has, each file from one rank."""
        self.together(self._wait_for_disk)
        mine = [file.relative_to(self.folder).as_posix() for file in self.files]
        writers: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank, (node, names) in enumerate(gathered((self.node, mine))):
            for name in names:
                writers[node, name].append(rank)
        self.kept = [self.folder / name for name in mine if writers[self.node, name][0] == self.engine.global_rank]
        self.together(lambda: manifest.begin(self.folder, self.facts) if self.is_first else None)
        self.is_placing = True
        self.together(self._place)
        if self.is_first:
            self._remove_older({self.folder / name for node, name in writers if node == self.node})
        # Where folders cannot be locked, another job may have saved this tag meanwhile.
        self.is_overtaken = any(gathered(self.is_first and not manifest.is_of(self._header, self.save_id)))
        if self.is_overtaken:
            raise CheckpointError(f"another job has saved {self.folder} meanwhile; give each job its own folder")

    def _wait_for_disk(self) -> None:
        """Raise what has failed on this rank, while it wrote or when its files were brought to disk."""
        for path, done in self._syncs.items():
            try:
                done.result()
            except Exception as error:
                if isinstance(error, OSError):
                    error.filename = str(path)
                self.error = self.error or error
        if self.error is not None:
            raise self.error

    def _place(self) -> None:
        """Give this rank's files their names, and list them."""
        shutil.rmtree(saved_files(self.engine, self.folder), ignore_errors=True)
        for file, temporary in self.files.items():
            if file in self.kept:
                durable.move(temporary, file)
            else:
                temporary.unlink()
        manifest.finish(self.folder, self.engine.global_rank, self.save_id, self.kept)

    def _remove_older(self, files: set[Path]) -> None:
        """Remove what earlier saves of this tag have left, which converters would take for a part of this one."""
        listed = {self.folder / manifest.manifest_name(rank) for rank in self.facts["ranks"]}
        others = {*self._states(), *self.folder.glob(manifest.MANIFESTS)} - files - listed
        for file in (*others, *self.folder.glob(f"*{durable.TEMPORARY}")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("deepspeed-muon: %s is of an older checkpoint and cannot be removed: %s", file, error)

    @property
    def _header(self) -> Path:
        return self.folder / manifest.HEADER

    def name_latest(self) -> None:
        """Write ``latest``, on one rank."""
        if self.is_first:
            durable.write_atomically(self.save_dir / "latest", self.tag)

    def close(self) -> None:
        """Give back the lock and the threads."""
        self._threads.shutdown()
        if self._lock is not None:
            os.close(self._lock)

    def clean_up(self) -> None:
        """Remove what was written, and leave no ``latest`` that names it."""
        self._threads.shutdown()
        placed = self.kept if self.is_placing and not self.is_overtaken else []
        for file in (*self.files.values(), *placed):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        manifest.forget(self.folder / manifest.manifest_name(self.engine.global_rank), self.save_id)
        was_begun = self.is_first and manifest.forget(self._header, self.save_id)
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
        durable.write_atomically(latest, tags[0])
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
    _compare_arguments(engine, "load_checkpoint", call.arguments)
    adapter, arguments, is_universal = engine.muon_adapter, call.arguments, engine.load_universal_checkpoint()
    if is_universal:
        refuse_universal(engine)
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
        replaced(importlib.import_module(_MODEL_FILES).SDLoaderBase, check_ckpt_list=_check_mapped),
        mapped_states(engine.checkpoint_engine),
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


def _check_mapped(original: Callable, loader: Any) -> None:
    """``SDLoaderBase.check_ckpt_list``, which reads the model's whole file for one number: the file is mapped."""
    files = loader.checkpoint_engine
    load = {"load": lambda original, path, map_location=None: read_model(Path(path))} if is_torchs(files) else {}
    with replaced(files, **load):
        original(loader)


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
