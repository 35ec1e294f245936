# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz after AOL's scaling of rows: the map of the scaled matrix, in every dtype and method."""

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import OPERATIONS
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.math.coefficients import NAMED, Schedule, schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, orthogonalize
from helpers.rules import almost_orthogonal
from helpers.singular_values import SHAPES, generator, relative_error

KERNELS = {table.name: table for table in (OPERATIONS, choose(unavailable_kernels("auto", ["cpu"])))}
#: Published with Turbo-Muon, repeated by others.
PUBLISHED = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)


def scaled(matrix: Tensor) -> Tensor:
    """In fp64, by rows, of a tall matrix by columns."""
    return almost_orthogonal(matrix.double()) if matrix.size(0) <= matrix.size(1) else scaled(matrix.T).T


def mapped(x: Tensor, triples: Schedule) -> Tensor:
    """The image of the singular values of a batch."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


def test_no_singular_value_exceeds_one() -> None:
    """So that every schedule stays in its range; a matrix of rank one, and rows at right angles, have exactly one."""
    for matrix in (torch.randn(12, 40, generator=generator(0)), torch.ones(5, 9), torch.eye(4, 6)):
        largest = torch.linalg.matrix_norm(scaled(matrix), 2)
        assert largest <= 1 + 1e-12
    assert largest == 1 and torch.linalg.matrix_norm(scaled(torch.ones(5, 9)), 2) == pytest.approx(1)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", ["simple", "you", "polar_express"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_fp32_is_the_map_of_the_scaled_matrix(
    method: str, shape: tuple[int, int, int], name: str, kernels: object
) -> None:
    x = torch.randn(shape, generator=generator(0)) * torch.logspace(-6, 3, shape[1])[:, None]
    result = orthogonalize(x.clone(), schedule(name), method, kernels=kernels, normalization="aol")
    for i, matrix in enumerate(x):
        assert relative_error(result[i], mapped(scaled(matrix), schedule(name))) < 1e-4
    plain = orthogonalize(x.clone(), schedule(name), method, kernels=kernels)
    assert relative_error(plain, result.double()) > 0.1, "else this test could not fail"


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("method", METHODS)
def test_no_matrix_goes_astray(method: str, name: str, dtype: str) -> None:
    """As without AOL: thousands of small matrices of all spectra, where nothing averages rounding out.

    The scaled matrix is rounded once more than one that was divided by its norm.
    """
    largest, usual = {"bf16": (2.0, 0.45), "fp16": (0.35, 0.25), "fp32": (5e-4, 2e-4)}[dtype]
    for rows, cols in ((2, 4), (8, 16)):
        draw = generator(rows)
        u, v = (torch.linalg.qr(torch.randn(2000, n, rows, generator=draw))[0] for n in (rows, cols))
        decay = 6 * torch.rand(2000, 1, generator=draw) * torch.rand(2000, rows, generator=draw)
        x = (u @ torch.diag_embed(torch.exp(-decay)) @ v.mT).bfloat16()
        sums = (x.double() @ x.double().mT).abs().sum(-1)
        expected = mapped(x.double() * sums.rsqrt()[..., None], schedule(name))
        for kernels in KERNELS.values():
            options = {"kernels": kernels, "normalization": "aol"}
            result = orthogonalize(x.float(), schedule(name), method, DTYPES[dtype], **options)
            errors = torch.linalg.matrix_norm(result.double() - expected, 2)
            assert errors.max() < largest and errors.quantile(0.999) < usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_zeros_and_what_is_not_finite(method: str, dtype: torch.dtype) -> None:
    """Zero rows and matrices stay zero, others beside them are as they are alone; a NaN is not hidden."""
    x = torch.randn(3, 6, 10, generator=generator(0)).to(dtype)
    x[0], x[1, 2] = 0, 0
    result = orthogonalize(x.clone(), schedule("simple"), method, normalization="aol")
    assert not result[0].any() and not result[1, 2].any() and result[1, 3].any()
    others = [row for row in range(6) if row != 2]
    kept = orthogonalize(x[1, others][None].clone(), schedule("simple"), method, normalization="aol")[0]
    torch.testing.assert_close(result[1, others], kept, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    x[1, 3, 3] = torch.nan
    bad = orthogonalize(x, schedule("simple"), method, normalization="aol")
    assert not bad[1].isfinite().all() and torch.equal(bad[2], result[2])


def test_the_published_coefficients_are_left_out_because_they_turn_directions_round() -> None:
    """They map 0.8837 to zero and larger values below it. A matrix of rank one has the singular value one."""
    assert all(triples != PUBLISHED for triples in NAMED.values())
    matrix = torch.ones(5, 9)
    result = orthogonalize(matrix[None].clone(), PUBLISHED, normalization="aol")[0]
    assert (result * matrix).sum() < 0, "the step would go uphill"
    for name in NAMED:
        assert (orthogonalize(matrix[None].clone(), schedule(name), normalization="aol")[0] * matrix).sum() > 0
