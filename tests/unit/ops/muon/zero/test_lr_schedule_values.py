# SPDX-License-Identifier: Apache-2.0
"""What a schedule's numbers describe, cycles of the momentum, resuming, and that rates keep their ratio."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run, run_each
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


def engine_of(params: dict[str, Any] = RATES, lrs: Sequence[float | None] = (), **kwargs: Any) -> Any:
    """Return an engine for the MLP; with ``lrs``, those of groups of its first layer and of the others."""
    net = Mlp()
    schedule = kwargs.pop("schedule", None)
    given: Any = list(net.parameters())
    if lrs:
        parts = (net.layers[0].parameters(), (p for layer in net.layers[1:] for p in layer.parameters()))
        given = [{"params": [*part]} | ({"lr": lr} if lr else {}) for part, lr in zip(parts, lrs, strict=True)]
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


def run_schedule(name: str, values: dict[str, float] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    """Train under one of the schedules; ``values`` are added to those of DeepSpeed's."""
    schedule: Any = SCHEDULES[name] if values is None else {"type": name, "params": DEEPSPEED[name] | values}
    return history(engine_of(schedule=schedule, **kwargs))


# ---- what the numbers describe ------------------------------------------------------------------------------

WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"}
GROUPS = {"group0-muon": 1e-3, "group0-adam": 1e-3, "group1-muon": 0.01, "group1-adam": 0.01}
#: The schedule's maximum, optimizer.params, rates of the user's groups, and the rates that come of it.
DESCRIBED: list[tuple[Any, dict[str, float], tuple[float | None, ...], dict[str, float]]] = [
    (0.01, {"lr": 0.02}, (), {"muon": 0.01, "adam": 0.01}),
    (0.01, {"lr": 0.02, "adam_lr": 0.002}, (), {"muon": 0.01, "adam": 0.001}),  # half of lr's 0.02
    (0.01, {"muon_lr": 0.02, "adam_lr": 0.002}, (), {"muon": 0.01, "adam": 0.001}),  # without lr, of muon_lr's
    (0.01, {"lr": 0.1, "muon_lr": 0.02, "adam_lr": 0.002}, (), {"muon": 0.002, "adam": 0.0002}),
    (0.01, {}, (), {"muon": 0.01, "adam": 0.01 * 3e-4 / 0.02}),
    ([0.02, 3e-4], RATES, (), {"muon": 0.02, "adam": 3e-4}),  # one per half, as with stock's Muon
    ([0.01], RATES, (), {"muon": 0.01, "adam": 1.5e-4}),  # one per group as given
    (0.01, {"lr": 0.02}, (0.002, None), GROUPS),  # the user's groups are scaled too
    (1e-3, {"weight_decay": 0.1}, (1e-3, 1e-4), dict(zip(GROUPS, (1e-3, 1e-3, 1e-4, 1e-4), strict=True))),
]


def last_rates(maximum: Any, params: dict[str, float], lrs: Sequence[float | None]) -> dict[str, float]:
    """The rates after four steps."""
    schedule = {"type": "WarmupLR", "params": WARMUP | {"warmup_max_lr": maximum}}
    last = history(engine_of(params, lrs, schedule=schedule), 4)[-1]
    return {name: group["lr"] for name, group in last.items()}


def test_what_a_schedule_describes() -> None:
    """A scalar describes lr, or without a rate in the section the first group's; a list describes halves, or groups."""
    cases = [{"maximum": maximum, "params": params, "lrs": lrs} for maximum, params, lrs, _ in DESCRIBED]
    for case, (found,), (*_, expected) in zip(cases, run_each(last_rates, 1, cases), DESCRIBED, strict=True):
        assert found == pytest.approx(expected), case


# ---- momentum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "low", "high"), [("OneCycle", 0.8, 0.9), ("OneCycleLR", 0.85, 0.95)])
def test_cycles_move_the_first_of_adamws_betas_only(name: str, low: float, high: float) -> None:
    """Of DeepSpeed's and torch's schedules."""
    values = {"cycle_min_mom": low, "cycle_max_mom": high} if name in DEEPSPEED else None
    record = run(run_schedule, 1, name=name, values=values)[0]
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
    results = run(driven_out, 2, rate=0.05)
    for _, error in results:
        assert re.match(r"MuonConfigError: parameter group adam: betas: .*1\.035, 0.99; .*decay_mom_rate", error), error
    said, _ = results[0]
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 2])
@pytest.mark.parametrize("kind", ["OneCycleLR", "CosineAnnealingLR", "SequentialLR"])
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 2])
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 2])
def test_a_schedule_keeps_no_state_alive(stage: int, tmp_path: Any) -> None:
    assert run(state_kept_alive, 1, folder=str(tmp_path), stage=stage) == [0]


# ---- without DeepSpeed --------------------------------------------------------------------------------------


def by_metric(kind: str, optimizer: Any) -> Any:
    """Return a schedule that the script steps with a metric."""
    if kind == "ReduceLROnPlateau":
        return torch_schedules.ReduceLROnPlateau(optimizer, factor=0.2, patience=1, min_lr=1e-4)
    if not hasattr(import_module("transformers.optimization"), kind):
        pytest.skip(f"this transformers has no {kind}")
    from transformers.optimization import GreedyLR

    return GreedyLR(optimizer, factor=0.2, patience=1, min_lr=1e-4, max_lr=0.05)


BY_METRIC = ["ReduceLROnPlateau", "GreedyLR"]


def groups_of_steps(kind: str, optimizer: Any, net: torch.nn.Module, target: Any) -> list[list[dict[str, Any]]]:
    """The settings of the optimizer's groups after each step of a schedule that is made on ``target``."""
    schedule = by_metric(kind, target) if kind in BY_METRIC else SCHEDULES[kind](target)
    record = []
    for _ in range(STEPS):
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        schedule.step(*([1.0] if kind in BY_METRIC else []))
        record.append([dict(group) for group in optimizer.param_groups])
    return record


@pytest.mark.parametrize("kind", [*TORCH, "cosine_with_min_lr", *BY_METRIC])
def test_a_schedule_of_the_script_does_what_it_does_with_adamw(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """Made on the groups as given, for which AdamW's rate keeps its ratio, or on an optimizer with one rate for all."""
    first, second, third = (torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3))
    adamw = torch.optim.AdamW(first.parameters(), lr=0.02, betas=(0.9, 0.95))
    one = MuonWithAuxAdam(second.parameters(), model=second, lr=0.02, betas=(0.9, 0.95))
    two = MuonWithAuxAdam(third.parameters(), model=third, betas=(0.9, 0.95), **RATES)
    jobs = ((adamw, first, adamw), (one, second, one), (two, third, two.given))
    expected, with_one, with_two = (groups_of_steps(kind, *job) for job in jobs)
    assert len({group["lr"] for (group,) in expected}) > 1
    for (theirs,), *ours in zip(expected, with_one, with_two, strict=True):
        for (muon, adam), ratio in zip(ours, (1.0, RATIO), strict=True):
            assert [muon["lr"], ratio * adam["lr"]] == pytest.approx([theirs["lr"]] * 2)
            assert (muon["momentum"], adam["betas"]) == (0.95, theirs["betas"])
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_schedule_goes_on_from_a_step_count() -> None:
    """As torch's: the optimizer's state holds initial_lr, and a schedule starts at last_epoch."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    first, second = (MuonWithAuxAdam(net.parameters(), model=net, **RATES) for _ in range(2))
    schedule = torch_schedules.CosineAnnealingLR(first.given, 10, eta_min=1e-3)
    for _ in range(3):
        first.step()
        schedule.step()
    assert first.given.param_groups[0]["params"] == list(net.parameters())
    second.load_state_dict(first.state_dict())
    again = torch_schedules.CosineAnnealingLR(second.given, 10, eta_min=1e-3, last_epoch=3)
    for optimizer, own in ((first, schedule), (second, again)):
        optimizer.step()
        own.step()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (first, second)]
    assert again.base_lrs == pytest.approx([0.02]) and rates[1][0] == pytest.approx(RATIO * rates[1][1], rel=1e-6)


# ---- schedulers of the script ------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_schedules_keep_the_ratio(stage: int) -> None:
    """DeepSpeed's, one of torch's, and one of Hugging Face's that reads the optimizer's defaults."""
    names = [*DEEPSPEED, "CosineAnnealingLR", "cosine_with_min_lr"]
    cases = [{"name": name, "stage": stage} for name in names]
    for name, (record,) in zip(names, run_each(run_schedule, 1, cases), strict=True):
        rates = [(groups["muon"]["lr"], groups["adam"]["lr"]) for groups in record]
        assert all(muon == pytest.approx(RATIO * adam, rel=1e-6) for muon, adam in rates), name
        assert len({muon for muon, _ in rates}) > 1, name
