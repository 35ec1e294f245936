# SPDX-License-Identifier: Apache-2.0
"""The auxiliary AdamW where torch has no fused kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.math import adamw

GROUP = {"betas": (0.9, 0.95), "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}


def train(decoupled: bool) -> list[Tensor]:
    """Weights and state after three steps, in fp64."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 7), (3,))]
    states: list[dict[str, Any]] = [adamw.state_of({}, tensor) for tensor in tensors]
    for _ in range(3):
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        adamw.step(tensors, states, GROUP, decoupled)
    return [*tensors, *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step"))]


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_a_fused_kernel_foreach_does_the_same(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = train(decoupled)
    monkeypatch.setattr(adamw, "has_fused_kernel", lambda device_type: False)
    monkeypatch.setattr(torch, "_fused_adam_", None)
    monkeypatch.setattr(torch, "_fused_adamw_", None)
    for found, expected in zip(train(decoupled), fused, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_one_device_without_the_kernel_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(adamw, "adamw", lambda *args, **settings: chosen.append(settings))
    monkeypatch.setattr(adamw, "has_fused_kernel", lambda device_type: device_type == "cpu")
    for devices in (("cpu", "cpu"), ("cpu", "meta")):
        tensors = [torch.zeros(2, device=device) for device in devices]
        adamw.step(tensors, [adamw.state_of({}, tensor) for tensor in tensors], GROUP, True)
    assert chosen[0]["fused"] and "foreach" not in chosen[0]
    assert chosen[1]["foreach"] and "fused" not in chosen[1]


def test_torch_is_asked_for_the_kernel() -> None:
    """Every torch has it for a CPU, none for XLA, whose tensors are not computed eagerly."""
    assert adamw.has_fused_kernel("cpu") and not adamw.has_fused_kernel("xla")


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_without_bias_correction(decoupled: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formulas, and with the same count of steps."""
    monkeypatch.setattr(adamw, "has_fused_kernel", lambda device_type: fused)
    group = GROUP | {"bias_correction": False}
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    state, expected = adamw.state_of({}, tensor), tensor.clone()
    mean, square = torch.zeros_like(tensor), torch.zeros_like(tensor)
    for _ in range(3):
        tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        adamw.step([tensor], [state], group, decoupled)
        grad = tensor.grad if decoupled else tensor.grad + 0.1 * expected
        expected = expected * (1 - 0.1 * 0.1) if decoupled else expected
        mean, square = 0.9 * mean + 0.1 * grad, 0.95 * square + 0.05 * grad**2
        update = mean / (square.sqrt() + 1e-8)
        expected = expected - 0.1 * update
    torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state["exp_avg"], mean, rtol=1e-10, atol=0)
    assert state["step"] == 3
    squares = adamw.update_squares(state, group, 0, tensor.numel())
    torch.testing.assert_close(squares.double(), update.square().sum(), rtol=1e-5, atol=0)
