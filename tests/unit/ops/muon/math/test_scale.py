# SPDX-License-Identifier: Apache-2.0
"""The scale of updates by shape; momentum and weight decay by the number of updates done."""

import pytest
import torch

from deepspeed.muon.math.scale import SCALES, scale_factor, update_rms
from deepspeed.muon.math.schedules import Schedules


@pytest.mark.parametrize(
    ("rows", "cols", "original", "rms", "spectral"),
    [
        (64, 64, 1.0, 1.6, 1.0),
        (64, 256, 1.0, 3.2, 0.5),
        (256, 64, 2.0, 3.2, 2.0),
        (100, 1, 10.0, 2.0, 10.0),
        (1, 100, 1.0, 2.0, 0.1),
        (225, 100, 1.5, 3.0, 1.5),
        (100, 225, 1.0, 3.0, 2 / 3),
    ],
)
def test_scales(rows: int, cols: int, original: float, rms: float, spectral: float) -> None:
    expected = {"original": original, "match_rms_adamw": rms, "spectral_unclamped": spectral, "none": 1.0}
    assert {name: scale_factor(name, rows, cols) for name in SCALES} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_scales_are_torchs(name: str, shape: tuple[int, int]) -> None:
    from torch.optim._muon import _adjust_lr

    assert _adjust_lr(0.1, name, torch.Size(shape)) == pytest.approx(0.1 * scale_factor(name, *shape), rel=1e-12)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("shape", [(24, 24), (24, 60), (60, 24), (2, 50)])
def test_update_rms(name: str, shape: tuple[int, int]) -> None:
    """A matrix whose singular values are all one, scaled, has the RMS that is promised."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    scaled = scale_factor(name, *shape) * (u @ vh)
    assert scaled.square().mean().sqrt().item() == pytest.approx(update_rms(name, *shape), rel=1e-12)
    assert name != "match_rms_adamw" or update_rms(name, *shape) == pytest.approx(0.2, rel=1e-12)


# ---- momentum and weight decay by the number of updates done ----------------------------------------------

GROUP = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.2}


def test_momentum_goes_linearly_to_that_of_the_group() -> None:
    for done, momentum in {0: 0.85, 1: 0.875, 2: 0.9, 3: 0.925, 4: 0.95, 5: 0.95, 10**9: 0.95}.items():
        found = Schedules(momentum_start=0.85, momentum_warmup_steps=4).settings_at(GROUP, done)
        assert found == GROUP | {"momentum": pytest.approx(momentum)}
    found = Schedules(momentum_start=0.99, momentum_warmup_steps=2).settings_at(GROUP | {"momentum": 0.9}, 1)
    assert found["momentum"] == pytest.approx(0.945), "it may fall"


def test_weight_decay_goes_linearly_to_zero() -> None:
    for done, decay in {0: 0.2, 1: 0.15, 2: 0.1, 3: 0.05, 4: 0.0, 5: 0.0, 99: 0.0}.items():
        found = Schedules(muon_weight_decay_steps=4).settings_at(GROUP, done)
        assert found == GROUP | {"weight_decay": pytest.approx(decay)}


def test_without_schedules_a_group_keeps_its_values() -> None:
    assert Schedules().settings_at(GROUP, 7) == GROUP and not str(Schedules())
    text = "momentum from 0.85 over 300 steps, weight decay of the Muon groups to zero over 1000 steps"
    assert str(Schedules(0.85, 300, 1000)) == text
