# SPDX-License-Identifier: Apache-2.0
"""The race: what is timed, within which bounds, and what leaves it."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import OPERATIONS
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math import race as module
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.math.race import fast_enough, probe, race

CPU = torch.device("cpu")
KINDS = ("square", "product", "multiply")


class Time:
    """A clock that stands still except while a product runs, for as long as it is told."""

    def __init__(self, seconds: Callable[[str, Tensor], float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.calls: list[tuple[str, str, tuple[int, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def table(self, name: str) -> Operations:
        """Plain operations on this clock."""

        def timed(kind: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                x = next(arg for arg in args if isinstance(arg, Tensor)) if kind != "product" else args[0].rest
                self.now += self.seconds(name, x)
                self.calls.append((name, kind, tuple(x.shape)))
                return getattr(OPERATIONS, kind)(*args)

            return run

        return dataclasses.replace(OPERATIONS, **{kind: timed(kind) for kind in KINDS})


def hold(shapes: dict[tuple[int, int], int], time: Time, **kwargs: Any) -> Any:
    return race(shapes, ["fp32"], {"torch": time.table("torch")}, CPU, clock=time, **kwargs)


def test_times_are_seconds_per_matrix_of_the_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix is timed on a small one of its aspect ratio, small ones in a batch."""
    monkeypatch.setattr(module, "CPU_OPERATIONS", 2 * 16 * 16 * 64 / torch.get_num_threads())
    time = Time(lambda name, x: 1.0)
    found = hold({(64, 256): 5, (8, 8): 3}, time, seconds=1e9)["fp32"]
    assert {shape for _, kind, shape in time.calls if kind == "multiply"} == {(1, 16, 64), (3, 8, 8)}
    assert found["64x256"]["square"] == {"torch": 4.0**3} == found["64x256"]["multiply"]
    assert {shape for _, kind, shape in time.calls if kind == "product"} == {(4, 16, 16), (3, 8, 8)}
    assert found["8x8"] == {kind: {"torch": pytest.approx(1 / 3)} for kind in KINDS}


def test_no_shape_is_begun_when_the_time_is_over() -> None:
    """The most expensive ones come first, and one is always timed."""
    time = Time(lambda name, x: 0.01)
    shapes = {(8, 8): 1, (32, 32): 1, (16, 16): 1}
    assert list(hold(shapes, time, seconds=0.0)["fp32"]) == ["32x32"]
    assert list(hold(shapes, Time(time.seconds), seconds=0.12)["fp32"]) == ["32x32", "16x16"]
    assert list(hold(shapes, Time(time.seconds), seconds=9.0)["fp32"]) == ["32x32", "16x16", "8x8"]


def test_compilation_takes_nothing_of_the_time_of_a_race() -> None:
    """So the first start on a machine times the shapes that later ones time."""
    time, compiled = Time(lambda name, x: 0.0), set[Any]()

    def tuned(kind: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            key = kind, (args[0].rest if kind != "square" else args[0]).shape
            time.now += 0.001 if key in compiled else 60.0
            compiled.add(key)
            return getattr(OPERATIONS, kind)(*args)

        return run

    tables = {"torch": OPERATIONS, "tuned": dataclasses.replace(OPERATIONS, **{kind: tuned(kind) for kind in KINDS})}
    shapes = {(8, 8): 1, (32, 32): 1, (16, 16): 1}
    assert list(race(shapes, ["fp32"], tables, CPU, seconds=0.05, clock=time)["fp32"]) == ["32x32", "16x16", "8x8"]
    assert len(compiled) == 9


def test_the_shortest_run_counts_and_the_first_never() -> None:
    waits = {"square": iter([9.0, 0.03, 0.01, 0.02]), "multiply": iter([9.0, 0.02, 0.02, 0.01])}
    time = Time(lambda name, x: 0.0)
    square, multiply = OPERATIONS.square, OPERATIONS.multiply

    def slow(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.now += next(waits[kind], 7.0)
            return original(*args)

        return run

    table = dataclasses.replace(OPERATIONS, square=slow("square", square), multiply=slow("multiply", multiply))
    found = race({(8, 8): 1}, ["fp32"], {"torch": table}, CPU, clock=time)["fp32"]["8x8"]
    assert found["square"] == {"torch": pytest.approx(0.01)} and found["multiply"] == {"torch": pytest.approx(0.01)}


def test_a_product_that_takes_long_is_timed_once() -> None:
    """On a loaded machine whatever runs in several threads waits for a core; a start must not."""
    time = Time(lambda name, x: 0.06)
    hold({(8, 8): 1}, time)
    assert [kind for _, kind, _ in time.calls].count("multiply") == 2, "once before, to compare its result"


def test_the_probe_is_no_larger_than_the_model() -> None:
    time = Time(lambda name, x: 1.0)
    probe(DTYPES, {"torch": time.table("torch")}, CPU, time, largest=24)
    assert {shape for *_, shape in time.calls} == {(1, 24, 24)}


def probed(dtypes: Collection[str], speed: dict[torch.dtype, float]) -> dict[str, float]:
    time = Time(lambda name, x: speed[x.dtype])
    return probe(dtypes, {"torch": time.table("torch"), "other": OPERATIONS}, CPU, time)


def test_a_dtype_that_is_only_emulated_does_not_enter() -> None:
    speed = {torch.float32: 1.0, torch.float16: 50.0, torch.bfloat16: 1.5}
    found = probed(DTYPES, speed)
    assert found == {"fp32": 1.0, "fp16": 50.0, "bf16": 1.5} and fast_enough([found]) == ["fp32", "bf16"]
    assert fast_enough([probed(["fp16"], speed)]) == ["fp16"], "unless it is the only one"


def test_a_dtype_that_raises_does_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: said.append(text % args))

    def multiply(gram: Any, x: Tensor, *rest: Any) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("no such instruction")
        return OPERATIONS.multiply(gram, x, *rest)

    found = probe(DTYPES, {"torch": dataclasses.replace(OPERATIONS, multiply=multiply)}, CPU)
    assert list(found) == ["fp32", "bf16"] and min(found.values()) > 0
    assert said == ["deepspeed-muon: the kernels of torch are not used in fp16: no such instruction"]


@pytest.mark.parametrize(
    ("probes", "expected"),
    [
        ([{"fp32": 1.0, "bf16": 3.0}, {"fp32": 1.0, "bf16": 1.0}], ["fp32"]),
        ([{"fp32": 1.0, "bf16": 3.0}, {"fp32": 2.0, "bf16": 1.0}], ["fp32", "bf16"]),
        ([{"fp32": 9.0, "fp16": 1.0}, {"bf16": 1.0, "fp32": 9.0}], ["fp32"]),
        ([{"fp16": 1.0}, {"bf16": 1.0}], []),
    ],
)
def test_the_slowest_rank_says_which_dtypes_enter(probes: list[dict[str, float]], expected: list[str]) -> None:
    """Ranks that are slow in different dtypes, by nature or by chance, still race in the same ones."""
    assert fast_enough(probes) == expected


def test_no_dtype_means_no_times() -> None:
    assert race({(8, 8): 1}, [], {"torch": OPERATIONS}, CPU) == {}


def test_a_table_that_raises_or_errs_leaves_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *args: said.append(text % args))

    def wrong(x: Tensor, out: Any, work: Any) -> None:
        OPERATIONS.square(x, out, work)
        out.rest.mul_(1.01)

    def raising(*args: Any) -> None:
        raise RuntimeError("no such instruction")

    tables = {
        "torch": OPERATIONS,
        "wrong": dataclasses.replace(OPERATIONS, square=wrong),
        "raising": dataclasses.replace(OPERATIONS, multiply=raising),
    }
    found = race({(8, 16): 2}, ["fp32"], tables, CPU)["fp32"]["8x16"]
    assert {kind: set(found[kind]) for kind in KINDS} == {
        "square": {"torch", "raising"},
        "product": {"torch", "wrong", "raising"},
        "multiply": {"torch", "wrong"},
    }
    assert any("wrong are not used in fp32: wrong by" in text for text in said)
    assert any("raising are not used in fp32: no such instruction" in text for text in said)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_race_leaves_torchs_generator_alone(dtype: str) -> None:
    state = torch.get_rng_state()
    found = race({(4, 8): 2, (8, 4): 1}, [dtype], {"torch": OPERATIONS}, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(found[dtype]["4x8"][kind]["torch"] > 0 for kind in KINDS)
