# SPDX-License-Identifier: Apache-2.0
"""A lock that lets one process build an extension while others wait, at most ``GIVE_UP_AFTER`` seconds.

The lock is ``flock``'s, which the operating system releases when the process ends. torch builds DeepSpeed's own
extensions under another lock, a file (``FileBaton``) that a killed process leaves behind; :func:`wait_for_torch` names
it.
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

from deepspeed.muon.log import logger

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

    Yield True. If the file system has no ``flock``, lock a file in the machine's temporary folder instead, and yield
    False: processes on other machines then do not wait.

    Raises:
        TimeoutError: another process has held the lock for ``GIVE_UP_AFTER`` seconds.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        file = files.enter_context(path.open("a"))
        try:
            _take(file)
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
            _take(files.enter_context(local.open("a")))
            yield False


def _take(file: IO[str]) -> None:
    """Wait until this process holds a lock on ``file``. Closing the file releases the lock."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        if waited >= GIVE_UP_AFTER:
            raise TimeoutError(
                f"another process has held the build lock {file.name} for {waited / 60:.0f} minutes ({_compilers()}"
                "). If that process hangs, end it, which releases the lock, and start again"
            )
        if waited >= TELL_AFTER and not is_told:
            is_told = True
            _warn_once_per_machine(
                "waiting for another process to build the C++ kernels; it holds the lock %s, and %s",
                file.name,
                _compilers(),
            )
        time.sleep(INTERVAL)


def wait_for_torch(original: Callable[[Any], None], baton: Any) -> None:
    """Wait, as torch's ``FileBaton.wait`` (``original``) does, until another process has built an extension.

    After ``TELL_AFTER`` seconds, log the path of the lock file that torch waits for. If the process that created the
    file was killed, the wait does not end until a user deletes the file.
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
    _warn_once_per_machine(
        "waiting until the lock file %s is gone, which a process that builds %s created %s ago; %s. If no machine that "
        "shares this folder is building that extension, the process was killed: delete the file",
        path,
        path.parent.name,
        f"{age:.0f} s" if age < 600 else f"{age / 60:.0f} minutes" if age < 36000 else f"{age / 3600:.0f} hours",
        _compilers(),
    )


def _warn_once_per_machine(text: str, *values: Any) -> None:
    """Log a warning, on only one rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(f"deepspeed-muon: {text}", *values)


def _compilers() -> str:
    """Return, as text, which compilers are running at the moment, such as ``g++ runs on this machine``."""
    names = {process.info["name"] for process in psutil.process_iter(["name"])}
    running = sorted(COMPILERS & {name for name in names if name})
    return f"{', '.join(running)} runs on this machine" if running else "no compiler runs on this machine"
