# SPDX-License-Identifier: Apache-2.0
"""The optimizer in plain PyTorch, against torch.optim.Muon and torch.optim.AdamW."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam, UnsupportedError
from deepspeed.muon.replicas import bind_without_sharding
from helpers.engine_state import kept_dtypes
from helpers.models import MODELS
from helpers.oracles import change_error, newton_schulz_fp64


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> dict[str, Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(*model.batch(step)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_muon_and_adamw(adjust_lr_fn: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own iteration runs in bf16, so both get the same exact one; all else is torch's."""
    import torch.optim._muon as torch_muon

    def exact(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        return newton_schulz_fp64(grad, [coefficients] * steps).to(grad.dtype)

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", exact)
    ours, theirs = MODELS["mlp"](), MODELS["mlp"]()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    mine = MuonWithAuxAdam(
        ours.parameters(), model=ours, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, ns_dtype="fp32", **settings
    )
    matrices, vectors = split(theirs)
    muon = torch.optim.Muon(matrices, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, **settings)
    adam = torch.optim.AdamW(vectors, lr=0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    initial = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for step in range(5):
        for optimizer in (muon, adam):
            optimizer.zero_grad()
        theirs(*theirs.batch(step)).backward()
        muon.step()
        adam.step()
    got = train(ours, mine)
    for name, p in theirs.named_parameters():
        assert change_error(initial[name], got[name], p.detach()) <= 1e-4, name


def test_bf16_takes_the_standard_method_where_kernels_round_diagonals() -> None:
    """Of matrices of these shapes the Gram iteration would be faster."""
    model = nn.Sequential(nn.Linear(32, 128), nn.Linear(128, 32))
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, ns_dtype="bf16", kernels="torch")
    exact = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, ns_dtype="fp32", kernels="torch")
    for each, method in ((optimizer, "standard"), (exact, "gram")):
        model(torch.ones(2, 32)).sum().backward()
        each.step()
        assert {row.methods for row in each.describe().rows if row.updated_by == "Muon"} == {(method,)}


def test_without_adam_w_mode_the_adam_half_equals_torchs_adam() -> None:
    ours, theirs = MODELS["mlp"](), MODELS["mlp"]()
    for p in ours.parameters():
        p.use_muon = False
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    reference = torch.optim.Adam(theirs.parameters(), **settings)
    got = train(ours, MuonWithAuxAdam(ours.parameters(), model=ours, adam_w_mode=False, **settings))
    for name, wanted in train(theirs, reference).items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=1e-7)


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="are not parameters of model="):
        MuonWithAuxAdam([nn.Parameter(torch.zeros(3, 3))], model=MODELS["mlp"]())


def test_a_group_cannot_be_added_later() -> None:
    """It would be neither routed nor planned."""
    model = MODELS["frozen"]()
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=0.02)
    before, late = copy.deepcopy(optimizer.state_dict()), [p for p in model.parameters() if not p.requires_grad]
    for p in late:
        p.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="build a new optimizer with all parameters that now train"):
        optimizer.add_param_group({"params": late})
    assert optimizer.state_dict() == before
    train(model, optimizer, 1)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("momentum_dtype", "ns_dtype"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"), ("int8", "bf16")]
)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_newton_schulz_leaves_the_momentum_alone(
    kernels: str, momentum_dtype: str, ns_dtype: str, nesterov: bool
) -> None:
    """It works in place on what travels, which must not be the state, even where both have one dtype and shape."""
    model = MODELS["wide"]()
    dtypes = {"momentum_dtype": momentum_dtype, "ns_dtype": ns_dtype}
    optimizer = MuonWithAuxAdam(
        model.parameters(), model=model, muon_lr=0.02, momentum=0.5, nesterov=nesterov, kernels=kernels, **dtypes
    )
    model(*model.batch(0)).backward()
    optimizer.step()
    for p in split(model)[0]:
        kept, average = optimizer.read_state(p, "momentum_buffer").view_as(p), 0.5 * p.grad
        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
        assert kept_dtypes([optimizer.state[p]]) == {dtypes[momentum_dtype]}
        limits = {"bf16": (2**-7, 0), "fp32": (1e-6, 0), "int8": (0, float(average.abs().max()) / 127)}
        rtol, atol = limits[momentum_dtype]
        torch.testing.assert_close(kept, average, rtol=rtol, atol=atol)


def test_state_dict_round_trip_is_exact() -> None:
    """The saved settings act, also on an optimizer that has begun with others."""
    straight, resumed = MODELS["mlp"](), MODELS["mlp"]()
    first = MuonWithAuxAdam(straight.parameters(), model=straight, lr=0.02, ns_method="gram")
    train(straight, first, 3)
    others = {"adjust_lr_fn": "none", "ns_method": "standard", "nesterov": False}
    second = MuonWithAuxAdam(resumed.parameters(), model=resumed, lr=0.5, **others)
    train(resumed, second, 1)
    resumed.load_state_dict(straight.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(train(resumed, second, 3), train(straight, first, 3), rtol=0, atol=0)
    assert sum(len(partition.tensors) for partition in second.all_partitions) == len(list(resumed.parameters()))


def test_a_copied_scheduler_sets_the_rates_of_the_same_optimizer() -> None:
    model = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=0.02)
    scheduler = copy.deepcopy(torch.optim.lr_scheduler.LambdaLR(optimizer.given, lambda step: 0.5))
    scheduler.optimizer.param_groups[0]["lr"] = 0.25
    assert {group["lr"] / group["lr_ratio"] for group in optimizer.param_groups} == {0.25}
    # Torch wraps the step of a copy's class; the schedule of another optimizer must not meet that.
    other = MuonWithAuxAdam(model.parameters(), model=model, lr=0.02)
    torch.optim.lr_scheduler.LambdaLR(other.given, lambda step: 0.5)
    other.step()


def test_flattened_parameters_of_an_unknown_wrapper_are_refused() -> None:
    model = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(model.parameters(), model=model)
    flat = torch.nn.Parameter(torch.zeros(10))
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.zeros(10)
    optimizer.step()
    flat.grad = torch.ones(10)
    with pytest.raises(RuntimeError, match=r"deepspeed\.initialize"):
        optimizer.step()


def test_a_load_changes_no_digest() -> None:
    """Ranks of DDP compare digests in every step, and one of them may have loaded the state that all have."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1)
    bind_without_sharding(optimizer, None)
    before = optimizer.digest()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.digest() == before
