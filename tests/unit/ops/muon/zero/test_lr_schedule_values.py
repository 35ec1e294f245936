# SPDX-License-Identifier: Apache-2.0
"""What a schedule's numbers describe, cycles of the momentum, resuming, and schedules without DeepSpeed."""

import math
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.logs import logged
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


#: Torch's schedules, by how they compute: from the step, from the last rate, in cycles of the betas, and joined.
TORCH: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch_schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: torch_schedules.MultiplicativeLR(o, lambda step: 0.9),
    "CosineAnnealingLR": lambda o: torch_schedules.CosineAnnealingLR(o, 8, eta_min=1e-4),
    "CyclicLR": lambda o: torch_schedules.CyclicLR(o, base_lr=1e-3, max_lr=0.05, step_size_up=3, step_size_down=4),
    "OneCycleLR": lambda o: torch_schedules.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "SequentialLR": lambda o: torch_schedules.SequentialLR(
        o, [torch_schedules.LinearLR(o, 0.1, 1.0, 4), torch_schedules.CosineAnnealingLR(o, 8, 1e-4)], [4]
    ),
    "ChainedScheduler": lambda o: torch_schedules.ChainedScheduler(
        [torch_schedules.ConstantLR(o, 0.5, 4), torch_schedules.ExponentialLR(o, 0.9)]
    ),
}


def with_a_least_rate(optimizer: Any) -> Any:
    """Return one of Hugging Face's schedules: all are LambdaLR, and this one reads the optimizer's `defaults`."""
    from transformers import get_scheduler

    options = {"min_lr": 1e-4}
    return get_scheduler("cosine_with_min_lr", optimizer, 4, 12, scheduler_specific_kwargs=options)


SCHEDULES = {
    **{name: {"type": name, "params": values} for name, values in DEEPSPEED.items()},
    **TORCH,
    "cosine_with_min_lr": with_a_least_rate,
}


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
        record.append(
            {g["name"]: {k: g.get(k) for k in ("lr", "momentum", "betas")} for g in engine.basic_optimizer.param_groups}
        )
        train_engine(engine, 1, first_step=step)
    engine.destroy()
    return record


def run_schedule(name: str, values: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    """Train under one of the schedules, or under DeepSpeed's schedule of that name and these values."""
    schedule: Any = SCHEDULES[name] if values is None else {"type": name, "params": values}
    return history(engine_of(schedule=schedule, **kwargs))


# ---- what the numbers describe ------------------------------------------------------------------------------

WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"}
GROUPS = {"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 0.01, "group1-adam": 0.01}


@pytest.mark.parametrize(
    ("maximum", "params", "expected"),
    [
        (0.01, {"lr": 0.02}, {"muon": 0.01, "adam": 0.01}),
        (0.01, {"lr": 0.02, "adam_lr": 0.002}, {"muon": 0.01, "adam": 0.001}),  # half of lr's 0.02
        (0.01, {"muon_lr": 0.02, "adam_lr": 0.002}, {"muon": 0.01, "adam": 0.001}),  # without lr, of muon_lr's
        (0.01, {"lr": 0.1, "muon_lr": 0.02, "adam_lr": 0.002}, {"muon": 0.002, "adam": 0.0002}),
        (0.01, {}, {"muon": 0.01, "adam": 0.01 * 3e-4 / 0.02}),
        ([0.02, 3e-4], RATES, {"muon": 0.02, "adam": 3e-4}),  # one per half, as with stock's Muon
        ([0.01], RATES, {"muon": 0.01, "adam": 1.5e-4}),  # one per group as given
        (0.01, {"lr": 0.02}, GROUPS),  # the user's groups are scaled too
    ],
)
def test_what_a_schedule_describes(maximum: Any, params: dict[str, float], expected: dict[str, float]) -> None:
    """A scalar describes lr; a list describes halves, or groups as the user gave them."""
    settings = {"params": params, "groups": 2 if "group0-muon" in expected else 1}
    last = run(run_schedule, 1, name="WarmupLR", values=WARMUP | {"warmup_max_lr": maximum}, **settings)[0][-1]
    assert {name: group["lr"] for name, group in last.items()} == pytest.approx(expected)


def own_rates_only() -> dict[str, float]:
    """A section without a rate, and groups that have their own, as scripts for AdamW do."""
    net = Mlp()
    layers = [list(layer.parameters()) for layer in net.layers]
    given = [{"params": layers[0], "lr": 1e-3}, {"params": [p for layer in layers[1:] for p in layer], "lr": 1e-4}]
    schedule = {"type": "WarmupLR", "params": WARMUP | {"warmup_max_lr": 1e-3}}
    config = ds_config(optimizer={"type": "Muon", "params": {"weight_decay": 0.1}}, scheduler=schedule)
    engine = make_engine(net, config, model_parameters=given)
    train_engine(engine, 4)
    rates = rates_of(engine)
    engine.destroy()
    return rates


def test_without_a_rate_in_the_section_a_scalar_describes_the_first_groups() -> None:
    expected = {"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 1e-4, "group1-adam": 1e-4}
    assert run(own_rates_only, 1)[0] == pytest.approx(expected)


def one_lambda_per_group() -> list[dict[str, Any]]:
    factors = [lambda step: 0.5, lambda step: 0.25]
    schedule = lambda optimizer: torch_schedules.LambdaLR(optimizer, factors)  # noqa: E731
    return history(engine_of({"lr": 0.02, "adam_lr": 0.002}, groups=2, schedule=schedule, stage=3), 2)


def test_a_script_for_adamw_has_one_lambda_per_group_of_its_own() -> None:
    last = run(one_lambda_per_group, 1)[0][-1]
    got = {name: group["lr"] for name, group in last.items()}
    expected = {"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 0.005, "group1-adam": 0.0005}
    assert got == pytest.approx(expected)


# ---- momentum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "low", "high"), [("OneCycle", 0.8, 0.9), ("OneCycleLR", 0.85, 0.95)])
def test_cycles_move_the_first_of_adamws_betas_only(name: str, low: float, high: float) -> None:
    """Of DeepSpeed's and torch's schedules."""
    values = DEEPSPEED[name] | {"cycle_min_mom": low, "cycle_max_mom": high} if name in DEEPSPEED else None
    record = run(run_schedule, 1, name=name, values=values, stage=2)[0]
    firsts, seconds = zip(*(groups["adam"]["betas"] for groups in record), strict=True)
    assert (min(firsts), max(firsts)) == pytest.approx((low, high), abs=0.02) and len(set(firsts)) > 4
    if name == "OneCycleLR":
        assert set(seconds) == {0.95}
    assert {groups["muon"]["momentum"] for groups in record} == {0.95}


def driven_out(rate: float) -> tuple[list[str], str]:
    """What is said at start, and the error of training on."""
    values = DEEPSPEED["OneCycle"] | {"cycle_first_step_size": 2, "decay_step_size": 1, "decay_mom_rate": rate}
    with logged() as said:
        engine = engine_of(schedule={"type": "OneCycle", "params": values})
        try:
            train_engine(engine, 10)
        except ValueError as error:
            return said, f"{type(error).__name__}: {error}"
        finally:
            engine.destroy()
    return said, ""


def test_a_momentum_that_leaves_its_range_ends_training_on_all_ranks() -> None:
    for _, error in run(driven_out, 2, rate=0.05):
        assert re.match(r"MuonConfigError: parameter group adam: betas: .*1\.035, 0.99; .*decay_mom_rate", error), error
    said, error = run(driven_out, 1, rate=0.05)[0]
    assert any("decay_mom_rate 0.05 raises" in text and "within 3 steps" in text for text in said)
    assert any("cycles the first of AdamW's betas between 0.8 and 0.9" in text for text in said)
    said, error = run(driven_out, 1, rate=0.0)[0]
    assert not error and not any("decay_mom_rate" in text for text in said)


# ---- resume -------------------------------------------------------------------------------------------------


def resumed(folder: str, kind: str, stage: int) -> tuple[list[Any], list[Any]]:
    """Rates of steps 6 to 11 of one run, and of one that was saved and loaded before step 6."""
    schedule: Any = SCHEDULES[kind]
    engine = engine_of(schedule=schedule, stage=stage)
    train_engine(engine, 6)
    engine.save_checkpoint(folder)
    straight = history(engine, 6)
    engine = engine_of(schedule=schedule, stage=stage)
    engine.load_checkpoint(folder)
    return straight, history(engine, 6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["WarmupDecayLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
def test_resume_is_exact(kind: str, stage: int, tmp_path: Any) -> None:
    for straight, again in run(resumed, 2, folder=str(tmp_path), kind=kind, stage=stage):
        assert straight == again


def resumed_with_other_rates(folder: str, stage: int) -> dict[str, float]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    engine = engine_of(schedule=schedule, stage=stage)
    train_engine(engine, 4)
    engine.save_checkpoint(folder)
    engine = engine_of({"muon_lr": 0.04, "adam_lr": 3e-4}, schedule=schedule, stage=stage)
    engine.load_checkpoint(folder)
    train_engine(engine, 1, first_step=4)
    rates = rates_of(engine)
    engine.destroy()
    return rates


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_schedule_has_the_configs_rates(stage: int, tmp_path: Any) -> None:
    rates = run(resumed_with_other_rates, 2, folder=str(tmp_path), stage=stage)[0]
    assert rates == pytest.approx({"muon": 0.04, "adam": 3e-4})


def state_kept_alive(folder: str, stage: int) -> int:
    """How many tensors of the state from before a load are still there without being the state."""
    import gc
    import weakref

    engine = engine_of(schedule=SCHEDULES["WarmupCosineLR"], stage=stage)
    train_engine(engine, 1)
    engine.save_checkpoint(folder)
    before = [weakref.ref(t) for s in engine.basic_optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    engine.load_checkpoint(folder)
    gc.collect()
    now = {id(t) for s in engine.basic_optimizer.state.values() for t in s.values()}
    alive = sum(reference() is not None and id(reference()) not in now for reference in before)
    engine.destroy()
    return alive


@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_keeps_no_state_alive(stage: int, tmp_path: Any) -> None:
    assert run(state_kept_alive, 1, folder=str(tmp_path), stage=stage) == [0]


# ---- without DeepSpeed --------------------------------------------------------------------------------------


def test_given_groups_of_a_plain_optimizer(recwarn: pytest.WarningsRecorder) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **RATES)
    schedule = torch_schedules.CosineAnnealingLR(optimizer.given, 10, eta_min=1e-3)
    for _ in range(5):
        net(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    muon, adam = optimizer.param_groups
    assert muon["lr"] == pytest.approx(1e-3 + (0.02 - 1e-3) * (1 + math.cos(math.pi / 2)) / 2)
    assert muon["lr"] == pytest.approx(RATIO * adam["lr"], rel=1e-6)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
    assert optimizer.given.param_groups[0]["params"] == list(net.parameters())


def test_a_schedule_goes_on_from_a_step_count() -> None:
    """As torch's: the optimizer's state holds initial_lr, and a schedule starts at last_epoch."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    first, second = (MuonWithAuxAdam(net.parameters(), model=net, **RATES) for _ in range(2))
    schedule = torch_schedules.CosineAnnealingLR(first.given, 10, eta_min=1e-3)
    for _ in range(3):
        first.step()
        schedule.step()
    second.load_state_dict(first.state_dict())
    again = torch_schedules.CosineAnnealingLR(second.given, 10, eta_min=1e-3, last_epoch=3)
    for optimizer, own in ((first, schedule), (second, again)):
        optimizer.step()
        own.step()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (first, second)]
    assert again.base_lrs == pytest.approx([0.02]) and rates[1][0] == pytest.approx(RATIO * rates[1][1], rel=1e-6)


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_torchs_cycles_can_be_made_on_the_optimizer(kind: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3)
    schedule, betas = TORCH[kind](optimizer), []
    for _ in range(6):
        net(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
        betas.append(optimizer.param_groups[1]["betas"])
    assert len(set(betas)) > 4 and {beta2 for _, beta2 in betas} == {0.95}
    assert optimizer.param_groups[0]["momentum"] == 0.95
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]


# ---- schedulers of the script ------------------------------------------------------------------------------


@pytest.mark.sample(12)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_keep_the_ratio(name: str, stage: int) -> None:
    """DeepSpeed's, torch's and Hugging Face's."""
    record = run(run_schedule, 1, name=name, stage=stage)[0]
    rates = [(groups["muon"]["lr"], groups["adam"]["lr"]) for groups in record]
    assert all(muon == pytest.approx(RATIO * adam, rel=1e-6) for muon, adam in rates)
    assert len({muon for muon, _ in rates}) > 1


def by_metric(kind: str) -> list[dict[str, float]]:
    """A schedule that is stepped by the user with a metric that does not improve."""
    engine = engine_of(stage=2)
    given = engine.basic_optimizer.given
    if kind == "ReduceLROnPlateau":
        schedule = torch_schedules.ReduceLROnPlateau(given, factor=0.2, patience=1, min_lr=1e-4)
    else:
        from transformers.optimization import GreedyLR

        schedule = GreedyLR(given, factor=0.2, patience=1, min_lr=1e-4, max_lr=0.05)
    record = []
    for _ in range(STEPS):
        schedule.step(1.0)
        record.append(rates_of(engine))
    engine.destroy()
    return record


@pytest.mark.parametrize("kind", ["ReduceLROnPlateau", "GreedyLR"])
def test_schedules_by_metric_keep_the_ratio(kind: str) -> None:
    if kind == "GreedyLR" and not hasattr(import_module("transformers.optimization"), kind):
        pytest.skip("this transformers has no GreedyLR")
    record = run(by_metric, 1, kind=kind)[0]
    for rates in record:
        assert rates["muon"] == pytest.approx(RATIO * rates["adam"], rel=1e-6)
    assert record[-1]["muon"] == pytest.approx(1e-4) and record[0]["muon"] == pytest.approx(0.02)
