# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedulers: the ratio of the two halves' rates, and what a schedule's numbers describe."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from deepspeed.muon import MuonWithAuxAdam
from distributed import run
from models import Mlp, train_engine
from training import ds_config, make_engine

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


#: Torch's schedules. Those with an absolute number of their own have one here.
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
    """Every name of ``get_scheduler`` that schedules an optimizer by steps."""
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
    """An engine on the MLP; ``groups`` of 2: its first layer has a tenth of the learning rate."""
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
    """Each group's settings before every step."""
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
    """The Muon half's rates; they move, and those of AdamW are in proportion."""
    for groups in record:
        assert groups["muon"]["lr"] == pytest.approx(ratio * groups["adam"]["lr"], rel=1e-6)
    return [groups["muon"]["lr"] for groups in record]


# ---- the ratio ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeeds_schedules_keep_the_ratio(name: str, stage: int) -> None:
    lrs = check_ratio(run(run_deepspeed, 1, name=name, values=DEEPSPEED[name], stage=stage)[0])
    assert len(set(lrs)) > 4 and min(lrs[1:]) > 0


@pytest.mark.parametrize("name", TORCH)
def test_torchs_schedules_keep_the_ratio(name: str) -> None:
    lrs = check_ratio(run(run_client, 1, kind="torch", name=name, stage=2)[0])
    assert len(set(lrs)) > 1


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_schedules_at_other_stages(name: str, stage: int) -> None:
    check_ratio(run(run_client, 2, kind="torch", name=name, stage=stage)[0])


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant", "inverse_sqrt", "cosine_with_min_lr"])
def test_a_name_of_hugging_face_is_known(name: str) -> None:
    assert name in hugging_face()


@pytest.mark.parametrize("name", list(hugging_face()))
def test_hugging_faces_schedules_keep_the_ratio(name: str) -> None:
    lrs = check_ratio(run(run_client, 1, kind="hugging_face", name=name, stage=2)[0])
    assert len(set(lrs)) > 1 or name == "constant"


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
    record = run(by_metric, 1, kind=kind)[0]
    for rates in record:
        assert rates["muon"] == pytest.approx(RATIO * rates["adam"], rel=1e-6)
    assert record[-1]["muon"] == pytest.approx(1e-4) and record[0]["muon"] == pytest.approx(0.02)


# ---- what the numbers describe ------------------------------------------------------------------------------

WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"}


@pytest.mark.parametrize(
    ("params", "muon", "adam"),
    [
        ({"lr": 0.02}, 0.01, 0.01),
        ({"lr": 0.02, "adam_lr": 0.002}, 0.01, 0.001),  # the scalar is lr's: half of 0.02
        ({"muon_lr": 0.02, "adam_lr": 0.002}, 0.01, 0.001),  # without lr it is muon_lr's
        ({"lr": 0.1, "muon_lr": 0.02, "adam_lr": 0.002}, 0.002, 0.0002),
        ({}, 0.01, 0.01 * 3e-4 / 0.02),
    ],
)
def test_a_scalar_describes_lr(params: dict[str, float], muon: float, adam: float) -> None:
    last = run(run_deepspeed, 1, name="WarmupLR", values=WARMUP, params=params)[0][-1]
    assert last["muon"]["lr"] == pytest.approx(muon) and last["adam"]["lr"] == pytest.approx(adam)


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


def warnings_of(params: dict[str, float], values: dict[str, Any]) -> list[str]:
    from deepspeed.muon.logs import logger

    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine_of(params, schedule={"type": "WarmupLR", "params": values}).destroy()
    logger.removeHandler(handler)
    return seen


def test_a_rate_in_the_schedule_alone_is_pointed_out() -> None:
    (text,) = run(warnings_of, 1, params={"weight_decay": 0.1}, values=WARMUP)[0]
    assert "warmup_max_lr of the scheduler describes Muon's rate" in text and "0.015 of it" in text
    assert run(warnings_of, 1, params={"lr": 1e-3}, values=WARMUP) == [[]]
    assert run(warnings_of, 1, params={}, values={"warmup_num_steps": 4}) == [[]]


def test_the_users_groups_are_scaled_too() -> None:
    last = run(run_deepspeed, 1, name="WarmupLR", values=WARMUP, params={"lr": 0.02}, groups=2)[0][-1]
    got = {name: group["lr"] for name, group in last.items()}
    assert got == pytest.approx({"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 0.01, "group1-adam": 0.01})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.02, 3e-4], {"muon": 0.02, "adam": 3e-4}),  # one per half, as with stock's Muon
        ([0.01], {"muon": 0.01, "adam": 1.5e-4}),  # one per group as given
    ],
)
def test_lists(values: list[float], expected: dict[str, float]) -> None:
    settings = WARMUP | {"warmup_max_lr": values}
    last = run(run_deepspeed, 1, name="WarmupLR", values=settings)[0][-1]
    assert {name: group["lr"] for name, group in last.items()} == pytest.approx(expected)


def one_lambda_per_group() -> list[dict[str, Any]]:
    factors = [lambda step: 0.5, lambda step: 0.25]
    schedule = lambda optimizer: torch_schedules.LambdaLR(optimizer, factors)  # noqa: E731
    return history(engine_of({"lr": 0.02, "adam_lr": 0.002}, groups=2, schedule=schedule, stage=3), 2)


def test_a_script_for_adamw_has_one_lambda_per_group_of_its_own() -> None:
    last = run(one_lambda_per_group, 1)[0][-1]
    got = {name: group["lr"] for name, group in last.items()}
    expected = {"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 0.005, "group1-adam": 0.0005}
    assert got == pytest.approx(expected)


def refused(name: str, params: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        engine_of(schedule={"type": name, "params": params})
    return f"{type(error.value).__name__} {error.value}"


def test_a_list_of_another_length_is_refused() -> None:
    text = run(refused, 1, name="WarmupLR", params=WARMUP | {"warmup_max_lr": [0.1, 0.2, 0.3]})[0]
    assert "MuonConfigError scheduler.params.warmup_max_lr: got 3 values" in text and "(muon, adam)" in text


# ---- momentum -----------------------------------------------------------------------------------------------


def check_momentum(record: list[dict[str, Any]], low: float, high: float) -> None:
    values = [groups["muon"]["momentum"] for groups in record]
    assert min(values) == pytest.approx(low, abs=0.02) and max(values) == pytest.approx(high, abs=0.02)
    assert len(set(values)) > 4
    for groups in record:
        assert groups["adam"]["betas"][0] == groups["muon"]["momentum"]


def test_deepspeeds_one_cycle_cycles_momentum_and_betas() -> None:
    values = DEEPSPEED["OneCycle"] | {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    check_momentum(run(run_deepspeed, 1, name="OneCycle", values=values)[0], 0.8, 0.9)


def test_torchs_one_cycle_cycles_momentum_and_betas() -> None:
    record = run(run_client, 1, kind="torch", name="OneCycleLR", stage=2)[0]
    check_momentum(record, 0.85, 0.95)
    assert all(groups["adam"]["betas"][1] == 0.95 for groups in record), "the second rate stays"


def test_a_cycle_of_the_momentum_needs_rates_per_group() -> None:
    params = DEEPSPEED["OneCycle"] | {"cycle_max_lr": [0.02, 3e-4]}
    text = run(refused, 1, name="OneCycle", params=params)[0]
    assert "MuonConfigError scheduler.params.cycle_momentum" in text and "set it to false" in text
    last = run(run_deepspeed, 1, name="OneCycle", values=params | {"cycle_momentum": False})[0][4]
    assert (last["muon"]["lr"], last["adam"]["lr"]) == pytest.approx((0.02, 3e-4))


def test_momentum_stays_where_the_cycle_leaves_it() -> None:
    values = DEEPSPEED["OneCycle"] | {"cycle_momentum": False}
    for groups in run(run_deepspeed, 1, name="OneCycle", values=values)[0]:
        assert (groups["muon"]["momentum"], groups["adam"]["betas"]) == (0.95, (0.9, 0.95))


# ---- resume -------------------------------------------------------------------------------------------------


def resumed(folder: str, kind: str, stage: int) -> tuple[list[Any], list[Any]]:
    """Rates of steps 6 to 11 of one run, and of one that was saved and loaded before step 6."""
    schedule: Any = (
        {"type": "WarmupDecayLR", "params": DEEPSPEED["WarmupDecayLR"]} if kind == "deepspeed" else TORCH[kind]
    )
    engine = engine_of(schedule=schedule, stage=stage)
    train_engine(engine, 6)
    engine.save_checkpoint(folder)
    straight = history(engine, 6)
    engine = engine_of(schedule=schedule, stage=stage)
    engine.load_checkpoint(folder)
    return straight, history(engine, 6)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["deepspeed", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
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
    """How many tensors of the state from before a load are still there."""
    import gc
    import weakref

    engine = engine_of(schedule=DEEPSPEED_COSINE, stage=stage)
    train_engine(engine, 1)
    engine.save_checkpoint(folder)
    before = [weakref.ref(t) for s in engine.basic_optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    engine.load_checkpoint(folder)
    gc.collect()
    alive = sum(reference() is not None for reference in before)
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


def test_a_relative_schedule_needs_no_view() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **RATES)
    torch_schedules.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 1.5e-4])
