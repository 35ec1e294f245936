# SPDX-License-Identifier: Apache-2.0
"""Live output of a run, through DeepSpeed's monitor (TensorBoard, CSV, W&B, Comet) and timers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as comm
from deepspeed.accelerator import get_accelerator

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.step_stats import HALVES, StepStats
from deepspeed.muon.zero.wrappers.grad_norm import skips_in_silence

#: Phases of a step, as DeepSpeed's timers name them with ``wall_clock_breakdown``.
TIMERS = tuple(f"muon_{phase}" for phase in ("prepare", "exchange", "newton_schulz", "apply", "adamw"))
#: Prefix of the names of all recorded values.
PREFIX = "Train/Muon/"


def set_up_monitor(engine: Any, monitored: bool) -> None:
    """Set up what the config asks for. The ranks record together: ``monitored`` says whether rank 0's monitor is on."""
    optimizer = engine.basic_optimizer
    engine._muon_monitored = monitored and optimizer.config.monitor_interval > 0
    if engine.wall_clock_breakdown():
        optimizer.phase = _timed(engine.timers)


def take_step(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedEngine._take_model_step``, with a record in every ``monitor_interval``-th step.

    A skipped step that DeepSpeed does not log is reported. No temporaries stay on an accelerator.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, MuonWithAuxAdam):
        return original(engine, *args, **kwargs)
    optimizer.begin_step()
    interval, skipped = optimizer.config.monitor_interval, engine.skipped_steps
    if engine._muon_monitored and (engine.global_steps + 1) % interval == 0:
        _record(lambda: original(engine, *args, **kwargs), engine, optimizer)
    else:
        original(engine, *args, **kwargs)
    optimizer.release_scratch()
    if engine.skipped_steps > skipped and skips_in_silence(engine.optimizer):
        optimizer.report_skip()
    if engine.wall_clock_breakdown():  # on all ranks, as this also resets the timers; rank 0 prints
        engine.timers.log(names=TIMERS)


def _record(step: Callable[[], None], engine: Any, optimizer: MuonWithAuxAdam) -> None:
    stats, outer = StepStats(get_accelerator().synchronize), optimizer.phase

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with outer(name), stats.phase(name):
            yield

    groups = reversed(optimizer.param_groups)  # the first of each half counts, with the rate that this step uses
    rates = {f"lr_{'muon' if group['use_muon'] else 'adamw'}": float(group["lr"]) for group in groups}
    optimizer.phase, optimizer.step_stats = phase, stats
    started = time.perf_counter()
    try:
        step()
    finally:
        optimizer.phase, optimizer.step_stats = outer, None
    get_accelerator().synchronize()
    seconds = time.perf_counter() - started
    values = _update_rms(stats) | rates | {"step_ms": 1e3 * seconds}
    values |= {f"{name}_ms": 1e3 * spent for name, spent in stats.seconds.items()}
    if (norm := engine.get_global_grad_norm()) is not None:
        values["grad_norm"] = float(norm)
    if optimizer.qk_clip:
        values |= {f"max_logit/{layer}": logit for layer, logit in optimizer.qk_clip.largest.items()}
    if engine.global_rank == 0:
        engine.monitor.write_events([(PREFIX + name, value, engine.global_samples) for name, value in values.items()])


def _update_rms(stats: StepStats) -> dict[str, float]:
    """Root mean square of each half's update per unit of learning rate, over all ranks; a collective."""
    sums = stats.sums().to(get_accelerator().current_device_name())
    if comm.is_initialized():
        comm.all_reduce(sums)
    pairs = zip(HALVES, sums.tolist(), strict=True)
    return {f"update_rms_{half}": math.sqrt(squares / count) for half, (squares, count) in pairs if count}


def _timed(timers: Any) -> Callable[[str], Any]:
    @contextmanager
    def phase(name: str) -> Iterator[None]:
        timer = timers(f"muon_{name}")
        timer.start()
        yield
        timer.stop()

    return phase
