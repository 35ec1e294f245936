# SPDX-License-Identifier: Apache-2.0
"""A lock that lets one process build an extension while others wait, at most ``GIVE_UP_AFTER`` seconds.

The lock is ``flock``'s, which the operating system releases when the process ends. torch before 2.15 builds DeepSpeed's
own extensions under another lock, a file (``FileBaton``) that a killed process leaves behind. :func:`wait_for_torch`
logs the path of that file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from deepspeed.muon.errors import logger

#: Seconds after which a waiting process logs that it waits, and after which it gives up: less than the 30 minutes that
#: ranks give each other to get ready, so that all of them can continue with plain PyTorch.
TELL_AFTER, GIVE_UP_AFTER = 30.0, 600.0
#: Seconds between two attempts to take a lock.
INTERVAL = 0.2
#: Error numbers of file systems without ``flock``, such as some network file systems.
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
#: Names of processes that build an extension.
COMPILERS = frozenset(
    ("ninja", "c++", "g++", "gcc", "cc1plus", "clang", "clang++", "icpx", "ld", "nvcc", "cicc", "ptxas", "hipcc")
)


@contextmanager
def build_lock(path: Path) -> Iterator[bool]:
    """Hold a lock on the file ``path`` within the ``with`` block. Other processes that ask for the same lock wait.

    Yield True if the file system of ``path`` has ``flock``. Otherwise lock a file in the machine's temporary folder
    instead, so that only processes on this machine wait, and yield False.

    Raises:
        TimeoutError: another process has held the lock for ``GIVE_UP_AFTER`` seconds.
        RuntimeError: the file cannot be written.
    """
    with ExitStack() as files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = files.enter_context(path.open("a"))
        except OSError as error:
            why = f"the folder {path.parent} cannot be written ({error.strerror})"
            raise RuntimeError(f"{why}; set TORCH_EXTENSIONS_DIR to a writable folder") from None
        try:
            _take(file, path.stem)
            yield True
        except OSError as error:
            if isinstance(error, TimeoutError) or error.errno not in NO_FLOCK:
                raise
            local = Path(tempfile.gettempdir()) / f"{path.parent.name}_{os.getuid()}.lock"
            logger.info(
                "deepspeed-muon: the file system of %s has no file locks (flock), so each machine builds the C++ "
                "kernels for itself, under the lock %s",
                path,
                local,
            )
            _take(files.enter_context(local.open("a")), path.stem)
            yield False


def _take(file: IO[str], name: str) -> None:
    """Wait until this process holds a lock on ``file``. Closing the file releases the lock.

    ``name``: name of the extension to build, for messages. Raise TimeoutError after ``GIVE_UP_AFTER`` seconds.
    """
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        if waited >= GIVE_UP_AFTER:
            raise TimeoutError(
                f"{_verdict(name)}, and another process has held its lock {file.name} for "
                f"{waited / 60:.0f} minutes; if that process hangs, end it, which releases the lock, and start again"
            )
        if waited >= TELL_AFTER and not is_told:
            is_told = True
            _warn_once_per_machine("%s; waiting for the process that holds its lock %s", _verdict(name), file.name)
        time.sleep(INTERVAL)


def wait_for_torch(original: Callable[[Any], None], baton: Any) -> None:
    """Wait until another process has built an extension. This replaces torch's ``FileBaton.wait``, ``original``.

    After ``TELL_AFTER`` seconds, log the path of the lock file that torch waits for. If the process that created the
    file was killed, the wait does not end until a user deletes the file. ``baton``: the ``FileBaton`` object.
    """
    timer = threading.Timer(TELL_AFTER, _tell_of_file, [Path(baton.lock_file_path)])
    timer.daemon = True
    timer.start()
    try:
        original(baton)
    finally:
        timer.cancel()


def _tell_of_file(path: Path) -> None:
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:  # removed meanwhile
        return
    name = path.parent.name
    is_built = bool(_compilers(name))
    _warn_once_per_machine(
        "%s%s; waiting until its lock file %s, created %s ago, is gone%s",
        _verdict(name),
        "" if is_built else ", so its build was probably killed",
        path,
        f"{age:.0f} s" if age < 600 else f"{age / 60:.0f} minutes" if age < 36000 else f"{age / 3600:.0f} hours",
        "" if is_built else ". Delete the file, unless another machine that shares this folder builds it",
    )


def _warn_once_per_machine(text: str, *values: Any) -> None:
    """Log the warning ``text % values``, on only one rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(f"deepspeed-muon: {text}", *values)


def _verdict(extension: str) -> str:
    """Return a phrase for messages that says whether a compiler is building ``extension`` on this machine now."""
    running = ", ".join(_compilers(extension))
    if running:
        return f"this machine is building {extension} ({running})"
    return f"no compiler on this machine is building {extension}"


def _compilers(extension: str) -> list[str]:
    """Return the names of the compilers that run on this machine with ``extension`` in their arguments."""
    found = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        name, arguments = process.info["name"], process.info["cmdline"]
        if name in COMPILERS and any(extension in argument for argument in arguments or ()):
            found.add(name)
    return sorted(found)
