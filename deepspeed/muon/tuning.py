# SPDX-License-Identifier: Apache-2.0
"""What a run may choose for its Newton-Schulz, and the choice that follows: from a race, or without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import (
    TORCH,
    Choice,
    Recipe,
    Shape,
    Times,
    by_count,
    complete,
    fastest,
    from_pinned,
    seconds,
)
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, Products
from deepspeed.muon.math.race import fast_enough, probe, race


@dataclass(frozen=True)
class Tuning:
    """The choice, and the times of all ranks from which it follows; empty where none were taken."""

    choice: Choice
    times: Times = field(default_factory=dict)

    def speedup_over(self, other: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
        """How many times faster this choice is than another by the times taken; ``None`` if they do not tell."""
        ours, theirs = (seconds(self.times, choice, shapes, schedule) for choice in (self.choice, other))
        return theirs / ours if ours and theirs else None


@dataclass(frozen=True)
class Candidates:
    """The dtypes, methods and tables of operations among which to choose, the usual ones first."""

    dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    tables: Mapping[str, Operations]
    schedule: Schedule
    device: torch.device

    @classmethod
    def of(
        cls,
        config: MuonConfig,
        tables: Mapping[str, Operations],
        ns_methods: set[str],
        device: torch.device,
        has_bf16: bool,
    ) -> Candidates:
        """Those that the config leaves open.

        Args:
            tables: that compute products on ``device``, by name, plain PyTorch's first.
            ns_methods: ``ns_method`` of all Muon groups.
            has_bf16: whether the device has instructions for bf16; see :func:`has_bf16`.
        """
        left_out = {"bf16": not has_bf16, "fp16": config.ns_normalization == "aol"}
        dtypes = tuple(name for name in DTYPES if not left_out.get(name))
        methods = METHODS if "auto" in ns_methods or len(ns_methods) != 1 else tuple(ns_methods)
        chosen = dtypes if config.ns_dtype == "auto" else (config.ns_dtype,)
        return cls(chosen, methods, tables, config.schedule, device)

    @property
    def usual_dtype(self) -> str:
        """The dtype where nothing is measured: on a CPU the most exact, elsewhere the least, which is bf16."""
        return self.dtypes[0] if self.device.type == "cpu" else self.dtypes[-1]

    @property
    def is_open(self) -> bool:
        """Whether there is anything to race for."""
        return max(len(self.dtypes), len(self.methods), len(self.tables)) > 1

    def without_race(self, shapes: Mapping[Shape, int]) -> Tuning:
        """By the count of operations, on a CPU with its own kernels, elsewhere with PyTorch's."""
        table = list(self.tables)[-1] if self.device.type == "cpu" else TORCH
        return Tuning(by_count(shapes, self.schedule, self.usual_dtype, self.methods, table))

    def alone(self, shapes: Mapping[Shape, int], world_size: int) -> Tuning:
        """The choice of this process alone: by a race where one is allowed and decides anything."""
        if not (may_race() and self.is_open and shapes):
            return self.without_race(shapes)
        self.log_compilation()
        return self.after_race(shapes, self.race(shapes, fast_enough([self.probe(shapes)]), world_size))

    def log_compilation(self) -> None:
        """Say that a start may take long, where kernels are compiled for it."""
        if own := [name for name in self.tables if name != TORCH and self.device.type != "cpu"]:
            logger.info(
                "deepspeed-muon: compiling and timing the kernels of %s in %s for the matrices of this model; the "
                "first start on a machine takes about a minute per dtype, later ones find them compiled",
                " and ".join(own),
                ", ".join(self.dtypes),
            )

    def probe(self, shapes: Collection[Shape]) -> dict[str, float]:
        """Return the seconds of one product in each dtype in this process, by which ranks agree on the dtypes to race.

        ``shapes``: of the model's matrices, at least one.
        """
        return probe(self.dtypes, self.tables, self.device, largest=max(map(min, shapes)))

    def race(self, shapes: Mapping[Shape, int], dtypes: Sequence[str], world_size: int) -> Times:
        """This process's times.

        Args:
            shapes: rows, columns -> how many matrices the model has.
            dtypes: those of its own that :func:`deepspeed.muon.math.race.fast_enough` keeps.
            world_size: ranks that share the matrices, so that a batch has its size.
        """
        at_once = {shape: -(-count // world_size) for shape, count in shapes.items()}
        return race(at_once, dtypes, self.tables, self.device)

    def after_race(self, shapes: Mapping[Shape, int], times: Times) -> Tuning:
        """The fastest choice by these times; without a race where none could be taken."""
        if not complete(times):
            return self.without_race(shapes)
        return Tuning(fastest(times, shapes, self.schedule, self.methods), times)


def may_race() -> bool:
    """Whether this process allows what may end otherwise in the next run."""
    return not torch.are_deterministic_algorithms_enabled()


def has_bf16(device_type: str, supported: bool | None = None) -> bool:
    """Whether a device computes with bf16. NVIDIA's before Ampere (V100, T4) only emulate it; a CPU may, and races.

    ``supported``: what DeepSpeed's accelerator says; by default what the device's module in torch says.
    """
    if device_type == "cpu":
        return True
    if device_type == "cuda":  # DeepSpeed's accelerator counts emulation
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if supported is None:
        ask = getattr(torch.get_device_module(device_type), "is_bf16_supported", None)
        return bool(ask and ask())
    return supported


def described(choice: Choice, tuning: Tuning) -> str:
    """The choice in one line, for people."""
    recipes = [str(recipe) for recipe in choice.recipes.values()]
    by_recipe: dict[str, Any] = {recipe: recipes.count(recipe) for recipe in recipes}
    how = ", ".join(f"{count} of {len(recipes)} shapes by {recipe}" for recipe, count in by_recipe.items())
    if not tuning.times:
        return f"{choice.dtype}, {how} (by the count of operations)"
    return f"{choice.dtype}, {how} (the fastest in a race at start; {pin(choice.dtype)})"


def pin(dtype: str) -> str:
    """Return how a user makes every further run take a dtype: two races may end differently."""
    return f'"ns_dtype": "{dtype}" in optimizer.params keeps this dtype in new runs'


def pinned_in(group: dict[str, Any], usual: Choice, ns_dtype: str) -> Choice:
    """The choice of a group: a checkpoint's for the shapes that it knows, else ``usual``. Pins it.

    ``ns_dtype``: of the config, which wins unless it is ``auto``.
    """
    choice = usual
    if "ns_choice" in group:
        saved = from_pinned(group["ns_choice"])
        choice = Choice(saved.dtype if ns_dtype == "auto" else ns_dtype, {**usual.recipes, **saved.recipes})
    choice = choice.with_methods(group.pop("ns_methods", {}))  # of a checkpoint that pinned nothing else
    group["ns_choice"] = choice.pinned()
    return choice


def method_of(choice: Choice, ns_method: str, rows: int, cols: int) -> str:
    """The method for one shape: the group's own, or under ``auto`` the chosen one."""
    return choice.recipe(rows, cols).method if ns_method == "auto" else ns_method


def with_products(
    kernels: Operations, tables: Mapping[str, Operations], choice: Choice, rows: int, cols: int
) -> Operations:
    """``kernels`` with the products that are chosen for a shape; plain PyTorch's where a table is not here."""
    recipe: Recipe = choice.recipe(rows, cols)
    found = {kind: tables.get(getattr(recipe, kind), tables[TORCH]) for kind in Products._fields}
    return replace(kernels, **{kind: getattr(table, kind) for kind, table in found.items()})
