# SPDX-License-Identifier: Apache-2.0
"""``SafeFiles``, the checkpoint engine through which DeepSpeed saves and loads: a save succeeds or fails on all ranks.

DeepSpeed calls ``makedirs``, ``create``, ``save`` (once per file) and ``commit`` in this order. ``create`` and
``commit`` are collectives and raise the error of one rank on all ranks; the other calls keep an error until then.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.exchange.groups import broadcast, gathered
from deepspeed.muon.log import logger
from deepspeed.muon.seam import Seam, replaced
from deepspeed.muon.zero.checkpoint import compatibility, durable, manifest
from deepspeed.muon.zero.checkpoint.safe_load import read_model
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.nvme import saved_swap_folder

#: Patterns that match the state files of any DeepSpeed checkpoint.
STATES = ("*model_states.pt", "*optim_states.pt")
SEAMS = (
    *(
        Seam("deepspeed.runtime.checkpoint_engine.checkpoint_engine", f"CheckpointEngine.{name}")
        for name in ("makedirs", "create", "save", "commit", "load")
    ),
    Seam("deepspeed.runtime.engine", "DeepSpeedEngine.zero_nvme_offload_optimizer"),
)


def is_default_engine(checkpoint_engine: Any) -> bool:
    """Return whether DeepSpeed's checkpoint engine is the default one, in whose place :class:`SafeFiles` can save."""
    return type(checkpoint_engine).__name__ == "TorchCheckpointEngine"


class SafeFiles(CheckpointEngine):
    """A checkpoint engine for DeepSpeed. It writes temporary files, and renames them once all ranks' files are on disk.

    Args:
        exclude_frozen: whether a save leaves out frozen parameters.
        names_latest: whether ``commit`` writes the tag into the file ``latest``.
    """

    def __init__(self, engine: Any, exclude_frozen: bool = False, names_latest: bool = False) -> None:
        super().__init__()
        self.engine, self.contents = engine, engine.checkpoint_engine
        self.exclude_frozen, self.names_latest = exclude_frozen, names_latest
        is_local = engine.use_node_local_storage()
        #: The first rank that sees this rank's files: its node's first rank if storage is local to nodes, or rank 0.
        self.node = engine.global_rank - engine.local_rank if is_local else 0
        #: Whether this rank writes the header and ``latest``.
        self.is_first = engine.global_rank == self.node
        self.save_dir, self.tag, self.folder = Path(), "", Path()
        #: The contents of the header, once ``create`` has run.
        self.facts: dict[str, Any] = {}
        #: Final path -> temporary path of each file that this rank has begun to write.
        self.files: dict[Path, Path] = {}
        #: Final paths of the files that this rank may rename: another rank may have written a file of the same name.
        self.placed: list[Path] = []
        self.is_complete = False
        self.error: BaseException | None = None
        self._lock: int | None = None
        self._threads = ThreadPoolExecutor(4, "muon-save")
        self._syncs: dict[Path, Future] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the DeepSpeed engine save and load through this checkpoint engine in this context."""
        self.engine.checkpoint_engine = self
        try:
            yield
        finally:
            self.engine.checkpoint_engine = self.contents

    def run(self, save: Callable[[], Any]) -> Any:
        """Call ``save``, a function that calls DeepSpeed's ``save_checkpoint``, and return its result.

        Raises:
            CheckpointError: on all ranks, if one of them could not save. The files of this save are removed, except if
                only ``latest`` could not be written.
        """
        # DeepSpeed would copy NVMe swap files, bypassing its checkpoint engine; our files already have their contents.
        on_engine = {"zero_nvme_offload_optimizer": lambda original: False}
        # An int8 momentum is decoded into a mapped file: a save must not need 4 bytes of memory per element.
        on_states = {"host_zeros": lambda original, numel: durable.zeros_on_disk(self.folder, original, numel)}
        with replaced(self.engine, **on_engine), replaced(self.engine.basic_optimizer, **on_states):
            try:
                with self.in_use():
                    return self._guarded(save)
            except CheckpointError:
                if not self.is_complete:
                    self._clean_up()
                raise
            finally:
                self._threads.shutdown()
                if self._lock is not None:
                    os.close(self._lock)

    def _guarded(self, save: Callable[[], Any]) -> Any:
        """Call ``save`` and return its result; after a failure still join the collectives of the other ranks."""
        try:
            return save()
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:
            if not self.facts:  # before ``create``
                raise
            self.error = self.error or error
            if hasattr(self.engine.optimizer, "checkpoint_event_epilogue"):
                self.engine.optimizer.checkpoint_event_epilogue()  # at stage 3 a collective; the last one before commit
            return self.commit()

    def _attempt(self, act: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return act(*args, **kwargs)
        except (Exception, SystemExit) as error:  # raised on all ranks by the next `create` or `commit`
            self.error = self.error or error

    def _on_all_ranks(self, act: Callable[[], Any]) -> Any:
        def failure(reasons: str) -> CheckpointError:
            return CheckpointError(
                f"the checkpoint {self.folder} could not be saved: {reasons}. Its files were removed, latest does not "
                "name an incomplete checkpoint, and training can continue. Save again once the cause is removed"
            )

        return raise_on_all_ranks(act, failure)

    def leave_to_deepspeed(self, folder: Path) -> None:
        """Remove an older save's ``muon_save.json`` from ``folder``; warn that another checkpoint engine saves there.

        A collective.
        """
        self.folder = folder
        self._on_all_ranks(lambda: (folder / manifest.HEADER).unlink(missing_ok=True) if self.is_first else None)
        if self.is_first:
            logger.warning(
                f"deepspeed-muon: the checkpoint engine {type(self.contents).__name__} writes this checkpoint, so it "
                "has no manifest (a list of files with their checksums), and a load cannot detect damage; to change "
                "that, use DeepSpeed's default checkpoint engine"
            )

    # ---- what DeepSpeed calls, in this order --------------------------------------------------------------

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a folder. If that fails, ``create`` or ``commit`` raises the error on all ranks."""
        self._attempt(self.contents.makedirs, path, exist_ok=exist_ok)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save: choose an id that all ranks share, and lock the tag's folder; a collective.

        A new folder gets the header (``muon_save.json``) now. If the folder has an older checkpoint, ``commit`` writes
        the header later, so that a failed save leaves the older checkpoint valid.
        """
        self.save_dir, self.tag = Path(info.save_dir), info.tag
        self.folder = self.save_dir / self.tag
        self.contents.create(info)
        nodes = gathered(self.node)
        self.facts = {
            "save_id": broadcast(uuid.uuid4().hex),
            "tag": self.tag,
            "step": self.engine.global_steps,
            "world_size": self.engine.world_size,
            "structures": self._structures(),
            "ranks": [rank for rank, node in enumerate(nodes) if node == self.node],
        }

        def prepare() -> None:
            if self.error is not None:
                raise self.error
            if self.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = durable.lock(self.folder)
                if not self._states():
                    manifest.begin(self.folder, self.facts)

        self._on_all_ranks(prepare)

    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` to a temporary file, which ``commit`` will rename to ``path``.

        If that fails, ``commit`` raises the error, on all ranks.
        """
        if self.error is not None:
            return
        final = Path(path)
        temporary = f"{final.name}.{self.facts['save_id']}.{self.engine.global_rank}{durable.TEMPORARY}"
        if final in self._syncs:  # this rank writes the file again; the second version counts
            self._attempt(self._syncs.pop(final).result)
        self.files[final] = final.with_name(temporary)
        file = self._attempt(durable.SyncedFile, self.files[final])

        # Never raise: torch.save calls this from C++, and to close its archive after a failed write ends the process.
        def write(data: Any) -> int:
            view = memoryview(data).cast("B")
            if self.error is None:
                self._attempt(file.write, view)
            return len(view)

        self._attempt(self.contents.save, state_dict, SimpleNamespace(write=write, flush=lambda: None))
        if file is not None:
            self._syncs[final] = self._threads.submit(file.close)
        if isinstance(self.error, OSError):
            self.error.filename = path

    def commit(self, info: CheckpointCommitInfo | None = None) -> bool:
        """Rename all ranks' temporary files, write manifests (checksums) and ``latest``, return True; a collective."""
        self._on_all_ranks(self._wait_for_disk)
        # Several ranks may write one file (experts under tensor parallelism): the lowest rank's version counts.
        mine = [file.relative_to(self.folder).as_posix() for file in self.files]
        writers: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank, (node, names) in enumerate(gathered((self.node, mine))):
            for name in names:
                writers[node, name].append(rank)
        # From this header on, an older checkpoint in the folder counts as incomplete.
        self._on_all_ranks(lambda: manifest.begin(self.folder, self.facts) if self.is_first else None)
        self.placed = [self.folder / name for name in mine if writers[self.node, name][0] == self.engine.global_rank]
        self._on_all_ranks(self._place)
        if self.is_first:
            self._remove_older({self.folder / name for node, name in writers if node == self.node})
        header = self.folder / manifest.HEADER
        # If the folder could not be locked, another job may have saved this tag meanwhile.
        if any(gathered(self.is_first and not manifest.belongs_to_save(header, self.facts["save_id"]))):
            self.placed = []
            raise CheckpointError(f"another job saved {self.folder} at the same time; give each job its own folder")
        self.is_complete = True
        if self.names_latest:
            unnamed = f"the checkpoint {self.folder} is complete, but latest could not be written; load it by its tag: "
            latest = partial(durable.write_atomically, self.save_dir / "latest", self.tag)
            raise_on_all_ranks(
                lambda: latest() if self.is_first else None, lambda reasons: CheckpointError(unnamed + reasons)
            )
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of a checkpoint file. The tensors of ZeRO's optimizer state files are memory-mapped."""
        # Mapping saves time and memory. A load copies states into existing tensors, so nothing keeps the file in use.
        # The user may keep tensors of other files. If those were mapped, a later save to the file would change them.
        is_state = "zero_pp_rank_" in path and path.endswith("optim_states.pt")
        return read_model(Path(path)) if is_state else self.contents.load(path, map_location)

    # ---- steps of a save ----------------------------------------------------------------------------------

    def _states(self) -> list[Path]:
        return [file for pattern in STATES for file in self.folder.glob(pattern)]

    def _structures(self) -> list[dict[str, Any]]:
        """Return the :func:`engine_fingerprint` of each part of the model (see :func:`model_share`); a collective."""
        from deepspeed import comm  # type: ignore[attr-defined]

        mine = self._on_all_ranks(lambda: compatibility.engine_fingerprint(self.engine, self.exclude_frozen))
        share, shares = compatibility.model_share(self.engine)
        if shares == 1:
            return [mine]
        is_first_of_share = comm.get_rank(group=self.engine.seq_data_parallel_group) == 0
        found = gathered((share, mine) if is_first_of_share else None)
        return [structure for _, structure in sorted(filter(None, found))]

    def _wait_for_disk(self) -> None:
        """Wait until all files of this rank are on disk; raise the first error of this save."""
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
        shutil.rmtree(saved_swap_folder(self.engine, self.folder), ignore_errors=True)
        for file, temporary in self.files.items():
            if file in self.placed:
                durable.move(temporary, file)
            else:
                temporary.unlink()
        manifest.finish(self.folder, self.engine.global_rank, self.facts["save_id"], self.placed)

    def _remove_older(self, files: set[Path]) -> None:
        """Remove earlier saves' files from the tag's folder, where converters would read them; keep ``files``."""
        listed = {self.folder / manifest.manifest_name(rank) for rank in self.facts["ranks"]}
        others = {*self._states(), *self.folder.glob(manifest.MANIFESTS)} - files - listed
        for file in (*others, *self.folder.glob(f"*{durable.TEMPORARY}")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                logger.warning(
                    "deepspeed-muon: %s belongs to an older checkpoint of this tag and cannot be removed: %s; delete "
                    "it before converting this checkpoint",
                    file,
                    error,
                )

    def _clean_up(self) -> None:
        self._threads.shutdown()
        for file in (*self.files.values(), *self.placed):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        save_id = self.facts.get("save_id", "")
        manifest.forget(self.folder / manifest.manifest_name(self.engine.global_rank), save_id)
        was_begun = self.is_first and manifest.forget(self.folder / manifest.HEADER, save_id)
        with suppress(OSError):
            self.folder.rmdir()  # only if it is empty
        with suppress(OSError):
            if was_begun:
                self._repoint_latest()

    def _repoint_latest(self) -> None:
        """Replace this failed save's tag in ``latest`` by the newest complete tag; without one, remove ``latest``."""
        latest = self.save_dir / "latest"
        if not latest.is_file() or latest.read_text().strip() != self.tag:
            return
        if tags := [tag for tag in manifest.complete_tags(self.save_dir) if tag != self.tag]:
            durable.write_atomically(latest, tags[0])
        else:
            latest.unlink()
