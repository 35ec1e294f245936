# SPDX-License-Identifier: Apache-2.0
"""The race: what is timed, within which bounds, and what leaves it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import tuning as module
from deepspeed.muon.kernels.reference import OPERATIONS
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.choice import Rates
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.tuning import race

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
        """Tables of these names on this clock."""
        return {name: self.table(name) for name in names}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One 8 x 16 matrix in the trial, eight times as large a one in the race."""
    monkeypatch.setattr(module, "TRIAL_OPERATIONS", 2 * 8 * 8 * (32 + 8))
    monkeypatch.setattr(module, "CPU_OPERATIONS", 2 * 16 * 16 * (64 + 16) / torch.get_num_threads())


def raced(time: Time, tables: Mapping[str, Operations], dtypes: tuple[str, ...] = ("fp32",)) -> Rates:
    return race({(64, 128): 3}, 1, dtypes, tables, CPU, clock=time)


def test_a_rate_is_operations_per_second_of_a_smaller_matrix_of_the_same_aspect_ratio() -> None:
    time = Time(lambda name, x: 1.0)
    rates = raced(time, time.tables("torch"))
    assert {shape for _, kind, _, shape in time.calls if kind == "multiply"} == {(1, 8, 16), (1, 16, 32)}
    assert rates == {"fp32": {"torch": 2 * 16 * 16 * (64 + 16) / 3.0}}


def test_small_matrices_are_timed_in_a_batch_of_those_that_a_rank_has() -> None:
    time = Time(lambda name, x: 1.0)
    race({(4, 4): 6}, 2, ["fp32"], time.tables("torch"), CPU, clock=time)
    assert {shape for *_, shape in time.calls} == {(3, 4, 4)}
    race({(64, 16): 1}, 1, ["fp32"], time.tables("torch"), CPU, clock=time)
    assert time.calls[-1][-1] == (1, 8, 32), "a tall matrix is timed as its transpose"


def test_the_shortest_run_counts_and_the_first_never() -> None:
    waits = iter([9.0] + [0.003] * 4 + [9.0, 0.003, 0.001, 0.002, 0.002, 0.002])
    operations = 2 * 16 * 16 * (64 + 16)
    time = Time(lambda name, x: 0.0)

    def slow(*args: Any) -> Any:
        time.now += next(waits)
        return OPERATIONS.multiply(*args)

    rates = raced(time, {"torch": dataclasses.replace(OPERATIONS, multiply=slow)})
    assert rates["fp32"]["torch"] == pytest.approx(operations / 0.001)


def test_what_takes_long_is_timed_once() -> None:
    """On a loaded machine whatever runs in several threads waits for a core; a start must not."""
    time = Time(lambda name, x: 0.06)
    raced(time, time.tables("torch"))
    assert [kind for _, kind, *_ in time.calls].count("multiply") == 2 * 2, "once before, to compare its result"


def test_candidates_take_turns() -> None:
    time = Time(lambda name, x: 0.001)
    raced(time, time.tables("torch", "C++"))
    names = [name for name, kind, _, shape in time.calls if kind == "multiply" and shape == (1, 16, 32)]
    assert names == ["torch", "C++"] * (len(names) // 2)


def test_a_dtype_that_is_only_emulated_does_not_enter() -> None:
    """By its rate with the table that is fastest in it."""
    speed = {torch.float32: 1.0, torch.float16: 50.0, torch.bfloat16: 1.5}
    time = Time(lambda name, x: speed[x.dtype] * (4.0 if name == "torch" else 1.0))
    rates = raced(time, time.tables("torch", "C++"), tuple(DTYPES))
    assert {dtype: set(tables) for dtype, tables in rates.items()} == {"fp32": {"C++"}, "fp16": set(), "bf16": {"C++"}}
    assert raced(time, time.tables("torch"), ("fp16",))["fp16"], "unless it is the only one"


def test_an_accelerator_compiles_for_no_dtype_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may take a minute per dtype: plain PyTorch's products tell which dtypes are worth it."""
    monkeypatch.setattr(module, "OPERATIONS", 2 * 16 * 16 * (64 + 16))
    matrices = module._matrices
    monkeypatch.setattr(module, "_matrices", lambda shape, count, limit, device: matrices(shape, count, limit, CPU))
    speed = {torch.float32: 10.0, torch.float16: 1.0, torch.bfloat16: 1.0}
    time = Time(lambda name, x: speed[x.dtype] * (0.5 if name == "triton" else 1.0))
    rates = race({(64, 128): 1}, 1, tuple(DTYPES), time.tables("torch", "triton"), torch.device("meta"), clock=time)
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
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_a_dtype_that_raises_does_not_enter(said: list[str]) -> None:
    def multiply(gram: Any, x: Tensor, *rest: Any) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("no such instruction")
        return OPERATIONS.multiply(gram, x, *rest)

    time = Time(lambda name, x: 0.0)
    rates = raced(Time(lambda name, x: 0.0), {"torch": dataclasses.replace(OPERATIONS, multiply=multiply)}, ("fp16",))
    assert rates == {"fp16": {}} and time.calls == []
    assert said == ["deepspeed-muon: the kernels of torch fail in fp16 and are not used: no such instruction"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_errs_in_any_product_leaves_the_race(kind: str, said: list[str]) -> None:
    def wrong(*args: Any) -> Any:
        found = getattr(OPERATIONS, kind)(*args)
        (args[2] if kind == "multiply" else args[-2 if kind == "square" else 2].rest).mul_(1.01)
        return found

    tables = {"torch": OPERATIONS, "wrong": dataclasses.replace(OPERATIONS, **{kind: wrong})}
    assert set(race({(8, 16): 2}, 1, ["fp32"], tables, CPU)["fp32"]) == {"torch"}
    assert len(said) == 1 and "the kernels of wrong fail in fp32 and are not used: relative error" in said[0]


def test_no_dtype_means_no_rates() -> None:
    assert race({(8, 8): 1}, 1, [], {"torch": OPERATIONS}, CPU) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_race_leaves_torchs_generator_alone(dtype: str) -> None:
    state = torch.get_rng_state()
    rates = race({(4, 8): 2}, 1, [dtype], {"torch": OPERATIONS}, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert rates[dtype]["torch"] > 0


def test_autocast_of_the_script_makes_no_kernel_wrong(said: list[str]) -> None:
    """The products that results are compared with would be rounded to bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert race({(4, 8): 2}, 1, ["fp32"], {"torch": OPERATIONS}, CPU)["fp32"] and not said


def test_the_shape_with_most_operations_in_all_is_timed() -> None:
    for shapes, taken in (({(4, 4): 1, (1, 1): 50, (2, 2): 5}, (1, 4, 4)), ({(4, 4): 1, (2, 2): 9}, (9, 2, 2))):
        time = Time(lambda name, x: 1.0)
        race(shapes, 1, ["fp32"], time.tables("torch"), CPU, clock=time)
        assert {shape for *_, shape in time.calls} >= {taken}
