# SPDX-License-Identifier: Apache-2.0
"""Jobs that distributed tests run on every rank: train a small model with deepspeed-muon, return weights and state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from helpers.models import GLOBAL_BATCH, MODELS, full_weights, initialize_, train_engine, without_head_
from helpers.oracles import OracleConfig

PARAMS = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-8, "ns_dtype": "fp32"}
"""optimizer.params of most tests."""
MOMENTA: dict[str, dict[str, Any]] = {
    dtype: {"type": "Muon", "params": PARAMS | {"momentum_dtype": dtype}} for dtype in ("fp32", "bf16", "int8")
}
"""The section `optimizer`, by dtype of the momentum."""
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_OPTIMIZER: dict[str, Any] = {"stage": 1, "dtype": "bf16", **FP32_GRADIENTS}
"""The settings under which DeepSpeed takes BF16_Optimizer."""
ORACLE = OracleConfig(
    lr=PARAMS["lr"],
    adam_lr=PARAMS["adam_lr"],
    momentum=PARAMS["momentum"],
    weight_decay=PARAMS["weight_decay"],
    adam_weight_decay=PARAMS["weight_decay"],
    betas=(0.9, 0.95),
    eps=PARAMS["eps"],
    clip=1.0,
)
"""The same for the oracle."""

BF16_MASTERS: dict[str, Any] = {
    "dtype": "bf16",
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
}
"""The settings under which nothing is kept in fp32."""


def with_params(**params: Any) -> dict[str, Any]:
    """Return the section `optimizer` with `PARAMS`, updated by `params`."""
    return {"type": "Muon", "params": PARAMS | params}


def ds_config(
    stage: int = 2,
    accumulation: int = 1,
    clip: float = 1.0,
    dtype: str = "fp32",
    offload: bool = False,
    optimizer: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Return a ds_config for the ranks of this job."""
    import torch.distributed as dist

    section = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {}) | (zero or {})
    precision: dict[str, Any] = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}.get(
        dtype, {"fp16": {"enabled": True, "loss_scale": 64}}
    )
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // (dist.get_world_size() * accumulation),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "Muon", "params": PARAMS} if optimizer is None else optimizer,
        "zero_optimization": section,
        "steps_per_print": 10**9,
        **precision,
        **extra,
    }


def make_engine(model: nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
    """Return an engine; assert that its optimizer is deepspeed-muon's."""
    import deepspeed

    kwargs = kwargs or {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    engine = deepspeed.initialize(model=model, config=config, **kwargs)[0]
    assert type(engine.basic_optimizer).__module__ == "deepspeed.muon.optimizer"
    return engine


def fp32_weights(engine: Any) -> dict[str, Tensor]:
    """Return name -> whole master weight, on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param

    model, optimizer = engine.module, engine.optimizer
    if next(model.parameters()).dtype == torch.float32:
        return full_weights(model)
    if hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        names = {id(p): name for name, p in model.named_parameters()}
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = (pair for params, masters in groups for pair in zip(params, masters, strict=True))
        return {names[id(p)]: master.detach().clone() for p, master in pairs}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(p).detach().cpu().clone() for name, p in trained.items()}


def train(model: str, steps: int = 5, **config: Any) -> dict[str, Tensor]:
    """Train `MODELS[model]` until `steps` steps were not skipped; return the master weights."""
    return train_with_norms(model, steps, **config)[0]


def steps_done(engine: Any) -> int:
    """Return the number of updates that the optimizer has made, without skipped steps."""
    states = engine.basic_optimizer.state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def take(engine: Any, step: Callable[[], Any]) -> int:
    """Call `step` until a step of the engine is not skipped; return how many were."""
    done = steps_done(engine)
    for skipped in range(40):
        step()
        if steps_done(engine) > done:
            return skipped
    raise AssertionError("every step is skipped")


def train_through_skips(engine: Any, steps: int, first_step: int = 0) -> int:
    """Train, with each batch repeated until its step is not skipped; return the number of skipped steps."""
    numbers = range(first_step, first_step + steps)
    return sum(take(engine, partial(train_engine, engine, 1, first_step=number)) for number in numbers)


def train_with_norms(model: str, steps: int = 5, **config: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Train until `steps` steps were not skipped; return (master weights, norm that the engine reports after each)."""
    engine, norms = make_engine(MODELS[model](), ds_config(**config)), []
    for step in range(steps):
        train_through_skips(engine, 1, first_step=step)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, norms


class FixedGradient(nn.Linear):
    """A matrix whose gradient is exactly the argument of `forward`."""

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient.to(self.weight.dtype)).sum()


class FixedGradients(nn.Module):
    """Matrices of given shapes, with a known gradient for each matrix and step."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FixedGradient(cols, rows, bias=False) for rows, cols in shapes)
        generator = torch.Generator().manual_seed(0)
        for layer in self.layers:
            layer.weight.data.normal_(generator=generator)
        without_head_(self)

    def gradients(self, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        return [torch.randn(layer.out_features, layer.in_features, generator=generator) for layer in self.layers]

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([layer(g) for layer, g in zip(self.layers, gradients, strict=True)]).sum()


def train_on_gradients(shapes: list[tuple[int, int]], steps: int, **config: Any) -> dict[str, Tensor]:
    """Train on known gradients; return the change of the weights."""
    net = FixedGradients(shapes)
    initial = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine = make_engine(net, ds_config(**config))
    for step in range(steps):
        engine.backward(engine(net.gradients(step)))
        engine.step()
    weights = fp32_weights(engine)
    engine.destroy()
    return {name: weights[name] - initial[name] for name in initial}


def fresh_engine(seed: int, case: dict[str, Any], **extra: Any) -> Any:
    """Return an engine for the small model, with weights from `seed`."""
    net = MODELS["mlp"]()
    initialize_(net, seed)
    return make_engine(net, ds_config(**case, **extra))
