# SPDX-License-Identifier: Apache-2.0
"""What Triton's and quack's tables take, how they launch it and what they tune, with recorders in place of kernels."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from deepspeed.muon.kernels import probe, quack, reference, triton_table
from deepspeed.muon.kernels import triton_elementwise as elementwise
from deepspeed.muon.kernels import triton_products as products
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric, symmetric_of
from deepspeed.muon.kernels.workspace import Workspace
from helpers.kernels import OPERATIONS, Interpret, interpreted_table, oriented, randn

BF16 = torch.bfloat16


def symmetric(batch: int, size: int, offset: int = 0) -> Symmetric:
    return Symmetric(half(batch, size, size, offset=offset), torch.zeros(batch, size))


def half(*shape: int, offset: int = 0) -> Tensor:
    """In bf16, so many elements behind an aligned address."""
    numel = torch.Size(shape).numel()
    return torch.zeros(numel + offset, dtype=BF16)[offset:].view(shape)


# ---- what a table takes ---------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[Any], str]]:
    """For each table, a function that says whether it has a symmetric kernel for a call, and not the table below it."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: called.append(name)

    monkeypatch.setattr(triton_table, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", 32)
    interface = ModuleType("quack.gemm_interface")
    interface.gemm_symmetric = noted("symmetric")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setattr(products, "complete", noted("completed"))
    for name, kind in (("square", "symmetric"), ("product", "symmetric"), ("unfused_product", "library")):
        monkeypatch.setattr(products, name, noted(kind))
    below = Operations("below", *map(noted, ["below"] * len(OPERATIONS)))
    tables = {"triton": triton_table.operations(below), "quack": quack.operations(below)}

    def of(name: str) -> Callable[[Any], str]:
        def first(call: Callable[[Operations], None]) -> str:
            called.clear()
            call(tables[name])
            return called[0]

        return first

    return of


@pytest.mark.parametrize("table", ["triton", "quack"])
def test_only_aligned_matrices_have_symmetric_products(table: str, taken: Any) -> None:
    """Triton knows of multiples of 16 alone; an address that eight bf16 numbers do not divide is not aligned."""
    first = taken(table)

    def square(x: Tensor, out: Symmetric) -> str:
        return first(lambda kernels: kernels.square(oriented(x), out, Workspace()))

    def product(a: Symmetric, b: Symmetric, out: Symmetric) -> str:
        return first(lambda kernels: kernels.product(a, b, out, Workspace(), Scalars()))

    for x in (half(2, 32, 48), half(2, 48, 32), half(1, 64, 64, offset=8)):
        assert square(x, symmetric(x.size(0), min(x.shape[1:]))) == "symmetric", x.shape
    for x in (half(2, 32, 40), half(2, 40, 48), half(2, 32, 48, offset=4), half(2, 16, 48)):
        assert square(x, symmetric(2, min(x.shape[1:]))) == "below", x.shape
    assert square(half(2, 32, 48), symmetric(2, 32, offset=1)) == "below"
    unaligned = "library" if table == "triton" else "below"
    for offsets in itertools.product((0, 4), repeat=3):
        a, b, out = (symmetric(2, 32, offset) for offset in offsets)
        assert product(a, b, out) == (unaligned if any(offsets) else "symmetric"), offsets
    assert product(symmetric(2, 40), symmetric(2, 40), symmetric(2, 40)) == unaligned


@pytest.mark.parametrize("table", ["triton", "quack"])
def test_whole_matrices_are_left_to_the_table_below(table: str, taken: Any) -> None:
    """Those in fp32: the kernels would read the diagonals, which are empty."""
    first, x = taken(table), torch.zeros(2, 32, 48)
    whole, work = symmetric_of("gram", x, Workspace()), Workspace()
    assert whole.is_whole
    assert first(lambda kernels: kernels.square(x, whole, work)) == "below"
    assert first(lambda kernels: kernels.product(whole, whole, whole, work, Scalars())) == "below"
    assert first(lambda kernels: kernels.multiply(whole, x, x, work)) == "below"


def test_amd_has_the_elementwise_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    table = triton_table.operations(reference.OPERATIONS)
    assert table.name == "triton (elementwise) + torch"
    for name in ("square", "product", "multiply"):
        assert getattr(table, name) is getattr(reference, name)
    for name in ("advance", "advance_rounded", "look_ahead", "advance_codes", "apply_", "normalize"):
        assert getattr(table, name) is not getattr(reference, name)


def names_of_calls(kernels: Operations) -> list[str]:
    """Calls every operation with tensors of the CPU."""
    x, k = randn(2, 64, 64), Symmetric(randn(2, 64, 64), randn(2, 64))
    work, flat = Workspace(), randn(8)
    kernels.advance(flat, flat.clone(), flat.clone(), 0.9, True, work)
    kernels.advance_rounded(flat.bfloat16(), flat, flat.clone(), 0.9, True, (1, 2), 0, work)
    codes, absmax = torch.zeros(8, dtype=torch.int8), torch.zeros(1)
    kernels.look_ahead(codes, absmax, 0, flat, flat.clone(), 8, 8, 0.9, True, work)
    kernels.advance_codes(codes, absmax, flat, None, 0.9, True, (1, 2), 0, work)
    kernels.apply_(flat, flat.clone(), 0.1, 1.0, 0.1, False, work)
    kernels.copy_rounded(flat.bfloat16(), flat.clone(), (1, 2), 0, work)
    kernels.normalize(x, x)
    kernels.square(x, k, work)
    kernels.product(k, k, Symmetric(x, randn(2, 64)), work, Scalars(0.1, 1.0))
    assert kernels.multiply(k, x, x.clone(), work) is not None
    return OPERATIONS


def test_the_rest_goes_to_the_other_table() -> None:
    called = []

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(reference, name)(*args, **kwargs)

        return call

    table = triton_table.operations(Operations("noted", *map(noted, OPERATIONS)))
    assert table.name == "triton + noted"
    assert names_of_calls(table) == called


# ---- launches -------------------------------------------------------------------------------------------------


class Launches:
    """In place of a kernel: keeps the grids that it would have."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        config = products.CONFIGS[0].kwargs
        return lambda *args, **kwargs: self.grids.append(grid(config) if callable(grid) else grid)


def test_no_number_of_matrices_is_too_many_for_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA allows 65,535 programs along all but the first dimension."""
    batch, launches = 150_000, Launches()
    for module in (elementwise, products):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, launches)
    monkeypatch.setattr(triton_table, "is_on_gpu", lambda tensor: True)
    x, work, a, b = torch.zeros(batch, 2, 3), Workspace(), symmetric(batch, 2), symmetric(batch, 2)
    table = triton_table.operations(reference.OPERATIONS)
    assert table.normalize(x, x) is x
    calls: list[Callable[[], Any]] = [
        lambda: products.square(x.bfloat16(), a, work),
        lambda: products.product(a, a, b, work),
        lambda: table.product(a, a, b, work, Scalars()),
        lambda: table.multiply(a, x.bfloat16(), x.bfloat16(), work),
    ]
    counted = sum(grid[1] for grid in launches.grids if len(grid) > 1)
    assert counted == 2 * batch, "the two passes of the normalization that have a program for each part of a matrix"
    for call in calls:
        before = len(launches.grids)
        call()
        (grid,) = launches.grids[before:]
        assert grid[0] >= batch
    assert max(size for grid in launches.grids for size in grid[1:]) <= 65_535


# ---- tuning ---------------------------------------------------------------------------------------------------


def test_batches_are_tuned_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the next power of two; the number itself is not compiled into the code."""
    keys = []

    def run(**named: Any) -> None:
        keys.append(tuple(named[key] for key in products.tuned_kernel.keys))

    class Tuner:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            names = products.tuned_kernel.arg_names
            return lambda *args, **kwargs: run(**dict(zip(names, args, strict=False)), **kwargs)

    tuner = Tuner()
    for batch in (1, 3, 4, 5):
        a = symmetric(batch, 16)
        products.product(a, a, a, Workspace(), kernel=tuner)
    assert keys[1] == keys[2] and len(set(keys)) == 3
    specialized = {p.name: not p.do_not_specialize for p in products.symmetric_kernel.params}
    assert specialized["size"] and not specialized["matrices"]


def test_a_configuration_is_timed_by_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = itertools.accumulate([0, 9, 2, 2, 2, 3, 3, 50]), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: "Event") -> int:
            return other.at - self.at

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event, synchronize=lambda: None))
    assert products._bench(lambda: calls.append(1), (0.5, 0.2, 0.8)) == [3, 3, 3]
    assert len(calls) == products.TRIALS + 1, "the first one compiles"


def test_what_was_measured_is_kept_on_disk() -> None:
    """Where Triton can."""
    assert products._KEPT == {"cache_results": True}
    assert products.untuned_kernel.configs == products.CONFIGS[:1]


def test_warming_calls_every_operation_on_matrices() -> None:
    """For every batch once, before a step; the user's random numbers stay as they are."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def noted(name: str) -> Callable[..., Any]:
        def call(x: Any, *args: Any) -> Any:
            shape = (x.rest if isinstance(x, Symmetric) else x).shape
            seen.append((name, tuple(shape)))
            return getattr(reference, name)(x, *args)

        return call

    names = ("normalize", "square", "product", "multiply")
    table = replace(reference.OPERATIONS, **{name: noted(name) for name in names})
    state = torch.get_rng_state()
    probe.warm(
        table,
        [(2, 16, 32, 0, BF16), (1, 48, 16, 1, BF16), (1, 24, 16, 0, BF16), (2, 16, 32, 0, BF16)],
        torch.device("cpu"),
    )
    assert state.equal(torch.get_rng_state())
    assert [name for name, _ in seen] == 3 * list(names)
    assert {shape for name, shape in seen if name == "square"} == {(2, 16, 32), (1, 16, 48), (1, 24, 16)}
    assert {shape for name, shape in seen if name == "product"} == {(2, 16, 16), (1, 16, 16), (1, 24, 24)}


# ---- whether a table works here -------------------------------------------------------------------------------


def test_the_probe_reaches_the_symmetric_products() -> None:
    """Smaller matrices fall back to other products, so a probe of them would prove nothing."""
    assert probe.SIZE >= triton_table.SYMMETRIC_FROM


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a Hopper, with plain PyTorch in place of every kernel of both tables."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    monkeypatch.setattr(probe, "SIZE", 32)
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", 32)
    monkeypatch.setattr(triton_table, "is_on_gpu", lambda tensor: True)
    for name in ("advance", "advance_rounded", "look_ahead", "advance_codes", "apply_"):
        monkeypatch.setattr(elementwise, name, getattr(reference, name))
    monkeypatch.setattr(elementwise, "normalize", reference.normalize)
    for name in ("tiles", "advance_runs", "apply_runs_"):
        monkeypatch.setattr(elementwise, name, getattr(reference, name))
    monkeypatch.setattr(products, "multiply", reference.multiply)
    monkeypatch.setattr(products, "unfused_product", reference.product)
    monkeypatch.setattr(products, "complete", lambda a, b, out, by: reference.product(a, b, out, Workspace(), by))
    monkeypatch.setattr(products, "square", lambda *args, kernel: reference.square(*args))
    monkeypatch.setattr(products, "product", lambda *args, kernel: reference.product(*args))
    interface, library = ModuleType("quack.gemm_interface"), ModuleType("quack")
    interface.gemm_symmetric = lambda a, b, out: torch.bmm(a, b, out=out)  # type: ignore[attr-defined]
    library.__spec__ = importlib.machinery.ModuleSpec("quack", None)
    monkeypatch.setitem(sys.modules, "quack", library)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)


def chosen() -> str:
    """What the log says of the table that a run would have."""
    from deepspeed.muon.kernels import selection

    unavailable = selection.unavailable_kernels("auto", ["cuda"])
    table = selection.choose(unavailable)
    if unavailable["cuda"]:
        assert table is reference.OPERATIONS
    return selection.summary(table, unavailable)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("misaligned address\nCompile with TORCH_USE_CUDA_DSA")


def test_kernels_that_work_are_taken(gpu: None) -> None:
    assert chosen() == "quack + triton + torch"


WRONG: list[tuple[Any, str, Any, str]] = [
    (elementwise, "advance_rounded", raising, "RuntimeError: misaligned address"),
    (elementwise, "look_ahead", lambda *args: None, "the result of look_ahead is wrong, by "),
    (elementwise, "advance_codes", lambda *args: None, "the result of advance_codes is wrong, by "),
    (elementwise, "apply_", lambda *args: None, "the result of apply_ is wrong, by "),
    (
        elementwise,
        "apply_",
        lambda *args: reference.apply_(*args[:5], False, Workspace()),
        "the result of cautious apply_ is wrong, by ",
    ),
    (elementwise, "advance_runs", raising, "RuntimeError: misaligned address"),
    (elementwise, "apply_runs_", lambda *args: None, "the result of apply_ of runs is wrong, by "),
    (products, "square", raising, "RuntimeError: misaligned address"),
    (products, "product", lambda a, b, out, *rest, kernel: out.rest.zero_(), "the result of product is wrong, by "),
    (products, "multiply", lambda p, x, out, work: out.copy_(x), "the result of multiply is wrong, by "),
]


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"), WRONG, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_kernel_that_fails_is_a_reason(
    gpu: None, where: Any, name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    assert chosen().startswith(f"torch (cuda: Triton's kernels fail: {reason}")


def without_do_bench(configs: Any, key: Any, warmup: Any = None, rep: Any = None) -> Any:
    """``triton.autotune`` as version 3.1 has it, which comes with torch 2.5."""
    return lambda kernel: kernel


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("triton", "ModuleNotFoundError: "),
        ("triton.language", "ModuleNotFoundError: "),
        (None, "TypeError: without_do_bench() got an unexpected keyword argument 'do_bench'"),
    ],
)
def test_a_triton_that_does_not_fit_is_a_reason(
    gpu: None, missing: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for module in (elementwise, products):
        monkeypatch.delitem(sys.modules, module.__name__)
        monkeypatch.delattr(sys.modules["deepspeed.muon.kernels"], module.__name__.rpartition(".")[2])
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        monkeypatch.setattr(triton, "autotune", without_do_bench)
    assert chosen().startswith(f"torch (cuda: Triton's kernels fail: {reason}")


def old_quack() -> ModuleType:
    return ModuleType("quack.gemm_interface")


def quack_with(symmetric: Callable[..., Any]) -> ModuleType:
    module = ModuleType("quack.gemm_interface")
    module.gemm_symmetric = symmetric  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "ModuleNotFoundError: "),
        (old_quack(), "ImportError: cannot import name 'gemm_symmetric'"),
        (quack_with(raising), "RuntimeError: misaligned address"),
        (quack_with(lambda a, b, out: out.fill_(1.0)), "the result of square is wrong, by "),
    ],
    ids=["incomplete", "old", "raises", "wrong"],
)
def test_a_quack_that_does_not_work_is_a_reason(
    gpu: None, library: ModuleType | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", library)
    assert chosen().startswith(f"triton + torch (quack: its kernels fail (version 0.6.5 is known to work): {reason}")


def test_without_a_gpu_that_triton_knows_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "why_wrong", lambda *args: pytest.fail("nothing to try"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (triton_table.unavailable(), quack.unavailable()) == (
        "triton is not installed",
        "quack-kernels is not installed",
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (triton_table.unavailable(), quack.unavailable()) == ("no NVIDIA or AMD GPU", "no NVIDIA GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert triton_table.unavailable() == "the GPU is older than Ampere"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert quack.unavailable() == "no NVIDIA GPU"


# ---- the probe itself, on kernels -----------------------------------------------------------------------------


def probed() -> str | None:
    """Triton's own kernels, interpreted; in fp16, as the interpreter does not multiply bf16."""
    interpreted_table(tiles=(16, 32, 32))
    products.untuned_kernel.configs = products.tuned_kernel.configs
    probe.DEVICE, probe.DTYPE, probe.SIZE = "cpu", torch.float16, 32
    return probe.why_wrong(triton_table._untuned)


def test_triton_passes_its_probe(interpret: Interpret) -> None:
    assert interpret(probed) is None
