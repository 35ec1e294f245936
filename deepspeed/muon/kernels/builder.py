# SPDX-License-Identifier: Apache-2.0
"""Build csrc/muon as DeepSpeed builds its own ops: with ninja at first use, or into a wheel by ``DS_BUILD_MUON=1``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import sysconfig
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from packaging.version import Version

from deepspeed.muon.errors import logger
from deepspeed.muon.kernels.build_lock import build_lock

#: ATen's name for the vector instructions of a CPU -> the compiler flags with which ATen's own files use them.
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}


def cpu_capability() -> str:
    """Return which vector instructions ATen uses on this CPU, as a key of :data:`CAPABILITIES`, such as ``AVX2``."""
    found = torch.backends.cpu.get_cpu_capability()  # which ATEN_CPU_CAPABILITY can limit
    return next((name for name in CAPABILITIES if found.startswith(name)), "DEFAULT")


def capabilities_in_wheel() -> tuple[str, ...]:
    """Return the keys of :data:`CAPABILITIES` for which a wheel for this machine type contains a compiled module.

    On x86-64 these are AVX2 and AVX512. CPUs without AVX2 build a module at first use.
    """
    return ("AVX2", "AVX512") if platform.machine() == "x86_64" else ("DEFAULT",)


class MuonBuilder(CPUOpBuilder):
    """The DeepSpeed op builder of Muon's C++ kernels for the CPU. Runs with a GPU use them under CPU offload.

    ``capability``: the key of :data:`CAPABILITIES` to build for, by default that of this CPU.
    """

    BUILD_VAR = "DS_BUILD_MUON"
    NAME = "muon"

    def __init__(self, capability: str | None = None) -> None:
        super().__init__(name=self.NAME)
        self.capability = capability or cpu_capability()

    def module_name(self) -> str:
        """Return the name of the compiled module without its package, such as ``muon_avx2``."""
        return f"{self.NAME}_{self.capability.lower()}"

    def absolute_name(self) -> str:
        """Return the import name of the module in a wheel."""
        return f"deepspeed.muon.kernels.{self.module_name()}"

    def sources(self) -> list[str]:
        """Return the paths of the C++ files: in the installed package, or in ``csrc/muon`` of a checkout."""
        package = Path(__file__).resolve().parents[1]
        folders = (package / "csrc", package.parents[1] / "csrc" / "muon")
        return [str(path) for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.cpp"))]

    def cxx_args(self) -> list[str]:
        """Return the compiler flags, which allow only the vector instructions of ``self.capability``."""
        # Machines of one capability share a build, and -march=native may use instructions that some of them lack.
        # Without contraction, bits do not depend on how a loop is compiled. The linker does not get -fopenmp, because
        # the threads must be those of torch's own copy of the library.
        vectors = [f"-DCPU_CAPABILITY={self.capability}", f"-DCPU_CAPABILITY_{self.capability}"]  # as ATen's files
        threads = ["-fopenmp", "-DAT_PARALLEL_OPENMP=1"]
        amd = ["-D__HIP_PLATFORM_AMD__=1"] if torch.version.hip else []  # which torch's headers ask for
        return ["-O3", "-Wno-reorder", *CAPABILITIES[self.capability], *vectors, *threads, "-ffp-contract=off", *amd]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the kernels can be built: their sources, a C++ compiler and torch 2.6 or later are installed.

        If not, ``error_log`` holds the reason; if ``verbose``, it is logged, too.
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
        """Return the compiled C++ module: that of the installed wheel, or one that an earlier process has built.

        Build a new one if neither exists for this torch and CPU. ``verbose``: whether to print the compiler's output.

        Raises:
            Exception: of any type: there is no compiler, the build failed, or another process is building for too long.
        """
        if self.NAME not in self._loaded_ops:
            self._loaded_ops[self.NAME] = self._installed() or self._compiled(verbose)
        return self._loaded_ops[self.NAME]

    def path(self) -> Path:
        """Return the path of the module that the first use builds: ``.../HASH/muon_avx2.so``.

        The hash changes with the sources, ``CXX``, compiler flags, torch, Python, the C library and the machine type.
        """
        from torch.utils.cpp_extension import _get_build_directory

        name, digest = self.module_name(), hashlib.sha256()
        headers = {header for source in self.sources() for header in Path(source).parent.glob("*.h")}
        for file in (*map(Path, self.sources()), *sorted(headers)):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
        abi = sysconfig.get_config_var("SOABI"), torch.compiled_with_cxx11_abi(), platform.libc_ver()
        torch_version = torch.__version__, torch.version.git_version
        facts = (*self.cxx_args(), os.environ.get("CXX"), *torch_version, platform.machine())
        digest.update(repr((abi, facts)).encode())
        return Path(_get_build_directory(name, False)) / digest.hexdigest()[:16] / f"{name}.so"

    def _compiled(self, verbose: bool) -> Any:
        """Return the module that an earlier process has built; otherwise build it in one process while others wait."""
        path, began = self.path(), time.perf_counter()
        if module := self._imported(path):
            return module
        if not self.is_compatible(verbose):
            raise RuntimeError(self.error_log)
        _log_on_rank_0("compiling the C++ kernels for the CPU; this takes about a minute, and later runs reuse them")
        with build_lock(path.with_suffix(".lock")) as has_flock:
            module = self._imported(path) or self._build(path, has_flock, verbose)
        _log_on_rank_0("the C++ kernels are ready after %.0f s", time.perf_counter() - began)
        return module

    def _build(self, path: Path, has_flock: bool, verbose: bool) -> Any:
        """Build the module in a temporary folder, delete the folder, move the module to ``path``, and return it.

        ``has_flock``: whether the file system of ``path`` has ``flock``. If so, the temporary folder is next to
        ``path``, and what killed builds left is deleted first, because no other process builds there. Otherwise
        it is the system's temporary folder, because torch, too, must be able to lock the folder in which it builds.
        """
        from torch.utils import cpp_extension

        if path.exists():
            logger.warning(
                "deepspeed-muon: building the C++ kernels again, because %s is damaged or from a machine with other "
                "libraries; if this repeats at each start, give each kind of machine its own TORCH_EXTENSIONS_DIR",
                path,
            )
        if has_flock:
            for left in path.parent.glob("build_*"):
                shutil.rmtree(left, ignore_errors=True)
            for left in path.parent.glob("copy_*"):
                left.unlink(missing_ok=True)
        # A build that failed earlier in this process must not change the name of the module.
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(path.stem, None)
        built = path.with_name(f"copy_{uuid.uuid4().hex}_{path.name}")
        with _folder(path.parent if has_flock else None) as folder:
            module = cpp_extension.load(
                path.stem, self.sources(), extra_cflags=self.cxx_args(), build_directory=folder, verbose=verbose
            )
            shutil.copyfile(Path(folder, path.name), built)
            with built.open("r+b") as file:
                os.fsync(file.fileno())  # otherwise a crash of the machine may leave an empty file
        built.replace(path)  # last, because the folder of a build that is killed later would never be deleted
        return module

    def _imported(self, path: Path) -> Any:
        """Return the module in the file ``path``; ``None`` if the file is missing or cannot be loaded."""
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
        """Return the module of the installed wheel; ``None`` if there is none, or if this torch cannot use it."""
        if importlib.util.find_spec(self.absolute_name()) is None:
            return None
        try:
            module = importlib.import_module(self.absolute_name())
            if module.torch_version == ".".join(torch.__version__.split(".")[:2]):
                return module
            reason = f"they are for torch {module.torch_version}, this is {torch.__version__}"
        except ImportError as error:  # this torch or the C library lacks functions that it needs
            reason = str(error)
        _log_on_rank_0("the C++ kernels of the installed wheel are not used, because %s", reason)
        return None


def _folder(parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder in ``parent`` or, if that is ``None``, in the system's temporary folder."""
    return tempfile.TemporaryDirectory(prefix="build_", dir=parent, ignore_cleanup_errors=True)


def _log_on_rank_0(text: str, *values: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.info(f"deepspeed-muon: {text}", *values)
