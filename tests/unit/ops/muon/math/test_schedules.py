# SPDX-License-Identifier: Apache-2.0
"""Momentum and weight decay by the number of updates done."""

import pytest

from deepspeed.muon.math.schedules import Schedules

GROUP = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.2}


@pytest.mark.parametrize(
    ("done", "momentum"), [(0, 0.85), (1, 0.875), (2, 0.9), (3, 0.925), (4, 0.95), (5, 0.95), (10**9, 0.95)]
)
def test_momentum_goes_linearly_to_that_of_the_group(done: int, momentum: float) -> None:
    found = Schedules(momentum_start=0.85, momentum_warmup_steps=4).at(GROUP, done)
    assert found == GROUP | {"momentum": pytest.approx(momentum)}


def test_it_may_fall() -> None:
    found = Schedules(momentum_start=0.99, momentum_warmup_steps=2).at(GROUP | {"momentum": 0.9}, 1)
    assert found["momentum"] == pytest.approx(0.945)


@pytest.mark.parametrize(("done", "decay"), [(0, 0.2), (1, 0.15), (2, 0.1), (3, 0.05), (4, 0.0), (5, 0.0), (99, 0.0)])
def test_weight_decay_goes_linearly_to_zero(done: int, decay: float) -> None:
    found = Schedules(muon_weight_decay_steps=4).at(GROUP, done)
    assert found == GROUP | {"weight_decay": pytest.approx(decay)}


def test_without_schedules_a_group_keeps_its_values() -> None:
    assert Schedules().at(GROUP, 7) == GROUP and not str(Schedules())


def test_they_are_named() -> None:
    text = str(Schedules(0.85, 300, 1000))
    assert text == "momentum from 0.85 over 300 steps, weight decay of the Muon groups to zero over 1000 steps"
