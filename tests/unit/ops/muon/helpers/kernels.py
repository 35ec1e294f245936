# SPDX-License-Identifier: Apache-2.0
"""Kernel sets without a fallback: PyTorch's, C++'s, and Triton's with interpreted kernels; conftest.py's ``on``."""

import dataclasses
import importlib.util
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
from deepspeed.muon.kernels.table import Operations

has_triton = importlib.util.find_spec("triton") is not None and Version(version("triton")) >= Version("3.4")
needs_triton = pytest.mark.skipif(not has_triton, reason="triton 3.4 or later is not installed")
Interpret = Callable[..., Any]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DEFAULT_TILES = (16, 32, 16)
#: The names of all operations that a kernel set must have.
OPERATIONS = [
    field.name for field in dataclasses.fields(Operations) if field.name not in ("name", "in_place", "is_slice", "runs")
]


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
    """Return whether the C++ products support bf16 on this machine: the CPU must have bf16 dot products."""
    return native.unavailable() is None and torch.cpu._is_avx512_bf16_supported()


def oriented(x: Tensor) -> Tensor:
    """Return ``x [batch, rows, cols]``, transposed if it has more rows than columns."""
    return x if x.size(-2) <= x.size(-1) else x.mT


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal random numbers, the same on every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
