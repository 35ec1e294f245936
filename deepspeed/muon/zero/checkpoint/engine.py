# SPDX-License-Identifier: Apache-2.0
"""``SafeFiles``, a checkpoint engine for DeepSpeed: a save succeeds or fails on all ranks, and leaves no part of files.

DeepSpeed calls ``makedirs``, ``create``, ``save`` (once per file) and ``commit`` in this order. ``create`` and
``commit`` are collectives and raise the error of one rank on all ranks; the other calls keep an error until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.saved_state import read_mapped
from deepspeed.muon.zero.consensus import raise_on_all_ranks

#: Suffix of the name of a file that is not complete yet.
TEMPORARY = ".muon-tmp"
FAILED = (
    "the checkpoint {} could not be saved: {}. latest does not name an incomplete checkpoint, and training can "
    "continue. Save again once the cause is removed"
)


class SafeFiles(CheckpointEngine):
    """A checkpoint engine that writes temporary files, and renames them once the files of all ranks are on disk.

    ``contents``: DeepSpeed's default checkpoint engine, which writes and reads the contents of a file. ``is_first``:
    whether this is the first of the ranks that see the same folders: rank 0, or each node's first rank.
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

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a folder."""
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
        """Return the contents of a checkpoint file; within a load, read each file once."""
        opened = {} if self.opened is None else self.opened
        if path not in opened:
            is_mapped = path.endswith("optim_states.pt")  # a load copies these; the script may keep what others contain
            opened[path] = read_mapped(path) if is_mapped else self.contents.load(path, map_location)
        return opened[path]

    @contextmanager
    def errors_kept(self) -> Iterator[None]:
        """Return a context that keeps an exception for the next ``create`` or ``commit`` to raise on all ranks."""
        try:
            yield
        except CheckpointError:  # all ranks have raised it
            raise
        except (Exception, SystemExit) as error:
            self._error = self._error or error

    def _on_all_ranks(self, act: Callable[[], Any]) -> None:
        """Call ``act``; if a rank has kept an error or raises one, raise those of all ranks, and clean up."""

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
        """Remove the files of an older checkpoint of this tag, whose ranks or stage may have been others."""
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
