# SPDX-License-Identifier: Apache-2.0
"""Files that are on disk when a function returns, also on file systems without rename, fsync or locks."""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger

#: What file systems answer to a call that they do not implement.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EXDEV, errno.ENOTTY}
#: Bytes written to a file before the system is asked to start to bring them to disk.
SYNC_BYTES = 32 * 2**20
#: Ends the name of a file that is not complete yet.
TEMPORARY = ".muon-tmp"


@functools.cache
def _warn_once(call: str, consequence: str) -> None:
    logger.warning("deepspeed-muon: the file system of this checkpoint does not support %s: %s", call, consequence)


def sync(descriptor: int) -> None:
    """Flush what was written to a descriptor to disk; warn once where the file system cannot."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn_once("fsync", "a save that returned can be lost in a power failure")


def move(temporary: Path, file: Path) -> None:
    """Replace ``file`` by ``temporary``, atomically where the file system can rename."""
    try:
        temporary.replace(file)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn_once("rename", "files are copied into place, so a crash can leave a part of one")
        shutil.copyfile(temporary, file)
        with file.open("rb") as target:
            sync(target.fileno())
        temporary.unlink()


def write_atomically(file: Path, text: str) -> None:
    """Replace a small file, or the file that a link names: after a crash it has the old text or the new one."""
    file = file.resolve()
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("w") as target:
            target.write(text)
            target.flush()
            sync(target.fileno())
        move(temporary, file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    with suppress(OSError):  # not every file system can open or sync a folder
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends; ``None`` where folders cannot be locked.

    Raises:
        CheckpointError: another process has locked it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            return None
    raise CheckpointError(f"another job is saving {folder} at this moment; give each job its own folder")


def zeros_on_disk(folder: Path, in_memory: Callable[[int], Tensor], numel: int) -> Tensor:
    """Return zeros, fp32, 1-D, in a mapped file without a name, which the system can move out of memory.

    Where the folder has no room or its file system maps no files: what ``in_memory(numel)`` returns.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * numel)  # a full disk is an error here, and a signal later
            return torch.frombuffer(mmap.mmap(file.fileno(), 4 * numel), dtype=torch.float32)
    except (OSError, ValueError):  # a file of no bytes cannot be mapped
        return in_memory(numel)


class SyncedFile:
    """A new file that the system starts to bring to disk while it is written."""

    def __init__(self, path: Path) -> None:
        self._file, self._waiting = path.open("wb"), 0

    def write(self, data: Any) -> None:
        """Append bytes."""
        self._file.write(data)
        self._waiting += len(data)
        if self._waiting >= SYNC_BYTES:
            self._waiting = 0
            # A system or a file system may lack this advice; `close` raises what a write has failed with.
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Return once the bytes are on disk; raise what has failed."""
        with self._file:
            self._file.flush()
            sync(self._file.fileno())
