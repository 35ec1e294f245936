# SPDX-License-Identifier: Apache-2.0
"""The elementwise half of Muon against float64 formulas."""

import math

import pytest
import torch
from torch import Tensor

from deepspeed.muon.config import MuonConfig
from deepspeed.muon.update import SCALES, apply_, direction, momentum_, scale_factor, update_rms

SHAPES = [(7, 5), (64,), (3, 4, 2)]


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equals(actual: Tensor, expected: Tensor) -> None:
    """To a few roundings of fp32."""
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_is_an_average(shape: tuple[int, ...], momentum: float) -> None:
    buffer, grad = randn(shape, 0), randn(shape, 1)
    expected = momentum * buffer.double() + (1 - momentum) * grad.double()
    before, kept = buffer.data_ptr(), grad.clone()
    momentum_(buffer, grad, momentum)
    assert_equals(buffer, expected)
    assert buffer.data_ptr() == before
    assert torch.equal(grad, kept)


def test_momentum_of_a_constant_gradient_converges_to_it() -> None:
    """A sum would grow to grad / (1 - momentum)."""
    buffer, grad = torch.zeros(6), randn((6,), 0)
    for step in range(1, 201):
        momentum_(buffer, grad, 0.9)
        assert_equals(buffer, (1 - 0.9**step) * grad.double())


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("shape", SHAPES)
def test_nesterov_looks_ahead(shape: tuple[int, ...], momentum: float) -> None:
    buffer, grad, out = randn(shape, 0), randn(shape, 1), torch.full(shape, torch.nan)
    kept = buffer.clone(), grad.clone()
    result = direction(buffer, grad, momentum, nesterov=True, out=out)
    assert result is out
    assert_equals(out, (1 - momentum) * grad.double() + momentum * buffer.double())
    assert torch.equal(buffer, kept[0])
    assert torch.equal(grad, kept[1])


@pytest.mark.parametrize("target", ["grad", "buffer"])
def test_nesterov_may_write_over_its_inputs(target: str) -> None:
    tensors = {"buffer": randn((9, 4), 0), "grad": randn((9, 4), 1)}
    expected = 0.1 * tensors["grad"].double() + 0.9 * tensors["buffer"].double()
    direction(**tensors, momentum=0.9, nesterov=True, out=tensors[target])
    assert_equals(tensors[target], expected)


def test_without_nesterov_the_momentum_itself_is_given() -> None:
    buffer, grad, out = randn((4, 4), 0), randn((4, 4), 1), torch.full((4, 4), 7.0)
    kept = buffer.clone()
    assert direction(buffer, grad, 0.9, nesterov=False, out=out) is buffer
    assert torch.equal(buffer, kept)
    assert (out == 7.0).all(), "nothing was written"


def test_slices_of_a_matrix_give_the_same_bits_as_the_whole() -> None:
    buffer, grad, param = (randn((101,), seed) for seed in range(3))
    whole = [tensor.clone() for tensor in (buffer, grad, param)]

    def step(buffer: Tensor, grad: Tensor, param: Tensor) -> None:
        momentum_(buffer, grad, 0.95)
        apply_(param, direction(buffer, grad, 0.95, True, torch.empty_like(grad)), 0.1, 0.7, 0.1)

    step(*whole)
    for start, stop in ((0, 13), (13, 14), (14, 77), (77, 101)):
        step(buffer[start:stop], grad[start:stop], param[start:stop])
    assert torch.equal(buffer, whole[0])
    assert torch.equal(param, whole[2])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(weight_decay: float, dtype: torch.dtype) -> None:
    param, update = randn((7, 5), 0), randn((7, 5), 1, dtype)
    expected = param.double() * (1 - 0.02 * weight_decay) - 0.02 * 1.7 * update.double()
    before = param.data_ptr()
    apply_(param, update, lr=0.02, scale=1.7, weight_decay=weight_decay)
    assert param.data_ptr() == before
    assert_equals(param, expected)


@pytest.mark.parametrize("scale", [0.2, 1.0, 50.0])
def test_decay_is_by_the_unscaled_rate(scale: float) -> None:
    param = randn((7, 5), 0)
    expected = param.double() * (1 - 0.5 * 0.1)
    apply_(param, torch.zeros(7, 5), lr=0.5, scale=scale, weight_decay=0.1)
    assert_equals(param, expected)


def test_decay_comes_before_the_update() -> None:
    param = torch.ones(1)
    apply_(param, torch.ones(1), lr=0.5, scale=1.0, weight_decay=1.0)
    assert param.item() == 0.0, "the update itself does not decay"


def test_a_zero_rate_changes_nothing() -> None:
    param = randn((7, 5), 0)
    kept = param.clone()
    apply_(param, randn((7, 5), 1), lr=0.0, scale=1.7, weight_decay=0.1)
    assert torch.equal(param, kept)


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
    apply_(param, u @ vh, lr=0.01, scale=scale_factor("match_rms_adamw", 40, 16), weight_decay=0.0)
    rms = (param - before).square().mean().sqrt().item()
    assert math.isclose(rms, 0.01 * update_rms("match_rms_adamw", 40, 16), rel_tol=1e-4)
