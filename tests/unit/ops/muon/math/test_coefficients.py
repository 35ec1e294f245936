# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz schedules: the published numbers, their length, and the map that they make of singular values."""

import pytest
import torch

from deepspeed.muon.math.newton_schulz import DEFAULT_STEPS, NAMED, SIMPLE, Schedule, schedule, segments
from helpers.singular_values import image

PUBLISHED_POLAR_EXPRESS = (
    (8.156555, -22.483293, 15.878770),
    (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065),
    (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
)


def test_simple_is_torchs() -> None:
    from torch.optim import Muon

    default = Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    assert default["ns_coefficients"] == SIMPLE
    assert default["ns_steps"] == DEFAULT_STEPS == 5


def test_others_are_the_published_schedules() -> None:
    assert NAMED["deepseek_v4"] == (SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2


def test_a_single_triple_is_repeated_and_a_schedule_fixes_the_number_of_steps() -> None:
    for single in (SIMPLE, (1.5, -0.5, 0.0)):
        for steps in (1, 2, 5, 7):
            assert schedule((single,), steps) == (single,) * steps
        assert schedule((single,)) == (single,) * DEFAULT_STEPS
    assert schedule("simple", 7) == (SIMPLE,) * 7 and schedule("simple") == (SIMPLE,) * DEFAULT_STEPS
    for name, triples in NAMED.items():
        assert name == "simple" or schedule(name) == schedule(name, len(triples)) == triples
    triples = schedule([[3, -4, 2], [2, -1, 0]])
    assert triples == ((3.0, -4.0, 2.0), (2.0, -1.0, 0.0))
    assert all(type(value) is float for triple in triples for value in triple)


def test_the_input_of_polar_express_is_treated_as_if_divided_by_a_safety_factor() -> None:
    """Its map leaves its range just above one, which rounding may reach."""
    values, found = torch.linspace(0, 1, 1001, dtype=torch.float64), NAMED["polar_express"]
    expected = image(values / 1.02, PUBLISHED_POLAR_EXPRESS)
    torch.testing.assert_close(image(values, found), expected, rtol=1e-12, atol=1e-12)
    assert found[1:] == PUBLISHED_POLAR_EXPRESS[1:]
    assert found[0][0] == pytest.approx(PUBLISHED_POLAR_EXPRESS[0][0] / 1.02, rel=1e-12)


@pytest.mark.parametrize(
    ("triples", "bf16", "finer"),
    [
        (schedule("simple"), (2, 2, 1), (2, 3)),
        (schedule("simple", 8), (2, 2, 2, 2), (2, 2, 3, 1)),
        (schedule("simple", 1), (1,), (1,)),
        (schedule("polar_express"), (1, 1, 2, 1), (2, 3)),
        (((2.0, -1.5, 0.5),) * 4, (2, 2), (3, 1)),
        (((30.0, -1.5, 0.5),) * 3, (1, 1, 1), (1, 1, 1)),
        (((1e200, -1e200, 1e200),) * 3, (1, 1, 1), (1, 1, 1)),  # to infinity, and to NaN
    ],
)
def test_steps_are_composed_where_that_is_safe(
    triples: Schedule, bf16: tuple[int, ...], finer: tuple[int, ...]
) -> None:
    """In bf16 not after the steep start of `polar_express`, and never where the map itself diverges."""
    assert segments(triples, "bf16") == bf16
    assert segments(triples, "fp16") == segments(triples, "fp32") == finer
