# SPDX-License-Identifier: Apache-2.0
"""What the section ``scheduler`` of a ds_config decides about rate and momentum, read without building a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

#: By schedule, the key that is the learning rate, whatever the optimizer's. Other schedules scale the optimizer's.
RATE_KEYS = {
    "CyclicLR": "max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "WarmupLR": "warmup_max_lr",
}
#: By schedule that cycles the momentum by default, the keys of its lowest and its highest value.
MOMENTUM_KEYS = {
    "CyclicLR": ("base_momentum", "max_momentum"),
    "OneCycle": ("cycle_min_mom", "cycle_max_mom"),
    "OneCycleLR": ("base_momentum", "max_momentum"),
}


class Schedule(NamedTuple):
    """``rate_key`` of the schedule's params is the learning rate, ``rate``; empty and ``None`` where none is.

    ``momenta``: the lowest and the highest momentum of a cycle, ``None`` without one. ``is_asked``: whether the
    config asks for that cycle by itself.
    """

    rate_key: str = ""
    rate: Any = None
    momenta: tuple[Any, Any] | None = None
    is_asked: bool = False


def read_schedule(section: Any) -> Schedule:
    """Return what a section ``scheduler``, or ``None``, decides."""
    name = str(section.get("type") or "") if isinstance(section, Mapping) else ""
    given = section.get("params") if name else None
    values = defaults_of(name) | dict(given if isinstance(given, Mapping) else {})
    key, cycle = RATE_KEYS.get(name, ""), MOMENTUM_KEYS.get(name)
    momenta = (values[cycle[0]], values[cycle[1]]) if cycle and values.get("cycle_momentum") is not False else None
    rate = values.get(key)  # None: the optimizer's own
    return Schedule("" if rate is None else key, rate, momenta, "cycle_momentum" in (given or ()))


def about_momentum(schedule: Schedule) -> str:
    """Say which momentum the schedule cycles, and how to stop it; empty where it cycles none."""
    if schedule.momenta is None:
        return ""
    low, high = schedule.momenta
    return (
        f"scheduler.params.cycle_momentum cycles the first of AdamW's betas between {low} and {high}; Muon's momentum "
        "stays as it is; write false to leave both"
    )


def about_rate(schedule: Schedule, key: str, lr: Any) -> str:
    """Say that the schedule sets another rate than ``optimizer.params`` under ``key``; empty where it does not."""
    try:
        if float(schedule.rate) == float(lr):
            return ""
    except (TypeError, ValueError):  # a list, "auto", or no rate
        return ""
    return (
        f"scheduler.params.{schedule.rate_key}, {schedule.rate}, is the learning rate, in place of optimizer.params."
        f"{key}, {lr}; change {schedule.rate_key} to change the rate, and write the same value for both"
    )


def defaults_of(name: str) -> dict[str, Any]:
    """Return the defaults of a schedule's arguments, by name."""
    from deepspeed.runtime import lr_schedules

    if name not in {*RATE_KEYS, *MOMENTUM_KEYS}:
        return {}
    cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    described = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in described if each.default is not each.empty}
