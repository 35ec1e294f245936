# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run a test once with each kernel set, none of which falls back to another."""

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet
from helpers.kernels import has_triton, native_only, with_interpreted

On = Callable[..., Any]


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelSet:
    """The kernel sets of a CPU."""
    return kernel_set.TORCH if request.param == "torch" else native_only(monkeypatch)


@pytest.fixture(params=["torch", "native", "triton"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, interpret: On) -> On:
    """Runs ``check(kernels, ...)`` with one of all kernel sets, Triton's where Triton interprets."""
    if request.param == "triton":
        if not has_triton:
            pytest.skip("triton 3.4 or later is not installed")
        return lambda check, **kwargs: interpret(with_interpreted, check=check, **kwargs)
    table = kernel_set.TORCH if request.param == "torch" else native_only(monkeypatch)
    return lambda check, **kwargs: check(table, **kwargs)
