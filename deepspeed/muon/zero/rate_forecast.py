# SPDX-License-Identifier: Apache-2.0
"""The learning rates that a ds_config gives a run at the steps that matter, computed without an engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError, SettingsError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.scheduler_section import check_schedule

#: Attribute of a schedule that counts steps -> (step to report minus the attribute's value, what that step is).
MILESTONES = {
    "warmup_num_steps": (1, "the first after the warm-up"),
    "total_num_steps": (-1, "the last of total_num_steps"),
    "first_step_size": (0, "the peak of the cycle"),
    "total_size": (0, "the end of the cycle"),
    "total_steps": (-1, "the last of total_steps"),
    "total_iters": (0, "total_iters is over"),
    "step_size": (0, "one step_size is over"),
    "T_max": (0, "T_max is over"),
    "T_0": (0, "T_0 is over"),
}
#: Attributes that tell how long the whole run is.
TOTALS = ("total_num_steps", "total_steps")
#: Parameters of schedules that the Trainer and accelerate fill in -> what is taken for "auto"; ``None``: ``lr``.
PLACEHOLDERS = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 10, "total_num_steps": 100}


class RateAt(NamedTuple):
    """The learning rates of one optimizer step, counted from 0, and what the step is."""

    step: int
    when: str
    muon: float
    adamw: float


class RateForecast(NamedTuple):
    """The rates of some steps of a run, in order, and sentences for the user about what they depend on."""

    rates: list[RateAt]
    notes: list[str]


def forecast_rates(config: MuonConfig, section: Any) -> RateForecast:
    """Return the learning rates of a run whose model has one parameter group, for Muon and AdamW.

    ``config``: the settings in ``optimizer.params``. ``section``: the ds_config's section ``scheduler``, or ``None``.

    Raises:
        SettingsError: DeepSpeed cannot build the schedule, or it fails in the first steps.
        MuonConfigError: deepspeed-muon refuses a value of the schedule.
    """
    linear = nn.Linear(2, 2)
    linear.weight.use_muon = True  # type: ignore[attr-defined]
    chosen = {key: getattr(config, key) for key in ("lr", "muon_lr", "adam_lr") if getattr(config, key) is not None}
    optimizer = MuonWithAuxAdam(linear.parameters(), model=linear, **chosen)
    name = section.get("type") if isinstance(section, Mapping) else None
    if not name:
        why = "constant, unless the script passes a scheduler, as Hugging Face's Trainer does"
        return RateForecast([RateAt(0, why, *_rates(optimizer))], [])
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        raise SettingsError(f"scheduler.params: expected an object, got {params!r}")
    params, notes = _filled(params, optimizer.defaults["lr"])
    lr_schedules.logger.disabled = True  # it would warn that rates are read before the first step
    try:
        scheduler = _built(optimizer, name, params)
        rates = [RateAt(0, "the first", *_rates(optimizer))]
        with _without_warnings():
            scheduler.step()  # some schedules fail only now
        for step, when in _milestones(scheduler):
            _advance(scheduler, step)
            rates.append(RateAt(step, when, *_rates(optimizer)))
    except MuonConfigError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"scheduler: {name} fails: {error}") from None
    finally:
        lr_schedules.logger.disabled = False
    if not any(hasattr(scheduler, total) for total in TOTALS):
        notes.append(f"{name} does not know how long the run is, so the rate of the run's last step is unknown")
    notes.append("a scheduler that the script passes to deepspeed.initialize replaces this one")
    return RateForecast(rates, notes)


def _filled(params: Mapping[str, Any], lr: float) -> tuple[dict[str, Any], list[str]]:
    """Return ``scheduler.params`` with placeholders for each "auto" that tools fill in, and notes on these.

    ``lr``: the optimizer's learning rate.
    """
    autos = [key for key in PLACEHOLDERS if params.get(key) == "auto"]
    filled = {key: lr if PLACEHOLDERS[key] is None else PLACEHOLDERS[key] for key in autos}
    taken = ", ".join(f"{key} {value:g}" for key, value in filled.items())
    return {**params, **filled}, [f"auto in scheduler.params: the rates are those of {taken}"] if taken else []


def _built(optimizer: MuonWithAuxAdam, name: str, params: dict[str, Any]) -> Any:
    """Return the scheduler that an engine with this ``optimizer`` would build for ``scheduler.type`` ``name``."""
    found = SimpleNamespace(scheduler_params=params)
    engine: Any = SimpleNamespace(
        basic_optimizer=optimizer,
        client_lr_scheduler=None,
        global_rank=0,
        scheduler_name=lambda: name,
        scheduler_params=lambda: found.scheduler_params,
        _config=found,
    )
    check_schedule(engine, optimizer)
    return DeepSpeedEngine._scheduler_from_config(engine, optimizer)


def _milestones(scheduler: Any) -> Iterator[tuple[int, str]]:
    """Yield (step, what it is) in order for the steps after the first that ``scheduler`` describes."""
    found = {}
    for key, (offset, when) in MILESTONES.items():
        if isinstance(count := getattr(scheduler, key, None), (int, float)):
            found[int(count) + offset] = when
    if phases := getattr(scheduler, "_schedule_phases", None):  # torch's OneCycleLR
        found[round(phases[0]["end_step"])] = "the peak of the cycle"
    elif hasattr(scheduler, "step_ratio") and not hasattr(scheduler, "first_step_size"):  # torch's CyclicLR
        found[round(scheduler.total_size * scheduler.step_ratio)] = "the peak of the cycle"
    last = min((getattr(scheduler, total) for total in TOTALS if hasattr(scheduler, total)), default=math.inf)
    yield from sorted((step, when) for step, when in found.items() if 0 < step < last)


def _advance(scheduler: Any, step: int) -> None:
    """Set the learning rates of optimizer step number ``step``, which follows as many steps of the scheduler."""
    if type(scheduler).__module__ == lr_schedules.__name__:
        scheduler.step(step - 1)
        return
    with _without_warnings():
        if hasattr(scheduler, "T_0"):
            scheduler.step(step)
            return
        scheduler.last_epoch = step
        rates = getattr(scheduler, "_get_closed_form_lr", scheduler.get_lr)()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide torch's warnings that a scheduler moves although its optimizer makes no steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rates(optimizer: MuonWithAuxAdam) -> tuple[float, float]:
    """Return the current learning rates of Muon and of AdamW."""
    muon, adamw = sorted(optimizer.param_groups, key=lambda group: not group["use_muon"])
    return float(muon["lr"]), float(adamw["lr"])
