# SPDX-License-Identifier: Apache-2.0
"""The section ``scheduler`` of a ds_config: what it sets, and how to build its scheduler for groups with unequal rates.

A learning rate in a DeepSpeed schedule, such as ``warmup_max_lr``, replaces ``optimizer.params.lr`` or, if that is not
set, ``muon_lr``. The rates of all parameter groups are multiplied by the same factor, so that their ratios stay. In
place of one number the config may give a list, with one value for each group that the user passed, or for each of the
groups (Muon's and AdamW's) into which the optimizer has split these.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.muon.config.schema import DEFAULT_ADAM_LR, DEFAULT_MUON_LR, MuonConfig
from deepspeed.muon.errors import MuonConfigError, logger
from deepspeed.muon.optimizer import MuonWithAuxAdam


class Keys(NamedTuple):
    """Names of a schedule's parameters whose values are learning rates or momenta.

    Args:
        rates: parameters that are learning rates. The last of them replaces the optimizer's learning rate.
        momenta: parameters for the lowest and the highest momentum; empty if the schedule does not cycle the momentum.
        has_rate_per_group: whether DeepSpeed, not torch, implements the schedule. Then this package replaces a number
            in ``rates`` with a list of one learning rate for each parameter group.
    """

    rates: tuple[str, ...]
    momenta: tuple[str, ...] = ()
    has_rate_per_group: bool = True


#: Type of a schedule -> its :class:`Keys`. All other schedules multiply the optimizer's learning rate.
SCHEDULES = {
    "LRRangeTest": Keys(("lr_range_test_min_lr",)),
    "OneCycle": Keys(("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")),
    "WarmupLR": Keys(("warmup_min_lr", "warmup_max_lr")),
    "WarmupDecayLR": Keys(("warmup_min_lr", "warmup_max_lr")),
    "CyclicLR": Keys(("base_lr", "max_lr"), ("base_momentum", "max_momentum"), has_rate_per_group=False),
    "OneCycleLR": Keys(("max_lr",), ("base_momentum", "max_momentum"), has_rate_per_group=False),
}


def _rates_per_group(name: str) -> tuple[str, ...]:
    """Return the parameters of the schedule ``name`` that DeepSpeed accepts as a list of one rate for each group."""
    keys = SCHEDULES.get(name)
    return keys.rates if keys and keys.has_rate_per_group else ()


# ---- read without building a schedule ---------------------------------------------------------------------------


class Schedule(NamedTuple):
    """What the section ``scheduler`` of a ds_config sets, with the schedule's own defaults filled in.

    Attributes:
        rate_key: the parameter that sets the learning rate, such as ``"warmup_max_lr"``; empty if there is none.
        rate: the value of that parameter; ``None`` if there is none.
        momenta: (lowest, highest momentum) if the schedule cycles the momentum, otherwise ``None``.
        sets_cycle_momentum: whether the section contains the key ``cycle_momentum``, so that ``momenta`` is not only a
            default.
    """

    rate_key: str = ""
    rate: Any = None
    momenta: tuple[Any, Any] | None = None
    sets_cycle_momentum: bool = False


def read_schedule(section: Any) -> Schedule:
    """Return what the section ``scheduler`` of a ds_config sets; ``section`` is ``None`` if there is none."""
    name = str(section.get("type") or "") if isinstance(section, Mapping) else ""
    params = section.get("params") if name else None
    values = _defaults(name) | dict(params if isinstance(params, Mapping) else {})
    keys = SCHEDULES.get(name, Keys(("",)))
    low, high = (values.get(key) for key in keys.momenta or ("", ""))
    momenta = (low, high) if keys.momenta and values.get("cycle_momentum") is not False else None
    rate = values.get(keys.rates[-1])  # None: the optimizer's rate
    return Schedule("" if rate is None else keys.rates[-1], rate, momenta, "cycle_momentum" in (params or ()))


def momentum_note(schedule: Schedule) -> str:
    """Return a sentence for the user on the momentum that the schedule cycles; empty if it cycles none."""
    if schedule.momenta is None:
        return ""
    low, high = schedule.momenta
    return (
        f"scheduler.params.cycle_momentum cycles the first of AdamW's betas between {low} and {high}; Muon's momentum "
        "does not change; to keep the beta constant, too, set cycle_momentum to false"
    )


def rate_warning(schedule: Schedule, config: MuonConfig) -> str:
    """Return a warning if the schedule replaces a different learning rate in ``optimizer.params``; otherwise ``""``."""
    # As in `MuonConfig.reference_lr`, which is the rate that a schedule replaces.
    rates = {"lr": config.lr, "muon_lr": config.muon_group()["lr"], "adam_lr": config.adam_group()["lr"]}
    key, lr = next(((key, lr) for key, lr in rates.items() if lr), ("", 0.0))
    try:
        if not config.sets_learning_rate or not lr or float(schedule.rate) == lr:
            return ""
    except (TypeError, ValueError):  # a list, "auto", or no rate
        return ""
    return (
        f"scheduler.params.{schedule.rate_key} = {schedule.rate} overrides optimizer.params.{key} = {lr}; change "
        f"{schedule.rate_key} to change the learning rate, and write the same value for both"
    )


def _defaults(name: str) -> dict[str, Any]:
    """Return {parameter: default value} of the schedule ``name``; empty if ``name`` is not in :data:`SCHEDULES`."""
    from deepspeed.runtime import lr_schedules

    if name not in SCHEDULES:
        return {}
    cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    described = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in described if each.default is not each.empty}


# ---- building a scheduler ---------------------------------------------------------------------------------------


def scheduler_from_config(original: Callable, engine: Any, optimizer: Any) -> Any:
    """Replace ``DeepSpeedEngine._scheduler_from_config``: keep the ratios of the parameter groups' learning rates.

    For a schedule of DeepSpeed, a learning rate in the config becomes a list with one rate for each group.

    Raises:
        MuonConfigError: the length of a list in the config does not fit; see :func:`_schedule_target`.
    """
    ours, name, params = engine.basic_optimizer, engine.scheduler_name(), engine.scheduler_params()
    values, reference = dict(params or {}), ours.defaults["lr"]
    target = _schedule_target(ours, name, values)
    ratios = [group["lr"] / reference if reference else 1.0 for group in target.param_groups]
    for key in _rates_per_group(name):
        value = values.get(key, _defaults(name).get(key))  # the default may be the groups' own rate
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = [value * ratio for ratio in ratios]
    engine._config.scheduler_params = values  # where DeepSpeed looks them up
    try:
        return original(engine, target)
    finally:
        engine._config.scheduler_params = params


def configure_scheduler(original: Callable, engine: Any) -> None:
    """Replace ``DeepSpeedEngine._configure_lr_scheduler`` for scripts that pass a function ``optimizer -> scheduler``.

    The function gets ``optimizer.given``, which has the parameter groups that the user passed. The optimizer itself has
    split them into groups for Muon and for AdamW.
    """
    ours, client = engine.basic_optimizer, engine.client_lr_scheduler
    if callable(client):  # an absolute rate, such as eta_min, would make Muon's and AdamW's rates equal
        engine.client_lr_scheduler = lambda _: client(ours.given)
    original(engine)
    engine.client_lr_scheduler = client


def apply_schedule(engine: Any) -> None:
    """Set the parameter groups' learning rates to those of the step that the engine's scheduler has reached.

    Call it after a load that did not set them: a scheduler that loads its state does not set learning rates, so the
    next step would use those of the schedule's start.
    """
    scheduler = engine.lr_scheduler
    if getattr(scheduler, "last_batch_iteration", -1) >= 0:  # DeepSpeed's
        rates = scheduler.get_lr()
    else:  # torch's; DeepSpeed's at its start, which has set its rates
        rates = getattr(scheduler, "_last_lr", ())
    if rates and hasattr(scheduler, "optimizer"):
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate


def check_schedule(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Check the config's schedule before ZeRO allocates memory, and log warnings about doubtful values.

    Raises:
        MuonConfigError: a list of learning rates has the wrong length, or a momentum is outside [0, 1).
    """
    name, params = engine.scheduler_name(), engine.scheduler_params() or {}
    if engine.client_lr_scheduler is not None or not _rates_per_group(name):
        return
    _schedule_target(optimizer, name, params)
    numbers = [key for key in _rates_per_group(name) if isinstance(params.get(key), (int, float)) and params[key]]
    if numbers and not optimizer.sets_learning_rate and engine.global_rank == 0:
        logger.warning(
            f"deepspeed-muon: {', '.join(numbers)} in scheduler.params sets Muon's learning rate, because "
            f"optimizer.params has no lr; AdamW's rate is {DEFAULT_ADAM_LR / DEFAULT_MUON_LR:.3g} times Muon's. To "
            "give both the same rate, set lr in optimizer.params"
        )
    if name == "OneCycle" and params.get("cycle_momentum", True):
        _check_cycle(params, engine.global_rank == 0)


def _check_cycle(params: dict[str, Any], is_logging_rank: bool) -> None:
    """Raise MuonConfigError if OneCycle's momentum is outside [0, 1); warn if ``decay_mom_rate`` will raise it to 1.

    ``params``: the schedule's parameters in the config.
    """
    numbers = _defaults("OneCycle") | params
    for key in ("cycle_min_mom", "cycle_max_mom"):
        values = numbers[key] if isinstance(numbers[key], (list, tuple)) else [numbers[key]]
        if not all(isinstance(value, (int, float)) and 0 <= value < 1 for value in values):
            raise MuonConfigError(f"scheduler.params.{key}: got {numbers[key]!r}; expected a number from 0 to below 1")
    if not is_logging_rank:
        return
    rate, size, highest = numbers["decay_mom_rate"], numbers["decay_step_size"], numbers["cycle_max_mom"]
    if all(isinstance(value, (int, float)) for value in (rate, size, highest)) and rate > 0 < size and highest:
        # No error, because the run may end before that, and AdamW trains until then.
        steps = math.ceil((1 / highest - 1) / rate * size)
        logger.warning(
            f"deepspeed-muon: scheduler.params.decay_mom_rate {rate:g} raises the first of AdamW's betas to 1 within "
            f"{steps} steps after the cycle, and training ends with an error; set decay_mom_rate to 0 for a longer run"
        )


def _schedule_target(optimizer: MuonWithAuxAdam, name: str, params: dict[str, Any]) -> Any:
    """Return the object whose parameter groups the schedule sets: ``optimizer.given`` or ``optimizer`` itself.

    ``optimizer.given`` has the groups that the user passed. ``optimizer`` has split them into groups of Muon and AdamW.
    If ``params`` has lists of learning rates, their length must be the number of groups of one of these two objects.
    Otherwise raise MuonConfigError. Without lists, return ``optimizer.given``.
    """
    lists = {key: params[key] for key in _rates_per_group(name) if isinstance(params.get(key), (list, tuple))}
    users, halves = len(optimizer.given.param_groups), len(optimizer.param_groups)
    lengths = {len(value) for value in lists.values()}
    if lengths <= {users}:
        return optimizer.given
    if lengths == {halves}:
        return optimizer
    names = ", ".join(group["name"] for group in optimizer.param_groups)
    problems = [
        f"scheduler.params.{key}: got {len(value)} values; write one number, or for all keys a list of {users} "
        f"(one per parameter group) or {halves} values ({names})"
        for key, value in lists.items()
    ]
    raise MuonConfigError("\n".join(problems))
