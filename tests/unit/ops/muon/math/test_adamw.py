# SPDX-License-Identifier: Apache-2.0
"""The auxiliary AdamW against its formulas, with torch's fused kernel and where there is none."""

from dataclasses import replace

import pytest
import torch

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math import adamw
from deepspeed.muon.saved_state import adamw_state

GROUP = {"betas": (0.9, 0.95), "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}


@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_three_steps_are_those_of_the_formulas(
    decoupled: bool, fused: bool, is_corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "has_fused_kernel", lambda device_type: fused)
    for name in ("_fused_adam_", "_fused_adamw_") if not fused else ():
        monkeypatch.setattr(torch, name, None)
    group = GROUP | ({} if is_corrected else {"bias_correction": False})
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 7), (3,))]
    states, expected = [adamw_state(tensor) for tensor in tensors], [tensor.clone() for tensor in tensors]
    means, squares = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(2))
    for step in range(1, 4):
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        adamw.step(tensors, states, group, decoupled)
        for i, tensor in enumerate(tensors):
            grad = tensor.grad if decoupled else tensor.grad + 0.1 * expected[i]
            means[i], squares[i] = 0.9 * means[i] + 0.1 * grad, 0.95 * squares[i] + 0.05 * grad**2
            mean, square = (1 - 0.9**step, 1 - 0.95**step) if is_corrected else (1.0, 1.0)
            update = means[i] / mean / ((squares[i] / square).sqrt() + 1e-8)
            expected[i] = expected[i] * (1 - 0.1 * 0.1 * decoupled) - 0.1 * update
    torch.testing.assert_close(tensors, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([state["exp_avg"] for state in states], means, rtol=1e-10, atol=1e-15)
    assert [state["step"] for state in states] == [3, 3]


def test_one_device_without_the_kernel_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torch has it for a CPU, none for XLA, whose tensors are not computed eagerly."""
    assert adamw.has_fused_kernel("cpu") and not adamw.has_fused_kernel("xla")
    chosen = []
    monkeypatch.setattr(adamw, "adamw", lambda *args, **settings: chosen.append(settings))
    monkeypatch.setattr(adamw, "has_fused_kernel", lambda device_type: device_type == "cpu")
    for devices in (("cpu", "cpu"), ("cpu", "meta")):
        tensors = [torch.zeros(2, device=device) for device in devices]
        adamw.step(tensors, [adamw_state(tensor) for tensor in tensors], GROUP, True)
    assert [("fused" in settings, "foreach" in settings) for settings in chosen] == [(True, False), (False, True)]


def test_bf16_weights_and_moments_draw_numbers_of_their_own() -> None:
    """Whatever the place in a fragment of several chunks, no two of them draw the same."""
    numel = 2 * kernel_set.CPU_CHUNK
    tensor = torch.zeros(numel, dtype=torch.bfloat16)
    tensor.grad = torch.zeros_like(tensor)
    drawn: list[tuple[object, int]] = []
    kernels = replace(
        kernel_set.TORCH, copy_rounded=lambda target, source, key, first, work: drawn.append((key, first))
    )
    fragments = [adamw.Fragment("w", 5, 0, numel)]
    adamw.step_in_bf16(tensor, adamw_state(tensor), GROUP, True, fragments, kernels, Workspace())
    assert len({key for key, _ in drawn}) == 3
    assert sorted({first for _, first in drawn}) == [5, 5 + kernel_set.CPU_CHUNK] and len(drawn) == 6
