# SPDX-License-Identifier: Apache-2.0
"""A race: what is timed, within which bounds, what leaves it. The choice by its times, or by a count of operations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import tuning
from deepspeed.muon.config.schema import parse
from deepspeed.muon.kernels.reference import OPERATIONS
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.choice import (
    Choice,
    Rates,
    Recipe,
    choice_from_json,
    counted_method,
    fastest_choice,
    fewest_operations,
    lowest_rates,
    predicted_seconds,
    shape_key,
    unknown_in_choice,
    unknown_methods,
)
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, flops
from deepspeed.muon.tuning import Candidates, has_bf16, measure_rates

SIMPLE = schedule("simple")


# ---- without a race -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_count_of_operations_decides(dtype: str) -> None:
    shapes = [(8, 8), (8, 32), (48, 8), (5, 6), (64, 8)]
    choice = fewest_operations(shapes, SIMPLE, dtype, table="C++")
    assert choice.dtype == dtype and choice.tables == {"C++"}
    for rows, cols in shapes:
        cost = {method: flops(rows, cols, SIMPLE, method, dtype) for method in METHODS}
        method = choice.recipe(rows, cols).method
        assert cost[method] <= 1.03 * min(cost.values())
        assert choice.recipe(cols, rows) == choice.recipe(rows, cols)
        assert counted_method(rows, cols, "auto", SIMPLE, dtype) == method
        assert all(counted_method(rows, cols, fixed, SIMPLE, dtype) == fixed for fixed in METHODS)
    assert choice.recipe(8, 8).method == "standard" and choice.recipe(64, 8).method == "gram"
    assert fewest_operations(shapes, SIMPLE, dtype, ["gram"]).recipe(8, 8).method == "gram"


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
    choice = fastest_choice(rates, {(8, 32): 3}, SIMPLE, methods=["standard"])
    assert choice == fewest_operations([(8, 32)], SIMPLE, dtype, ["standard"], table)
    shapes = {(8, 8): 2, (8, 64): 1}
    assert fastest_choice({dtype: {table: 1.0}}, shapes, SIMPLE) == fewest_operations(
        shapes, SIMPLE, dtype, table=table
    )
    assert fastest_choice({}, shapes, SIMPLE) is None and fastest_choice({dtype: {}}, shapes, SIMPLE) is None


def test_a_dtype_that_needs_more_operations_must_be_faster_by_so_much() -> None:
    """Gram Newton-Schulz restarts at other steps in bf16 than in fp32."""
    ratio = flops(8, 64, SIMPLE, "gram", "bf16") / flops(8, 64, SIMPLE, "gram", "fp32")
    assert abs(ratio - 1) > 0.1
    for factor, expected in ((0.9, "fp32"), (1.1, "bf16")):
        choice = fastest_choice(
            {"fp32": {"torch": 1.0}, "bf16": {"torch": factor * 1.03 * ratio}}, {(8, 64): 1}, SIMPLE
        )
        assert choice and choice.dtype == expected and choice.recipe(8, 64).method == "gram"


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_that_emulates_bf16_does_not_take_it_unasked(
    native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V100 and T4, for which torch and DeepSpeed's accelerator say that they support it, by emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    gpu, tables = torch.device("cuda"), {"torch": OPERATIONS}
    of = {
        dtype: Candidates.from_config(
            parse({"ns_dtype": dtype}), tables, {"auto"}, gpu, has_bf16("cuda", supported=True)
        )
        for dtype in ("auto", "bf16")
    }
    assert of["auto"].choose_untimed({(8, 32): 1}).choice.dtype == expected
    assert of["bf16"].dtypes == ("bf16",), "unless it is asked for"


def test_the_slowest_rank_counts() -> None:
    """What one rank cannot do, no rank does; those that raced in no common dtype take the default."""
    ranks: list[Rates] = [
        {"fp32": {"torch": 1.0, "C++": 3.0}, "bf16": {"torch": 9.0}},
        {"fp32": {"torch": 2.0, "C++": 0.5}, "bf16": {}},
    ]
    assert lowest_rates(ranks) == lowest_rates(ranks[::-1]) == {"fp32": {"torch": 1.0, "C++": 0.5}, "bf16": {}}
    assert lowest_rates(ranks[:1]) == ranks[0]
    candidates = Candidates(("fp32", "bf16"), METHODS, {"torch": OPERATIONS}, SIMPLE, torch.device("cpu"))
    for left in ("fp32", "bf16"):
        found = lowest_rates([{left: {"torch": 1.0}}, {"fp16": {"torch": 1.0}}])
        chosen = candidates.choose(
            {(8, 32): 3}, world_size=1, may_time=True, slowest=lambda measure, found=found: found
        )
        assert chosen == candidates.choose_untimed({(8, 32): 3}) and chosen.choice.dtype == "fp32" and not chosen.rates


# ---- a choice and its checkpoint --------------------------------------------------------------------------


def test_a_choice_is_kept_as_json() -> None:
    choice = fewest_operations([(8, 8), (8, 32)], SIMPLE, "fp16", table="C++")
    assert choice_from_json(choice.as_json()) == choice
    assert unknown_in_choice(choice.as_json()) == []
    assert str(Recipe("gram", "torch", "C++", "torch")) == "gram with C++ and torch", "as older checkpoints have them"


def test_what_is_unknown_is_named() -> None:
    pinned = fewest_operations([(8, 8)], SIMPLE, "fp16").as_json()
    assert unknown_in_choice(pinned | {"dtype": "fp8"}) == ["'fp8'"]
    pinned["shapes"]["8x8"]["method"] = "quintic"
    assert unknown_in_choice(pinned) == ["'quintic' for 8x8"]
    for wrong in ([], {"dtype": "fp32"}, {"dtype": "fp32", "shapes": {"8x8": {"way": "gram"}}}):
        assert unknown_in_choice(wrong) == [repr(wrong)]
    assert unknown_methods({"8x16": "gram", "9x9": "quintic"}) == ["'quintic' for 9x9"]
    assert unknown_methods(["gram"]) == ["['gram']"]


def test_seconds_of_a_choice() -> None:
    """Operations over the rate, also of an older choice with several tables."""
    rates: Rates = {"fp32": {"torch": 1.0, "C++": 2.0}}
    shapes = {(8, 32): 3, (8, 8): 1}
    operations = 3 * flops(8, 32, SIMPLE, "standard", "fp32") + flops(8, 8, SIMPLE, "standard", "fp32")
    for dtype, table, taken in (
        ("fp32", "torch", pytest.approx(operations)),
        ("fp32", "C++", pytest.approx(operations / 2)),
        ("bf16", "torch", None),
        ("fp32", "triton", None),
    ):
        assert (
            predicted_seconds(rates, fewest_operations(shapes, SIMPLE, dtype, ["standard"], table), shapes, SIMPLE)
            == taken
        )
    mixed = Choice("fp32", {key: Recipe("standard", "torch", "C++", "C++") for key in ("8x8", "8x32")})
    taken = predicted_seconds(rates, mixed, shapes, SIMPLE)
    assert taken and operations / 2 < taken < operations
    assert shape_key(32, 8) == shape_key(8, 32) == "8x32"


# ---- the race -------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
KINDS = ("square", "product", "multiply")


class Time:
    """A clock that advances only while a product runs, by as much as the test sets."""

    def __init__(self, seconds: Callable[[str, Tensor], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.calls: list[tuple[str, str, torch.dtype, tuple[int, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def table(self, name: str) -> Operations:
        """Plain operations on this clock."""

        def timed(kind: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                x = next(arg for arg in args if isinstance(arg, Tensor)) if kind != "product" else args[0].rest
                self.now += self.seconds(name, x)
                self.calls.append((name, kind, x.dtype, tuple(x.shape)))
                return getattr(OPERATIONS, kind)(*args)

            return run

        return dataclasses.replace(OPERATIONS, **{kind: timed(kind) for kind in KINDS})

    def tables(self, *names: str) -> dict[str, Operations]:
        return {name: self.table(name) for name in names}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One 8 x 16 matrix in the trial, eight times as large a one in the race."""
    monkeypatch.setattr(tuning, "TRIAL_OPERATIONS", 2 * 8 * 8 * (32 + 8))
    monkeypatch.setattr(tuning, "CPU_OPERATIONS", 2 * 16 * 16 * (64 + 16) / torch.get_num_threads())


def raced(time: Time, tables: Mapping[str, Operations], dtypes: tuple[str, ...] = ("fp32",)) -> Rates:
    return measure_rates({(64, 128): 3}, 1, dtypes, tables, CPU, clock=time)


def test_what_is_timed_and_how_it_counts() -> None:
    """A smaller matrix of the same aspect ratio; small ones in a batch of those that a rank has; tall ones transposed.

    Of several shapes, that with most operations in all.
    """
    time = Time(lambda name, x: 1.0)
    assert raced(time, time.tables("torch")) == {"fp32": {"torch": 2 * 16 * 16 * (64 + 16) / 3.0}}
    assert {shape for _, kind, _, shape in time.calls if kind == "multiply"} == {(1, 8, 16), (1, 16, 32)}
    for shapes, ranks, taken in (
        ({(4, 4): 6}, 2, (3, 4, 4)),
        ({(64, 16): 1}, 1, (1, 8, 32)),
        ({(4, 4): 1, (1, 1): 50, (2, 2): 5}, 1, (1, 4, 4)),
        ({(4, 4): 1, (2, 2): 9}, 1, (9, 2, 2)),
    ):
        time.calls.clear()
        measure_rates(shapes, ranks, ["fp32"], time.tables("torch"), CPU, clock=time)
        assert time.calls[-1][-1] == taken
    assert measure_rates({(8, 8): 1}, 1, [], {"torch": OPERATIONS}, CPU) == {}


def test_the_shortest_run_counts_and_the_first_never() -> None:
    waits, time = iter([9.0] + [0.003] * 4 + [9.0, 0.003, 0.001, 0.002, 0.002, 0.002]), Time(lambda name, x: 0.0)

    def slow(*args: Any) -> Any:
        time.now += next(waits)
        return OPERATIONS.multiply(*args)

    rates = raced(time, {"torch": dataclasses.replace(OPERATIONS, multiply=slow)})
    assert rates["fp32"]["torch"] == pytest.approx(2 * 16 * 16 * (64 + 16) / 0.001)


def test_candidates_take_turns_and_what_takes_long_is_timed_once() -> None:
    """On a loaded machine whatever runs in several threads waits for a core; a start must not."""
    for duration, times in ((0.001, range(4, 99)), (0.06, [1])):
        time = Time(lambda name, x, duration=duration: duration)
        raced(time, time.tables("torch", "C++"))
        names = [name for name, kind, _, shape in time.calls if kind == "multiply" and shape == (1, 16, 32)]
        assert names == ["torch", "C++"] * (len(names) // 2) and len(names) // 2 - 1 in times


def test_a_dtype_that_is_only_emulated_does_not_enter() -> None:
    """By its rate with the table that is fastest in it."""
    speed = {torch.float32: 1.0, torch.float16: 50.0, torch.bfloat16: 1.5}
    time = Time(lambda name, x: speed[x.dtype] * (4.0 if name == "torch" else 1.0))
    rates = raced(time, time.tables("torch", "C++"), tuple(DTYPES))
    assert {dtype: set(tables) for dtype, tables in rates.items()} == {"fp32": {"C++"}, "fp16": set(), "bf16": {"C++"}}
    assert raced(time, time.tables("torch"), ("fp16",))["fp16"], "unless it is the only one"


def test_an_accelerator_compiles_for_no_dtype_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may take a minute per dtype: plain PyTorch's products tell which dtypes are worth it."""
    monkeypatch.setattr(tuning, "OPERATIONS", 2 * 16 * 16 * (64 + 16))
    matrices = tuning._matrices
    monkeypatch.setattr(tuning, "_matrices", lambda shape, count, limit, device: matrices(shape, count, limit, CPU))
    speed = {torch.float32: 10.0, torch.float16: 1.0, torch.bfloat16: 1.0}
    time = Time(lambda name, x: speed[x.dtype] * (0.5 if name == "triton" else 1.0))
    rates = measure_rates(
        {(64, 128): 1}, 1, tuple(DTYPES), time.tables("torch", "triton"), torch.device("meta"), clock=time
    )
    assert {dtype: set(tables) for dtype, tables in rates.items()} == {
        "fp32": set(),
        "fp16": {"torch", "triton"},
        "bf16": {"torch", "triton"},
    }
    assert not any(name == "triton" and dtype == torch.float32 for name, _, dtype, _ in time.calls)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the race warns of."""
    lines: list[str] = []
    monkeypatch.setattr(tuning.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_a_dtype_that_raises_does_not_enter(said: list[str]) -> None:
    def multiply(gram: Any, x: Tensor, *rest: Any) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("no such instruction")
        return OPERATIONS.multiply(gram, x, *rest)

    tables = {"torch": dataclasses.replace(OPERATIONS, multiply=multiply)}
    assert raced(Time(lambda name, x: 0.0), tables, ("fp16",)) == {"fp16": {}}
    assert said == [
        "deepspeed-muon: the Newton-Schulz kernels of torch fail in dtype fp16 and are not used: no such instruction"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_errs_in_any_product_leaves_the_race(kind: str, said: list[str]) -> None:
    def wrong(*args: Any) -> Any:
        found = getattr(OPERATIONS, kind)(*args)
        (args[2] if kind == "multiply" else args[-2 if kind == "square" else 2].rest).mul_(1.01)
        return found

    tables = {"torch": OPERATIONS, "wrong": dataclasses.replace(OPERATIONS, **{kind: wrong})}
    assert set(measure_rates({(8, 16): 2}, 1, ["fp32"], tables, CPU)["fp32"]) == {"torch"}
    assert (
        len(said) == 1
        and "Newton-Schulz kernels of wrong fail in dtype fp32 and are not used: an iteration's result differs"
        in said[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_race_neither_draws_random_numbers_nor_minds_autocast(dtype: str, said: list[str]) -> None:
    """Under autocast the products that results are compared with would be rounded to bf16."""
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rates = measure_rates({(4, 8): 2}, 1, [dtype], {"torch": OPERATIONS}, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert rates[dtype]["torch"] > 0 and not said
