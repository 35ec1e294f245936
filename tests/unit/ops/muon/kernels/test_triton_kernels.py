# SPDX-License-Identifier: Apache-2.0
"""What Triton's table takes, how it launches it and whether it works, with recorders in place of kernels."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from deepspeed.muon.kernels import kernel_set, triton_kernels
from deepspeed.muon.kernels import triton_elementwise as elementwise
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from helpers.kernels import OPERATIONS, Interpret, interpreted_table, operands, randn, step

# ---- what a table takes ---------------------------------------------------------------------------------------


PRODUCTS = {"symmetric", "diagonal", "square", "product", "multiply"}


def test_tensors_of_the_cpu_go_to_the_other_table() -> None:
    called = set()

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(kernel_set, name)(*args, **kwargs)

        return call

    below = KernelSet("noted", *map(noted, OPERATIONS))
    table = triton_kernels.operations(below)
    assert table.name == "triton + noted"
    tensors, work, codes = operands(8), Workspace(), (torch.zeros(8, dtype=torch.int8), torch.zeros(1))
    step(table, tensors)
    table.advance_codes(*codes, tensors["grad"], tensors["out"], 0.9, True, (1, 2), 0, work)
    table.copy_rounded(tensors["rounded"], tensors["param"], (1, 2), 0, work)
    x = randn(2, 64, 64)
    table.normalize(x, x)
    assert called == {*OPERATIONS} - PRODUCTS
    assert all(getattr(table, name) is getattr(below, name) for name in PRODUCTS)


# ---- launches -------------------------------------------------------------------------------------------------


class Launches:
    """In place of a kernel: keeps the grids that it would have."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.grids.append(grid)


def test_no_number_of_matrices_is_too_many_for_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA allows 65,535 programs along all but the first dimension."""
    batch, launches = 150_000, Launches()
    for name in [name for name in vars(elementwise) if name.endswith("_kernel")]:
        monkeypatch.setattr(elementwise, name, launches)
    monkeypatch.setattr(triton_kernels, "is_on_gpu", lambda tensor: True)
    x, table = torch.zeros(batch, 2, 3), triton_kernels.operations(kernel_set.TORCH)
    assert table.normalize(x, x) is x
    counted = sum(grid[1] for grid in launches.grids if len(grid) > 1)
    assert counted == 2 * batch, "the two passes of the normalization that have a program for each part of a matrix"
    assert max(size for grid in launches.grids for size in grid[1:]) <= 65_535


# ---- whether a table works here -------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a Hopper, with plain PyTorch in place of every kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(triton_kernels, "is_on_gpu", lambda tensor: True)
    passes = ("advance", "advance_rounded", "advance_codes", "apply_", "normalize")
    for name in (*passes, "tiles", "advance_runs", "apply_runs_"):
        monkeypatch.setattr(elementwise, name, getattr(kernel_set, name))


def chosen() -> str:
    """What the log says of the table that a run would have."""
    from deepspeed.muon.kernels import selection

    unavailable = selection.unavailable_kernels("auto", ["cuda"])
    table = selection.choose(unavailable)
    assert not unavailable["cuda"] or table is kernel_set.TORCH
    return selection.summary(table, unavailable)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("misaligned address\nCompile with TORCH_USE_CUDA_DSA")


def test_kernels_that_work_are_taken(gpu: None) -> None:
    assert chosen() == "triton + torch"


KERNELS = ("advance_rounded", "advance_codes", "apply_", "advance_runs", "apply_runs_", "normalize")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_raises_or_errs_is_a_reason(gpu: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, name, raising)
    assert "RuntimeError: misaligned address" in chosen()
    original = getattr(kernel_set, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = original(*args)
        for arg in args:
            if isinstance(arg, Tensor):
                arg.mul_(2)
        return result

    monkeypatch.setattr(elementwise, name, wrong)
    kind = name.replace("apply_runs_", "apply_ of runs").replace("advance_runs", "advance of runs")
    assert f"the result of {kind} is wrong" in chosen()


def test_a_kernel_that_is_not_cautious_is_a_reason(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "apply_", lambda *args: kernel_set.apply_(*args[:5], False, Workspace()))
    assert "the result of cautious apply_ is wrong" in chosen()


@pytest.mark.parametrize("missing", ["triton", "triton.language"])
def test_a_triton_that_does_not_fit_is_a_reason(gpu: None, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delitem(sys.modules, elementwise.__name__)
    monkeypatch.delattr(sys.modules["deepspeed.muon.kernels"], "triton_elementwise")
    monkeypatch.setitem(sys.modules, missing, None)
    assert "ModuleNotFoundError" in chosen()


def test_without_a_gpu_that_triton_knows_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "why_wrong", lambda *args: pytest.fail("nothing to try"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_kernels.unavailable() == "triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_kernels.unavailable() == "no NVIDIA or AMD GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert triton_kernels.unavailable() == "the GPU is older than Ampere"


# ---- the check itself, on kernels -----------------------------------------------------------------------------


def checked() -> str | None:
    """Triton's own kernels, interpreted."""
    interpreted_table()
    triton_kernels.DEVICE, triton_kernels.SHAPE = "cpu", (32, 64)
    return triton_kernels.why_wrong(lambda: triton_kernels.operations(kernel_set.TORCH))


def test_triton_passes_its_check(interpret: Interpret) -> None:
    assert interpret(checked) is None
