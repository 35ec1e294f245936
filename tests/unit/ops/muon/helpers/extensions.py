# SPDX-License-Identifier: Apache-2.0
"""Before the tests: remove what killed runs left, and build the C++ extensions that their first use would compile."""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import psutil

from helpers.paths import ROOT, TESTS

os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / "build" / "torch_extensions"))
FOLDER = Path(os.environ["TORCH_EXTENSIONS_DIR"])
MUON = "from deepspeed.muon.kernels.builder import MuonBuilder; MuonBuilder().load()"
COMMUNICATION = "from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder; ShareMemCommBuilder().load()"
LATE = "from helpers.late_device import build; build()"
LATE_SOURCE = TESTS / "helpers" / "late_device.cpp"
_LATE_HASH = hashlib.sha256(LATE_SOURCE.read_bytes() + version("torch").encode()).hexdigest()
LATE_FOLDER = FOLDER / f"late_device_{_LATE_HASH[:12]}"
"""Where the device of `late_device.py` is compiled to."""
ASYNC_IO = os.environ.get("TEST_ASYNC_IO") == "1"
"""Whether NVMe is tested with DeepSpeed's own async_io, which is compiled in minutes; else by plain files."""
NVME = "from deepspeed.ops.op_builder.cpu.async_io import AsyncIOBuilder; AsyncIOBuilder().load()"
TIMEOUT = 900.0
"""Seconds a build may take on a loaded machine."""


def remove_locks() -> None:
    """Remove lock files of killed builds of DeepSpeed's extensions, on which the next build would wait forever.

    A lock file that a running build has open stays.
    """
    locks = [lock.resolve() for lock in FOLDER.glob("**/lock")]
    processes = psutil.process_iter(["open_files"]) if locks else ()
    held = {file.path for process in processes for file in process.info["open_files"] or ()}
    for lock in locks:
        if str(lock) not in held:
            lock.unlink(missing_ok=True)


def remove_shared_memory() -> None:
    """Remove the buffers, 69 MB a rank, that DeepSpeed's ranks on CPUs leave in /dev/shm, also if they end well.

    A buffer that a running rank has mapped stays.
    """
    buffers = list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))
    processes = psutil.process_iter(["memory_maps"]) if buffers else ()
    mapped = {part.path for process in processes for part in process.info["memory_maps"] or ()}
    for buffer in buffers:
        if str(buffer) not in mapped:
            buffer.unlink(missing_ok=True)


def build() -> None:
    """Compile csrc/muon if its sources have changed, and the DeepSpeed extensions that tests need.

    A failure is reported by the tests that need the extension.
    """
    sources = [path.stat().st_mtime for path in (ROOT / "csrc" / "muon").iterdir()]
    built = [path.stat().st_mtime for path in FOLDER.glob("muon_*/*/*.so")]
    for needed, code in (
        (max(sources) > max(built, default=0.0), MUON),
        (not list(FOLDER.glob("**/deepspeed_shm_comm.so")), COMMUNICATION),
        (not list(LATE_FOLDER.glob("*.so")), LATE),
        (ASYNC_IO and not list(FOLDER.glob("**/async_io.so")), NVME),
    ):
        if needed and shutil.which("c++"):
            subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT, cwd=TESTS)


if __name__ == "__main__":
    remove_locks()
    build()
