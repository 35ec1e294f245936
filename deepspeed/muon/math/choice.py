# SPDX-License-Identifier: Apache-2.0
"""The choice of how Newton-Schulz runs: the dtype of its products, and for each shape the method and the kernels.

:func:`fastest_choice` takes the dtype and the kernels with the best rates, which
:func:`deepspeed.muon.tuning.measure_rates` measures, and for each shape the method with fewer operations. The choice is
stored in the parameter groups, key ``ns_choice``, and saved with them in every checkpoint, so that a resumed training
run gets the same bits on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    """The Newton-Schulz method and the kernels for all matrices of one shape and of its transpose.

    ``method``: ``standard`` or ``gram``. ``square``, ``product``, ``multiply``: name of the kernel table (set of
    kernels), such as ``torch``, for each kind of matrix product (see
    :class:`deepspeed.muon.math.newton_schulz.Products`). They differ only in checkpoints of version 0.2.0 and older.
    """

    method: str
    square: str = TORCH
    product: str = TORCH
    multiply: str = TORCH

    @property
    def tables(self) -> set[str]:
        """Return the names of the recipe's kernel tables (sets of kernels), such as ``{"torch"}``."""
        return {self.square, self.product, self.multiply}

    def __str__(self) -> str:
        return f"{self.method} with {' and '.join(sorted(self.tables))}"


@dataclass(frozen=True)
class Choice:
    """How Newton-Schulz runs in one training run. Checkpoints store it, so that a resumed run computes the same bits.

    ``dtype``: dtype of the matrix products, a key of :data:`DTYPES`. ``recipes``: shape key, such as ``16x64`` (see
    :func:`shape_key`) -> :class:`Recipe`.
    """

    dtype: str
    recipes: Mapping[str, Recipe]

    def recipe(self, rows: int, cols: int) -> Recipe:
        """Return the :class:`Recipe` for matrices of this shape or of its transpose."""
        return self.recipes[shape_key(rows, cols)]

    @property
    def tables(self) -> set[str]:
        """Return the names of the kernel tables (sets of kernels) in the choice's recipes, such as ``{"torch"}``."""
        return set().union(*(recipe.tables for recipe in self.recipes.values()))

    def as_json(self) -> dict[str, Any]:
        """Return the choice as a dict of JSON values, for checkpoints. :func:`choice_from_json` is the inverse."""
        return {"dtype": self.dtype, "shapes": {key: asdict(recipe) for key, recipe in self.recipes.items()}}


def shape_key(rows: int, cols: int) -> str:
    """Return the key of a shape and of its transpose: ``"16x64"`` for (16, 64) and for (64, 16)."""
    return "x".join(map(str, sorted((rows, cols))))


def choice_from_json(saved: Mapping[str, Any]) -> Choice:
    """Return the :class:`Choice` that :meth:`Choice.as_json` has converted to ``saved``.

    Check ``saved`` with :func:`unknown_in_choice` first.
    """
    return Choice(saved["dtype"], {key: Recipe(**recipe) for key, recipe in saved["shapes"].items()})


def unknown_in_choice(saved: Any) -> list[str]:
    """Return the dtype and methods in a saved choice that this version does not know; an empty list if it knows all.

    Example: ``["'fp8'", "'quintic' for 8x8"]``. If ``saved`` is not a choice at all, return ``[repr(saved)]``. Names of
    kernel tables are not checked, because another machine may have other tables.
    """
    try:
        choice = choice_from_json(saved)
        wrong = [repr(choice.dtype)] if choice.dtype not in DTYPES else []
        return wrong + unknown_methods({key: recipe.method for key, recipe in choice.recipes.items()})
    except (KeyError, TypeError, AttributeError):
        return [repr(saved)]


def unknown_methods(methods: Any) -> list[str]:
    """Return a text, such as ``"'quintic' for 8x8"``, for each method that this version does not know.

    ``methods``: shape key -> method, from a checkpoint. If it is not a mapping, return ``[repr(methods)]``.
    """
    if not isinstance(methods, Mapping):
        return [repr(methods)]
    return [f"{method!r} for {shape}" for shape, method in methods.items() if method not in METHODS]


def fewest_operations(
    shapes: Collection[Shape], schedule: Schedule, dtype: str, methods: Sequence[str] = METHODS, table: str = TORCH
) -> Choice:
    """Return the :class:`Choice` that uses, for each shape, the method with the fewest floating-point operations.

    The first of ``methods`` is the default. Another method is chosen only if the default needs more than :data:`MARGIN`
    times as many operations. ``shapes``: (rows, columns) of the matrices. ``dtype``: dtype of the matrix products, a
    key of :data:`DTYPES`. ``table``: name of the kernel table (set of kernels) for all products.
    """
    default, *others = methods
    recipes = {}
    for rows, cols in sorted(shapes):
        cost = {method: flops(rows, cols, schedule, method, dtype) for method in methods}
        method = next((other for other in others if MARGIN * cost[other] < cost[default]), default)
        recipes[shape_key(rows, cols)] = Recipe(method, square=table, product=table, multiply=table)
    return Choice(dtype, recipes)


def counted_method(rows: int, cols: int, ns_method: str, schedule: Schedule, dtype: str) -> str:
    """Return the method for one shape: ``ns_method``, or if that is ``auto``, the one with the fewest operations."""
    methods = METHODS if ns_method == "auto" else (ns_method,)
    return fewest_operations([(rows, cols)], schedule, dtype, methods).recipe(rows, cols).method


def lowest_rates(rates: Sequence[Rates]) -> Rates:
    """Return {dtype: {kernel table: FLOP/s}}, with the lowest speed of any rank; a kernel table is a set of kernels.

    ``rates``: a dict of this form from each rank. A table that some rank has not timed is left out.
    """
    return {
        dtype: {
            table: min(one[dtype][table] for one in rates)
            for table in tables
            if all(table in one.get(dtype, {}) for one in rates)
        }
        for dtype, tables in rates[0].items()
    }


def fastest_choice(
    rates: Rates, shapes: Mapping[Shape, int], schedule: Schedule, methods: Sequence[str] = METHODS
) -> Choice | None:
    """Return the :class:`Choice` with the dtype and kernel table that need the least time for all matrices of a model.

    Times within a factor of :data:`MARGIN` count as equal. Of equally fast choices, take the one with the more exact
    dtype; with the same dtype, the one whose kernel table (set of kernels) comes first in ``rates``.

    Args:
        rates: speeds of the kernels, from :func:`lowest_rates`; if they contain none, return ``None``.
        shapes: (rows, columns) -> number of matrices of this shape in the model.
        schedule: coefficients of Newton-Schulz.
        methods: the methods to choose from, the default first.
    """
    best: Choice | None = None
    least = 0.0
    for dtype in DTYPES:
        for table in rates.get(dtype, {}):
            choice = fewest_operations(shapes, schedule, dtype, methods, table)
            taken = predicted_seconds(rates, choice, shapes, schedule)
            if taken is not None and (best is None or MARGIN * taken < least):
                best, least = choice, taken
    return best


def predicted_seconds(rates: Rates, choice: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
    """Return the seconds that Newton-Schulz is expected to take on one device for all matrices of a model.

    ``rates``: speeds of the kernels, from :func:`lowest_rates`. If they lack a kernel table that ``choice`` uses,
    return ``None``. ``shapes``: (rows, columns) -> number of matrices of this shape in the model.
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
