# SPDX-License-Identifier: Apache-2.0
"""`ds_muon init --check`: the rates that it names are those of an engine's steps; it fails where an engine would."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.accelerate_yamls import DS_CONFIG
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.training import ds_config

Command = Callable[..., Any]
OPTIMIZER = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}}
WARM = {"warmup_max_lr": 0.01, "warmup_num_steps": 3}
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 4}
#: Type, parameters, and the steps of which the rates are named.
SCHEDULES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("WarmupLR", WARM, [0, 4]),
    ("WarmupLR", WARM | {"warmup_min_lr": 1e-4, "warmup_type": "linear", "warmup_num_steps": 1}, [0, 3]),
    ("WarmupLR", {"warmup_num_steps": 5}, [0, 6]),
    ("WarmupLR", WARM | {"warmup_max_lr": [0.01, 0.05], "warmup_min_lr": [0.0, 0.1]}, [0, 4]),
    ("WarmupDecayLR", WARM | {"total_num_steps": 9}, [0, 4, 8]),
    ("WarmupDecayLR", WARM | {"total_num_steps": 9, "warmup_num_steps": 20}, [0, 8]),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}, [0, 4, 8]),
    ("OneCycle", CYCLE, [0, 3, 7]),
    ("OneCycle", CYCLE | {"decay_step_size": 1, "decay_lr_rate": 0.5, "cycle_second_step_size": 2}, [0, 3, 5]),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4}, [0, 4]),
    ("OneCycleLR", {"max_lr": 0.02, "total_steps": 9}, [0, 2, 8]),
    ("CyclicLR", {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 3, "step_size_down": 4}, [0, 3, 7]),
    ("CosineAnnealingLR", {"T_max": 6, "eta_min": 1e-4}, [0, 6]),
    ("CosineAnnealingWarmRestarts", {"T_0": 4}, [0, 4]),
    ("LinearLR", {"total_iters": 5}, [0, 5]),
    ("PolynomialLR", {"total_iters": 5, "power": 2.0}, [0, 5]),
    ("StepLR", {"step_size": 3, "gamma": 0.5}, [0, 3]),
    ("ExponentialLR", {"gamma": 0.9}, [0]),
]
#: Keys that are a number of steps -> how many more there are in a long run.
LONG = dict.fromkeys(("total_num_steps", "total_steps", "T_max", "total_iters", "step_size", "step_size_up"), 10**7)


@pytest.fixture
def check(init_with: Command) -> Command:
    """Calls `ds_muon init --check`."""
    return partial(init_with, "--check")


def engine_rates(cases: list[tuple[dict[str, Any], int]]) -> list[list[tuple[float, float]]]:
    """The rates of Muon and AdamW before each step of an engine with each schedule."""
    import deepspeed

    found = []
    for scheduler, steps in cases:
        net = MODELS["mlp"]()
        config = ds_config(stage=0, optimizer=OPTIMIZER, scheduler=scheduler)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
        rates = []
        for step in range(steps):
            groups = {group["use_muon"]: float(group["lr"]) for group in engine.basic_optimizer.param_groups}
            rates.append((groups[True], groups[False]))
            train_engine(engine, 1, first_step=step)
        found.append(rates)
        engine.destroy()
    return found


def test_the_rates_are_those_of_an_engine(check: Command) -> None:
    cases, named = [], []
    for name, params, steps in SCHEDULES:
        scheduler = {"type": name, "params": params}
        rates = check("--json", optimizer=OPTIMIZER, scheduler=scheduler, zero_optimization={"stage": 2}).facts["rates"]
        assert [rate["step"] for rate in rates] == steps, (name, rates)
        named.append({rate["step"]: (rate["muon"], rate["adamw"]) for rate in rates})
        cases.append((scheduler, steps[-1] + 1))
    for case, expected, rates in zip(SCHEDULES, named, run(engine_rates, 1, cases=cases)[0], strict=True):
        for step, pair in expected.items():
            assert pair == pytest.approx(rates[step], rel=1e-9, abs=1e-12), (case, step)


@pytest.mark.parametrize("index", range(len(SCHEDULES)))
def test_a_long_schedule_is_not_stepped_through(index: int, check: Command) -> None:
    name, params, _ = SCHEDULES[index]
    params = {key: value + LONG.get(key, 0) for key, value in params.items() if not isinstance(value, (str, list))}
    found = check("--json", optimizer=OPTIMIZER, scheduler={"type": name, "params": params})
    assert found.facts["ok"]


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
#: Sections that start a run, and what is said about it.
STARTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"optimizer": OPTIMIZER},
        [
            "a run with Muon would start\n",
            "constant, unless the script passes a scheduler",
            " 0.02 ",
            " 0.003 ",
        ],
    ),
    ({"optimizer": ADAMW}, ["a run with Muon would start, once ds_muon init has converted the file\n", "0.001"]),
    (
        {"optimizer": OPTIMIZER, "scheduler": {"type": "WarmupLR", "params": WARM}},
        ["WarmupLR does not know how long the run is", "a scheduler that the script passes to deepspeed.initialize"],
    ),
    (
        {
            "optimizer": {"type": "Muon", "params": {"lr": "auto"}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
            },
        },
        [
            "\n11    0.001 ",
            "auto in optimizer.params: the rates are those of lr 0.001\n",
            "the rates are those of warmup_max_lr 0.001, warmup_num_steps 10, total_num_steps 100\n",
        ],
    ),
]


@pytest.mark.parametrize(("config", "words"), STARTS)
def test_a_run_that_would_start(config: dict[str, Any], words: list[str], check: Command) -> None:
    found = check(zero_optimization={"stage": 2}, **config)
    assert found.status == 0 and len(found.out.splitlines()) <= 15, found
    assert [text for text in words if text not in found.out] == []
    assert "taken as DeepSpeed's defaults" not in found.out


def scheduled(name: Any, **params: Any) -> dict[str, Any]:
    return {"optimizer": OPTIMIZER, "scheduler": {"type": name, "params": params}}


#: Sections with which an engine would not start, and the error.
FAILS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "Muon", "params": {"lr": -1}}}, "optimizer.params.lr: got -1"),
    ({"optimizer": ADAMW | {"params": {"betaas": [0, 0]}}}, "unknown key, did you mean betas?"),
    ({"optimizer": {"type": "Lamb"}}, 'expected "AdamW" or "Adam"'),
    (scheduled("WarmupLRR"), "scheduler: WarmupLRR fails: DeepSpeed does not recognize"),
    (scheduled("WarmupDecayLR"), "WarmupDecayLR fails: "),
    (scheduled("WarmupLR", warmup_num_steps=0), "warmup_num_steps must be a positive integer"),
    (scheduled("WarmupLR", warmup_max_lr=[1e-3] * 3), "scheduler.params.warmup_max_lr: got 3 values"),
    (scheduled("OneCycle", **CYCLE | {"cycle_max_lr": "auto"}), "OneCycle fails: unsupported operand"),
    (scheduled("StepLR", step_size=0), "StepLR fails: "),
    (scheduled("OneCycle", **CYCLE, cycle_max_mom=1.5), "scheduler.params.cycle_max_mom: got 1.5"),
]


@pytest.mark.parametrize(("config", "words"), FAILS)
def test_a_run_that_would_not_start(config: dict[str, Any], words: str, check: Command) -> None:
    found = check(zero_optimization={"stage": 2}, **config)
    assert found.status == 1 and "a run with Muon would not start:\n" in found.out and words in found.out, found
    facts = json.loads(check("--json", zero_optimization={"stage": 2}, **config).out)
    assert (facts["ok"], facts["rates"]) == (False, []) and any(words in error for error in facts["errors"])


def refusals(configs: list[dict[str, Any]]) -> list[str]:
    """What an engine raises for each config, when it starts or in two steps; empty where it trains."""
    import deepspeed

    found = []
    for config in configs:
        net = MODELS["mlp"]()
        try:
            engine = deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=net.parameters())[0]
            train_engine(engine, 2)
            found.append("")
        except Exception as error:
            found.append(str(error))
    return found


def test_an_engine_raises_what_the_check_says(check: Command) -> None:
    """Also for schedules of which a value is odd, with which it starts."""
    odd = [scheduled("WarmupLR", warmup_type="auto"), scheduled("OneCycle", **CYCLE, decay_step_size=1)]
    # DeepSpeed takes the TypeError of a schedule's step for a schedule of another kind, and steps it by the batch size.
    cases = [
        config for config, words in FAILS if config["optimizer"]["type"] == "Muon" and "operand" not in words
    ] + odd
    for config, raised in zip(cases, run(refusals, 1, configs=cases)[0], strict=True):
        errors = json.loads(check("--json", zero_optimization={"stage": 2}, **config).out)["errors"]
        assert bool(errors) is bool(raised), (config, errors, raised)
        assert all(error.rpartition(" fails: ")[2] in raised for error in errors), (
            errors,
            raised,
        )


YAMLS = {
    "accelerate's": ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n", True),
    "inside": ("tool:\n  zero_optimization: {stage: 2}\n  optimizer: {type: Muon, params: {lr: 1e-3}}\n", False),
    "names one": ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: other.json}\n", True),
    "names Muon's": ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: muon.json}\n", False),
}


@pytest.mark.parametrize("name", YAMLS)
def test_files_that_contain_a_ds_config_or_name_one(name: str, check: Command, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(DS_CONFIG)
    (tmp_path / "muon.json").write_text(DS_CONFIG.replace("AdamW", "Muon"))
    text, is_converted = YAMLS[name]
    facts = check("--json", text=text, file="some.yaml").facts
    assert (facts["converted"], len(facts["rates"])) == (is_converted, 1)


def test_wrong_calls(check: Command, ds_muon: Command, tmp_path: Path) -> None:
    check(text="- a\n", file="list.yaml").must_refuse("init", "expected a JSON object, got list")
    check(text="a: 1\n", file="some.yaml").must_refuse("init", "not a ds_config")
    assert check(optimizer={"type": "Muon", "params": None}).status == 0
    found = check(optimizer=OPTIMIZER, scheduler={"type": "WarmupLR", "params": [1]})
    assert found.status == 1 and "scheduler.params: expected an object, got [1]" in found.out
    check("--out", "x.json", optimizer=OPTIMIZER).must_refuse("init", "--out works only with --config")
    check("--config", "x.json", optimizer=OPTIMIZER).must_refuse("init", "not allowed with argument")
    ds_muon("init").must_refuse("init", "one of the arguments --config --check is required")
