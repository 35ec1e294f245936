# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/muon as DeepSpeed builds its own ops: with ninja at first use, or by ``DS_BUILD_MUON=1 pip install``."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from packaging.version import Version


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
            self._loaded_ops[self.NAME] = self._installed() or self.jit_load(verbose)
        return self._loaded_ops[self.NAME]

    def _installed(self) -> Any:
        try:
            module = importlib.import_module(self.absolute_name())
        except ImportError:  # not built, or with another torch's symbols
            return None
        is_this_torch = module.torch_version == ".".join(torch.__version__.split(".")[:2])
        runs_here = torch.backends.cpu.get_cpu_capability().startswith((module.cpu_capability, "AVX512"))
        return module if is_this_torch and runs_here else None
