# SPDX-License-Identifier: Apache-2.0
"""The collectives in which the owners of one matrix orthogonalize their slices, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed.muon.kernels.workspace import batch_limit
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, SPLIT_FROM, product_order
from deepspeed.muon.plan.bucket import Batch
from deepspeed.muon.plan.collective import Collective, Group
from deepspeed.muon.plan.memory import SUM_ELEMENTS


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz:
    """What decides the products of Newton-Schulz, and so what the owners of a slice send each other.

    ``method``: by rows and columns. ``dtype``: a key of :data:`deepspeed.muon.math.newton_schulz.DTYPES`.
    ``device_type``: where it runs.
    """

    schedule: Schedule
    method: Callable[[int, int], str]
    dtype: str
    device_type: str


def between_owners(batch: Batch, rank: int, how: NewtonSchulz) -> Iterator[Collective]:
    """Yield what the owners of a batch's matrices call; nothing where a matrix has one owner.

    :mod:`deepspeed.muon.exchange.owner_set` makes these calls and no others. ``rank``: one of the owners.
    """
    if batch.owners == 1:
        return
    rows, cols = batch.shape
    first = rank // batch.owners * batch.owners
    group, small = Group(range(first, first + batch.owners)), min(rows, cols)
    has_diagonals, splits_products = how.dtype != "fp32", batch.owners >= SPLIT_FROM
    products = [*product_order(how.schedule, how.method(rows, cols), how.dtype)]
    limit = batch_limit(batch.rows * batch.cols, small, DTYPES[how.dtype].itemsize, how.device_type != "cpu", threads=1)
    for count in _parts(batch.count, limit):
        yield Collective("all_gather", group, "fp32", 2 * count)  # of each matrix a power of two, and a length
        for kind in products:
            # The Gram matrix is the sum of those of the slices.
            if kind == "square":
                for numel in _parts(count * small * small, SUM_ELEMENTS):
                    yield Collective("all_reduce", group, "fp32", numel)
                if has_diagonals:
                    yield Collective("all_reduce", group, "fp32", count * small)
            # Each owner has computed some rows of the product of two small matrices.
            elif kind == "product" and splits_products:
                for _ in range(count):
                    yield Collective("all_gather", group, how.dtype, small * small // batch.owners)
                    if has_diagonals:
                        yield Collective("all_gather", group, "fp32", small // batch.owners)


def _parts(total: int, most: int) -> Iterator[int]:
    """Cut a number into parts of ``most`` and a rest."""
    for start in range(0, total, most):
        yield min(most, total - start)
