# SPDX-License-Identifier: Apache-2.0
"""What follows from the times of a race, and from a count of operations where there was none."""

import json
import re

import pytest
import torch

from deepspeed.muon.config.schema import parse
from deepspeed.muon.kernels import reference
from deepspeed.muon.math.choice import (
    Choice,
    Rates,
    Recipe,
    by_count,
    counted_method,
    fastest,
    from_pinned,
    lowest,
    seconds,
    shape_key,
    unknown,
    unknown_methods,
)
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import METHODS, flops
from deepspeed.muon.tuning import Candidates, Tuning, has_bf16

SIMPLE = schedule("simple")


def choose(rates: Rates) -> Choice:
    choice = fastest(rates, {(8, 32): 3}, SIMPLE)
    assert choice
    return choice


# ---- without a race -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_count_of_operations_decides(dtype: str) -> None:
    shapes = [(8, 8), (8, 32), (48, 8), (5, 6), (64, 8)]
    choice = by_count(shapes, SIMPLE, dtype, table="C++")
    assert choice.dtype == dtype and choice.tables == {"C++"}
    for rows, cols in shapes:
        cost = {method: flops(rows, cols, SIMPLE, method, dtype) for method in METHODS}
        method = choice.recipe(rows, cols).method
        assert cost[method] <= 1.03 * min(cost.values())
        assert choice.recipe(cols, rows) == choice.recipe(rows, cols)
        assert counted_method(rows, cols, "auto", SIMPLE, dtype) == method
        assert all(counted_method(rows, cols, fixed, SIMPLE, dtype) == fixed for fixed in METHODS)
    assert choice.recipe(8, 8).method == "standard" and choice.recipe(64, 8).method == "gram"
    assert by_count(shapes, SIMPLE, dtype, ["gram"]).recipe(8, 8).method == "gram"


# ---- from a race ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "dtype", "table"),
    [
        ({"fp32": {"torch": 1.0, "C++": 2.0}, "bf16": {"torch": 1.2, "C++": 1.7}}, "fp32", "C++"),
        ({"fp32": {"torch": 1.0, "C++": 2.0}, "bf16": {"torch": 2.5, "C++": 1.1}}, "bf16", "torch"),
        ({"fp32": {"torch": 1.0}, "fp16": {"torch": 1.02}, "bf16": {"torch": 1.01}}, "fp32", "torch"),
        ({"fp32": {"torch": 1.0, "C++": 1.02}}, "fp32", "torch"),
        ({"fp32": {"torch": 1.0}, "fp16": {"torch": 2.0}, "bf16": {"torch": 2.04}}, "fp16", "torch"),
        ({"bf16": {"C++": 1.0}, "fp32": {}}, "bf16", "C++"),
    ],
)
def test_what_is_not_the_default_must_be_clearly_faster(rates: Rates, dtype: str, table: str) -> None:
    choice = fastest(rates, {(8, 32): 3}, SIMPLE, methods=["standard"])
    assert choice == by_count([(8, 32)], SIMPLE, dtype, ["standard"], table)


def test_a_dtype_that_needs_more_operations_must_be_faster_by_so_much() -> None:
    """Gram Newton-Schulz restarts at other steps in bf16 than in fp32."""
    ratio = flops(8, 64, SIMPLE, "gram", "bf16") / flops(8, 64, SIMPLE, "gram", "fp32")
    assert abs(ratio - 1) > 0.1
    for factor, expected in ((0.9, "fp32"), (1.1, "bf16")):
        choice = fastest({"fp32": {"torch": 1.0}, "bf16": {"torch": factor * 1.03 * ratio}}, {(8, 64): 1}, SIMPLE)
        assert choice and choice.dtype == expected and choice.recipe(8, 64).method == "gram"


def test_the_methods_of_one_choice_follow_from_their_operations() -> None:
    choice = fastest({"bf16": {"torch": 1.0, "C++": 2.0}}, {(8, 8): 2, (8, 64): 1}, SIMPLE)
    assert choice == by_count([(8, 8), (8, 64)], SIMPLE, "bf16", table="C++")
    assert fastest({}, {(8, 8): 1}, SIMPLE) is None and fastest({"fp32": {}}, {(8, 8): 1}, SIMPLE) is None


def test_a_recipe_names_its_tables() -> None:
    """As older checkpoints have them."""
    assert str(Recipe("gram", "torch", "C++", "torch")) == "gram with C++ and torch"
    assert str(Recipe("standard", "C++", "C++", "C++")) == "standard with C++"


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_that_emulates_bf16_does_not_take_it_unasked(
    native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V100 and T4, for which torch and DeepSpeed's accelerator say that they support it, by emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    gpu, tables = torch.device("cuda"), {"torch": reference.OPERATIONS}
    of = {
        dtype: Candidates.of(parse({"ns_dtype": dtype}), tables, {"auto"}, gpu, has_bf16("cuda", supported=True))
        for dtype in ("auto", "bf16")
    }
    assert of["auto"].without_race({(8, 32): 1}).choice.dtype == expected
    assert of["bf16"].dtypes == ("bf16",), "unless it is asked for"


def test_the_log_says_how_to_keep_the_dtype_of_a_race() -> None:
    rates: Rates = {"fp16": {"torch": 1.0}}
    raced = Tuning(choose(rates), rates)
    line = raced.described(raced.choice)
    (pinned,) = re.findall(r'"ns_dtype": "\w+"', line)
    assert parse(json.loads("{" + pinned + "}")).ns_dtype == raced.choice.dtype
    assert "ns_dtype" not in Tuning(raced.choice).described(raced.choice), "a count ends the same each time"


def test_the_slowest_rank_counts() -> None:
    ranks: list[Rates] = [
        {"fp32": {"torch": 1.0, "C++": 3.0}, "bf16": {"torch": 9.0}},
        {"fp32": {"torch": 2.0, "C++": 0.5}, "bf16": {}},
    ]
    assert lowest(ranks) == {"fp32": {"torch": 1.0, "C++": 0.5}, "bf16": {}}, "what one rank cannot do, no rank does"
    assert lowest(ranks[::-1]) == lowest(ranks), "whoever is slow"
    assert lowest(ranks[:1]) == ranks[0]


@pytest.mark.parametrize("left", ["fp32", "bf16"])
def test_ranks_that_raced_in_no_common_dtype_take_the_default(left: str) -> None:
    """What raises or errs on one of them is missing there."""
    found = lowest([{left: {"torch": 1.0}}, {"fp16": {"torch": 1.0}}])
    candidates = Candidates(("fp32", "bf16"), METHODS, {"torch": reference.OPERATIONS}, SIMPLE, torch.device("cpu"))
    tuning = candidates.choose({(8, 32): 3}, world_size=1, races=True, slowest=lambda measure: found)
    assert tuning == candidates.without_race({(8, 32): 3}) and tuning.choice.dtype == "fp32" and not tuning.rates


# ---- a choice and its checkpoint --------------------------------------------------------------------------


def test_a_choice_is_kept_as_json() -> None:
    choice = by_count([(8, 8), (8, 32)], SIMPLE, "fp16", table="C++")
    assert from_pinned(choice.pinned()) == choice
    assert unknown(choice.pinned()) == []
    assert choice.with_methods({"8x8": "gram", "9x9": "gram"}).recipe(8, 8) == Recipe("gram", *("C++",) * 3)


def test_what_is_unknown_is_named() -> None:
    pinned = by_count([(8, 8)], SIMPLE, "fp16").pinned()
    assert unknown(pinned | {"dtype": "fp8"}) == ["'fp8'"]
    pinned["shapes"]["8x8"]["method"] = "quintic"
    assert unknown(pinned) == ["'quintic' for 8x8"]
    for wrong in ([], {"dtype": "fp32"}, {"dtype": "fp32", "shapes": {"8x8": {"way": "gram"}}}):
        assert unknown(wrong) == [repr(wrong)]
    assert unknown_methods({"8x16": "gram", "9x9": "quintic"}) == ["'quintic' for 9x9"]
    assert unknown_methods(["gram"]) == ["['gram']"]


def test_seconds_of_a_choice() -> None:
    """Operations over the rate, also of an older choice with several tables."""
    rates: Rates = {"fp32": {"torch": 1.0, "C++": 2.0}}
    shapes = {(8, 32): 3, (8, 8): 1}
    operations = 3 * flops(8, 32, SIMPLE, "standard", "fp32") + flops(8, 8, SIMPLE, "standard", "fp32")
    for table, rate in rates["fp32"].items():
        choice = by_count(shapes, SIMPLE, "fp32", ["standard"], table)
        assert seconds(rates, choice, shapes, SIMPLE) == pytest.approx(operations / rate)
    mixed = Choice("fp32", {key: Recipe("standard", "torch", "C++", "C++") for key in ("8x8", "8x32")})
    taken = seconds(rates, mixed, shapes, SIMPLE)
    assert taken and operations / 2 < taken < operations
    assert seconds(rates, by_count(shapes, SIMPLE, "bf16"), shapes, SIMPLE) is None
    assert seconds(rates, by_count(shapes, SIMPLE, "fp32", table="triton"), shapes, SIMPLE) is None
    assert shape_key(32, 8) == shape_key(8, 32) == "8x32"
