# SPDX-License-Identifier: Apache-2.0
"""An engine's step: recorded or timed if the config asks for it, with a line in the log if it is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.muon.monitor import Phase
from deepspeed.muon.zero.threads import limited_threads

#: Phases of a step, as DeepSpeed's timers name them with ``wall_clock_breakdown``.
TIMERS = tuple(f"muon_{phase}" for phase in ("prepare", "exchange", "newton_schulz", "apply", "adamw"))


def take_step(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedEngine._take_model_step``: call the original, and measure the step if the config asks for it.

    Every ``monitor_interval``-th step is recorded in DeepSpeed's monitor. ``wall_clock_breakdown`` times the phases of
    each step. A skipped step is logged unless DeepSpeed logs it.
    """
    optimizer = engine.basic_optimizer

    def step() -> None:
        with limited_threads(optimizer.context.threads):
            optimizer.begin_step()
            original(engine, *args, **kwargs)

    recorder, skipped = engine._muon_recorder, engine.skipped_steps
    phase = _timed(engine.timers) if engine.wall_clock_breakdown() else nullcontext
    if recorder is not None and recorder.is_due(engine):
        recorder.record(step, engine, phase)
    else:
        with optimizer.observed(phase):
            step()
    optimizer.workspace.release()
    if engine.skipped_steps > skipped and not _logs_skipped_steps(engine.optimizer):
        optimizer.report_skip()
    if engine.wall_clock_breakdown():  # on all ranks, as this also resets the timers; rank 0 prints
        engine.timers.log(names=TIMERS)


def _logs_skipped_steps(wrapper: Any) -> bool:
    """Return whether the loss scaler of a ZeRO wrapper logs skipped steps itself, as some versions of DeepSpeed do."""
    scaler = getattr(wrapper, "loss_scaler", None)  # if it logs, its code names log_dist or logger
    return scaler is not None and bool({"log_dist", "logger"} & set(type(scaler).update_scale.__code__.co_names))


def _timed(timers: Any) -> Phase:
    """Return a function ``phase``: ``with phase("apply"):`` times its block with DeepSpeed's timer ``muon_apply``."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        timer = timers(f"muon_{name}")
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    return phase
