# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against the map that it makes of singular values."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon.kernels.kernel_set import TORCH, KernelSet, normalize
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.math.newton_schulz import (
    DTYPES,
    METHODS,
    NAMED,
    NORM,
    SIMPLE,
    exact_method,
    flops,
    method_of,
    orthogonalize,
    schedule,
)
from helpers.kernels import native_bf16, relative
from helpers.singular_values import SCHEDULES, SHAPES, generator, reference

FASTEST = choose(unavailable_kernels("auto", ["cpu"]))
KERNELS = {table.name: table for table in (TORCH, FASTEST)}
every_table = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)

# ---- the definition -------------------------------------------------------------------------------------


@every_table
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("method", METHODS)
def test_fp32_is_the_polynomial_of_singular_values(method: str, name: str, kernels: KernelSet) -> None:
    """Of rows of unequal size."""
    for shape in SHAPES.values():
        x = torch.randn(shape, generator=generator(0)) * torch.logspace(-1, 1, shape[1])[:, None]
        result = orthogonalize(x.clone(), SCHEDULES[name], method, kernels=kernels)
        for found, expected in zip(result, reference(x, SCHEDULES[name]), strict=True):
            assert relative(found, expected) < 1e-4, shape


SIDES = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65)
#: Of the norm of the result. Singular values near zero move most in 16 bits; in a larger matrix few are.
BOUNDS = {"fp32": 1e-4, "fp16": 0.03, "bf16": 0.2}
OF_A_LARGER_ONE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 0.03}


@every_table
@pytest.mark.parametrize("method", METHODS)
def test_every_shape_in_every_dtype(method: str, kernels: KernelSet) -> None:
    """The result replaces the matrix, and is rounded to its dtype once."""
    shapes = [*itertools.product(SIDES, SIDES), (48, 116)]
    for (rows, cols), wire in itertools.product(shapes, (torch.bfloat16, torch.float32)):
        x = torch.randn(2, rows, cols, generator=generator(rows * 100 + cols)).to(wire)
        expected = reference(x, schedule("simple"))
        for dtype in DTYPES:
            matrix = x.clone()
            found = orthogonalize(matrix, schedule("simple"), method, DTYPES[dtype], None, kernels)
            assert found is matrix and found.dtype == wire
            if rows == 48:
                bound = max(OF_A_LARGER_ONE[dtype], 3e-3 if wire == torch.bfloat16 else 0.0)
            else:
                bound = BOUNDS[dtype] + (0.01 if wire == torch.bfloat16 else 0.0)
            assert relative(found, expected) <= bound, (rows, cols, wire, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16, 40), (5, 40, 16), (3, 24, 24)])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of very different magnitudes, so that anything shared between matrices shows."""
    x = (torch.randn(shape, generator=generator(0)) * torch.logspace(-38, 37, shape[0])[:, None, None]).to(dtype)
    single = torch.cat([orthogonalize(matrix.clone()[None], schedule("simple"), method) for matrix in x])
    result = orthogonalize(x.clone(), schedule("simple"), method)
    torch.testing.assert_close(result, single, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)
    for found, expected in zip(result, reference(x, schedule("simple")), strict=True):
        assert relative(found, expected) < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_zeros_and_what_is_not_finite(method: str, dtype: torch.dtype) -> None:
    """Zero rows and matrices stay zero, others beside them are as they are without them; a NaN is not hidden."""

    def result(x: Tensor) -> Tensor:
        return orthogonalize(x.clone(), schedule("simple"), method)

    x = torch.randn(3, 6, 10, generator=generator(0)).to(dtype)
    x[0], x[1, 2] = 0, 0
    found = result(x)
    assert not found[0].any() and not found[1, 2].any() and found[1, 3].any()
    others = [row for row in range(6) if row != 2]
    kept = result(x[1, others][None])[0]
    torch.testing.assert_close(found[1, others], kept, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[1, 3, 3] = value
        bad = result(x)
        assert not bad[1].isfinite().all() and not normalize(x.clone(), x.clone())[1].isfinite().all()
        assert bad[2].equal(found[2]) and not bad[0].any()


# ---- 16 bits --------------------------------------------------------------------------------------------


def gaussian(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=generator(seed))


def log_spaced(rows: int, cols: int, seed: int) -> Tensor:
    """Singular values from 1 to 1e-5."""
    rank, gen = min(rows, cols), generator(seed)
    u, v = (torch.linalg.qr(torch.randn(size, rank, generator=gen))[0] for size in (rows, cols))
    return (u * torch.logspace(0, -5, rank)) @ v.T


def recorded(rows: int, cols: int, seed: int) -> Tensor:
    """The gradient of a rows x cols layer of a two-layer MLP after three steps of training."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(cols, rows), nn.Tanh(), nn.Linear(rows, 32))
    inputs, targets = torch.randn(96, cols), torch.randn(96, 32)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(layers(inputs), targets).backward()
        optimizer.step()
    return layers[0].weight.grad


def bf16_errors(
    shape: tuple[int, int], make: Callable[[int, int, int], Tensor], seeds: int, kernels: KernelSet
) -> tuple[float, float]:
    """Mean relative error to float64 of ours and of torch's, on the same bf16 matrices.

    A norm near a power of two makes the division by it nearly exact for one side and not for the other,
    which is luck; norms of random mantissas measure the method.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz

    ours = torchs = 0.0
    for seed in range(seeds):
        mantissa = 1 + torch.rand((), generator=generator(seed + 100))
        x = (mantissa * make(*shape, seed)).bfloat16()
        expected = reference(x[None], schedule("simple"))[0]
        auto = exact_method("auto", "bf16", kernels.keeps_diagonals)
        method = method_of(*shape, auto, schedule("simple"), "bf16")
        result = orthogonalize(x.clone()[None], schedule("simple"), method, kernels=kernels)[0]
        ours += relative(result, expected) / seeds
        torchs += relative(_zeropower_via_newtonschulz(x.clone(), SIMPLE, 5, 1e-7), expected) / seeds
    return ours, torchs


SMALL = [(128, 512), (512, 128), (192, 192), (192, 768), (48, 116)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", [gaussian, log_spaced, recorded])
@pytest.mark.parametrize("shape", [*SMALL, pytest.param((512, 2048), marks=pytest.mark.full)])
def test_bf16_is_as_accurate_as_torch(shape: tuple[int, int], make: Callable[[int, int, int], Tensor]) -> None:
    """By the standard method, and with the C++ kernels, which keep diagonals apart, by either.

    Of a small recorded matrix, whose spectrum is wide, the Gram iteration has 1.09 times torch's error (mean of 64); of
    larger ones less than torch's.
    """
    pytest.importorskip("torch.optim._muon")
    for table in (TORCH, FASTEST) if native_bf16() else (TORCH,):
        ours, torchs = bf16_errors(shape, make, 32 if max(shape) < 128 else 3, table)
        assert ours <= (1.15 if make is recorded else 1.05) * torchs, f"{table.name}: {ours:.4f}, torch's {torchs:.4f}"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(128, 512), (192, 192), (512, 128)])
def test_bf16_is_near_the_definition(shape: tuple[int, int], name: str) -> None:
    """For the schedules that torch does not have; the fp32 tests check their numbers."""
    x = gaussian(*shape, 0).bfloat16()[None]
    assert relative(orthogonalize(x.clone(), schedule(name), "standard"), reference(x, schedule(name))) < 0.03


#: By dtype, of the spectral norms of the errors: the largest, and the 0.999 quantile. A matrix of norm about 1 that
#: diverges has an error of 10 to 10^12.
ASTRAY = {"bf16": (2.0, 0.35), "fp16": (0.25, 0.2), "fp32": (5e-4, 2e-4)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("method", METHODS[::-1])
def test_no_matrix_goes_astray(method: str, name: str, dtype: str) -> None:
    """Small matrices, where nothing averages rounding out: what large ones are whose singular vectors have few entries.

    All kinds of spectra; the largest error of thousands, in the norm that a single direction decides.
    """
    largest, usual = ASTRAY[dtype]
    for rows, cols in ((2, 4), (4, 6), (8, 16), (16, 32)):
        draw = generator(rows)
        u, v = (torch.linalg.qr(torch.randn(3000, n, rows, generator=draw))[0] for n in (rows, cols))
        decay = 6 * torch.rand(3000, 1, generator=draw) * torch.rand(3000, rows, generator=draw)
        x = (u @ torch.diag_embed(torch.exp(-decay)) @ v.mT).bfloat16()
        expected = reference(x, schedule(name))
        for kernels in KERNELS.values():
            if method == "gram" and exact_method("auto", dtype, kernels.keeps_diagonals) == "standard":
                continue  # `auto` does not take it
            wide = x.clone() if dtype == "bf16" else x.float()
            result = orthogonalize(wide, schedule(name), method, DTYPES[dtype], None, kernels)
            errors = torch.linalg.matrix_norm(result.double() - expected, 2)
            assert errors.max() < largest, (rows, cols)
            assert errors.quantile(0.999) < usual, (rows, cols)


@pytest.mark.parametrize("count", [8, pytest.param(2048, marks=pytest.mark.full)])
def test_fp16_keeps_the_entries_of_a_very_large_matrix(count: int) -> None:
    """Those of 16384 x 65536 are near 3e-5 at norm 1, where fp16 has lost bits. A few of its rows show that."""
    numel, x = 16384 * 65536, 1e-3 * torch.randn(count, 65536, generator=generator(0))
    x[-1, -1] = 1e-3 * (numel - x.numel()) ** 0.5  # has the norm of all other rows
    expected = NORM * x.double() / x.double().norm()
    ordinary = expected.abs() > 2.0**-14
    assert ordinary.float().mean() > 0.85, "else most of them would be subnormal numbers"
    for kernels in KERNELS.values():
        kept = kernels.normalize(x.clone()[None], torch.empty(1, *x.shape, dtype=torch.float16), NORM)[0]
        assert float(((kept - expected).abs() / expected.abs())[ordinary].max()) <= 1.002 * 2.0**-11
        assert float((kept - expected).norm() / expected.norm()) < 3e-4


@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (1, 9), (2, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_fp16_does_not_overflow(method: str, shape: tuple[int, int]) -> None:
    """Matrices of rank one have the largest products that a norm allows."""
    corner = torch.zeros(1, 4, 4)
    corner[0, 0, 0] = 1.0
    for x in (torch.ones(1, *shape), torch.eye(*shape)[None], corner):
        result = orthogonalize(x.clone(), schedule("simple"), method, torch.float16)
        assert result.isfinite().all()
        assert relative(result, reference(x, schedule("simple"))) < 0.03


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_count_of_operations_decides_the_method(dtype: str) -> None:
    steps = schedule("simple")
    for rows, cols in [(8, 8), (8, 32), (48, 8), (5, 6), (64, 8)]:
        cost = {method: flops(rows, cols, steps, method, dtype) for method in METHODS}
        method = method_of(rows, cols, "auto", steps, dtype)
        assert cost[method] <= 1.03 * min(cost.values())
        assert method_of(cols, rows, "auto", steps, dtype) == method
        assert all(method_of(rows, cols, fixed, steps, dtype) == fixed for fixed in METHODS)
    assert method_of(8, 8, "auto", steps, dtype) == "standard" and method_of(64, 8, "auto", steps, dtype) == "gram"
