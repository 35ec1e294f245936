# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedulers, from the config or passed as callables, schedule the parameter groups as given.

A scalar of a DeepSpeed schedule describes ``lr`` where the config gives it, else ``muon_lr``; every group
gets it in proportion to its own learning rate. A list has one value per group as given, or one per half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from deepspeed.muon.config.types import DEFAULT_ADAM_LR, DEFAULT_MUON_LR
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.schedules import defaults_of

#: Parameters of DeepSpeed's schedules that are learning rates; the others are relative or counts.
ABSOLUTE = {
    "LRRangeTest": ("lr_range_test_min_lr",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr"),
}


def scheduler_from_config(original: Callable, engine: Any, optimizer: Any) -> Any:
    """``DeepSpeedEngine._scheduler_from_config``, with one value per group for each learning rate.

    Raises MuonConfigError for a list of another length than the groups.
    """
    ours, name, params = engine.basic_optimizer, engine.scheduler_name(), engine.scheduler_params()
    if name is None:
        return original(engine, optimizer)
    values, reference = dict(params or {}), ours.defaults["lr"]
    target = _target(ours, name, values)
    ratios = [group["lr"] / reference if reference else 1.0 for group in target.param_groups]
    for key in ABSOLUTE.get(name, ()):
        value = values.get(key, defaults_of(name).get(key))  # the default may be the groups' own rate
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = [value * ratio for ratio in ratios]
    engine._config.scheduler_params = values
    try:
        return original(engine, target)
    finally:
        engine._config.scheduler_params = params


def configure_scheduler(original: Callable, engine: Any) -> None:
    """``DeepSpeedEngine._configure_lr_scheduler``: pass the groups as given to a scheduler that is a callable."""
    ours, client = engine.basic_optimizer, engine.client_lr_scheduler
    if callable(client):
        engine.client_lr_scheduler = lambda _: client(ours.given)
    original(engine)
    engine.client_lr_scheduler = client


def check_schedule(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Raise MuonConfigError for lists that do not fit the groups, before anything is wrapped."""
    name, params = engine.scheduler_name(), engine.scheduler_params() or {}
    if engine.client_lr_scheduler is not None or name not in ABSOLUTE:
        return
    _target(optimizer, name, params)
    numbers = [key for key in ABSOLUTE[name] if isinstance(params.get(key), (int, float)) and params[key]]
    if numbers and not optimizer.sets_a_rate and engine.global_rank == 0:
        logger.warning(
            f"deepspeed-muon: {', '.join(numbers)} of the scheduler describes Muon's rate, because optimizer.params "
            f"sets no lr; AdamW's is {DEFAULT_ADAM_LR / DEFAULT_MUON_LR:.3g} of it. Write lr into optimizer.params to "
            "give both halves the same"
        )
    if name == "OneCycle" and params.get("cycle_momentum", True):
        _check_cycle(params, engine.global_rank == 0)


def _check_cycle(params: dict[str, Any], is_logging_rank: bool) -> None:
    """Raise MuonConfigError for impossible bounds of a cycle; warn of a decay rate that ends training."""
    numbers = defaults_of("OneCycle") | params
    for key in ("cycle_min_mom", "cycle_max_mom"):
        values = numbers[key] if isinstance(numbers[key], (list, tuple)) else [numbers[key]]
        if not all(isinstance(value, (int, float)) and 0 <= value < 1 for value in values):
            raise MuonConfigError(f"scheduler.params.{key}: got {numbers[key]!r}; expected a number from 0 to below 1")
    if not is_logging_rank:
        return
    rate, size, highest = numbers["decay_mom_rate"], numbers["decay_step_size"], numbers["cycle_max_mom"]
    if all(isinstance(value, (int, float)) for value in (rate, size, highest)) and rate > 0 < size and highest:
        steps = math.ceil((1 / highest - 1) / rate * size)
        logger.warning(
            f"deepspeed-muon: scheduler.params.decay_mom_rate {rate:g} raises the first of AdamW's betas to 1 within "
            f"{steps} steps after the cycle, where training ends with an error; set it to 0 if the run is longer"
        )


def _target(optimizer: MuonWithAuxAdam, name: str, params: dict[str, Any]) -> Any:
    """The optimizer or its groups as given, whichever has as many groups as the lists have values."""
    lists = {key: params[key] for key in ABSOLUTE.get(name, ()) if isinstance(params.get(key), (list, tuple))}
    given, halves = len(optimizer.given.param_groups), len(optimizer.param_groups)
    lengths = {len(value) for value in lists.values()}
    if lengths <= {given}:
        return optimizer.given
    if lengths == {halves}:
        return optimizer
    names = ", ".join(group["name"] for group in optimizer.param_groups)
    problems = [
        f"scheduler.params.{key}: got {len(value)} values; write one number, {given} (one per parameter group) or "
        f"{halves} ({names}), the same for all keys"
        for key, value in lists.items()
    ]
    raise MuonConfigError("\n".join(problems))
