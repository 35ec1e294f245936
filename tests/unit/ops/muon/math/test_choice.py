# SPDX-License-Identifier: Apache-2.0
"""What follows from the times of a race, and from a count of operations where there was none."""

import itertools
import json
import re
from typing import Any

import pytest
import torch

from deepspeed.muon.config.schema import parse
from deepspeed.muon.kernels import reference
from deepspeed.muon.math.choice import (
    Choice,
    Recipe,
    Times,
    by_count,
    counted_method,
    fastest,
    from_pinned,
    seconds,
    shape_key,
    slowest,
    unknown,
    unknown_methods,
)
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import METHODS, flops, products
from deepspeed.muon.tuning import Candidates, Tuning, described, has_bf16

SIMPLE = schedule("simple")
KINDS = ("square", "product", "multiply")


def times(**by_dtype: dict[str, float]) -> Times:
    """Of one shape, 8 x 32: by dtype and table, the seconds of each product."""
    return {dtype: {"8x32": {kind: dict(tables) for kind in KINDS}} for dtype, tables in by_dtype.items()}


def choose(found: Times, **kwargs: Any) -> Choice:
    return fastest(found, {(8, 32): 3}, SIMPLE, **kwargs)


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
    ("found", "dtype", "table"),
    [
        (times(fp32={"torch": 1.0, "C++": 0.5}, bf16={"torch": 0.8, "C++": 0.6}), "fp32", "C++"),
        (times(fp32={"torch": 1.0, "C++": 0.5}, bf16={"torch": 0.4, "C++": 0.9}), "bf16", "torch"),
        (times(fp32={"torch": 1.0}, fp16={"torch": 0.98}, bf16={"torch": 0.99}), "fp32", "torch"),
        (times(fp32={"torch": 1.0, "C++": 0.98}), "fp32", "torch"),
        (times(fp32={"torch": 1.0}, fp16={"torch": 0.5}, bf16={"torch": 0.49}), "fp16", "torch"),
    ],
)
def test_what_is_not_usual_must_be_clearly_faster(found: Times, dtype: str, table: str) -> None:
    choice = choose(found)
    assert choice.dtype == dtype
    recipe = choice.recipe(32, 8)
    assert (recipe.square, recipe.product, recipe.multiply) == (table,) * 3


def test_each_product_has_its_own_table() -> None:
    found = times(fp32={"torch": 1.0, "C++": 1.0})
    found["fp32"]["8x32"]["product"]["C++"] = 0.1
    assert choose(found).recipe(8, 32) == Recipe("gram", "torch", "C++", "torch")
    assert str(choose(found).recipe(8, 32)) == "gram with C++ for product, torch for square and multiply"
    assert str(Recipe("standard", "C++", "C++", "C++")) == "standard with C++"


def test_the_method_is_that_of_the_least_time() -> None:
    """Against the sum over all products by hand, for random times."""
    values = itertools.cycle([0.3, 1.7, 0.9, 5.0, 0.11])
    for _ in range(20):
        kinds = {kind: next(values) * next(values) for kind in KINDS}
        found: Times = {"bf16": {"8x32": {kind: {"torch": value} for kind, value in kinds.items()}}}
        cost = {
            method: sum(kinds[kind] * count for kind, count in products(SIMPLE, method, "bf16")._asdict().items())
            for method in METHODS
        }
        method = choose(found).recipe(8, 32).method
        assert cost[method] <= 1.03 * min(cost.values())
        assert choose(found, methods=["standard"]).recipe(8, 32).method == "standard"


def test_all_matrices_count_with_their_number() -> None:
    """One shape would rather have bf16, the other is more numerous."""
    found: Times = {
        "fp32": {key: {kind: {"torch": 1.0} for kind in KINDS} for key in ("4x4", "8x32")},
        "bf16": {
            "4x4": {kind: {"torch": 0.2} for kind in KINDS},
            "8x32": {kind: {"torch": 2.0} for kind in KINDS},
        },
    }
    assert fastest(found, {(4, 4): 1, (8, 32): 1}, SIMPLE).dtype == "fp32"
    assert fastest(found, {(4, 4): 9, (8, 32): 1}, SIMPLE).dtype == "bf16"


def test_a_shape_without_times_goes_as_its_neighbour() -> None:
    found = times(fp32={"torch": 1.0, "C++": 0.5})
    found["fp32"]["8x8"] = {kind: {"torch": 1.0} for kind in KINDS}
    choice = fastest(found, {(8, 32): 1, (8, 8): 1, (16, 16): 4, (30, 7): 2}, SIMPLE)
    assert choice.recipe(16, 16) == choice.recipe(8, 8) != choice.recipe(8, 32) == choice.recipe(7, 30)


def test_a_dtype_that_left_the_race_is_not_chosen() -> None:
    found = times(fp32={"torch": 1.0}, bf16={"torch": 0.1})
    found["fp32"]["8x8"] = {kind: {"torch": 1.0} for kind in KINDS}
    assert fastest(found, {(8, 32): 1, (8, 8): 1}, SIMPLE).dtype == "fp32"
    del found["fp32"]["8x8"]["square"]["torch"]
    assert fastest(found, {(8, 32): 1, (8, 8): 1}, SIMPLE).dtype == "bf16"


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
    raced = Tuning(choose(times(fp16={"torch": 1.0})), times(fp16={"torch": 1.0}))
    line = described(raced.choice, raced)
    (pinned,) = re.findall(r'"ns_dtype": "\w+"', line)
    assert parse(json.loads("{" + pinned + "}")).ns_dtype == raced.choice.dtype
    assert "ns_dtype" not in described(raced.choice, Tuning(raced.choice)), "a count ends the same each time"


def test_the_slowest_rank_counts() -> None:
    ranks = [times(fp32={"torch": 1.0, "C++": 3.0}, bf16={"torch": 0.1}), times(fp32={"torch": 2.0, "C++": 0.5})]
    ranks[1]["bf16"] = {"8x32": {kind: {} for kind in KINDS}}
    found = slowest(ranks)
    assert found["fp32"]["8x32"]["square"] == {"torch": 2.0, "C++": 3.0}
    assert found["bf16"]["8x32"]["square"] == {}, "what one rank cannot do, no rank does"
    assert choose(found) == choose(slowest(ranks[::-1])), "whoever is slow"
    assert slowest(ranks[:1]) == ranks[0]


@pytest.mark.parametrize("left", [{"fp32": {"torch": 1.0}}, {"bf16": {"torch": 1.0}}], ids=str)
def test_ranks_that_raced_in_no_common_dtype_take_the_usual_one(left: Any) -> None:
    """What raises or errs on one of them is missing there."""
    found = slowest([times(**left), times(fp16={"torch": 1.0})])
    candidates = Candidates(("fp32", "bf16"), METHODS, {"torch": reference.OPERATIONS}, SIMPLE, torch.device("cpu"))
    tuning = candidates.after_race({(8, 32): 3}, found)
    assert tuning == candidates.without_race({(8, 32): 3}) and tuning.choice.dtype == "fp32" and not tuning.times


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
    found = times(fp32={"torch": 1.0, "C++": 0.5})
    choice = choose(found)
    count = products(SIMPLE, choice.recipe(8, 32).method, "fp32")
    assert seconds(found, choice, {(8, 32): 3}, SIMPLE) == 3 * 0.5 * sum(count)
    assert seconds(found, by_count([(8, 32)], SIMPLE, "bf16"), {(8, 32): 3}, SIMPLE) is None
    assert seconds(found, by_count([(8, 32)], SIMPLE, "fp32", table="triton"), {(8, 32): 3}, SIMPLE) is None
    assert shape_key(32, 8) == shape_key(8, 32) == "8x32"
