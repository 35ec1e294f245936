# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/muon as DeepSpeed builds its own ops: with ninja at first use, or by ``DS_BUILD_MUON=1 pip install``."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from packaging.version import Version

from deepspeed.muon.log import logger
from deepspeed.muon.patch import replaced

#: Minutes after which a process that waits for another one's build says so.
PATIENCE = 2


class MuonBuilder(CPUOpBuilder):
    """The C++ operations for the CPU, whatever the accelerator: with CPU offload the shards are in host memory."""

    BUILD_VAR = "DS_BUILD_MUON"
    NAME = "muon"

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        """The name of the module if it was built ahead of time."""
        return f"deepspeed.muon.kernels.{self.NAME}_op"

    def sources(self) -> list[str]:
        """All of csrc/muon; a wheel has it inside the package, a checkout beside it."""
        package = Path(__file__).resolve().parents[1]
        folders = (package / "csrc", package.parents[1] / "csrc" / "muon")
        return [str(path) for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.cpp"))]

    def cxx_args(self) -> list[str]:
        """DeepSpeed's flags for this CPU, without contraction: bits must not depend on how a loop is compiled.

        -fopenmp is not passed to the linker, because the threads must be those of torch's own copy of the library.
        """
        capability = torch.backends.cpu.get_cpu_capability()
        name = next((name for name in ("AVX512", "AVX2") if capability.startswith(name)), "DEFAULT")
        vectors = [f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"]  # as ATen's own files have it
        given = [flag for flag in super().cxx_args() if flag != "-g"]
        return [*given, *vectors, "-ffp-contract=off", "-DAT_PARALLEL_OPENMP=1"]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether there are sources, a compiler, and the products of matrices in torch that the sources call."""
        compiler = os.environ.get("CXX", "c++").split()[0]
        if not self.sources():
            self.error_log = "the sources of csrc/muon are not installed"
        elif shutil.which(compiler) is None:
            self.error_log = f"there is no C++ compiler {compiler}"
        elif Version(torch.__version__) < Version("2.6"):
            self.error_log = f"torch 2.6 or later is needed, this is {torch.__version__}"
        else:
            return super().is_compatible(verbose)
        if verbose:
            self.warning(self.error_log)
        return False

    def load(self, verbose: bool = False) -> Any:
        """The module: the one built ahead of time if it fits this torch and CPU, else built now.

        Raises:
            Exception: of any type, if there is no compiler or the build fails.
        """
        if self.NAME not in self._loaded_ops:
            self._loaded_ops[self.NAME] = self._installed() or self._compiled(verbose)
        return self._loaded_ops[self.NAME]

    def _compiled(self, verbose: bool) -> Any:
        """The module of an earlier run, or built now: by one process, for whose lock the others wait."""
        from torch.utils.cpp_extension import FileBaton, is_ninja_available

        before, began = _built_at(self.NAME), time.perf_counter()
        newest = max((Path(source).stat().st_mtime for source in self.sources()), default=0.0)
        speaks = os.environ.get("RANK", "0") == "0"
        if speaks and before < newest and self.is_compatible() and is_ninja_available():
            logger.info("deepspeed-muon: compiling the C++ operations, once per environment, about a minute")
        with replaced(FileBaton, wait=_wait):
            module = self.jit_load(verbose)
        if speaks and _built_at(self.NAME) != before:
            logger.info("deepspeed-muon: compiled in %.0f s", time.perf_counter() - began)
        return module

    def _installed(self) -> Any:
        try:
            module = importlib.import_module(self.absolute_name())
        except ImportError:  # not built, or with another torch's symbols
            return None
        is_this_torch = module.torch_version == ".".join(torch.__version__.split(".")[:2])
        runs_here = torch.backends.cpu.get_cpu_capability().startswith((module.cpu_capability, "AVX512"))
        return module if is_this_torch and runs_here else None


def _built_at(name: str) -> float:
    """When an extension was built, as a file's time; 0 if it never was."""
    from torch.utils.cpp_extension import _get_build_directory

    file = Path(_get_build_directory(name, False)) / f"{name}.so"
    return file.stat().st_mtime if file.is_file() else 0.0


def _wait(original: Callable[[Any], None], lock: Any) -> None:
    """``FileBaton.wait``, which waits for ever for the lock of a process that was killed."""
    told = threading.Timer(60 * PATIENCE, _say_what_is_waited_for, [lock.lock_file_path])
    told.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        told.start()
    try:
        original(lock)
    finally:
        told.cancel()


def _say_what_is_waited_for(lock: str) -> None:
    logger.warning(
        "deepspeed-muon: another process has been compiling the C++ operations for %d minutes; if it was killed, "
        "delete its lock, %s",
        PATIENCE,
        lock,
    )
