# SPDX-License-Identifier: Apache-2.0
"""Functions that return once a file is on disk, with fallbacks for file systems without rename, fsync or locks."""

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

#: Error codes that file systems return for calls that they do not support.
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EXDEV, errno.ENOTTY}
#: After this many bytes written to a file, ask the system to start writing them to disk.
SYNC_BYTES = 32 * 2**20
#: Suffix of the name of a file that is not complete yet.
TEMPORARY = ".muon-tmp"


@functools.cache
def _warn_once(call: str, consequence: str) -> None:
    logger.warning(
        "deepspeed-muon: the file system of this checkpoint does not support %s: %s; to avoid this, "
        "save to another file system",
        call,
        consequence,
    )


def sync(descriptor: int) -> None:
    """Flush an open file or folder to disk (fsync); warn once if the file system does not support that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn_once("fsync", "a save that returned can be lost in a power failure")


def move(temporary: Path, file: Path) -> None:
    """Rename ``temporary`` to ``file`` atomically; if the file system cannot rename, copy it and warn once."""
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
    """Replace the contents of a small file by ``text``. A crash leaves either the old or the new contents."""
    file = file.resolve()  # the target of a symbolic link
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
    """Lock a folder until the returned file descriptor is closed or the process ends.

    Return ``None``, without a lock, if the file system cannot lock folders.

    Raises:
        CheckpointError: another process has locked the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:  # the kernel drops a flock with its process, so a killed job leaves no lock behind
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            return None
    raise CheckpointError(f"another job is saving {folder} at this moment; give each job its own folder")


def zeros_on_disk(folder: Path, in_memory: Callable[[int], Tensor], numel: int) -> Tensor:
    """Return a 1-D fp32 CPU tensor of ``numel`` zeros, mapped from a temporary file in ``folder`` to save memory.

    If there is no room for the file, or the file system cannot map it, return ``in_memory(numel)`` instead.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * numel)  # raises on a full disk; a later write would be a SIGBUS
            return torch.frombuffer(mmap.mmap(file.fileno(), 4 * numel), dtype=torch.float32)
    except (OSError, ValueError):  # a file of no bytes cannot be mapped
        return in_memory(numel)


class SyncedFile:
    """A new file whose data is written to disk while the caller is still appending, not only at the end."""

    def __init__(self, path: Path) -> None:
        self._file, self._waiting = path.open("wb"), 0

    def write(self, data: Any) -> None:
        """Append ``data`` (bytes, or another object with the buffer protocol) to the file."""
        self._file.write(data)
        self._waiting += len(data)
        if self._waiting >= SYNC_BYTES:
            self._waiting = 0
            # A system or a file system may lack this advice; `close` raises if a write failed.
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait until all data of the file is on disk, then close it; raise OSError if a write failed."""
        with self._file:
            self._file.flush()
            sync(self._file.fileno())
