# SPDX-License-Identifier: Apache-2.0
"""Switch the timing race for Newton-Schulz on or off; tests choose by operation counts, as races vary between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the package activates itself when it is imported, which is for the tests to decide
    from deepspeed.muon.math.choice import Rates, Shape


def without_races() -> None:
    """Switch races off in this process by deterministic mode, but without its filling of fresh memory."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def races() -> Iterator[None]:
    """Let runs that start within the context race."""
    import torch

    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


@contextmanager
def opinion(rate: Callable[[str, str], float]) -> Iterator[list[tuple[str, ...]]]:
    """Replace the race: this rank measures `rate(dtype, kernels)`. Yield a list that gets the dtypes of each race."""
    held: list[tuple[str, ...]] = []

    def race(
        shapes: Mapping[Shape, int], world_size: int, dtypes: Any, tables: Mapping[str, Any], device: Any
    ) -> Rates:
        held.append(tuple(dtypes))
        return {dtype: {name: rate(dtype, name) for name in tables} for dtype in dtypes}

    with races(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.tuning.measure_rates", race)
        yield held
