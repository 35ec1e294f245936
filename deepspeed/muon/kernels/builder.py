# SPDX-License-Identifier: Apache-2.0
"""Build csrc/muon as DeepSpeed builds its own ops: with ninja at first use, or by ``DS_BUILD_MUON=1 pip install``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from packaging.version import Version

from deepspeed.muon.kernels.build_lock import build_lock
from deepspeed.muon.log import logger

#: ATen's name for the vector instructions of a CPU -> the compiler flags with which ATen's own files use them.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}


def cpu_capability() -> str:
    """Return the vector instructions that ATen uses on this CPU, as a key of :data:`CAPABILITIES`.

    The environment variable ``ATEN_CPU_CAPABILITY`` can limit ATen to fewer instructions.
    """
    found = torch.backends.cpu.get_cpu_capability()
    return next((name for name in CAPABILITIES if found.startswith(name)), "DEFAULT")


class MuonBuilder(CPUOpBuilder):
    """The builder of the C++ kernels for the CPU. CPU offload needs them on machines with an accelerator, too."""

    BUILD_VAR = "DS_BUILD_MUON"
    NAME = "muon"

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        """Return the name of the module that is built ahead of time."""
        return f"deepspeed.muon.kernels.{self.NAME}_op"

    def sources(self) -> list[str]:
        """Return the paths of csrc/muon's C++ files; a wheel has them inside the package, a checkout next to it."""
        package = Path(__file__).resolve().parents[1]
        folders = (package / "csrc", package.parents[1] / "csrc" / "muon")
        return [str(path) for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.cpp"))]

    def cxx_args(self) -> list[str]:
        """Return the compiler flags, with ATen's for :func:`cpu_capability` instead of ``-march=native``.

        Machines of one capability share a build, and what ``-march=native`` makes on one of them may be an illegal
        instruction on another. Contraction is off, because bits must not depend on how a loop is compiled. -fopenmp is
        not passed to the linker, because the threads must be those of torch's own copy of the library.
        """
        capability = cpu_capability()
        vectors = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]  # as ATen's own files have it
        threads = ["-fopenmp", "-DAT_PARALLEL_OPENMP=1"]
        amd = ["-D__HIP_PLATFORM_AMD__=1"] if torch.version.hip else []  # which torch's headers ask for
        return ["-O3", "-Wno-reorder", *CAPABILITIES[capability], *vectors, *threads, "-ffp-contract=off", *amd]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the kernels can be built: sources and a C++ compiler are found, and torch is recent enough.

        If they cannot, ``error_log`` holds the reason. ``verbose``: whether to log the reason, too.
        """
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
        """Return the C++ module: the one built ahead of time if it fits this torch and CPU, otherwise build one now.

        Raises:
            Exception: of any type, if there is no compiler, the build fails, or another process builds for too long.
        """
        if self.NAME not in self._loaded_ops:
            self._loaded_ops[self.NAME] = self._installed() or self._compiled(verbose)
        return self._loaded_ops[self.NAME]

    def path(self) -> Path:
        """Return the path of the module that is built at first use.

        The name of its folder is a hash of sources, compiler flags and libraries.
        """
        from torch.utils.cpp_extension import _get_build_directory

        name, digest = f"{self.NAME}_{cpu_capability().lower()}", hashlib.sha256()
        headers = {header for source in self.sources() for header in Path(source).parent.glob("*.h")}
        for file in (*map(Path, self.sources()), *sorted(headers)):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
        abi = sysconfig.get_config_var("SOABI"), torch.compiled_with_cxx11_abi(), platform.libc_ver()
        torch_version = torch.__version__, torch.version.git_version
        facts = (*self.cxx_args(), os.environ.get("CXX"), *torch_version, platform.machine())
        digest.update(repr((abi, facts)).encode())
        return Path(_get_build_directory(name, False)) / digest.hexdigest()[:16] / f"{name}.so"

    def _compiled(self, verbose: bool) -> Any:
        """Return the module that an earlier job has built; otherwise build it in one process while the others wait."""
        path, began = self.path(), time.perf_counter()
        if module := self._imported(path):
            return module
        if not self.is_compatible(verbose):
            raise RuntimeError(self.error_log)
        is_logging_rank = os.environ.get("RANK", "0") == "0"
        if is_logging_rank:
            logger.info(
                "deepspeed-muon: compiling the C++ kernels for the CPU; this takes about a minute, and later runs "
                "reuse them"
            )
        with build_lock(path.with_suffix(".lock")) as keeps_out_all:
            module = self._imported(path) or self._build(path, keeps_out_all, verbose)
        if is_logging_rank:
            logger.info("deepspeed-muon: the C++ kernels are ready after %.0f s", time.perf_counter() - began)
        return module

    def _build(self, path: Path, is_only_builder: bool, verbose: bool) -> Any:
        """Build in a temporary folder, and move the result to ``path``, so that a killed build leaves no partial file.

        ``is_only_builder``: whether no other process can build in the folder of ``path`` at the same time.
        """
        from torch.utils import cpp_extension

        if path.exists():
            logger.warning("deepspeed-muon: %s is damaged or from another machine, so it is built again", path)
        if is_only_builder:  # remove what killed builds have left
            for left in path.parent.glob("build_*"):
                shutil.rmtree(left, ignore_errors=True)
        # A build that failed earlier in this process must not change the name of the module.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(path.stem, None)
        folder = tempfile.mkdtemp(prefix="build_", dir=path.parent)
        try:
            module = cpp_extension.load(
                path.stem, self.sources(), extra_cflags=self.cxx_args(), build_directory=folder, verbose=verbose
            )
            built = Path(folder, path.name)
            with built.open("r+b") as file:
                os.fsync(file.fileno())  # otherwise a crash of the machine may leave an empty file
            built.replace(path)
            return module
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _imported(self, path: Path) -> Any:
        """Return the module in the file ``path``; ``None`` if the file does not exist or cannot be loaded."""
        if not path.is_file():
            return None
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        except ImportError as error:  # damaged, or of a machine with other libraries
            logger.debug("deepspeed-muon: %s", error)
            return None

    def _installed(self) -> Any:
        """Return the module built ahead of time; ``None`` if it does not exist or is for another torch or CPU."""
        try:
            module = importlib.import_module(self.absolute_name())
        except ImportError:  # not built, or built for another torch
            return None
        is_this_torch = module.torch_version == ".".join(torch.__version__.split(".")[:2])
        runs_here = torch.backends.cpu.get_cpu_capability().startswith((module.cpu_capability, "AVX512"))
        return module if is_this_torch and runs_here else None
