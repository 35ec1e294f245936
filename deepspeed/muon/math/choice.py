# SPDX-License-Identifier: Apache-2.0
"""How Newton-Schulz runs: the dtype of its products, and for each shape the method and whose kernels multiply.

:func:`fastest` takes what :mod:`deepspeed.muon.math.race` has measured, :func:`by_count` what counting operations says.
A run's choice is pinned in the parameter groups, key ``ns_choice``, and saved with them in every checkpoint, so a
resumed run keeps its bits on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, Products, flops, products

#: What is not the usual choice must be faster by this factor, which is more than the noise.
MARGIN = 1.03
#: The table of plain PyTorch, which every machine has.
TORCH = "torch"
Shape = tuple[int, int]
#: Seconds per matrix, by dtype, shape, operation and table.
Times = dict[str, dict[str, dict[str, dict[str, float]]]]


@dataclass(frozen=True)
class Recipe:
    """Of one shape and its transpose: the method, and the name of the table that computes each kind of product."""

    method: str
    square: str = TORCH
    product: str = TORCH
    multiply: str = TORCH

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for kind in Products._fields:
            kinds.setdefault(getattr(self, kind), []).append(kind)
        if len(kinds) == 1:
            return f"{self.method} with {self.square}"
        own_first = sorted(kinds, key=lambda table: table == TORCH)
        return f"{self.method} with " + ", ".join(f"{table} for {' and '.join(kinds[table])}" for table in own_first)


@dataclass(frozen=True)
class Choice:
    """The dtype, a key of :data:`DTYPES`, and recipes by :func:`shape_key`."""

    dtype: str
    recipes: Mapping[str, Recipe]

    def recipe(self, rows: int, cols: int) -> Recipe:
        """How matrices of this shape are orthogonalized."""
        return self.recipes[shape_key(rows, cols)]

    @property
    def tables(self) -> set[str]:
        """The names of all tables."""
        return {name for recipe in self.recipes.values() for name in (recipe.square, recipe.product, recipe.multiply)}

    def pinned(self) -> dict[str, Any]:
        """As it is saved: JSON values."""
        return {"dtype": self.dtype, "shapes": {key: asdict(recipe) for key, recipe in self.recipes.items()}}

    def with_methods(self, methods: Mapping[str, str]) -> Choice:
        """With other methods for some shapes, those of a checkpoint that pinned nothing else."""
        changed = {key: replace(self.recipes[key], method=methods[key]) for key in self.recipes.keys() & methods.keys()}
        return Choice(self.dtype, {**self.recipes, **changed})


def shape_key(rows: int, cols: int) -> str:
    """The name of a shape, and of its transpose."""
    return "x".join(map(str, sorted((rows, cols))))


def from_pinned(pinned: Mapping[str, Any]) -> Choice:
    """From :meth:`Choice.pinned`; :func:`unknown` says whether it can be read."""
    return Choice(pinned["dtype"], {key: Recipe(**recipe) for key, recipe in pinned["shapes"].items()})


def unknown(pinned: Any) -> list[str]:
    """What this version does not know in a saved ``ns_choice``, as texts. Tables may be other machines'."""
    try:
        choice = from_pinned(pinned)
        wrong = [repr(choice.dtype)] if choice.dtype not in DTYPES else []
        return wrong + unknown_methods({key: recipe.method for key, recipe in choice.recipes.items()})
    except (KeyError, TypeError, AttributeError):
        return [repr(pinned)]


def unknown_methods(methods: Any) -> list[str]:
    """The entries of shape -> method that this version does not know, as texts."""
    if not isinstance(methods, Mapping):
        return [repr(methods)]
    return [f"{method!r} for {shape}" for shape, method in methods.items() if method not in METHODS]


def by_count(
    shapes: Collection[Shape], schedule: Schedule, dtype: str, methods: Sequence[str] = METHODS, table: str = TORCH
) -> Choice:
    """The method of fewer operations for each shape, and one table for all products."""
    recipes = {}
    for shape in sorted(shapes):
        usual, *others = methods
        cost = {method: flops(*shape, schedule, method, dtype) for method in methods}
        method = next((other for other in others if MARGIN * cost[other] < cost[usual]), usual)
        recipes[shape_key(*shape)] = Recipe(method, table, table, table)
    return Choice(dtype, recipes)


def counted_method(rows: int, cols: int, ns_method: str, schedule: Schedule, dtype: str) -> str:
    """The method for one shape where nothing was measured: the user's, or under ``auto`` that of fewer operations."""
    methods = METHODS if ns_method == "auto" else (ns_method,)
    return by_count([(rows, cols)], schedule, dtype, methods).recipe(rows, cols).method


def slowest(times: Sequence[Times]) -> Times:
    """Of several ranks the longest time of each product; only what all of them have timed."""
    first, *others = times
    return {
        dtype: {
            key: {
                kind: {
                    table: max(_at(one, dtype, key, kind, table) for one in times)
                    for table in tables
                    if all(_at(one, dtype, key, kind, table) is not None for one in others)
                }
                for kind, tables in kinds.items()
            }
            for key, kinds in keys.items()
        }
        for dtype, keys in first.items()
    }


def _at(times: Any, *path: str) -> Any:
    for name in path:
        times = times.get(name) if times is not None else None
    return times


def complete(times: Times) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """By dtype, the most exact first, the shapes of which some table timed every product; no dtype without a shape."""
    whole = {
        dtype: {key: kinds for key, kinds in times[dtype].items() if all(kinds.get(k) for k in Products._fields)}
        for dtype in DTYPES
        if dtype in times
    }
    return {dtype: keys for dtype, keys in whole.items() if keys}


def fastest(times: Times, shapes: Mapping[Shape, int], schedule: Schedule, methods: Sequence[str] = METHODS) -> Choice:
    """The dtype in which all matrices together take least, and the fastest recipe for each shape in it.

    A tie goes to the usual: the more exact dtype, ``standard``, plain PyTorch. A shape that was not timed takes the
    recipe of the timed one that is nearest in aspect ratio and size.

    Args:
        times: of every table of every product that is compared; :func:`complete` for at least one dtype and shape.
        shapes: rows, columns -> how many matrices the model has.
        methods: those that may be chosen.
    """
    counts = {shape_key(*shape): 0 for shape in shapes}
    for shape, count in shapes.items():
        counts[shape_key(*shape)] += count
    timed = complete(times)
    most = max(len(keys) for keys in timed.values())
    best: tuple[float, Choice] | None = None
    for dtype, keys in timed.items():
        if len(keys) < most:
            continue
        found = {key: _recipe(kinds, schedule, methods, dtype) for key, kinds in keys.items()}
        total = sum(counts[key] * seconds for key, (seconds, _) in found.items())
        if best is None or MARGIN * total < best[0]:
            recipes = {key: found[_nearest(key, found)][1] for key in counts}
            best = total, Choice(dtype, recipes)
    assert best is not None
    return best[1]


def seconds(times: Times, choice: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
    """What a choice takes for all timed shapes by the measured times; ``None`` where they lack one of its products."""
    total = 0.0
    for shape, count in shapes.items():
        recipe, kinds = choice.recipe(*shape), _at(times, choice.dtype, shape_key(*shape))
        if kinds is None:
            continue
        for kind, number in products(schedule, recipe.method, choice.dtype)._asdict().items():
            if (one := _at(kinds, kind, getattr(recipe, kind))) is None:
                return None
            total += count * number * one
    return total or None


def _recipe(
    kinds: Mapping[str, Mapping[str, float]], schedule: Schedule, methods: Sequence[str], dtype: str
) -> tuple[float, Recipe]:
    """Seconds per matrix, and the recipe that takes them."""
    tables = {kind: _first_or_faster(kinds[kind]) for kind in Products._fields}
    costs = {
        method: sum(n * kinds[k][tables[k]] for k, n in products(schedule, method, dtype)._asdict().items())
        for method in methods
    }
    method = _first_or_faster(costs)
    return costs[method], Recipe(method, **tables)


def _first_or_faster(times: Mapping[str, float]) -> str:
    """The fastest, if it is faster than the first by more than the noise."""
    usual, fast = next(iter(times)), min(times, key=lambda name: times[name])
    return fast if MARGIN * times[fast] < times[usual] else usual


def _nearest(key: str, among: Collection[str]) -> str:
    def distance(other: str) -> tuple[float, float, str]:
        (m, n), (p, q) = (tuple(map(int, name.split("x"))) for name in (key, other))
        return abs(n / m - q / p), abs(m - p), other

    return min(among, key=distance)
