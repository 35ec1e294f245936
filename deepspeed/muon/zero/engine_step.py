# SPDX-License-Identifier: Apache-2.0
"""What replaces an engine's backward and step: check their order, and measure a step if asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.muon.errors import CallOrderError
from deepspeed.muon.monitor import Phase

#: Phases of a step, as DeepSpeed's timers name them with ``wall_clock_breakdown``.
TIMERS = tuple(f"muon_{phase}" for phase in ("prepare", "exchange", "newton_schulz", "apply", "adamw"))


_AWAY = "{} are still offloaded; call engine.reload_states() first"


def record_backward(original: Callable, self: Any) -> None:
    """Replace ``DeepSpeedEngine._backward_prologue``, which every backward calls: record that a backward has run.

    Raise CallOrderError if ``engine.offload_states()`` has moved states that a backward needs.
    """
    # A backward needs neither master weights (hp_params) nor optimizer states, but everything else.
    if moved := [kind for kind in self.muon_adapter.moved_states if kind not in ("hp_params", "optim_states")]:
        raise CallOrderError(f"backward() after offload_states(): {_AWAY.format(', '.join(moved))}")
    self.muon_adapter.has_backward = True
    original(self)


def refuse_early_step(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.step``: raise CallOrderError if no backward has run, or states are still offloaded."""
    adapter = self.muon_adapter
    if adapter.moved_states:
        raise CallOrderError(f"step() after offload_states(): {_AWAY.format(', '.join(adapter.moved_states))}")
    # A script may write param.grad itself instead of calling backward.
    if not adapter.has_backward and all(param.grad is None for param in self.module.parameters()):
        raise CallOrderError(
            "step() without a backward since the last step(): there is no gradient to step with; call "
            "engine.backward(loss) once before each engine.step(), with gradient accumulation too"
        )
    adapter.has_backward = False
    return original(self, *args, **kwargs)


def take_step(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedEngine._take_model_step``: call the original, and measure the step if the config asks for it.

    Before the call, the optimizer's ``begin_step`` runs; after it, the optimizer's scratch memory is released. Every
    ``monitor_interval``-th step is recorded in DeepSpeed's monitor. ``wall_clock_breakdown`` times the phases of each
    step. A skipped step is logged unless DeepSpeed logs it.
    """
    optimizer = engine.basic_optimizer

    def step() -> None:
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
