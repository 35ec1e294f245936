# SPDX-License-Identifier: Apache-2.0
"""The tables of a GPU on one: every operation against float64 and its twin there, equal bits, no waiting."""

import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepspeed.muon.coefficients import schedule
from deepspeed.muon.kernels import quack, reference, triton_table
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.orthogonalize import orthogonalize
from deepspeed.muon.rounding import key_of
from deepspeed.muon.workspace import Workspace

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
    monkeypatch.setattr(quack, "SYMMETRIC_FROM", 1)
    reason = triton_table.why_not() or (quack.why_not() if request.param == "quack" else None)
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
    param = randn(numel, seed=2)
    expected = param.double() * (1 - 0.02 * 0.1) - 0.02 * 1.7 * grad.double()
    kernels.apply_(param, grad, 0.02, 1.7, 0.1, work)
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
        kernels.apply_(given["param"], given["out"], 0.1, 0.7, 0.1, work)
        kernels.advance_rounded(given["rounded"], given["grad"], given["out"], 0.95, True, (1, 2), first, work)

    step(whole, 0)
    for start, stop in ((0, 1), (1, 77), (77, 40_000), (40_000, numel)):
        step({name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    assert [name for name, tensor in whole.items() if not tensor.equal(sliced[name])] == []


@pytest.mark.parametrize("table", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalization(table: str, dtype: torch.dtype) -> None:
    """The plain table too: its norm must not be rounded to bf16."""
    if table == "triton" and triton_table.why_not():
        pytest.skip(str(triton_table.why_not()))
    chosen = reference.OPERATIONS if table == "torch" else triton_table.operations(reference.OPERATIONS)
    given = randn(5, 300, 500).double()
    given *= torch.tensor([1.0, 1e-25, 1e18, 1e-39, 0.0], dtype=torch.float64, device=GPU)[:, None, None]
    given = given.to(dtype)
    result = chosen.normalize_(given.clone()).double()
    norms = given.double().norm(dim=(1, 2))
    expected = given.double() / norms.clamp(min=1e-300)[:, None, None]
    assert float((result - expected).norm(dim=(1, 2)).max()) <= (1e-6 if dtype == torch.float32 else 2**-9)
    along = (result * expected).sum(dim=(1, 2))[:4]
    assert float((along - 1).abs().max()) <= 2e-4, "no common factor: the roundings of entries cancel"
    given[1, 100, 100] = math.inf
    assert not chosen.normalize_(given)[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 520, 1032), (2, 1032, 520), (1, 264, 264), (2, 200, 136)], ids=str)
def test_square(kernels: Operations, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, k = randn(*shape, dtype=dtype), min(shape[1:])
    out = torch.full((shape[0], k, k), torch.nan, dtype=dtype, device=GPU)
    kernels.square(x, out)
    wide = x.double() if shape[1] <= shape[2] else x.double().mT
    assert relative(out, wide @ wide.mT) <= 4e-3
    assert out.equal(out.mT)


@pytest.mark.parametrize("alias", ["", "a", "b", "out"])
@pytest.mark.parametrize("size", [264, 520])
def test_product_whatever_is_added(kernels: Operations, alias: str, size: int) -> None:
    root = randn(2, size, size)
    r = (root @ root.mT / size).bfloat16()
    a, b, add = r, reference.square(r, torch.empty_like(r)), r * 0.5
    out = add.clone() if alias == "out" else torch.full_like(r, torch.nan)
    add = {"a": a, "b": b, "out": out}.get(alias, add)
    expected = -1.7 * add.double() + 0.6 * a.double() @ b.double()
    kernels.product(a, b, add, out, -1.7, 0.6)
    assert relative(out, expected) <= 4e-3


def test_every_configuration_gives_the_same_bits() -> None:
    """Hence tuning may differ from rank to rank and from run to run."""
    if triton_table.why_not():
        pytest.skip(str(triton_table.why_not()))
    from deepspeed.muon.kernels import triton_products as products

    x, size = randn(2, 520, 1032, dtype=torch.bfloat16), 520
    results = []
    for config in products.CONFIGS:
        out = torch.full((2, size, size), torch.nan, dtype=x.dtype, device=GPU)
        grid = products.tiles(size, config.kwargs["ROWS"], config.kwargs["COLS"]), 2
        numbers = {"size": size, "depth": 1032, "across": 1032, "along": 1, "beta": 0.0, "alpha": 1.0}
        chosen = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        products.symmetric_kernel[grid](x, x, out, out, **numbers, ADDS=False, GROUP=8, **chosen)
        results.append(out)
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_iteration_waits_for_nothing(kernels: Operations, method: str) -> None:
    x, work = randn(2, 520, 1032, dtype=torch.bfloat16), Workspace()
    plain = orthogonalize(x.clone(), schedule("simple"), method)
    orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = orthogonalize(x.clone(), schedule("simple"), method, work=work, kernels=kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(result, plain) <= 0.03
