# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against the map that it makes of singular values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon.kernels.reference import OPERATIONS, normalize
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.choice import counted_method
from deepspeed.muon.math.coefficients import NAMED, SIMPLE, schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, NORM, orthogonalize
from helpers.kernels import native_bf16
from helpers.singular_values import SCHEDULES, SHAPES, VARIED, generator, quick_reference, reference, relative_error

# ---- fp32: the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_fp32_is_the_polynomial_of_singular_values(method: str, shape: tuple[int, int, int], name: str) -> None:
    x = torch.randn(shape, generator=generator(0))
    result = orthogonalize(x.clone(), SCHEDULES[name], method)
    for i, expected in enumerate(reference(x, SCHEDULES[name])):
        assert relative_error(result[i], expected) < 1e-4


@pytest.mark.parametrize("shape", [(30, 100), (100, 30), (40, 40)])
def test_the_two_references_agree(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=generator(0))
    assert relative_error(quick_reference(x, VARIED), reference(x, VARIED)) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_larger_matrix_in_fp32(method: str) -> None:
    x = torch.randn(1, 128, 384, generator=generator(0))
    assert (
        relative_error(orthogonalize(x.clone(), schedule("simple"), method)[0], reference(x[0], (SIMPLE,) * 5)) < 1e-4
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 16, 48), (1, 48, 16), (1, 24, 24)])
def test_many_steps_give_an_orthogonal_matrix(shape: tuple[int, int, int], method: str) -> None:
    """(1.875, -1.25, 0.375) converges to exactly one, unlike the fast schedules."""
    x = torch.randn(shape, generator=generator(0))
    y = orthogonalize(x, ((1.875, -1.25, 0.375),) * 20, method)[0].double()
    gram = y @ y.mT if shape[1] <= shape[2] else y.mT @ y
    torch.testing.assert_close(gram, torch.eye(16 if shape[1] != 24 else 24, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_transpose_of_a_matrix_gives_the_transpose(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 12, 30, generator=generator(0)).to(dtype)
    wide = orthogonalize(x.clone(), schedule("simple"), method)
    tall = orthogonalize(x.mT.contiguous(), schedule("simple"), method)
    torch.testing.assert_close(tall.mT, wide, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16, 40), (5, 40, 16), (3, 24, 24)])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of very different magnitudes, so that anything shared between matrices shows."""
    x = torch.randn(shape, generator=generator(0)) * torch.logspace(-20, 20, shape[0])[:, None, None]
    x = x.to(dtype)
    single = torch.cat([orthogonalize(matrix.clone()[None], schedule("simple"), method) for matrix in x])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(orthogonalize(x.clone(), schedule("simple"), method), single, rtol=0, atol=tolerance)


# ---- bf16: against torch.optim.Muon ---------------------------------------------------------------------


def gaussian(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=generator(seed))


def log_spaced(rows: int, cols: int, seed: int) -> Tensor:
    """Singular values from 1 to 1e-5."""
    rank, gen = min(rows, cols), generator(seed)
    u, v = (torch.linalg.qr(torch.randn(size, rank, generator=gen))[0] for size in (rows, cols))
    return (u * torch.logspace(0, -5, rank)) @ v.T


def low_rank(rank: int) -> Callable[[int, int, int], Tensor]:
    def make(rows: int, cols: int, seed: int) -> Tensor:
        gen = generator(seed)
        return torch.randn(rows, rank, generator=gen) @ torch.randn(rank, cols, generator=gen)

    return make


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
    gradient = layers[0].weight.grad
    assert gradient is not None
    assert gradient.shape == (rows, cols)
    return gradient


MATRICES: dict[str, Callable[[int, int, int], Tensor]] = {
    "gaussian": gaussian,
    "log_spaced": log_spaced,
    "rank_8": low_rank(8),
    "rank_64": low_rank(64),
    "recorded": recorded,
}


def bf16_errors(
    shape: tuple[int, int], make: Callable[[int, int, int], Tensor], seeds: int = 3, kernels: Operations = OPERATIONS
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
        expected = quick_reference(x, schedule("simple"))
        method = counted_method(*shape, "auto", schedule("simple"), "bf16")
        result = orthogonalize(x.clone()[None], schedule("simple"), method, kernels=kernels)[0]
        ours += relative_error(result, expected) / seeds
        torchs += relative_error(_zeropower_via_newtonschulz(x.clone(), SIMPLE, 5, 1e-7), expected) / seeds
    return ours, torchs


SMALL = [(128, 512), (512, 128), (192, 192), (192, 768), (48, 116)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("shape", [*SMALL, pytest.param((512, 2048), marks=pytest.mark.full)])
def test_bf16_is_as_accurate_as_torch(shape: tuple[int, int], kind: str) -> None:
    """The products in C++ round once where those in PyTorch round twice.

    Of a small recorded matrix, whose spectrum is wide, the Gram iteration has 1.09 and 1.35 times torch's error (means
    of 64); of larger ones less than torch's.
    """
    pytest.importorskip("torch.optim._muon")
    once, twice = (1.15, 1.4) if kind == "recorded" else (1.05, 1.2)
    for table, bound in (
        (OPERATIONS, twice),
        (choose(unavailable_kernels("auto", ["cpu"])), once if native_bf16() else twice),
    ):
        ours, torchs = bf16_errors(shape, MATRICES[kind], seeds=32 if max(shape) < 128 else 3, kernels=table)
        assert ours <= bound * torchs, f"{table.name}: {ours:.4f}, torch's {torchs:.4f}"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(128, 512), (192, 192), (512, 128)])
def test_bf16_is_near_the_definition(shape: tuple[int, int], name: str) -> None:
    """For the schedules that torch does not have; the fp32 tests hold their numbers."""
    x = gaussian(*shape, 0).bfloat16()
    result = orthogonalize(x.clone()[None], schedule(name), counted_method(*shape, "auto", schedule("simple"), "bf16"))[
        0
    ]
    assert result.dtype == torch.bfloat16
    assert relative_error(result, reference(x, schedule(name))) < 0.03


# ---- normalize ------------------------------------------------------------------------------------------

MAGNITUDES = [(torch.float32, 10.0**e) for e in (-44, -42, -38, -30, -19, -3, 0, 8, 19, 25, 38)]
MAGNITUDES += [(torch.bfloat16, 10.0**e) for e in (-38, -30, -19, -3, 0, 8, 19, 25, 38)]


def exact(x: Tensor, name: str) -> Tensor:
    """The map of a batch in fp64."""
    x = x.double()
    u, values, vh = torch.linalg.svd(x / x.norm(dim=(1, 2), keepdim=True), full_matrices=False)
    for a, b, c in schedule(name):
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag_embed(values) @ vh


#: By dtype, of the spectral norms of the errors: the largest, and the 0.999 quantile. A matrix of norm about 1 that
#: diverges has an error of 10 to 10^12.
ASTRAY = {"bf16": (2.0, 0.35), "fp16": (0.25, 0.2), "fp32": (5e-4, 2e-4)}


@pytest.mark.sample(2)
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
        expected = exact(x, name)
        for kernels in {
            choose(unavailable_kernels("auto", ["cpu"])).name: choose(unavailable_kernels("auto", ["cpu"])),
            "torch": OPERATIONS,
        }.values():
            given = x.float() if dtype == "fp32" else x.clone()  # a wire of bf16 would round the result
            wide = given.float() if dtype == "fp16" else given
            result = orthogonalize(wide, schedule(name), method, DTYPES[dtype], kernels=kernels)
            errors = torch.linalg.matrix_norm(result.double() - expected, 2)
            assert errors.max() < largest, (rows, cols)
            assert errors.quantile(0.999) < usual, (rows, cols)


# ---- dtypes apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_products_in_another_dtype_than_the_matrix(method: str, dtype: str, wire: torch.dtype) -> None:
    """The result is that of the matrix as it arrived, rounded once to where it came from."""
    x = gaussian(48, 116, 0).to(wire)
    expected = quick_reference(x, schedule("simple"))
    given = x[None].clone()
    result = orthogonalize(given, schedule("simple"), method, DTYPES[dtype])
    assert result is given and result.dtype == wire
    worst = max({"fp32": 1e-5, "fp16": 4e-3, "bf16": 0.03}[dtype], 3e-3 if wire == torch.bfloat16 else 0.0)
    assert relative_error(result[0], expected) < worst


@pytest.mark.parametrize("count", [8, pytest.param(2048, marks=pytest.mark.full)])
def test_fp16_keeps_the_entries_of_a_very_large_matrix(count: int) -> None:
    """Those of 16384 x 65536 are near 3e-5 at norm 1, where fp16 has lost bits. A few of its rows show that."""
    numel, x = 16384 * 65536, 1e-3 * torch.randn(count, 65536, generator=generator(0))
    x[-1, -1] = 1e-3 * (numel - x.numel()) ** 0.5  # has the norm of all other rows
    expected = NORM * x.double() / x.double().norm()
    ordinary = expected.abs() > 2.0**-14
    assert ordinary.float().mean() > 0.85, "else most of them would be subnormal numbers"
    for kernels in (choose(unavailable_kernels("auto", ["cpu"])), OPERATIONS):
        kept = kernels.normalize(x.clone()[None], torch.empty(1, *x.shape, dtype=torch.float16), NORM)[0]
        assert float(((kept - expected).abs() / expected.abs())[ordinary].max()) <= 1.002 * 2.0**-11
        assert float((kept - expected).norm() / expected.norm()) < 3e-4


@pytest.mark.parametrize("shape", [(4, 64), (64, 64), (1, 9), (2, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_fp16_does_not_overflow(method: str, shape: tuple[int, int]) -> None:
    """Matrices of rank one have the largest products that a norm allows."""
    for x in (
        torch.ones(1, *shape),
        torch.eye(*shape)[None],
        torch.nn.functional.pad(torch.ones(1, 1, 1), (0, 3, 0, 3)),
    ):
        result = orthogonalize(x.clone(), schedule("simple"), method, torch.float16)
        assert result.isfinite().all()
        assert relative_error(result[0], reference(x[0], schedule("simple"))) < 0.03


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
def test_orthogonalization_does_not_see_the_magnitude(dtype: torch.dtype, magnitude: float, method: str) -> None:
    x = (magnitude * (6 * torch.rand(1, 8, 24, generator=generator(0), dtype=torch.float64) - 3)).to(dtype)
    stored = x.double() / x.double().abs().max()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (
        relative_error(orthogonalize(x, schedule("simple"), method), reference(stored, schedule("simple"))) < tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_zero_gives_zero(method: str, dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        assert not orthogonalize(torch.zeros(shape, dtype=dtype), schedule("simple"), method).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_entry_stays_visible_in_its_own_matrix(method: str, dtype: torch.dtype, value: float) -> None:
    x = torch.randn(4, 6, 10, generator=generator(0)).to(dtype)
    x[3] = 0
    alone = orthogonalize(x.clone(), schedule("simple"), method)
    x[1, 3, 2] = value
    assert not normalize(x.clone(), x.clone())[1].isfinite().all()
    result = orthogonalize(x, schedule("simple"), method)
    assert not result[1].isfinite().all()
    torch.testing.assert_close(result[[0, 2, 3]], alone[[0, 2, 3]])
