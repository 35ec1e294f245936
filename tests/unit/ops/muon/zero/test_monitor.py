# SPDX-License-Identifier: Apache-2.0
"""What a run writes while it goes on: DeepSpeed's monitor, its timers and its communication log."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.attention import untrained_logits
from helpers.distributed import run
from helpers.models import MODELS, Mlp, train_engine
from helpers.records import monitored, of_parameters, records
from helpers.rules import RULES
from helpers.training import BF16_OPTIMIZER, PARAMS, ds_config, fp32_weights, make_engine

NAMES = {
    "grad_norm",
    "matrices_without_gradient",
    "update_rms_muon",
    "update_rms_adamw",
    "lr_muon",
    "lr_adamw",
    "step_ms",
}
PHASES = {"prepare_ms", "exchange_ms", "newton_schulz_ms", "apply_ms", "adamw_ms"}
MATRICES = [f"layers.{i}.weight" for i in range(5)]


def write_logits(folder: str) -> None:
    """Rank 0 leaves the records of two steps with QK-clip in the folder."""
    engine = make_engine(MODELS["gpt"](), monitored(folder, 1, {"qk_clip": {}}))
    train_engine(engine, 2)
    engine.destroy()


def write_records(folder: str, interval: int = 2, steps: int = 4, **config: Any) -> dict[str, Any]:
    """What the weights did in every step, and the gradient norms; rank 0 leaves its records in the folder."""
    engine = make_engine(Mlp(), monitored(folder, interval, **config))
    norms, changes, weights = [], [], []
    for step in range(steps):
        before = fp32_weights(engine)
        train_engine(engine, 1, first_step=step)
        after = fp32_weights(engine)
        changes.append({name: after[name] - before[name] for name in after})
        weights.append(before)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return {"norms": norms, "changes": changes, "weights": weights}


def rms(tensors: list[torch.Tensor]) -> float:
    total = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(total / sum(t.numel() for t in tensors))


def test_records_tell_the_largest_logits(tmp_path: Path) -> None:
    """Of all heads and ranks, by layer."""
    run(write_logits, 2, folder=str(tmp_path))
    found = records(tmp_path)
    for layer, heads in enumerate(untrained_logits()):
        (_, first), (_, second) = found[f"max_logit_blocks.{layer}"]
        assert first == pytest.approx(max(heads), rel=1e-5) != second


CASES = [{"stage": 0}, {"stage": 1}, {"stage": 2, "offload": True}, {"stage": 3}, {"stage": 3, "dtype": "bf16"}]
CASES += [BF16_OPTIMIZER, {"stage": 2, "dtype": "fp16"}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_tell_what_happened(case: dict[str, Any], tmp_path: Path) -> None:
    """Without decay the size of the updates is that of the weights' change, of each matrix too."""
    result = run(write_records, 2, folder=str(tmp_path), **case)[0]
    found = records(tmp_path)
    missing = {"grad_norm"} if case["stage"] == 0 else set()  # DeepSpeed keeps none there
    assert set(found) - set(of_parameters(found)) == (NAMES | PHASES | {"record_ms"}) - missing
    assert {name for name in found if name.startswith("update_to")} == {f"update_to_weight_{name}" for name in MATRICES}
    assert [samples for samples, _ in found["update_rms_muon"]] == [2 * 48, 4 * 48]
    for index, step in enumerate((1, 3)):
        value = {name: found[name][index][1] for name in (NAMES | PHASES) - missing}
        change = result["changes"][step].values()
        assert value["update_rms_muon"] == pytest.approx(rms([d / 0.02 for d in change if d.ndim == 2]), rel=1e-3)
        assert value["update_rms_adamw"] == pytest.approx(rms([d / 1e-3 for d in change if d.ndim == 1]), rel=1e-3)
        assert (value["lr_muon"], value["lr_adamw"]) == (0.02, 1e-3)
        assert missing or value["grad_norm"] == pytest.approx(float(result["norms"][step]))
        for name in MATRICES:
            ratio = rms([result["changes"][step][name]]) / rms([result["weights"][step][name]])
            assert found[f"update_to_weight_{name}"][index][1] == pytest.approx(ratio, rel=1e-3), name
        assert value["step_ms"] > sum(value[name] for name in PHASES) > 0


def test_an_interval_of_zero_writes_nothing(tmp_path: Path) -> None:
    run(write_records, 2, folder=str(tmp_path), interval=0)
    assert records(tmp_path) == {}


def train_weights(folder: str, interval: int, stage: int, rule: str) -> dict[str, torch.Tensor]:
    engine = make_engine(Mlp(), monitored(folder, interval, RULES[rule][0] if rule else {}, stage=stage))
    train_engine(engine, 3)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.sample(4)
@pytest.mark.parametrize("rule", ["", *RULES])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_record_changes_no_weight(stage: int, rule: str, tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "stage": stage, "rule": rule}
    with_records, without = (run(train_weights, 2, interval=n, **job)[0] for n in (1, 0))
    assert records(tmp_path)
    assert all(torch.equal(with_records[name], without[name]) for name in without)


def uneven_monitor(folder: str) -> int:
    """Rank 1's file has no monitor: rank 0 decides, and nobody waits for anybody."""
    import torch.distributed as dist

    settings = monitored(folder, 1, stage=2)
    if dist.get_rank() == 1:
        del settings["csv_monitor"]
    engine = make_engine(Mlp(), settings)
    losses = train_engine(engine, 2)
    engine.destroy()
    return len(losses)


def test_rank_zero_decides_whether_there_are_records(tmp_path: Path) -> None:
    assert run(uneven_monitor, 2, timeout=60, folder=str(tmp_path)) == [2, 2]
    assert len(records(tmp_path)["step_ms"]) == 2


def time_it(stage: int) -> dict[str, Any]:
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage, wall_clock_breakdown=True))
    logged: list[list[str]] = []
    log = engine.timers.log

    def spy(names: Any, *args: Any, **kwargs: Any) -> None:
        logged.append([name for name in names if name in engine.timers.timers])
        log(names, *args, **kwargs)

    engine.timers.log = spy
    train_engine(engine, 2)
    engine.destroy()
    kept = [len(timer.event_timers) for name, timer in engine.timers.timers.items() if name.startswith("muon_")]
    return {"logged": [names for names in logged if any(name.startswith("muon_") for name in names)], "kept": kept}


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeeds_timers_show_the_phases(stage: int) -> None:
    timers = ["muon_prepare", "muon_exchange", "muon_newton_schulz", "muon_apply", "muon_adamw"]
    for rank in run(time_it, 2, stage=stage):
        assert rank["logged"] == [timers, timers]
        assert rank["kept"] == [0] * len(timers), "no rank collects them"


@pytest.mark.parametrize("kind", ["timers", "stats"])
def test_a_phase_that_raises_ends(kind: str) -> None:
    """The error of a phase is not hidden by a timer that runs on, in the next step or around it."""
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    from deepspeed.muon.step_stats import StepStats
    from deepspeed.muon.zero.monitor import _timed

    timers, stats = SynchronizedWallClockTimer(), StepStats(lambda: None)
    phase = _timed(timers) if kind == "timers" else stats.phase
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), phase("apply"):
            raise ZeroDivisionError
    assert kind == "timers" or stats.seconds["apply"] > 0
    assert kind == "stats" or not timers("muon_apply").started_


def log_communication() -> dict[str, Any]:
    from deepspeed.comm import comm

    section = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    engine = make_engine(Mlp(), ds_config(stage=3, comms_logger=section))
    train_engine(engine, 2)
    found = {op: list(sizes) for op, sizes in comm.comms_logger.comms_dict.items()}
    engine.destroy()
    comm.comms_logger.enabled = False
    return found


def test_deepspeeds_communication_log_names_the_exchange() -> None:
    found = run(log_communication, 2, fresh=True)[0]
    assert len(found["muon_exchange"]) >= 1, found


def test_tensorboard_gets_the_same_records(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    run(write_tensorboard, 2, section=section)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {f"Train/Muon/{name}" for name in NAMES | PHASES} <= set(events.Tags()["scalars"])


def write_tensorboard(section: dict[str, Any]) -> None:
    optimizer = {"type": "Muon", "params": PARAMS | {"monitor_interval": 1}}
    engine = make_engine(Mlp(), ds_config(optimizer=optimizer, tensorboard=section))
    train_engine(engine, 2)
    if engine.monitor.tb_monitor:  # rank 0
        engine.monitor.tb_monitor.summary_writer.flush()
    engine.destroy()
