# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules, and training under each of them with a record of every group's settings."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler as torch_schedules

from helpers.models import Mlp, train_engine
from helpers.training import ds_config, make_engine

RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
STEPS = 12
RATIO = 0.02 / 3e-4

#: DeepSpeed's schedules, with scalars only.
DEEPSPEED: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-2,
        "cycle_first_step_size": 4,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
    },
    "WarmupLR": {"warmup_min_lr": 1e-3, "warmup_max_lr": 0.02, "warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_min_lr": 1e-3, "warmup_max_lr": 0.02, "warmup_num_steps": 5, "total_num_steps": 12},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
}


DEEPSPEED_COSINE = {"type": "WarmupCosineLR", "params": DEEPSPEED["WarmupCosineLR"]}


def chained(optimizer: Any) -> Any:
    return torch_schedules.ChainedScheduler(
        [torch_schedules.ConstantLR(optimizer, 0.5, 4), torch_schedules.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer: Any) -> Any:
    parts = [torch_schedules.LinearLR(optimizer, 0.1, 1.0, 4), torch_schedules.CosineAnnealingLR(optimizer, 8, 1e-4)]
    return torch_schedules.SequentialLR(optimizer, parts, [4])


#: Torch's schedules.
TORCH: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch_schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: torch_schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: torch_schedules.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: torch_schedules.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: torch_schedules.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: torch_schedules.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: torch_schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch_schedules.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: torch_schedules.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 5, eta_min=1e-4),
    "CyclicLR": lambda o: torch_schedules.CyclicLR(o, base_lr=1e-3, max_lr=0.05, step_size_up=3, step_size_down=4),
    "OneCycleLR": lambda o: torch_schedules.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}


def hugging_face() -> dict[str, Callable[[Any], Any]]:
    """Return name -> function that builds that schedule of ``transformers.get_scheduler`` for an optimizer."""
    from transformers import get_scheduler

    special: dict[str, dict[str, Any]] = {
        "polynomial": {"lr_end": 1e-5},
        "cosine_with_min_lr": {"min_lr": 1e-4},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
        "warmup_stable_decay": {"num_decay_steps": 3},
    }

    def make(name: str) -> Callable[[Any], Any]:
        return lambda optimizer: get_scheduler(name, optimizer, 4, 12, scheduler_specific_kwargs=special.get(name))

    names = (
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    )
    return {name: make(name) for name in names}


def engine_of(params: dict[str, Any] = RATES, groups: int = 1, **kwargs: Any) -> Any:
    """Return an engine for the MLP; with 2 ``groups``, its first layer has a tenth of the learning rate."""
    net = Mlp()
    schedule = kwargs.pop("schedule", None)
    given: Any = list(net.parameters())
    if groups == 2:
        first = list(net.layers[0].parameters())
        rest = [p for layer in net.layers[1:] for p in layer.parameters()]
        given = [{"params": first, "lr": 0.002}, {"params": rest}]
    extra = {"scheduler": schedule} if isinstance(schedule, dict) else {}
    client = {"lr_scheduler": schedule} if callable(schedule) else {}
    config = ds_config(optimizer={"type": "Muon", "params": {"ns_dtype": "fp32", **params}}, **kwargs, **extra)
    return make_engine(net, config, model_parameters=given, **client)


def rates_of(engine: Any) -> dict[str, float]:
    return {group["name"]: group["lr"] for group in engine.basic_optimizer.param_groups}


def history(engine: Any, steps: int = STEPS) -> list[dict[str, Any]]:
    """Train; return the settings of all groups before each step."""
    record = []
    for step in range(steps):
        record.append({g["name"]: {k: g.get(k) for k in ("lr", "momentum", "betas")} for g in groups_of(engine)})
        train_engine(engine, 1, first_step=step)
    engine.destroy()
    return record


def groups_of(engine: Any) -> list[dict[str, Any]]:
    return engine.basic_optimizer.param_groups


def run_deepspeed(name: str, values: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    return history(engine_of(schedule={"type": name, "params": values}, **kwargs))


def run_client(kind: str, name: str, **kwargs: Any) -> list[dict[str, Any]]:
    table = TORCH if kind == "torch" else hugging_face()
    return history(engine_of(schedule=table[name], **kwargs))


def check_ratio(record: list[dict[str, Any]], ratio: float = RATIO) -> list[float]:
    """Assert that Muon's rate is ``ratio`` times AdamW's at every step; return Muon's rates."""
    for groups in record:
        assert groups["muon"]["lr"] == pytest.approx(ratio * groups["adam"]["lr"], rel=1e-6)
    return [groups["muon"]["lr"] for groups in record]
