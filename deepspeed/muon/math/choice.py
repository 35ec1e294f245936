# SPDX-License-Identifier: Apache-2.0
"""The choice of how Newton-Schulz runs: the dtype of its products, and for each shape the method and the kernels.

:func:`fastest` chooses the dtype and the kernels by the rates that :func:`deepspeed.muon.tuning.measure_rates` returns,
and for each shape the method with fewer operations. The choice is stored in the parameter groups, key ``ns_choice``,
and saved with them in every checkpoint, so that a resumed training run gets the same bits on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, flops, products

#: A candidate other than the default must be faster by this factor, which is above the noise of a timing.
MARGIN = 1.03
#: Name of the table of plain PyTorch kernels, which every machine has.
TORCH = "torch"
#: (rows, columns) of a matrix.
Shape = tuple[int, int]
#: Dtype -> name of a table of kernels -> floating-point operations per second in Newton-Schulz.
Rates = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Recipe:
    """How matrices of one shape, or its transpose, are orthogonalized.

    ``method``: "standard" or "gram". ``square``, ``product``, ``multiply``: for each kind of product, the name of the
    table of kernels that computes it. New choices use one table; checkpoints of version 0.2.0 and older may name
    several.
    """

    method: str
    square: str = TORCH
    product: str = TORCH
    multiply: str = TORCH

    @property
    def tables(self) -> set[str]:
        """Return the names of the tables of kernels in this recipe."""
        return {self.square, self.product, self.multiply}

    def __str__(self) -> str:
        return f"{self.method} with {' and '.join(sorted(self.tables))}"


@dataclass(frozen=True)
class Choice:
    """How Newton-Schulz runs: the dtype of its products, and a recipe for each shape.

    ``dtype``: a key of :data:`DTYPES`. ``recipes``: :func:`shape_key` -> :class:`Recipe`.
    """

    dtype: str
    recipes: Mapping[str, Recipe]

    def recipe(self, rows: int, cols: int) -> Recipe:
        """Return the recipe for matrices of this shape."""
        return self.recipes[shape_key(rows, cols)]

    @property
    def tables(self) -> set[str]:
        """Return the names of the tables of kernels in all recipes."""
        return set().union(*(recipe.tables for recipe in self.recipes.values()))

    def as_json(self) -> dict[str, Any]:
        """Return the choice as JSON values, as checkpoints store it; :func:`choice_from_json` reads it."""
        return {"dtype": self.dtype, "shapes": {key: asdict(recipe) for key, recipe in self.recipes.items()}}

    def with_methods(self, methods: Mapping[str, str]) -> Choice:
        """Return a copy of the choice with ``methods``, :func:`shape_key` -> method, in place of its own.

        Checkpoints of version 0.1.0 store only methods.
        """
        changed = {key: replace(self.recipes[key], method=methods[key]) for key in self.recipes.keys() & methods.keys()}
        return Choice(self.dtype, {**self.recipes, **changed})


def shape_key(rows: int, cols: int) -> str:
    """Return the name that a shape and its transpose share: ``(64, 16) -> "16x64"``."""
    return "x".join(map(str, sorted((rows, cols))))


def choice_from_json(saved: Mapping[str, Any]) -> Choice:
    """Return the choice that :meth:`Choice.as_json` has converted to ``saved``. Check with :func:`unknown` before."""
    return Choice(saved["dtype"], {key: Recipe(**recipe) for key, recipe in saved["shapes"].items()})


def unknown(saved: Any) -> list[str]:
    """Return, as texts, the dtype and methods in a saved ``ns_choice`` that this version does not know.

    Names of tables are not checked, because other machines have other tables.
    """
    try:
        choice = choice_from_json(saved)
        wrong = [repr(choice.dtype)] if choice.dtype not in DTYPES else []
        return wrong + unknown_methods({key: recipe.method for key, recipe in choice.recipes.items()})
    except (KeyError, TypeError, AttributeError):
        return [repr(saved)]


def unknown_methods(methods: Any) -> list[str]:
    """Return, as texts, the entries of ``methods``, shape -> method, that this version does not know."""
    if not isinstance(methods, Mapping):
        return [repr(methods)]
    return [f"{method!r} for {shape}" for shape, method in methods.items() if method not in METHODS]


def by_count(
    shapes: Collection[Shape], schedule: Schedule, dtype: str, methods: Sequence[str] = METHODS, table: str = TORCH
) -> Choice:
    """Choose the method with fewer operations for each shape, and the kernels ``table`` for all products.

    ``methods``: those to choose from, the default first. Another one is chosen only if the default has more operations
    by a factor of ``MARGIN``.
    """
    default, *others = methods
    recipes = {}
    for rows, cols in sorted(shapes):
        cost = {method: flops(rows, cols, schedule, method, dtype) for method in methods}
        method = next((other for other in others if MARGIN * cost[other] < cost[default]), default)
        recipes[shape_key(rows, cols)] = Recipe(method, square=table, product=table, multiply=table)
    return Choice(dtype, recipes)


def counted_method(rows: int, cols: int, ns_method: str, schedule: Schedule, dtype: str) -> str:
    """Return the method for one shape: ``ns_method`` or, if that is ``auto``, the method with fewer operations."""
    methods = METHODS if ns_method == "auto" else (ns_method,)
    return by_count([(rows, cols)], schedule, dtype, methods).recipe(rows, cols).method


def lowest_rates(rates: Sequence[Rates]) -> Rates:
    """Return the lowest rate for each pair of dtype and table that all ranks have timed.

    ``rates``: of all ranks, one dict for each.
    """
    return {
        dtype: {
            table: min(one[dtype][table] for one in rates)
            for table in tables
            if all(table in one.get(dtype, {}) for one in rates)
        }
        for dtype, tables in rates[0].items()
    }


def fastest(
    rates: Rates, shapes: Mapping[Shape, int], schedule: Schedule, methods: Sequence[str] = METHODS
) -> Choice | None:
    """Choose the dtype and table of kernels with which all matrices of a model take least time.

    Return ``None`` if ``rates`` is empty. Times within a factor of ``MARGIN`` count as equal; then the more exact dtype
    is chosen, and among tables plain PyTorch's, which was timed first. ``rates``: from :func:`lowest_rates`.
    ``shapes``: (rows, columns) -> number of such matrices in the model. ``methods``: those that may be chosen, the
    default first.
    """
    best: Choice | None = None
    least = 0.0
    for dtype in DTYPES:
        for table in rates.get(dtype, {}):
            choice = by_count(shapes, schedule, dtype, methods, table)
            taken = seconds(rates, choice, shapes, schedule)
            if taken is not None and (best is None or MARGIN * taken < least):
                best, least = choice, taken
    return best


def seconds(rates: Rates, choice: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
    """Return the seconds that Newton-Schulz takes for all matrices with ``choice``.

    Return ``None`` if ``rates`` lacks a table of the choice. ``shapes``: (rows, columns) -> number of such matrices.
    """
    known = rates.get(choice.dtype, {})
    if not choice.tables <= known.keys():
        return None
    total = 0.0
    for (rows, cols), count in shapes.items():
        recipe, small = choice.recipe(rows, cols), min(rows, cols)
        for kind, number in products(schedule, recipe.method, choice.dtype)._asdict().items():
            longer = small if kind == "product" else max(rows, cols)
            total += count * number * 2 * small * small * longer / known[getattr(recipe, kind)]
    return total
