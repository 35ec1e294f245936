# SPDX-License-Identifier: Apache-2.0
"""Tables of operations with nobody to fall back to: Triton's where kernels are interpreted (conftest.py's
``interpret``), and the one in C++.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
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

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or Version(version("triton")) < Version("3.4"),
    reason="triton 3.4 or later is not installed",
)
Interpret = Callable[..., Any]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DEFAULT_TILES = (16, 32, 16)
#: The names of all operations that a table must have.
OPERATIONS = [
    field.name for field in dataclasses.fields(Operations) if field.name not in ("name", "in_place", "is_slice", "runs")
]


def interpreted_table(symmetric_from: int = 1, tiles: tuple[int, int, int] = DEFAULT_TILES) -> Operations:
    """Triton's table, which takes tensors of the CPU for those of a GPU, with tiles that suit small matrices."""
    import triton

    from deepspeed.muon.kernels import triton_products as products

    assert triton.knobs.runtime.interpret
    triton_table.is_on_gpu, triton_table.SYMMETRIC_FROM = lambda tensor: True, symmetric_from
    triton_table.HALVES, triton_table.MULTIPLE = tuple(FLOATS), 1
    products.tuned_kernel.configs = [triton.Config(dict(zip(("ROWS", "COLS", "DEPTH"), tiles, strict=True)))]
    return triton_table.operations(reference.OPERATIONS)


def native_bf16() -> bool:
    """Whether the products in C++ compute in bf16 here: they need the CPU's dot products of bf16."""
    return native.unavailable() is None and torch.cpu._is_avx512_bf16_supported()


def oriented(x: Tensor) -> Tensor:
    """``x [batch, rows, cols]``, or its transpose where that has the fewer rows."""
    return x if x.size(-2) <= x.size(-1) else x.mT


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same on every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the error over that of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def native_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> Operations:
    """The table in C++ whose operations of these names fail where they would call their twin; skips without a compiler
    or with a torch that lacks the products.

    Else a build that fails is an error.
    """
    builder = MuonBuilder()
    if native.unavailable() and not builder.is_compatible():
        pytest.skip(builder.error_log)
    table = native.operations()
    monkeypatch.setattr(native, "reference", SimpleNamespace(**dict.fromkeys(names, _never)))
    return table


def _never(*args: Any) -> Any:
    raise AssertionError("the twin was called instead")
