# SPDX-License-Identifier: Apache-2.0
"""Save a checkpoint on all ranks or on none, and leave no incomplete files.

:func:`save_checkpoint` replaces DeepSpeed's. Its files go through :class:`SafeFiles`, a checkpoint engine of which
DeepSpeed calls ``makedirs``, ``create``, ``save`` (once per file) and ``commit`` in this order. ``create`` and
``commit`` are collectives and raise the error of one rank on all ranks; the other two keep an error until then.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from deepspeed.muon.errors import CheckpointError, logger
from deepspeed.muon.exchange.consensus import differences, gathered, raise_on_all_ranks
from deepspeed.muon.saved_state import read_mapped

#: Suffix of the name of a file that is not complete yet.
TEMPORARY = ".muon-tmp"
FAILED = (
    "the checkpoint {} could not be saved: {}. latest does not name an incomplete checkpoint, and training can "
    "continue. Save again once the cause is removed"
)


class SafeFiles(CheckpointEngine):
    """A checkpoint engine that writes temporary files, and renames them once the files of all ranks are on disk.

    Args:
        contents: DeepSpeed's default checkpoint engine, which writes and reads the contents of a file.
        rank: this rank's global number.
        is_first: whether this is the first of the ranks that see the same folders: rank 0, or each node's first rank.
    """

    def __init__(self, contents: CheckpointEngine, rank: int, is_first: bool) -> None:
        super().__init__()
        self.contents, self.rank, self.is_first = contents, rank, is_first
        #: Path -> contents of each file that the load under way has read; ``None`` outside of loads.
        self.opened: dict[str, Any] | None = None
        #: Whether the next ``commit`` writes the file ``latest``. DeepSpeed would write it without these precautions.
        self.names_latest = False
        self._error: BaseException | None = None
        self._save_dir = self._folder = Path()
        #: Final path -> temporary path of each file that this rank has begun to write.
        self._files: dict[Path, Path] = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make the folder ``path``. If this fails, the next ``create`` or ``commit`` raises the error on all ranks."""
        with self.errors_kept():
            Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save, and remove temporary files that a killed save has left; a collective."""
        self.contents.create(info)
        self._save_dir, self._folder = Path(info.save_dir), Path(info.save_dir, info.tag)
        self._on_all_ranks(lambda: _remove(self._folder.glob(f"*{TEMPORARY}") if self.is_first else ()))

    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` to a temporary file, which ``commit`` will rename to ``path``."""
        if self._error is not None:
            return
        temporary = self._files[Path(path)] = Path(f"{path}.{self.rank}{TEMPORARY}")
        with self.errors_kept(), temporary.open("wb") as file:

            def write(data: Any) -> int:
                with self.errors_kept():  # torch.save calls this from C++, and ends the process if it raises
                    file.write(data)
                    if hasattr(os, "posix_fadvise"):  # the disk starts now: a save takes two thirds of the time
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return len(memoryview(data).cast("B"))

            self.contents.save(state_dict, SimpleNamespace(write=write, flush=lambda: None))
            file.flush()
            os.fsync(file.fileno())
        if isinstance(self._error, OSError):
            self._error.filename = path  # a full disk gives none

    def commit(self, info: CheckpointCommitInfo | None = None) -> bool:
        """Rename all ranks' temporary files, then write ``latest``; return True. A collective."""
        # Each step begins once all ranks have ended the one before, so that the files of two saves never mix.
        for step in (lambda: None, self._remove_older, self._place, self._write_latest):
            self._on_all_ranks(step)
        self._files, self.names_latest = {}, False
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of a checkpoint file. While ``opened`` is a dict, read each file only once."""
        opened = {} if self.opened is None else self.opened
        if path not in opened:
            is_mapped = path.endswith("optim_states.pt")  # a load copies these; the script may keep what others contain
            opened[path] = read_mapped(Path(path)) if is_mapped else self.contents.load(path, map_location)
        return opened[path]

    @contextmanager
    def errors_kept(self) -> Iterator[None]:
        """Return a context that catches an exception, for the next ``create`` or ``commit`` to raise on all ranks."""
        try:
            yield
        except CheckpointError:  # all ranks have raised it
            raise
        except (Exception, SystemExit) as error:
            self._error = self._error or error

    def _on_all_ranks(self, act: Callable[[], Any]) -> None:
        """Call ``act`` on every rank where no earlier call of this save has failed; a collective.

        If ``act`` or an earlier call failed on any rank, remove the temporary files and raise CheckpointError on all
        ranks.
        """

        def attempt() -> None:
            if self._error is not None:
                raise self._error
            act()

        try:
            raise_on_all_ranks(attempt, lambda reasons: CheckpointError(FAILED.format(self._folder, reasons)))
        except CheckpointError:
            with suppress(OSError):
                _remove(self._files.values())
                self._folder.rmdir()  # only if it is empty
            self._error, self._files, self.names_latest = None, {}, False
            raise

    def _remove_older(self) -> None:
        """Remove the files of an older checkpoint of this tag, which may have other names if the ZeRO stage differed.

        If the file ``latest`` names this tag, remove it first; ``commit`` writes it again.
        """
        if not self.is_first or self._folder not in {path.parent for path in self._files}:
            return  # save_16bit_model writes its file next to the folders of tags
        older = [*self._folder.glob("*model_states.pt"), *self._folder.glob("*optim_states.pt")]
        latest = self._save_dir / "latest"
        if older and latest.is_file() and self._save_dir / latest.read_text().strip() == self._folder:
            latest.unlink()
            _sync(self._save_dir)
            self.names_latest = True
        _remove(older)

    def _place(self) -> None:
        """Rename this rank's temporary files to their final names, and flush the folders to disk."""
        for path, temporary in self._files.items():
            temporary.replace(path)
        for folder in {parent for path in self._files for parent in (path.parent, path.parent.parent)}:
            _sync(folder)

    def _write_latest(self) -> None:
        if self.is_first and self.names_latest:
            temporary = self._save_dir / f"latest{TEMPORARY}"
            temporary.write_text(str(self._folder.relative_to(self._save_dir)))
            _sync(temporary)
            temporary.replace(self._save_dir / "latest")
            _sync(self._save_dir)


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def configure_checkpointing(original: Callable, engine: Any) -> None:
    """Replace ``DeepSpeedEngine._configure_checkpointing``: call it, then make the engine save with :class:`SafeFiles`.

    Change nothing if the config or the script chose another checkpoint engine than DeepSpeed's default.
    """
    original(engine)
    if type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine":  # not one that the config or script names
        is_first = (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0
        engine.checkpoint_engine = SafeFiles(engine.checkpoint_engine, engine.global_rank, is_first)


def micro_batches_done(engine: Any) -> int:
    """Return how many micro-batches of the current gradient accumulation have run.

    Return 0 if the script itself decides when to step, by ``managed_gradient_accumulation: false`` or
    ``engine.set_gradient_accumulation_boundary``.
    """
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if not is_managed or engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()


#: Arguments of ``save_checkpoint`` and ``load_checkpoint`` that must be equal on all ranks.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip


def arguments_of(original: Callable, engine: Any, positional: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return {name: value} of all arguments of a call of the engine's method ``original``, defaults included."""
    bound = inspect.signature(original).bind(engine, *positional, **keywords)
    bound.apply_defaults()
    return bound.arguments


def compare_arguments(engine: Any, call: str, arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError on all ranks if they pass different arguments to the method named ``call``; a collective.

    ``arguments``: {name: value}. Those in :data:`COMMON` are compared.
    """
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


def save_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.save_checkpoint``: with :class:`SafeFiles`, succeed on all ranks or on none.

    Raises:
        CheckpointError: on all ranks, if the save failed on one of them. The files of this save are removed,
            ``latest`` names no incomplete checkpoint, and the engine can continue training and save again.
    """
    arguments = arguments_of(original, engine, args, kwargs)
    if arguments["tag"] is None:
        arguments["tag"] = f"global_step{engine.global_steps}"
    compare_arguments(engine, "save_checkpoint", arguments)
    if not arguments["save_dir"]:
        return original(**arguments)  # raises DeepSpeed's error, on all ranks
    _warn_of_unfinished_step(engine)
    _warn_of_different_client_states(engine, arguments["client_state"])
    _warn_of_frozen(engine, arguments["exclude_frozen_parameters"])
    files = engine.checkpoint_engine
    with engine.basic_optimizer.owner_state.whole():
        if not isinstance(files, SafeFiles):  # it writes later, or in slices
            return original(**arguments)
        files.names_latest, arguments["save_latest"] = arguments["save_latest"], False
        with files.errors_kept():
            return original(**arguments)
        # The other ranks wait in collectives: at stage 3 in the last one of DeepSpeed's save, then in ``commit``.
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        return files.commit()


def _warn_of_different_client_states(engine: Any, client_state: Any) -> None:
    """Warn if ranks pass different ``client_state``, except at stage 3, where every rank's is saved; a collective."""
    plain = (str, bytes, int, float, bool, type(None))
    comparable = {
        str(key): value if isinstance(value, plain) else type(value).__name__
        for key, value in (client_state or {}).items()
    }
    of_ranks = gathered(comparable)
    differing = [rank for rank, other in enumerate(of_ranks) if other != of_ranks[0]]
    if differing and engine.zero_optimization_stage() != 3 and engine.global_rank == 0:
        logger.warning(
            f"deepspeed-muon: the client_state of ranks {differing} differs from that of rank 0. At ZeRO stages 0 to 2 "
            "DeepSpeed saves the client_state of only one rank and loads it on all ranks; before the save, "
            "gather what all ranks need into it"
        )


def _warn_of_unfinished_step(engine: Any) -> None:
    done, total = micro_batches_done(engine), engine.gradient_accumulation_steps()
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
