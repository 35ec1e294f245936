# SPDX-License-Identifier: Apache-2.0
"""Kernel sets without a fallback (PyTorch's, C++'s, Triton's with interpreted kernels) and checks of their products."""

import ctypes
import dataclasses
import importlib.util
import itertools
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from deepspeed.muon.kernels import cpp_kernels, kernel_set, triton_kernels
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import key_of

has_triton = importlib.util.find_spec("triton") is not None and Version(version("triton")) >= Version("3.4")
needs_triton = pytest.mark.skipif(not has_triton, reason="triton 3.4 or later is not installed")
Interpret = Callable[..., Any]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
#: The names of all operations that a kernel set must have.
OPERATIONS = [field.name for field in dataclasses.fields(KernelSet) if "Callable" in field.type]


def interpreted_table() -> KernelSet:
    """Return Triton's kernel set, made to accept CPU tensors."""
    import triton

    assert triton.knobs.runtime.interpret
    triton_kernels.is_on_gpu = lambda tensor: True
    return triton_kernels.operations(kernel_set.TORCH)


def native_bf16() -> bool:
    """Return whether the C++ products support bf16 on this machine: the CPU must have instructions for it."""
    if platform.machine() == "aarch64":
        at_hwcap2, hwcap2_bf16 = 26, 1 << 14  # of Linux
        return cpp_kernels.unavailable() is None and bool(ctypes.CDLL(None).getauxval(at_hwcap2) & hwcap2_bf16)
    return cpp_kernels.unavailable() is None and torch.cpu._is_avx512_bf16_supported()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the error, relative to that of ``expected``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_interpreted(kernels: KernelSet) -> bool:
    """Return whether a kernel set is Triton's, whose interpreter is slow and cuts fp32 to bf16 where a GPU rounds."""
    return kernels.name.startswith("triton")


def native_only(monkeypatch: pytest.MonkeyPatch) -> KernelSet:
    """Return the C++ kernel set, whose operations raise instead of falling back to plain PyTorch.

    Skip the test without a compiler, or if torch lacks the products that they need; any other failed build is an error.
    """
    builder = MuonBuilder()
    if cpp_kernels.unavailable() and not builder.is_compatible():
        pytest.skip(builder.error_log)
    table = cpp_kernels.operations()
    twins = dict.fromkeys(OPERATIONS, _never) | {"symmetric": kernel_set.symmetric, "diagonal": kernel_set.diagonal}
    monkeypatch.setattr(cpp_kernels, "kernel_set", SimpleNamespace(**twins))
    return table


def _never(*args: Any) -> Any:
    raise AssertionError("the twin was called instead")


def with_interpreted(check: Callable[..., Any], **kwargs: Any) -> Any:
    """Return ``check(kernels, **kwargs)`` for Triton's kernel set; to be run by conftest.py's ``interpret``."""
    return check(interpreted_table(), **kwargs)


# ---- elementwise operations ------------------------------------------------------------------------------


def operands(numel: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return what a step of every elementwise operation takes."""
    tensors = {name: randn(numel, seed=seed, device=device) for seed, name in enumerate(("buffer", "grad", "param"))}
    return tensors | {"rounded": tensors["buffer"].bfloat16(), "out": torch.zeros_like(tensors["grad"]).bfloat16()}


def step(kernels: KernelSet, tensors: dict[str, Tensor], start: int = 0) -> None:
    """Call each elementwise operation. The element of index 0 in ``tensors`` has index ``start``."""
    work: Any = Workspace()
    buffer, grad, param, rounded, out = tensors.values()
    kernels.advance(buffer, grad, out, 0.95, True, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.1, False, work)
    kernels.advance_rounded(rounded, grad, out, 0.95, True, key_of("w", 7), start, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.0, False, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.3, True, work)


def check_slices(kernels: KernelSet, numel: int, cuts: tuple[int, ...], device: str = "cpu") -> None:
    """Compare a step of slices, by one thread, with a step of all elements by two: equal bits."""
    whole, sliced = operands(numel, device), operands(numel, device)
    with threads(2):
        step(kernels, whole)
    with threads(1):
        for start, stop in itertools.pairwise((*cuts, numel)):
            step(kernels, {name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    assert [name for name, tensor in whole.items() if not tensor.equal(sliced[name])] == []


# ---- products ------------------------------------------------------------------------------------------------

#: alpha and beta of products.
BY = [(1.0, 0.0), (0.6, -1.7), (1.0, 2.5)]
Symmetric = Tensor | cpp_kernels.Apart


def room(kernels: KernelSet, x: Tensor) -> Symmetric:
    """Return room for ``x x^T`` as the iteration has it. What is not written stays NaN."""
    out = kernels.symmetric("out", x, Workspace())
    for part in parts(out):
        part.fill_(torch.nan)
    return out


def parts(matrix: Symmetric) -> tuple[Tensor, ...]:
    """Return the tensors of a matrix: all of it or, with the diagonal apart, the rest and the diagonal."""
    return tuple(matrix) if isinstance(matrix, cpp_kernels.Apart) else (matrix,)


def dense(matrix: Symmetric) -> Tensor:
    """Return a matrix in fp64. What is on the diagonal of ``rest`` counts, too."""
    rest, *diagonal = (part.double() for part in parts(matrix))
    return rest + torch.diag_embed(diagonal[0]) if diagonal else rest


def near_identity(like: Symmetric, factor: float, power: int) -> Symmetric:
    """Return one of several symmetric matrices that commute, in the form of another."""
    rest = parts(like)[0]
    size, device = rest.size(1), rest.device
    root = randn(*rest.shape, device=device.type).double()
    matrix = torch.linalg.matrix_power(root @ root.mT / size, power) / 8 + factor * torch.eye(size, device=device)
    if not isinstance(like, cpp_kernels.Apart):
        return matrix.to(rest.dtype)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return cpp_kernels.Apart((matrix - torch.diag_embed(diagonal)).to(rest.dtype), diagonal.float())


def assert_is(actual: Symmetric, expected: Tensor, tolerance: float) -> None:
    """Check all parts: a diagonal that is apart is right to fp32, and the rest is zero there."""
    scale, rest = expected.abs().amax().item(), parts(actual)[0]
    if isinstance(actual, cpp_kernels.Apart):
        apart = expected.diagonal(dim1=-2, dim2=-1)
        assert not rest.diagonal(dim1=-2, dim2=-1).any()
        assert relative(actual.diagonal, apart) <= 2e-6
        expected = expected - torch.diag_embed(apart)
    assert not expected.any() or relative(rest, expected) <= tolerance
    torch.testing.assert_close(rest.double(), expected, rtol=2 * tolerance, atol=2 * tolerance * scale)


def check_square(kernels: KernelSet, x: Tensor, tolerance: float) -> Symmetric:
    """Compare ``x x^T`` with fp64, and return it."""
    kept, out = x.clone(), room(kernels, x)
    kernels.square(x, out, Workspace())
    assert_is(out, x.double() @ x.double().mT, tolerance)
    assert x.equal(kept)
    return out


def check_product(kernels: KernelSet, like: Symmetric, same: bool, tolerance: float) -> Symmetric:
    """Compare ``alpha a b + beta a`` of two matrices, or of one with itself, with fp64. Return the last."""
    a = near_identity(like, 3.0, 1)
    b = a if same else near_identity(like, -1.0, 2)
    kept = [part.clone() for part in (*parts(a), *parts(b))]
    for alpha, beta in BY:
        out = near_identity(like, math.nan, 1)
        kernels.product(a, b, out, Workspace(), alpha, beta)
        assert_is(out, alpha * dense(a) @ dense(b) + beta * dense(a), tolerance)
    assert all(part.equal(before) for part, before in zip((*parts(a), *parts(b)), kept, strict=True))
    return out


def check_multiply(kernels: KernelSet, x: Tensor, like: Symmetric, tolerance: float) -> None:
    p, kept = near_identity(like, 3.0, 1), x.clone()
    for shift in (0.0, -2.5):
        out = torch.full_like(x, torch.nan)
        assert kernels.multiply(p, x, out, Workspace(), shift) is out
        assert x.equal(kept) and all(map(torch.equal, parts(p), parts(near_identity(like, 3.0, 1))))
        assert relative(out, dense(p) @ x.double() + shift * x.double()) <= tolerance
