# SPDX-License-Identifier: Apache-2.0
"""The tables of a GPU on one: every operation against float64 and its twin there, equal bits, no waiting."""

import functools
import importlib.util
import math

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set, triton_kernels
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import block_count, key_of
from deepspeed.muon.math.newton_schulz import orthogonalize, schedule
from helpers import kernels as helpers
from helpers.kernels import check_multiply, check_product, check_slices, check_square, operands, relative, room, step
from helpers.oracles import newton_schulz_fp64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
GPU = "cuda"
randn = functools.partial(helpers.randn, device=GPU)


@pytest.fixture
def kernels() -> KernelSet:
    """Triton's table. A table that fails its check fails these tests, with the reason."""
    assert triton_kernels.unavailable() is None
    return triton_kernels.operations(kernel_set.TORCH)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """To a rounding of fp32; what is rounded at random differs only where values lie that far apart."""
    if actual.dtype == torch.float32:
        assert relative(actual.cpu(), expected) <= 2e-7
    else:
        assert (actual.cpu() != expected).float().mean() <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_operations_are_those_of_the_cpu(kernels: KernelSet, dtype: torch.dtype) -> None:
    work, numel = Workspace(), 1_000_003
    tensors = operands(numel, GPU)
    tensors |= {"grad": tensors["grad"].to(dtype), "out": tensors["out"].float()}
    twins = {name: tensor.clone().cpu() for name, tensor in tensors.items()}
    step(kernels, tensors, 2**32 - 77)
    step(kernel_set.TORCH, twins, 2**32 - 77)
    for name, tensor in tensors.items():
        assert_near(tensor, twins[name])
    codes, magnitudes = torch.randint(-127, 128, (numel,), dtype=torch.int8), torch.rand(block_count(numel))
    for nesterov in (True, False):
        results = []
        for table, device, grad in ((kernels, GPU, tensors["grad"]), (kernel_set, "cpu", twins["grad"])):
            state = [part.clone().to(device) for part in (codes, magnitudes)]
            out = torch.empty(numel, device=device)
            table.advance_codes(*state, grad, out, 0.95, nesterov, key_of("w", 3), 2**32 - 77, work)
            results.append((out, *state))
        for actual, expected in zip(*results, strict=True):
            assert_near(actual, expected)


def test_slices_change_no_bit(kernels: KernelSet) -> None:
    """Aligned or not, which decides how a kernel loads."""
    check_slices(kernels, 100_003, (0, 1, 77, 40_000), GPU)


@pytest.mark.parametrize("table", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalization(table: str, dtype: torch.dtype) -> None:
    """The plain table too: its norm must not be rounded to bf16."""
    chosen = kernel_set.TORCH if table == "torch" else triton_kernels.operations(kernel_set.TORCH)
    given = randn(5, 300, 500).double()
    given *= torch.tensor([1.0, 1e-25, 1e18, 1e-39, 0.0], dtype=torch.float64, device=GPU)[:, None, None]
    given = given.to(dtype)
    result = chosen.normalize(given.clone(), torch.empty_like(given)).double()
    norms = given.double().norm(dim=(1, 2))
    expected = given.double() / norms.clamp(min=1e-300)[:, None, None]
    assert float((result - expected).norm(dim=(1, 2)).max()) <= (1e-6 if dtype == torch.float32 else 2**-9)
    # Subnormal entries have few values, whose roundings do not cancel: those of a single rounding are the reference.
    along, once = ((each * expected).sum(dim=(1, 2)) for each in (result, expected.to(dtype).double()))
    assert float((along - once).abs().max()) <= 2e-4, "no common factor"
    given[1, 100, 100] = math.inf
    assert not chosen.normalize(given, given)[1].isfinite().all()


SHAPES = [(3, 512, 1024), (2, 1024, 512), (1, 2048, 8192), (2, 528, 272), (1, 272, 272), (2, 200, 137)]
#: Relative, of one rounding of the result; of fp32 that of its sums, which cuBLAS makes one term after the other.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(kernels: KernelSet, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Those of the vendor's library."""
    given = randn(*shape, dtype=dtype)
    for x in (given, given.mT):
        like = room(kernels, x)
        check_square(kernels, x, ROUNDING[dtype])
        if x.numel() < 2**22:
            check_multiply(kernels, x, like, ROUNDING[dtype])
            for same in (True, False):
                check_product(kernels, like, same, 2 * ROUNDING[dtype])


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_iteration_waits_for_nothing(kernels: KernelSet, method: str) -> None:
    x, work = randn(2, 528, 1040, dtype=torch.bfloat16), Workspace()
    exact = torch.stack([newton_schulz_fp64(matrix) for matrix in x.cpu()])
    for given, expected in ((x, exact), (x.mT.contiguous(), exact.mT)):
        plain = orthogonalize(given.clone(), schedule("simple"), method)
        assert relative(plain.cpu(), expected) <= 0.03
    orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(result.cpu(), exact) <= 0.03
