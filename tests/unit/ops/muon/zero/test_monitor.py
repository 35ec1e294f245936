# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it goes on: records by DeepSpeed's monitor, its timers and its communication log."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.monitor import step_stats, write_records
from deepspeed.muon.monitor.step_stats import SIZES, Sample, StepStats, values_of
from deepspeed.muon.zero import engine_step
from deepspeed.muon.zero.consensus import agree, raise_on_all_ranks
from helpers import nvme
from helpers.attention import untrained_logits
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.models import MODELS, Mlp, fused_parts, train_engine
from helpers.oracles import SCALES, newton_schulz_fp64, route, train_oracle
from helpers.records import monitored, of_parameters, records, sections
from helpers.rules import RULES
from helpers.settings import SETTINGS
from helpers.training import BF16_OPTIMIZER, ORACLE, ds_config, fp32_weights, make_engine
from helpers.ways import Way

CAUTIOUS = RULES["cautious"]


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

PHASES = {"prepare_ms", "exchange_ms", "newton_schulz_ms", "apply_ms", "adamw_ms"}
OTHERS = {"matrices_without_gradient", "update_rms_muon", "update_rms_adamw", "lr_muon", "lr_adamw", "step_ms"}
MATRICES = [f"layers.{i}.weight" for i in range(5)]
CASES = [{"stage": 0}, {"stage": 3, "dtype": "bf16"}, BF16_OPTIMIZER, {"stage": 2, "dtype": "fp16", "offload": True}]


def rms(tensors: list[Tensor]) -> float:
    total = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(total / sum(t.numel() for t in tensors))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_tell_what_happened(case: dict[str, Any], tmp_path: Path) -> None:
    """Without decay the size of the updates is that of the weights' change, of each matrix too."""
    weights, norms = run(train, 2, folder=str(tmp_path), interval=2, steps=4, **case)[0]
    found = records(tmp_path)
    names = PHASES | OTHERS | ({"grad_norm"} if case["stage"] else set())  # at stage 0 DeepSpeed keeps none
    assert set(found) - set(of_parameters(found)) == names | {"record_ms"}
    assert {name for name in found if name.startswith("update_to")} == {f"update_to_weight_{name}" for name in MATRICES}
    assert [samples for samples, _ in found["update_rms_muon"]] == [2 * 48, 4 * 48]
    for index, step in enumerate((1, 3)):
        value = {name: found[name][index][1] for name in names}
        change = {name: weights[step + 1][name] - weights[step][name] for name in weights[step]}
        for half, ndim, lr in (("muon", 2, 0.02), ("adamw", 1, 1e-3)):
            assert value[f"update_rms_{half}"] == pytest.approx(
                rms([d / lr for d in change.values() if d.ndim == ndim]), rel=1e-3
            )
            assert value[f"lr_{half}"] == lr
        assert "grad_norm" not in value or value["grad_norm"] == pytest.approx(float(norms[step]))
        for name in MATRICES:
            ratio = rms([change[name]]) / rms([weights[step][name]])
            assert found[f"update_to_weight_{name}"][index][1] == pytest.approx(ratio, rel=1e-3), name
        assert value["step_ms"] > sum(value[name] for name in PHASES) > 0


def test_records_tell_the_largest_logits(tmp_path: Path) -> None:
    """Of all heads and ranks, by layer."""
    run(train, 2, folder=str(tmp_path), model="gpt", params={"qk_clip": {}})
    for layer, heads in enumerate(untrained_logits()):
        (_, first), (_, second), _ = records(tmp_path)[f"max_logit_blocks.{layer}"]
        assert first == pytest.approx(max(heads), rel=1e-5) != second


@cache
def expected(steps: int) -> list[dict[str, float]]:
    """By step, what records of a TinyGpt with cautious decay should say of every matrix, from whole matrices.

    Of a parameter that is several, the sampled one is the first.
    """
    net, weights = MODELS["gpt"](), []
    found: list[tuple[Tensor, Tensor]] = []

    def orthogonalize(matrix: Tensor) -> Tensor:
        found.append((matrix.clone(), newton_schulz_fp64(matrix)))
        return found[-1][1]

    def observe(model: nn.Module, batch: tuple[Tensor, ...]) -> Callable[[], None]:
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return lambda: None

    config = replace(ORACLE, **CAUTIOUS[1], orthogonalize=orthogonalize, observe=observe)
    routing, parts = route(net, ("tokens", "positions", "lm_head")), fused_parts(net)
    train_oracle(net, net.batch, steps, routing, config, parts=parts)
    by_step, results = [], iter(found)
    for before in weights:
        step: dict[str, float] = {}
        for name in (name for name, half in routing.items() if half == "muon"):
            pieces = [before[name].reshape(-1)[part] for part in parts[name]] if name in parts else [before[name]]
            taken = [next(results) for _ in pieces]
            updates = [SCALES[config.scale](*out.shape) * out for _, out in taken]
            step[f"update_to_weight_{name}"] = config.lr * rms(updates) / rms(pieces)
            acts = torch.cat([(w * u >= 0).flatten() for w, u in zip(pieces, updates, strict=True)])
            step[f"cautious_decay_{name}"] = float(acts.double().mean())
            singular, of_result = (torch.linalg.svdvals(x.double()).square() for x in taken[0])
            step[f"effective_rank_{name}"] = float(singular.sum() ** 2 / singular.square().sum())
            step[f"orthogonality_error_{name}"] = rms([of_result - 1])
        by_step.append(step)
    return by_step


@pytest.mark.parametrize(
    ("world", "case"),
    [(1, {"stage": 0}), (2, {"stage": 0}), (2, {"stage": 1}), (3, {"stage": 2, "offload": True}), (2, {"stage": 3})],
    ids=str,
)
def test_records_equal_the_oracle(world: int, case: dict[str, Any], tmp_path: Path) -> None:
    run(train, world, folder=str(tmp_path), steps=5, model="gpt", params=CAUTIOUS[0], **case)
    found, steps = of_parameters(records(tmp_path)), expected(5)
    always = [name for name in steps[0] if name.startswith(("update", "cautious"))]
    assert [len(found[name]) for name in always] == [5] * len(always)
    assert len(found.keys() - set(always)) == 2 * 5, "another parameter in every step"
    for name, rows in found.items():
        for samples, value in rows:
            tolerance = {"abs": 0.004} if name.startswith("cautious") else {"rel": 2e-3}  # signs of tiny elements
            assert value == pytest.approx(steps[samples // 48 - 1][name], **tolerance), (name, samples)


# ---- the same however the model is sharded --------------------------------------------------------------------


#: Row of the table of settings, optimizer.params beside the row's, and how its first case is changed.
SHARDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(("split by the config", CAUTIOUS[0], case) for case in ({"stage": 2, "world": 3}, {"stage": 3})),
    ("pipeline", {"qk_clip": {}, "muon_exclude": r"5\.weight"}, {"model": "untied"}),  # the output head
    ("AutoTP", {}, {"stage": 2}),
    ("experts", {}, {"stage": 2}),
    ("NVMe", CAUTIOUS[0], {"pipelined": False}),
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
    whole, parts = (of_parameters(records(tmp_path / folder)) for folder in ("whole", "parts"))
    assert len(whole) >= 6 and parts.keys() == whole.keys()
    for key, values in whole.items():
        if name == "experts" and len(values) < 3:
            continue  # each rank measures another expert
        bound = {"abs": 0.004} if key.startswith("cautious") else {"rel": 1e-3, "abs": 1e-6}  # signs of tiny elements
        assert [value for _, value in parts[key]] == pytest.approx([value for _, value in values], **bound), key


# ---- where there is no record ---------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", ["", *RULES])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_record_changes_no_weight(stage: int, rule: str, tmp_path: Path) -> None:
    """An interval of 0 writes nothing."""
    ends = []
    for interval in (1, 0):
        job = {"folder": str(tmp_path / str(interval)), "stage": stage, "params": RULES[rule][0] if rule else {}}
        ends.append(run(train, 2, interval=interval, **job)[0][0][-1])
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
    assert len(records(tmp_path)["step_ms"]) == 2


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
    settings = monitored(folder, interval, CAUTIOUS[0], stage=2)
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
    third, never, off = (
        run(operators_of_steps, 2, folder=str(tmp_path), interval=interval, has_monitor=has_monitor)
        for interval, has_monitor in ((3, True), (0, True), (3, False))
    )
    assert never == off
    for some, none in zip(third, off, strict=True):
        assert some[:2] == none[:2] and len(some[2]) > len(none[2])


# ---- the turn of the matrices, and values that do not exist -----------------------------------------------------


def recorder_of(monkeypatch: pytest.MonkeyPatch, matrices: dict[str, list[str]]) -> Any:
    monkeypatch.setattr(write_records, "union", list)
    blocks = [
        SimpleNamespace(shard=SimpleNamespace(spec=SimpleNamespace(name=parameter)), name=name)
        for parameter, names in matrices.items()
        for name in names
    ]
    plans = [SimpleNamespace(of_all=SimpleNamespace(items=blocks, counts=[1] * len(blocks)))]
    return write_records.Recorder(SimpleNamespace(plans=plans, qk_clip=None), lambda: None)


@pytest.mark.parametrize("count", [1, 6, 225])
def test_every_matrix_has_its_turn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder_of(monkeypatch, {}).sample(3) == Sample()
    found = recorder_of(monkeypatch, {f"p{i}": [f"p{i}", f"p{i}[9]", f"p{i}[18]"] for i in range(count)})
    turns = [found.sample(turn) for turn in range(3 * count)]
    assert {sample.label for sample in turns[:count]} == {f"p{i}" for i in range(count)}
    assert len(set(turns)) == 3 * count


def test_what_has_no_value_is_left_out() -> None:
    """A quotient over zero weights, a matrix without a gradient, a step that was skipped."""
    stats, group = StepStats(lambda: None, Sample("a", "a")), {"lr": 0.1, "weight_decay": 0.0}
    names = [*SIZES.values(), "update_to_weight/a", "cautious_decay/a", "orthogonality_error/a", "effective_rank/a"]
    assert values_of(names, stats.sums(names)) == {}
    stats.before_newton_schulz(("b", "a"), torch.zeros(2, 3, 4))
    stats.after_newton_schulz(("b", "a"), torch.zeros(2, 3, 4))
    stats.before_apply([("a", torch.zeros(12), torch.ones(12), 2.0)], group, cautious=True)
    assert values_of(names, stats.sums(names)) == {"update_rms_muon": pytest.approx(2.0)}
    stats.before_apply([("a", torch.ones(12), torch.ones(12), 2.0)], group | {"weight_decay": 0.1}, cautious=True)
    found = values_of(names, stats.sums(names))
    assert found["cautious_decay/a"] == 1 and found["update_to_weight/a"] == pytest.approx(0.2 * math.sqrt(2))


# ---- phases -----------------------------------------------------------------------------------------------------


def test_time_to_measure_is_in_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(step_stats.time, "perf_counter", lambda: clock[0])
    stats = StepStats(lambda: None)
    with stats.phase("step"):
        for _ in range(2):
            with stats.phase("apply"):
                clock[0] += 1
                with stats.phase("record"):
                    clock[0] += 10
                clock[0] += 2
        clock[0] += 4
    assert stats.seconds == {"step": 10, "apply": 6, "record": 20}


@pytest.mark.parametrize("kind", ["timers", "stats"])
def test_a_phase_that_raises_ends(kind: str) -> None:
    """The error of a phase is not hidden by a timer that runs on, in the next step or around it."""
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers, stats = SynchronizedWallClockTimer(), StepStats(lambda: None)
    phase = engine_step._timed(timers) if kind == "timers" else stats.phase
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), phase("apply"):
            raise ZeroDivisionError
    assert kind == "timers" or stats.seconds["apply"] > 0
    assert kind == "stats" or not timers("muon_apply").started_


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


@pytest.mark.parametrize("stage", [0, 3])
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
        (0, SECTIONS[0]),
        (3, SECTIONS[1]),
        (1, SECTIONS[2]),
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


@pytest.mark.parametrize("way", ["raise", "agree"])
def test_a_rank_that_exits_is_an_error_on_all(way: str) -> None:
    """As DeepSpeed's communication log does at an operation that it does not know."""
    assert all("rank 1: SystemExit: 0" in text for text in run(exit_on_rank_1, 2, way=way))
