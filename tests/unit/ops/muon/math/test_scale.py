# SPDX-License-Identifier: Apache-2.0
"""The scale of updates by shape."""

import math

import pytest
import torch
from torch import Tensor

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.kernels.reference import apply_
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.scale import SCALES, scale_factor, update_rms


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


def test_every_choice_of_the_config_has_a_scale() -> None:
    choices = MuonConfig.model_fields["adjust_lr_fn"].annotation.__args__
    assert set(choices) == {"auto", *SCALES}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("shape", [(24, 24), (24, 60), (60, 24), (2, 50)])
def test_update_rms(name: str, shape: tuple[int, int]) -> None:
    """A matrix whose singular values are all one, scaled, has the RMS that is promised."""
    u, _, vh = torch.linalg.svd(randn(shape, 0).double(), full_matrices=False)
    scaled = scale_factor(name, *shape) * (u @ vh)
    assert scaled.square().mean().sqrt().item() == pytest.approx(update_rms(name, *shape), rel=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (8, 512), (512, 8)])
def test_match_rms_adamw_is_one_fifth_at_any_shape(shape: tuple[int, int]) -> None:
    assert update_rms("match_rms_adamw", *shape) == pytest.approx(0.2, rel=1e-12)


def test_one_step_moves_a_parameter_by_the_rms() -> None:
    param = randn((40, 16), 0)
    u, _, vh = torch.linalg.svd(randn((40, 16), 1), full_matrices=False)
    before = param.clone()
    apply_(param, u @ vh, 0.01, scale_factor("match_rms_adamw", 40, 16), 0.0, False, Workspace())
    rms = (param - before).square().mean().sqrt().item()
    assert math.isclose(rms, 0.01 * update_rms("match_rms_adamw", 40, 16), rel_tol=1e-4)
