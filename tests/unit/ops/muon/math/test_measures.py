# SPDX-License-Identifier: Apache-2.0
"""Measures of singular values against a decomposition, and sums of an update against plain ones."""

import math

import pytest
import torch

from deepspeed.muon.kernels import reference
from deepspeed.muon.monitor import step_stats
from deepspeed.muon.monitor.step_stats import orthogonality_error, participation_ratio, sums_of_update

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 9), (130, 7)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the matrices have several."""
    monkeypatch.setattr(step_stats, "CHUNK", 100)
    monkeypatch.setattr(reference, "CPU_CHUNK", 100)


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_measures_equal_those_of_a_decomposition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(shape, dtype) / 5
    before, s = x.clone(), torch.linalg.svdvals(x.double())
    assert orthogonality_error(x) == pytest.approx(float((s.square() - 1).square().mean().sqrt()), rel=1e-5)
    assert participation_ratio(x) == pytest.approx(float(s.square().sum() ** 2 / s.pow(4).sum()), rel=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30])
def test_the_participation_ratio_has_no_scale(scale: float) -> None:
    x = matrix((24, 40))
    assert participation_ratio(x * scale) == pytest.approx(participation_ratio(x), rel=1e-3)


def test_what_the_ends_of_the_measures_mean() -> None:
    orthogonal = torch.linalg.qr(matrix((24, 24)))[0][:10]
    assert orthogonality_error(orthogonal) == pytest.approx(0, abs=1e-6)
    assert orthogonality_error(torch.zeros(5, 7)) == pytest.approx(1)
    assert participation_ratio(3 * orthogonal) == pytest.approx(10)
    assert participation_ratio(torch.ones(5, 7)) == pytest.approx(1)
    assert math.isnan(participation_ratio(torch.zeros(5, 7)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_an_update(dtype: torch.dtype) -> None:
    """Zeros count as weights that decay, and products that underflow keep their sign."""
    weight, update = matrix((1, 512))[0], matrix((2, 512), dtype)[1].clone()
    weight[:4], update[2:6] = 0.0, 0.0
    weight[6:10], update[6:10] = torch.tensor([1e-30, 1e-30, -1e-30, -1e-30]), torch.tensor([1e-30, -1e-30] * 2)
    chunks = torch.stack(list(sums_of_update(weight, update, cautious=True)))
    assert chunks[:, 0].tolist() == [100] * 5 + [12]
    assert float(chunks[:, 1].square().sum()) == pytest.approx(float(weight.square().sum()), rel=1e-5)
    assert float(chunks[:, 2].square().sum()) == pytest.approx(float(update.float().square().sum()), rel=1e-5)
    assert int(chunks[:, 3].sum()) == sum(a.sign() * b.float().sign() >= 0 for a, b in zip(weight, update, strict=True))
    assert torch.stack(list(sums_of_update(weight, update, cautious=False)))[:, 3].sum() == 0
