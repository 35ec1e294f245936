# SPDX-License-Identifier: Apache-2.0
"""The tables of a GPU on one: every operation against float64 and its twin there, equal bits, no waiting."""

import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import quack, reference, triton_table
from deepspeed.muon.kernels.codes import blocks_of
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
GPU = "cuda"


@pytest.fixture(params=["triton", "quack"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operations]:
    """Both tables, whose symmetric products begin at small sizes here."""
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", 1)
    reason = triton_table.unavailable() or (quack.unavailable() if request.param == "quack" else None)
    if reason:
        pytest.skip(reason)
    table = triton_table.operations(reference.OPERATIONS)
    yield table if request.param == "triton" else quack.operations(table)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_passes(kernels: Operations, dtype: torch.dtype, nesterov: bool) -> None:
    work, numel = Workspace(), 1_000_003
    buffer, grad, out = randn(numel), randn(numel, seed=1, dtype=dtype), torch.empty(numel, device=GPU)
    kept = buffer.bfloat16()
    expected = 0.95 * buffer.double() + 0.05 * grad.double()
    ahead = 0.95 * expected + 0.05 * grad.double() if nesterov else expected
    kernels.advance(buffer, grad, out, 0.95, nesterov, work)
    assert relative(buffer, expected) <= 1e-7 and relative(out, ahead) <= 1e-7
    twin, other = kept.clone(), torch.empty_like(out)
    kernels.advance_rounded(kept, grad, out, 0.95, nesterov, key_of("w", 3), 2**32 - 77, work)
    reference.advance_rounded(twin, grad, other, 0.95, nesterov, key_of("w", 3), 2**32 - 77, work)
    assert relative(out, other) <= 1e-7
    assert (kept != twin).float().mean() <= 1e-3, "but for values that lie a rounding of fp32 apart"
    codes = torch.randint(-127, 128, (numel,), device=GPU, dtype=torch.int8)
    state = codes, randn(blocks_of(numel), seed=3).abs()
    same, other = [part.clone() for part in state], torch.empty_like(out)
    for table, kept_, into in ((kernels, state, out), (reference, same, other)):
        table.look_ahead(*kept_, 0, grad, into, numel, numel, 0.95, nesterov, work)
    assert relative(out, other) <= 1e-7
    for table, kept_, into in ((kernels, state, out), (reference, same, other)):
        table.advance_codes(*kept_, grad, into, 0.95, nesterov, key_of("w", 3), 2**32 - 77, work)
    assert relative(out, other) <= 1e-7 and relative(state[1], same[1]) <= 1e-7
    assert (state[0] != same[0]).float().mean() <= 1e-3, "but for values that lie a rounding of fp32 apart"
    param = randn(numel, seed=2)
    expected = param.double() * (1 - 0.02 * 0.1) - 0.02 * 1.7 * grad.double()
    kernels.apply_(param, grad, 0.02, 1.7, 0.1, False, work)
    assert relative(param, expected) <= 1e-7


def test_slices_change_no_bit(kernels: Operations) -> None:
    """Aligned or not, which decides how a kernel loads."""
    work, numel = Workspace(), 100_003
    names = ("buffer", "grad", "param", "rounded", "out")
    whole = {name: randn(numel, seed=seed) for seed, name in enumerate(names)}
    whole["rounded"] = whole["rounded"].bfloat16()
    sliced = {name: tensor.clone() for name, tensor in whole.items()}

    def step(given: dict[str, Tensor], first: int) -> None:
        kernels.advance(given["buffer"], given["grad"], given["out"], 0.95, True, work)
        kernels.apply_(given["param"], given["out"], 0.1, 0.7, 0.1, False, work)
        kernels.advance_rounded(given["rounded"], given["grad"], given["out"], 0.95, True, (1, 2), first, work)

    step(whole, 0)
    for start, stop in ((0, 1), (1, 77), (77, 40_000), (40_000, numel)):
        step({name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    assert [name for name, tensor in whole.items() if not tensor.equal(sliced[name])] == []


@pytest.mark.parametrize("table", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalization(table: str, dtype: torch.dtype) -> None:
    """The plain table too: its norm must not be rounded to bf16."""
    if table == "triton" and triton_table.unavailable():
        pytest.skip(str(triton_table.unavailable()))
    chosen = reference.OPERATIONS if table == "torch" else triton_table.operations(reference.OPERATIONS)
    given = randn(5, 300, 500).double()
    given *= torch.tensor([1.0, 1e-25, 1e18, 1e-39, 0.0], dtype=torch.float64, device=GPU)[:, None, None]
    given = given.to(dtype)
    result = chosen.normalize(given.clone(), torch.empty_like(given)).double()
    norms = given.double().norm(dim=(1, 2))
    expected = given.double() / norms.clamp(min=1e-300)[:, None, None]
    assert float((result - expected).norm(dim=(1, 2)).max()) <= (1e-6 if dtype == torch.float32 else 2**-9)
    along = (result * expected).sum(dim=(1, 2))[:4]
    assert float((along - 1).abs().max()) <= 2e-4, "no common factor: the roundings of entries cancel"
    given[1, 100, 100] = math.inf
    assert not chosen.normalize(given, given)[1].isfinite().all()


def empty(batch: int, size: int, dtype: torch.dtype) -> Symmetric:
    """What is not reached stays NaN."""
    rest = torch.full((batch, size, size), torch.nan, dtype=dtype, device=GPU)
    return Symmetric(rest, torch.full((batch, size), torch.nan, device=GPU))


def dense(matrix: Symmetric) -> Tensor:
    return matrix.rest.double() + torch.diag_embed(matrix.diagonal.double())


def near_identity(batch: int, size: int, factor: float, power: int, dtype: torch.dtype) -> Symmetric:
    """One of several symmetric matrices that commute."""
    root = randn(batch, size, size).double()
    matrix = torch.linalg.matrix_power(root @ root.mT / size, power) / 8
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return Symmetric((matrix - torch.diag_embed(diagonal)).to(dtype), diagonal.float() + factor)


def assert_is(actual: Symmetric, expected: Tensor) -> None:
    """The diagonal is fp32, the rest rounded once or twice, and zero on it."""
    diagonal = expected.diagonal(dim1=-2, dim2=-1)
    assert not actual.rest.diagonal(dim1=-2, dim2=-1).any()
    assert relative(actual.diagonal, diagonal) <= 1e-5
    assert relative(actual.rest, expected - torch.diag_embed(diagonal)) <= 8e-3


SQUARES = [(3, 512, 1024), (2, 1024, 512), (1, 2048, 8192), (2, 528, 272), (1, 272, 272), (2, 200, 136)]
"""Multiples of 16, as the sizes of real models are: Triton compiles other code for them. The last one is not."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SQUARES, ids=str)
def test_square(kernels: Operations, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = randn(*shape, dtype=dtype)
    for x in (given, given.mT):
        out = empty(shape[0], x.size(1), dtype)
        kernels.square(x, out, Workspace())
        assert_is(out, x.double() @ x.double().mT)
        assert out.rest.equal(out.rest.mT)


@pytest.mark.parametrize("symmetric_from", [1, 10**9], ids=["symmetric", "library and pass"])
@pytest.mark.parametrize("size", [264, 272, 512, 2048])
def test_product(kernels: Operations, size: int, symmetric_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", symmetric_from)
    a, b = (near_identity(2, size, factor, power, torch.bfloat16) for factor, power in ((3.0, 1), (-1.0, 2)))
    for left, right in ((a, a), (a, b)):
        for alpha, beta, shift in ((1.0, 0.0, 0.0), (0.6, -1.7, 2.5)):
            out = empty(2, size, torch.bfloat16)
            kernels.product(left, right, out, Workspace(), Scalars(alpha, beta, shift))
            identity = torch.eye(size, dtype=torch.float64, device=GPU)
            assert_is(out, alpha * dense(left) @ dense(right) + beta * dense(left) + shift * identity)


@pytest.mark.parametrize("shape", [(2, 264, 520), (2, 512, 1024), (2, 528, 272), (1, 272, 272)], ids=str)
def test_multiply(kernels: Operations, shape: tuple[int, int, int]) -> None:
    given = randn(*shape, dtype=torch.bfloat16)
    for x in (given, given.mT):
        p, out = near_identity(shape[0], x.size(1), 3.0, 1, torch.bfloat16), torch.full_like(x, torch.nan)
        assert kernels.multiply(p, x, out, Workspace()) is out
        assert relative(out, dense(p) @ x.double()) <= 8e-3


@pytest.mark.parametrize("diagonals", [False, True], ids=["square", "product"])
def test_every_configuration_gives_the_same_bits(diagonals: bool) -> None:
    """Hence tuning may differ from rank to rank and from run to run."""
    if triton_table.unavailable():
        pytest.skip(str(triton_table.unavailable()))
    from deepspeed.muon.kernels import triton_products as products

    size = 528
    depth = size if diagonals else 1040
    a = near_identity(2, size, 3.0, 1, torch.bfloat16)
    x = a.rest if diagonals else randn(2, size, depth, dtype=torch.bfloat16)
    results = []
    for config in products.CONFIGS:
        out = empty(2, size, torch.bfloat16)
        grid = (2 * products.tiles(size, config.kwargs["ROWS"], config.kwargs["COLS"]),)
        numbers = {"size": size, "depth": depth, "across": depth, "along": 1, "matrices": 2}
        numbers |= {"alpha": 0.6, "beta": -1.7, "shift": 2.5}
        chosen = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages, **products.OPTIONS}
        tensors = x, x, out.rest, a.diagonal, a.diagonal, out.diagonal
        products.symmetric_kernel[grid](*tensors, **numbers, DIAGONALS=diagonals, GROUP=8, **chosen)
        results.append(out)
    assert all(part.equal(first) for result in results for part, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_iteration_waits_for_nothing(kernels: Operations, method: str) -> None:
    x, work = randn(2, 528, 1040, dtype=torch.bfloat16), Workspace()
    plain = orthogonalize(x.clone(), schedule("simple"), method)
    orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(result, plain) <= 0.03
