# SPDX-License-Identifier: Apache-2.0
"""Whether runs race for their Newton-Schulz. Tests count operations instead: a race may end otherwise the next time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the package activates itself when it is imported, which is for the tests to decide
    from deepspeed.muon.math.choice import Shape, Times


def without_races() -> None:
    """For the rest of this process. Fresh memory stays as it is, which is not what the tests are after."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def races() -> Iterator[None]:
    """Runs that begin inside race."""
    import torch

    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


@contextmanager
def opinion(
    seconds: Callable[[str, str, str], float], probed: Mapping[str, float] | None = None
) -> Iterator[list[tuple[str, ...]]]:
    """A race in which this rank finds these seconds by dtype, kind of product and table. Gives the dtypes of each.

    ``probed``: the seconds of the probe by dtype; by default all dtypes take the same.
    """
    from deepspeed.muon.math.choice import shape_key

    held: list[tuple[str, ...]] = []

    def race(shapes: Mapping[Shape, int], dtypes: Any, tables: Mapping[str, Any], *rest: Any) -> Times:
        held.append(tuple(dtypes))
        kinds = ("square", "product", "multiply")
        return {
            dtype: {
                shape_key(*shape): {kind: {name: seconds(dtype, kind, name) for name in tables} for kind in kinds}
                for shape in shapes
            }
            for dtype in dtypes
        }

    with races(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "deepspeed.muon.tuning.probe", lambda dtypes, *rest, **options: probed or dict.fromkeys(dtypes, 1.0)
        )
        patch.setattr("deepspeed.muon.tuning.race", race)
        yield held
