# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz schedules: the published numbers, their length, and the map that they make of singular values."""

import pytest
import torch

from deepspeed.muon.math.coefficients import DEFAULT_STEPS, NAMED, SIMPLE, Schedule, schedule, segments
from helpers.singular_values import image

PUBLISHED_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
PUBLISHED_POLAR_EXPRESS = (
    (8.156555, -22.483293, 15.878770),
    (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065),
    (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
)
PUBLISHED_CUBIC5 = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
#: Those whose maps leave their range just above one, which rounding may reach.
SAFER = {"polar_express": PUBLISHED_POLAR_EXPRESS, "cubic5": PUBLISHED_CUBIC5}


def test_simple_is_torchs() -> None:
    from torch.optim import Muon

    default = Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    assert default["ns_coefficients"] == SIMPLE
    assert default["ns_steps"] == DEFAULT_STEPS == 5


def test_others_are_the_published_schedules() -> None:
    assert NAMED["you"] == PUBLISHED_YOU
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


@pytest.mark.parametrize(
    ("coefficients", "steps", "length"),
    [("you", 4, 5), ("polar_express", 6, 5), (((1, 0, 0), (1, 0, 0)), 1, 2), (((1, 0, 0), (1, 0, 0)), 3, 2)],
)
def test_other_steps_than_the_schedules_are_refused(coefficients: str | Schedule, steps: int, length: int) -> None:
    with pytest.raises(ValueError, match=rf"ns_steps is {steps}\b.*{length} steps"):
        schedule(coefficients, steps)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'polar_expres'") as error:
        schedule("polar_expres")
    assert all(name in str(error.value) for name in NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_small_values_grow_and_none_leaves_the_range(name: str) -> None:
    """Below 0.01 values do not reach one, but stay positive and never overshoot; rounding may exceed one a little."""
    values = image(torch.logspace(-6, 0.004, 10_001, dtype=torch.float64), schedule(name))
    assert values.min() > 0
    assert values.max() < 1.3
    slope = image(torch.tensor(1e-9, dtype=torch.float64), schedule(name)) / 1e-9
    assert slope > (100 if name == "cubic5" else 300)


@pytest.mark.parametrize("name", SAFER)
def test_the_input_of_some_is_treated_as_if_divided_by_a_safety_factor(name: str) -> None:
    values, published = torch.linspace(0, 1, 1001, dtype=torch.float64), SAFER[name]
    expected = image(values / 1.02, published)
    torch.testing.assert_close(image(values, NAMED[name]), expected, rtol=1e-12, atol=1e-12)
    assert NAMED[name][1:] == published[1:]
    assert NAMED[name][0][0] == pytest.approx(published[0][0] / 1.02, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("simple", 0.68, 1.14),
        ("you", 0.97, 1.04),
        ("polar_express", 0.858, 1.142),
        ("deepseek_v4", 0.999, 1.001),
        ("cubic5", 0.774, 1.3),
    ],
)
def test_singular_values_come_near_one(name: str, low: float, high: float) -> None:
    """On [0.01, 1]: the input has Frobenius norm one, so its singular values are at most one."""
    values = image(torch.linspace(0.01, 1, 10_001, dtype=torch.float64), schedule(name))
    assert low < values.min()
    assert values.max() < high


@pytest.mark.parametrize(
    ("triples", "bf16", "finer"),
    [
        (schedule("simple"), (2, 2, 1), (2, 3)),
        (schedule("simple", 8), (2, 2, 2, 2), (2, 2, 3, 1)),
        (schedule("simple", 1), (1,), (1,)),
        (schedule("you"), (2, 2, 1), (2, 3)),
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
