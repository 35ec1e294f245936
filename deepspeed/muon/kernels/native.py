# SPDX-License-Identifier: Apache-2.0
"""The :class:`Operations` that run the C++ kernels for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from deepspeed.muon.errors import KernelError
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace


@functools.cache
def operations() -> Operations:
    """Return the C++ kernels for the CPU. The first call in a process loads them and, if necessary, builds them.

    Raises:
        KernelError: there is no compiler, the build failed, or another process has been building for too long.
    """
    return table(_load())


def unavailable() -> str | None:
    """Load the C++ kernels, and return why that failed; ``None`` if they can be used."""
    try:
        operations()
    except KernelError as error:
        return str(error)
    return None


def _load() -> Any:
    try:
        from deepspeed.muon.kernels.builder import MuonBuilder

        return MuonBuilder().load()
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        needs = "" if isinstance(error, OSError) else "; a C++ compiler (g++ 11 or later) and ninja are needed"
        raise KernelError(line + needs) from error


def table(module: Any) -> Operations:
    """Return the functions of a built C++ module as :class:`Operations`.

    Calls that the module does not support, such as those with GPU tensors, go to plain PyTorch.
    """

    def without_workspace(name: str) -> Callable[..., None]:
        compiled = getattr(module, name)

        def call(*args: Any) -> None:
            # A C++ function returns false, and has done nothing, if it does not support its arguments.
            if not compiled(*args[:-1]):
                getattr(reference, name)(*args)

        return call

    def product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN) -> None:
        if not module.product(a, b, out, coeffs):
            reference.product(a, b, out, work, coeffs)

    def multiply(p: Symmetric, x: Tensor, out: Tensor, work: Workspace) -> Tensor:
        return out if module.multiply(p, x, out) else reference.multiply(p, x, out, work)

    return Operations(
        name=f"C++ ({module.cpu_capability})",
        advance=without_workspace("advance"),
        advance_rounded=without_workspace("advance_rounded"),
        advance_codes=without_workspace("advance_codes"),
        apply_=without_workspace("apply_"),
        copy_rounded=without_workspace("copy_rounded"),
        normalize=lambda x, out, norm=1.0: out if module.normalize(x, out, norm) else reference.normalize(x, out, norm),
        square=without_workspace("square"),
        product=product,
        multiply=multiply,
    )
