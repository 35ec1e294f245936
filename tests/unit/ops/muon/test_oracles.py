# SPDX-License-Identifier: Apache-2.0
"""The reference itself, against torch.optim and against AdamW in unmodified DeepSpeed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import run
from helpers.models import GLOBAL_BATCH, MODELS, full_weights, make_batch, train_engine
from helpers.oracles import (
    SCALES,
    OracleConfig,
    OracleResult,
    change_cosine,
    change_error,
    msign_svd,
    newton_schulz_fp64,
    route,
    train_oracle,
)

STEPS = 4
ADAM = OracleConfig(adam_lr=0.01, adam_weight_decay=0.1, betas=(0.8, 0.95), clip=1.0)


class Matrices(nn.Module):
    """Only matrices, with a loss that sends a gradient to each."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(6, 10), (10, 6), (8, 8)]
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.weights[0].dtype)
        return sum((torch.tanh(inputs[:, : weight.shape[1]] @ weight.T) ** 2).mean() for weight in self.weights)

    def batch(self, step: int) -> tuple[Tensor]:
        """(12, 10), float32."""
        return (torch.randn(12, 10, generator=torch.Generator().manual_seed(step)),)


def train_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights after STEPS steps of `optimizer` on the global batches, in the dtype of `model`."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*model.batch(step)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_close(weights: dict[str, Tensor], oracle: OracleResult, tolerance: float) -> None:
    for name, reference in oracle.weights.items():
        assert change_error(oracle.initial[name], weights[name], reference) <= tolerance, name


def train_deepspeed(model: str, stage: int, accumulation: int) -> tuple[dict[str, Tensor], list[float]]:
    """Full weights and losses after STEPS steps of AdamW in DeepSpeed, float32."""
    import torch.distributed as dist

    import deepspeed

    net = MODELS[model]()
    params = {"lr": ADAM.adam_lr, "weight_decay": ADAM.adam_weight_decay, "betas": ADAM.betas, "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (dist.get_world_size() * accumulation),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": ADAM.clip,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    losses = train_engine(engine, STEPS)
    weights = full_weights(net)
    engine.destroy()
    return weights, losses


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_matches_torch(monkeypatch: pytest.MonkeyPatch, scale: str, nesterov: bool) -> None:
    """In float64, with torch's bfloat16 iteration replaced by one in the dtype of the update."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    model = Matrices().double()
    cfg = OracleConfig(lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=nesterov, scale=scale)
    oracle = train_oracle(model, model.batch, STEPS, route(model), cfg)
    optimizer = torch.optim.Muon(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=scale, eps=0.0
    )
    assert_close(train_torch(model, optimizer), oracle, 1e-10)
    for name, param in model.named_parameters():
        torch.testing.assert_close(oracle.momentum[name], optimizer.state[param]["momentum_buffer"])


def test_muon_in_bfloat16_is_near() -> None:
    model = Matrices()
    oracle = train_oracle(model, model.batch, STEPS, route(model), OracleConfig(lr=0.05))
    weights = train_torch(model, torch.optim.Muon(model.parameters(), lr=0.05, momentum=0.95, weight_decay=0.0))
    assert_close(weights, oracle, 0.1)
    assert all(change_cosine(oracle.initial[name], weights[name], oracle.weights[name]) > 0.99 for name in weights)


@pytest.mark.parametrize("name", ["mlp", "tied", "gpt", "gpt_tied"])
def test_adam_matches_torch(name: str) -> None:
    model = MODELS[name]().double()
    cfg = OracleConfig(adam_lr=0.01, adam_weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    oracle = train_oracle(model, model.batch, STEPS, dict.fromkeys(dict(model.named_parameters()), "adam"), cfg)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    assert_close(train_torch(model, optimizer), oracle, 1e-10)


def test_clipping_and_schedule() -> None:
    """A clip far below the norm bounds the gradient; a factor of the learning rate scales a first step."""
    model = MODELS["mlp"]()
    routing = route(model)
    whole = train_oracle(model, model.batch, 1, routing)
    half = train_oracle(model, model.batch, 1, routing, OracleConfig(schedule=lambda step: 0.5))
    small = train_oracle(model, model.batch, 1, routing, OracleConfig(clip=1e-3))
    total = sum(
        momentum.square().sum() / (0.05 if routing[name] == "muon" else 0.1) ** 2
        for name, momentum in small.momentum.items()
    ).sqrt()
    assert whole.norms == small.norms and whole.norms[0] > 0.1
    assert 0.99e-3 < total <= 1e-3
    for name, initial in whole.initial.items():
        torch.testing.assert_close(half.weights[name] - initial, (whole.weights[name] - initial) / 2)


def test_unused_matrices_stand_still_and_frozen_ones_are_left_out() -> None:
    model = MODELS["unused"]()
    oracle = train_oracle(model, model.batch, 1, route(model), OracleConfig(lr=0.1, weight_decay=0.5))
    assert torch.equal(oracle.weights["unused.weight"], oracle.initial["unused.weight"])
    assert not {"layers.1.weight", "layers.1.bias"} & route(MODELS["frozen"]()).keys()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
def test_newton_schulz_converges_to_the_sign(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(newton_schulz_fp64(matrix))
    assert singular.min() > 0.5 and singular.max() < 1.3
    converged = newton_schulz_fp64(matrix, [(15 / 8, -10 / 8, 3 / 8)] * 40)
    torch.testing.assert_close(converged, msign_svd(matrix))
    assert newton_schulz_fp64(torch.zeros(shape)).abs().max() == 0


def test_scales() -> None:
    values = {name: (scale(4, 1), scale(1, 4)) for name, scale in SCALES.items()}
    assert values == {"original": (2, 1), "match_rms_adamw": (0.4, 0.4), "spectral_unclamped": (2, 0.5), "none": (1, 1)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_shares_average_to_the_global_loss(world: int, accumulation: int) -> None:
    model = MODELS["gpt"]().double()
    shares = [
        make_batch(model, 3, micro, rank, world, accumulation) for micro in range(accumulation) for rank in range(world)
    ]
    mean = torch.stack([model(*share) for share in shares]).mean()
    torch.testing.assert_close(mean, model(*model.batch(3)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_not_tiny(name: str) -> None:
    model = MODELS[name]()
    model(*model.batch(0)).backward()
    norms = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    assert min(norms.values()) > 1e-3, norms


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]()
    low = copy.deepcopy(model).to(dtype)
    low(*model.batch(0)).backward()
    torch.testing.assert_close(low(*model.batch(0)), model(*model.batch(0)), rtol=0.05, atol=0.05, check_dtype=False)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["mlp", "frozen", "unused", "gpt_tied"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adam_matches_deepspeed(stage: int, name: str) -> None:
    """Batches, averaging over ranks and micro-steps and clipping are those of DeepSpeed."""
    model = MODELS[name]()
    routing = dict.fromkeys(route(model), "adam")
    oracle = train_oracle(model, model.batch, STEPS, routing, ADAM)
    unclipped = train_oracle(model, model.batch, STEPS, routing, replace(ADAM, clip=0.0)).weights
    assert max(change_error(oracle.initial[name], unclipped[name], oracle.weights[name]) for name in routing) > 0.01
    results = run(train_deepspeed, 2, model=name, stage=stage, accumulation=4)
    for weights, _ in results:
        assert_close(weights, oracle, 1e-4)
    losses = torch.tensor([losses for _, losses in results]).view(2, STEPS, 4).mean((0, 2))
    torch.testing.assert_close(losses.double(), torch.tensor(oracle.losses, dtype=torch.float64), rtol=1e-5, atol=0)
