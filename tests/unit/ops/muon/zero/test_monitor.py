# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it goes on: records by DeepSpeed's monitor, its timers and its communication log."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon import monitor
from deepspeed.muon.exchange.consensus import agree, raise_on_all_ranks
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.monitor import StepStats
from helpers import nvme
from helpers.distributed import run, run_each
from helpers.engine_state import differing
from helpers.models import MODELS, Mlp, train_engine
from helpers.records import monitored, records, sections
from helpers.settings import SETTINGS
from helpers.training import BF16_OPTIMIZER, PARAMS, ds_config, fp32_weights, make_engine
from helpers.ways import Way


def train(
    folder: str, interval: int = 1, steps: int = 3, model: str = "mlp", params: Mapping[str, Any] = {}, **config: Any
) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Weights at first and after every step, and the gradient norms; rank 0 leaves its records in the folder."""
    engine, norms = make_engine(MODELS[model](), monitored(folder, interval, params, **config)), []
    weights = [fp32_weights(engine)]
    for step in range(steps):
        train_engine(engine, 1, first_step=step)
        weights.append(fp32_weights(engine))
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return weights, norms


# ---- records tell what happened -------------------------------------------------------------------------------

#: Sizes, over the elements of all Muon matrices.
SIZES = ["update_rms", "weight_rms", "update_to_weight"]
NAMES = {*SIZES, "matrices_without_gradient", "newton_schulz_seconds"}
LR, DECAY = PARAMS["lr"], 0.1
CASES = [{"stage": 0}, {"stage": 3, "dtype": "bf16"}, BF16_OPTIMIZER, {"stage": 2, "dtype": "fp16", "offload": True}]


def rms(tensors: list[Tensor]) -> float:
    total = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(total / sum(t.numel() for t in tensors))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_tell_what_happened(case: dict[str, Any], tmp_path: Path) -> None:
    """The size of the updates is that of the weights' change without their decay."""
    settings = {"params": {"weight_decay": DECAY}, "interval": 2, "steps": 4, **case}
    weights, norms = run(train, 2, folder=str(tmp_path), **settings)[0]
    found = records(tmp_path)
    assert set(found) == NAMES | ({"grad_norm"} if case["stage"] else set())  # at stage 0 DeepSpeed keeps none
    assert [samples for samples, _ in found["update_rms"]] == [2 * 48, 4 * 48]
    for index, step in enumerate((1, 3)):
        value = {name: rows[index][1] for name, rows in found.items()}
        before = [weight for weight in weights[step].values() if weight.ndim == 2]
        after = [weight for weight in weights[step + 1].values() if weight.ndim == 2]
        change = rms([new - (1 - LR * DECAY) * old for new, old in zip(after, before, strict=True)])
        assert value["weight_rms"] == pytest.approx(rms(before), rel=1e-5)
        assert value["update_rms"] == pytest.approx(change / LR, rel=1e-3)
        assert value["update_to_weight"] == pytest.approx(change / rms(before), rel=1e-3)
        assert value["matrices_without_gradient"] == 0 and value["newton_schulz_seconds"] > 0
        assert "grad_norm" not in value or value["grad_norm"] == pytest.approx(float(norms[step]))


# ---- the same however the model is sharded --------------------------------------------------------------------


#: Row of the table of settings, optimizer.params beside the row's, and how its first case is changed.
SHARDED = [
    ("split by the config", {}, {"stage": 2}),
    ("pipeline", {"muon_exclude": r"5\.weight"}, {"model": "untied"}),  # the output head
    ("AutoTP", {}, {"stage": 0}),
    ("experts", {}, {"stage": 0}),
    ("NVMe", {}, {"pipelined": False}),
    pytest.param("split by the config", {}, {"stage": 3}, marks=pytest.mark.full),
    *(pytest.param(name, {}, {"stage": 2}, marks=pytest.mark.full) for name in ("AutoTP", "experts")),
]


def write(name: str, params: dict[str, Any], case: dict[str, Any], folder: str, is_whole: bool) -> None:
    """Leave the records of a few steps, of the sharded model or of all of it on one rank."""
    setting = SETTINGS[name]
    case = setting.case(0) | case | sections(folder, 1, setting.params | params) | {"swap": folder}
    way = Way() if is_whole else setting.way
    config = {key: case[key] for key in ("optimizer", "csv_monitor")}
    with (
        nullcontext(make_engine(setting.way.whole(case), ds_config(0, **config)))
        if is_whole
        else way.engine(case) as engine
    ):
        for number in range(3):
            way.take(engine, number)


@pytest.mark.parametrize(("name", "params", "case"), SHARDED, ids=str)
def test_the_same_values_whatever_the_sharding(
    name: str, params: dict[str, Any], case: dict[str, Any], tmp_path: Path
) -> None:
    job = {"name": name, "params": params, "case": case}
    nvme.run(write, 1, **job, folder=str(tmp_path / "whole"), is_whole=True)
    nvme.run(write, SETTINGS[name].case(0)["world"], **job, folder=str(tmp_path / "parts"), is_whole=False)
    whole, parts = (records(tmp_path / folder) for folder in ("whole", "parts"))
    for key in [*SIZES, "matrices_without_gradient"]:
        values = [value for _, value in whole[key]]
        assert [value for _, value in parts[key]] == pytest.approx(values, rel=1e-3), key


# ---- where there is no record ---------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 2])
def test_a_record_changes_no_weight(stage: int, tmp_path: Path) -> None:
    """An interval of 0 writes nothing."""
    ends = []
    for interval in (1, 0):
        ends.append(run(train, 2, interval=interval, folder=str(tmp_path / str(interval)), stage=stage)[0][0][-1])
        assert bool(records(tmp_path / str(interval))) == bool(interval)
    assert differing(*ends) == []


def uneven_monitor(folder: str) -> None:
    settings = monitored(folder, 1, stage=2)
    if dist.get_rank() == 1:
        del settings["csv_monitor"]
    engine = make_engine(Mlp(), settings)
    train_engine(engine, 2)
    engine.destroy()


def test_rank_zero_decides_whether_there_are_records_and_nobody_waits(tmp_path: Path) -> None:
    run(uneven_monitor, 2, timeout=60, folder=str(tmp_path))
    assert len(records(tmp_path)["update_rms"]) == 2


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of_steps(folder: str, interval: int, has_monitor: bool) -> list[list[str]]:
    """The operators of torch in each of three steps."""
    settings = monitored(folder, interval, stage=2)
    if not has_monitor:
        del settings["csv_monitor"]
    engine, found = make_engine(Mlp(), settings), []
    for step in range(3):
        inputs, targets = engine.module.batch(step)
        engine.backward(engine(inputs[:24], targets[:24]))
        with Operators() as operators:
            engine.step()
        found.append(operators.names)
    engine.destroy()
    return found


def test_a_step_without_a_record_does_nothing_more(tmp_path: Path) -> None:
    cases = [
        {"folder": str(tmp_path), "interval": interval, "has_monitor": has_monitor}
        for interval, has_monitor in ((3, True), (0, True), (3, False))
    ]
    third, never, off = run_each(operators_of_steps, 2, cases)
    assert never == off
    for some, none in zip(third, off, strict=True):
        assert some[:2] == none[:2] and len(some[2]) > len(none[2])


# ---- one rank's measurements ------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> StepStats:
    """Of a job with one process."""
    monkeypatch.setattr(monitor, "summed", lambda values: values)
    return StepStats(lambda: None)


def test_what_has_no_value_is_left_out(alone: StepStats) -> None:
    """A quotient over zero weights, sizes of updates in a step that was skipped."""
    counts = {"matrices_without_gradient": 0.0, "newton_schulz_seconds": 0.0}
    assert alone.of_all_ranks() == counts
    alone.before_apply([(torch.zeros(12), torch.ones(12), 2.0)], lr=0.1, copies=1)
    assert alone.of_all_ranks() == counts | {"update_rms": pytest.approx(2.0), "weight_rms": 0.0}
    alone.before_apply([(torch.ones(4), torch.ones(4), 2.0)], lr=0.1, copies=1)
    found = alone.of_all_ranks()
    assert found["weight_rms"] == pytest.approx(0.5) and found["update_to_weight"] == pytest.approx(0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_summed_by_chunks(dtype: torch.dtype, alone: StepStats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_set, "CPU_CHUNK", 100)
    generator = torch.Generator().manual_seed(0)
    weights, update = (torch.randn(512, generator=generator).to(dtype) for _ in range(2))
    alone.before_apply([(weights, update, 0.5)], lr=0.1, copies=1)
    found = alone.of_all_ranks()
    assert found["weight_rms"] == pytest.approx(rms([weights]), rel=1e-5)
    assert found["update_rms"] == pytest.approx(0.5 * rms([update]), rel=1e-5)


# ---- timers -----------------------------------------------------------------------------------------------------


def time_it(stage: int) -> tuple[list[list[str]], list[int]]:
    """The timers of each line of log that has some of ours, and how many values each of ours keeps."""
    engine = make_engine(Mlp(), ds_config(stage=stage, wall_clock_breakdown=True))
    with mock.patch.object(engine.timers, "log", wraps=engine.timers.log) as log:
        train_engine(engine, 2)
    engine.destroy()
    timers = engine.timers.timers
    logged = [
        [name for name in (call.kwargs.get("names") or call.args[0]) if name in timers] for call in log.call_args_list
    ]
    kept = [len(timer.event_timers) for name, timer in timers.items() if name.startswith("muon_")]
    return [names for names in logged if any(name.startswith("muon_") for name in names)], kept


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full)])
def test_deepspeeds_timers_show_the_phases(stage: int) -> None:
    timers = ["muon_prepare", "muon_exchange", "muon_newton_schulz", "muon_apply", "muon_adamw"]
    assert run(time_it, 2, stage=stage) == [([timers] * 2, [0] * len(timers))] * 2, "no rank collects them"


# ---- other logs of DeepSpeed's ----------------------------------------------------------------------------------


EVERYTHING = {"enabled": True, "verbose": True, "prof_all": True, "debug": True}
SECTIONS = [
    {"enabled": False},
    EVERYTHING,
    {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "all_gather_object", "broadcast_object_list"]},
]


def train_save_load(stage: int, folder: str, section: dict[str, Any], **config: Any) -> tuple[list[str], list[str]]:
    """Everything in which the ranks communicate: what a load does not restore, and the operations that are logged."""
    from deepspeed.comm.comm import comms_logger

    try:
        engine = make_engine(Mlp(), ds_config(stage=stage, comms_logger=section, **config))
        train_engine(engine, 1)
        assert engine.save_checkpoint(folder, tag="saved")
        train_engine(engine, 1, first_step=1)
        expected = fp32_weights(engine)
        assert engine.load_checkpoint(folder)[0] is not None
        train_engine(engine, 1, first_step=1)
        found = differing(fp32_weights(engine), expected), list(comms_logger.comms_dict)
        engine.destroy()
    finally:
        comms_logger.enabled = False
        comms_logger.reset_data()
    return found


@pytest.mark.parametrize(
    ("stage", "section"),
    [
        (3, SECTIONS[1]),
        (1, SECTIONS[2]),
        pytest.param(0, SECTIONS[0], marks=pytest.mark.full),
        *(pytest.param(stage, EVERYTHING, marks=pytest.mark.full) for stage in (0, 1, 2)),
    ],
)
def test_the_communication_log_names_the_exchange_and_leaves_saves_alone(
    stage: int, section: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSpeed enables it by the section's mere presence."""
    config = {"wall_clock_breakdown": True, **sections(str(tmp_path), 1, {"normuon": True})}
    for differ, logged in run(train_save_load, 2, stage=stage, folder=str(tmp_path), section=section, **config):
        assert differ == []
        names_it = any(name.startswith("muon_exchange") for name in logged)
        assert stage == 0 or names_it == (section == EVERYTHING)


def exit_on_rank_1(way: str) -> str:
    """The error of this rank where rank 1 exits in work that the ranks do together."""

    def act() -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise SystemExit(0)
        return {}

    with pytest.raises(RuntimeError) as error:
        raise_on_all_ranks(act, RuntimeError) if way == "raise" else agree(act, lambda facts: {})
    return str(error.value)


def test_a_rank_that_exits_is_an_error_on_all() -> None:
    """As DeepSpeed's communication log does at an operation that it does not know."""
    for texts in run_each(exit_on_rank_1, 2, [{"way": "raise"}, {"way": "agree"}]):
        assert all("rank 1: SystemExit: 0" in text for text in texts)
