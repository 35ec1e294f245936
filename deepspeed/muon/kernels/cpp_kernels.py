# SPDX-License-Identifier: Apache-2.0
"""The :class:`KernelSet` whose operations are the C++ kernels for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.errors import KernelError
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace


class Apart(NamedTuple):
    """A batch of symmetric matrices in bf16, except that their diagonals are stored separately, in fp32.

    ``rest``: ``[batch, k, k]``, contiguous, bf16, with zeros on the diagonal. ``diagonal``: ``[batch, k]``, fp32.
    """

    # In Newton-Schulz a matrix is a multiple of I plus something smaller. bf16 would round all entries of such a
    # diagonal alike, and so shift every eigenvalue.
    rest: Tensor
    diagonal: Tensor


@functools.cache
def operations() -> KernelSet:
    """Return the kernel set of the C++ kernels. The first call in a process loads and, if necessary, builds them.

    Raises:
        KernelError: there is no compiler, the build failed, or another process has been building for too long.
    """
    return kernels_of(_load())


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


def kernels_of(extension: Any) -> KernelSet:
    """Return a :class:`KernelSet` that calls the functions of ``extension``, the compiled C++ module.

    Calls that the module does not support, such as those with GPU tensors, go to plain PyTorch.
    """

    def without_workspace(name: str) -> Callable[..., None]:
        compiled = getattr(extension, name)

        def call(*args: Any) -> None:
            # A C++ function returns false, and has done nothing, if it does not support its arguments.
            if not compiled(*args[:-1]):
                getattr(kernel_set, name)(*args)

        return call

    def symmetric(name: str, x: Tensor, work: Workspace) -> Tensor | Apart:
        rest = kernel_set.symmetric(name, x, work)
        if not extension.multiplies_apart(x):
            return rest
        return Apart(rest, work.get(f"{name} diagonal", tuple(rest.shape[:2]), torch.float32, x.device))

    def square(x: Tensor, out: Any, work: Workspace) -> None:
        if not extension.square(x, _parts(out)):
            kernel_set.square(x, out, work)

    def product(a: Any, b: Any, out: Any, work: Workspace, alpha: float = 1.0, beta: float = 0.0) -> None:
        if not extension.product(_parts(a), _parts(b), _parts(out), alpha, beta):
            kernel_set.product(a, b, out, work, alpha, beta)

    def multiply(p: Any, x: Tensor, out: Tensor, work: Workspace, shift: float = 0.0) -> Tensor:
        return out if extension.multiply(_parts(p), x, out, shift) else kernel_set.multiply(p, x, out, work, shift)

    return KernelSet(
        name=f"C++ ({extension.cpu_capability})",
        advance=without_workspace("advance"),
        advance_rounded=without_workspace("advance_rounded"),
        advance_codes=without_workspace("advance_codes"),
        apply_=without_workspace("apply_"),
        copy_rounded=without_workspace("copy_rounded"),
        normalize=lambda x, out, norm=1.0: (
            out if extension.normalize(x, out, norm) else kernel_set.normalize(x, out, norm)
        ),
        symmetric=symmetric,
        diagonal=lambda matrix: matrix.diagonal if isinstance(matrix, Apart) else kernel_set.diagonal(matrix),
        square=square,
        product=product,
        multiply=multiply,
        fast_dtype="bf16" if extension.has_fast_bf16() else "fp32",
        keeps_diagonals=True,
    )


def _parts(operand: Tensor | Apart) -> tuple[Tensor, Tensor | None]:
    return operand if isinstance(operand, Apart) else (operand, None)
