# SPDX-License-Identifier: Apache-2.0
"""Kernel sets without a fallback (PyTorch's, C++'s, Triton's with interpreted kernels) and checks of their products."""

import ctypes
import dataclasses
import importlib.util
import itertools
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

from deepspeed.muon.kernels import native, reference, triton_table
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace

has_triton = importlib.util.find_spec("triton") is not None and Version(version("triton")) >= Version("3.4")
needs_triton = pytest.mark.skipif(not has_triton, reason="triton 3.4 or later is not installed")
Interpret = Callable[..., Any]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DEFAULT_TILES = (16, 32, 16)
#: The names of all operations that a kernel set must have.
OPERATIONS = [field.name for field in dataclasses.fields(Operations) if field.name not in ("name", "runs")]


def interpreted_table(symmetric_from: int = 1, tiles: tuple[int, int, int] = DEFAULT_TILES) -> Operations:
    """Return Triton's kernel set, made to accept CPU tensors, with tiles for small matrices."""
    import triton

    from deepspeed.muon.kernels import triton_products as products

    assert triton.knobs.runtime.interpret
    triton_table.is_on_gpu, triton_table.SYMMETRIC_FROM = lambda tensor: True, symmetric_from
    triton_table.HALVES, triton_table.MULTIPLE = tuple(FLOATS), 1
    products.tuned_kernel.configs = [triton.Config(dict(zip(("ROWS", "COLS", "DEPTH"), tiles, strict=True)))]
    return triton_table.operations(reference.OPERATIONS)


def native_bf16() -> bool:
    """Return whether the C++ products support bf16 on this machine: the CPU must have instructions for it."""
    if platform.machine() == "aarch64":
        at_hwcap2, hwcap2_bf16 = 26, 1 << 14  # of Linux
        return native.unavailable() is None and bool(ctypes.CDLL(None).getauxval(at_hwcap2) & hwcap2_bf16)
    return native.unavailable() is None and torch.cpu._is_avx512_bf16_supported()


def oriented(x: Tensor) -> Tensor:
    """Return ``x [batch, rows, cols]``, transposed if it has more rows than columns."""
    return x if x.size(-2) <= x.size(-1) else x.mT


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return normal random numbers, the same on every call."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the error, relative to that of ``expected``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch have so many threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_interpreted(kernels: Operations) -> bool:
    """Return whether a kernel set is Triton's, whose interpreter is slow and cuts fp32 to bf16 where a GPU rounds."""
    return kernels.name.startswith("triton")


def native_only(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """Return the C++ kernel set, whose operations raise instead of falling back to plain PyTorch.

    Skip the test without a compiler, or if torch lacks the products that they need; any other failed build is an error.
    """
    builder = MuonBuilder()
    if native.unavailable() and not builder.is_compatible():
        pytest.skip(builder.error_log)
    table = native.operations()
    monkeypatch.setattr(native, "reference", SimpleNamespace(**dict.fromkeys(OPERATIONS, _never)))
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


def step(kernels: Operations, tensors: dict[str, Tensor], start: int = 0) -> None:
    """Call each elementwise operation. The element of index 0 in ``tensors`` has index ``start``."""
    work: Any = Workspace()
    buffer, grad, param, rounded, out = tensors.values()
    kernels.advance(buffer, grad, out, 0.95, True, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.1, False, work)
    kernels.advance_rounded(rounded, grad, out, 0.95, True, key_of("w", 7), start, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.0, False, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.3, True, work)


def check_slices(kernels: Operations, numel: int, cuts: tuple[int, ...], device: str = "cpu") -> None:
    """Compare a step of slices, by one thread, with a step of all elements by two: equal bits."""
    whole, sliced = operands(numel, device), operands(numel, device)
    with threads(2):
        step(kernels, whole)
    with threads(1):
        for start, stop in itertools.pairwise((*cuts, numel)):
            step(kernels, {name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    assert [name for name, tensor in whole.items() if not tensor.equal(sliced[name])] == []


# ---- products ------------------------------------------------------------------------------------------------

BY = [PLAIN, Scalars(0.6, -1.7, 2.5), Scalars(0.5, 0.0, -1.0)]


def empty(batch: int, size: int, dtype: torch.dtype, *, is_whole: bool = False, device: str = "cpu") -> Symmetric:
    """Return room for a result. What is not written stays NaN."""
    rest = torch.full((batch, size, size), torch.nan, dtype=dtype, device=device)
    return Symmetric(rest, torch.full((batch, 0 if is_whole else size), torch.nan, device=device))


def dense(matrix: Symmetric) -> Tensor:
    """Return a matrix in fp64. What is on the diagonal of ``rest`` counts, too."""
    rest = matrix.rest.double()
    return rest if matrix.is_whole else rest + torch.diag_embed(matrix.diagonal.double())


def near_identity(like: Symmetric, factor: float, power: int) -> Symmetric:
    """Return one of several symmetric matrices that commute, in the form of another."""
    size, device = like.rest.size(1), like.rest.device
    root = randn(*like.rest.shape, device=device.type).double()
    matrix = torch.linalg.matrix_power(root @ root.mT / size, power) / 8 + factor * torch.eye(size, device=device)
    if like.is_whole:
        return Symmetric(matrix.to(like.rest.dtype), torch.empty_like(like.diagonal))
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return Symmetric((matrix - torch.diag_embed(diagonal)).to(like.rest.dtype), diagonal.float())


def assert_is(actual: Symmetric, expected: Tensor, tolerance: float, diagonal: float = 2e-6) -> None:
    """Check both parts: a diagonal that is apart is right to fp32, and the rest is zero there."""
    scale, rest = expected.abs().amax().item(), expected
    if not actual.is_whole:
        apart = expected.diagonal(dim1=-2, dim2=-1)
        assert not actual.rest.diagonal(dim1=-2, dim2=-1).any()
        assert relative(actual.diagonal, apart) <= diagonal
        rest = expected - torch.diag_embed(apart)
    assert not rest.any() or relative(actual.rest, rest) <= tolerance
    torch.testing.assert_close(actual.rest.double(), rest, rtol=2 * tolerance, atol=2 * tolerance * scale)


def check_square(kernels: Operations, x: Tensor, out: Symmetric, *tolerances: float) -> None:
    """Compare ``x x^T`` with fp64."""
    kept = x.clone()
    kernels.square(x, out, Workspace())
    assert_is(out, x.double() @ x.double().mT, *tolerances)
    assert x.equal(kept)


def check_product(kernels: Operations, like: Symmetric, same: bool, *tolerances: float) -> Symmetric:
    """Compare ``alpha a b + beta a + shift I`` of two matrices, or of one with itself, with fp64. Return the last."""
    a = near_identity(like, 3.0, 1)
    b = a if same else near_identity(like, -1.0, 2)
    kept = [part.clone() for part in (*a, *b)]
    identity = torch.eye(like.rest.size(1), dtype=torch.float64, device=like.rest.device)
    for by in BY:
        out = Symmetric(*(torch.full_like(part, torch.nan) for part in like))
        kernels.product(a, b, out, Workspace(), by)
        assert_is(out, by.alpha * dense(a) @ dense(b) + by.beta * dense(a) + by.shift * identity, *tolerances)
    assert all(part.equal(before) for part, before in zip((*a, *b), kept, strict=True))
    return out


def check_multiply(kernels: Operations, x: Tensor, like: Symmetric, tolerance: float) -> None:
    """Compare ``p x`` with fp64."""
    p, out = near_identity(like, 3.0, 1), torch.full_like(x, torch.nan)
    kept = x.clone(), p.rest.clone()
    assert kernels.multiply(p, x, out, Workspace()) is out
    assert x.equal(kept[0]) and p.rest.equal(kept[1])
    assert relative(out, dense(p) @ x.double()) <= tolerance
