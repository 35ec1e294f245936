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
from helpers.kernels import OPERATIONS, Interpret, interpreted_table, operands, oriented, randn, step

BF16 = torch.bfloat16


def symmetric(batch: int, size: int, offset: int = 0) -> Symmetric:
    return Symmetric(half(batch, size, size, offset=offset), torch.zeros(batch, size))


def half(*shape: int, offset: int = 0) -> Tensor:
    """In bf16, so many elements behind an aligned address."""
    numel = torch.Size(shape).numel()
    return torch.zeros(numel + offset, dtype=BF16)[offset:].view(shape)


def quack_with(**functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType("quack.gemm_interface")
    vars(module).update(functions)
    return module


# ---- what a table takes ---------------------------------------------------------------------------------------


@pytest.fixture(params=["triton", "quack"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Says what a table calls first: a symmetric kernel, a library's product that a pass completes, or one below it."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: called.append(name)

    monkeypatch.setattr(triton_table, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", 32)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack_with(gemm_symmetric=noted("symmetric")))
    for name, kind in (("square", "symmetric"), ("product", "symmetric"), ("complete", "completed")):
        monkeypatch.setattr(products, name, noted(kind))
    monkeypatch.setattr(products, "unfused_product", noted("library"))
    below = Operations("below", *map(noted, ["below"] * len(OPERATIONS)))
    table = triton_table.operations(below) if request.param == "triton" else quack.operations(below)

    def first(name: str, *args: Any) -> str:
        called.clear()
        getattr(table, name)(*args, Workspace(), *([Scalars()] if name == "product" else []))
        return called[0]

    return first


def test_only_aligned_matrices_have_symmetric_products(taken: Callable[..., str]) -> None:
    """Triton knows of multiples of 16 alone; an address that eight bf16 numbers do not divide is not aligned.

    Whole matrices are left to the table below: those in fp32, whose diagonals, which are empty, kernels would read.
    """
    for x in (half(2, 32, 48), half(2, 48, 32), half(1, 64, 64, offset=8)):
        assert taken("square", oriented(x), symmetric(x.size(0), min(x.shape[1:]))) == "symmetric", x.shape
    for x in (half(2, 32, 40), half(2, 40, 48), half(2, 32, 48, offset=4), half(2, 16, 48)):
        assert taken("square", oriented(x), symmetric(2, min(x.shape[1:]))) == "below", x.shape
    assert taken("square", half(2, 32, 48), symmetric(2, 32, offset=1)) == "below"
    for offsets in itertools.product((0, 4), repeat=3):
        found = taken("product", *(symmetric(2, 32, offset) for offset in offsets))
        assert (found == "symmetric") == (not any(offsets)), offsets
    assert taken("product", symmetric(2, 40), symmetric(2, 40), symmetric(2, 40)) in ("library", "below")
    x = torch.zeros(2, 32, 48)
    whole = symmetric_of("gram", x, Workspace())
    for name, args in (("square", (x, whole)), ("product", (whole, whole, whole)), ("multiply", (whole, x, x))):
        assert whole.is_whole and taken(name, *args) == "below"


def test_amd_has_the_elementwise_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    table = triton_table.operations(reference.OPERATIONS)
    assert table.name == "triton (elementwise) + torch"
    for name in ("square", "product", "multiply"):
        assert getattr(table, name) is getattr(reference, name)
    for name in ("advance", "advance_rounded", "advance_codes", "apply_", "normalize"):
        assert getattr(table, name) is not getattr(reference, name)


def test_tensors_of_the_cpu_go_to_the_other_table() -> None:
    called = set()

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(reference, name)(*args, **kwargs)

        return call

    table = triton_table.operations(Operations("noted", *map(noted, OPERATIONS)))
    assert table.name == "triton + noted"
    tensors, work, codes = operands(8), Workspace(), (torch.zeros(8, dtype=torch.int8), torch.zeros(1))
    step(table, tensors)
    table.advance_codes(*codes, tensors["grad"], tensors["out"], 0.9, True, (1, 2), 0, work)
    table.copy_rounded(tensors["rounded"], tensors["param"], (1, 2), 0, work)
    x = randn(2, 64, 64)
    probe.iterate(table, table.normalize(x, x), work)
    assert called == set(OPERATIONS)


# ---- launches -------------------------------------------------------------------------------------------------


class Launches:
    """In place of a kernel: keeps the grids that it would have, and the arguments."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.named: list[dict[str, Any]] = []
        self.names = products.tuned_kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.grids.append(grid(products.CONFIGS[0].kwargs) if callable(grid) else grid)
            self.named.append(dict(zip(self.names, args, strict=False)) | kwargs)

        return launch


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


def test_batches_are_tuned_by_class() -> None:
    """Up to the next power of two; the number itself is not compiled into the code."""
    launches = Launches()
    for batch in (1, 3, 4, 5):
        a = symmetric(batch, 16)
        products.product(a, a, a, Workspace(), kernel=launches)
    keys = [tuple(named[key] for key in products.tuned_kernel.keys) for named in launches.named]
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
    state, batches = torch.get_rng_state(), [(2, 16, 32, 0), (1, 48, 16, 1), (1, 24, 16, 0), (2, 16, 32, 0)]
    probe.warm(table, [(*batch, BF16) for batch in batches], torch.device("cpu"))
    assert state.equal(torch.get_rng_state())
    assert [name for name, _ in seen] == 3 * list(names)
    assert {shape for name, shape in seen if name == "square"} == {(2, 16, 32), (1, 16, 48), (1, 24, 16)}
    assert {shape for name, shape in seen if name == "product"} == {(2, 16, 16), (1, 16, 16), (1, 24, 24)}


# ---- whether a table works here -------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is taken for a Hopper, with plain PyTorch in place of every kernel of both tables."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(probe, "DEVICE", "cpu")
    assert probe.SIZE >= triton_table.SYMMETRIC_FROM, "a probe of smaller matrices would not reach symmetric products"
    monkeypatch.setattr(probe, "SIZE", 32)
    monkeypatch.setattr(triton_table, "SYMMETRIC_FROM", 32)
    monkeypatch.setattr(triton_table, "is_on_gpu", lambda tensor: True)
    passes = ("advance", "advance_rounded", "advance_codes", "apply_", "normalize")
    for name in (*passes, "tiles", "advance_runs", "apply_runs_"):
        monkeypatch.setattr(elementwise, name, getattr(reference, name))
    monkeypatch.setattr(products, "multiply", reference.multiply)
    monkeypatch.setattr(products, "unfused_product", reference.product)
    monkeypatch.setattr(products, "complete", lambda a, b, out, by: reference.product(a, b, out, Workspace(), by))
    monkeypatch.setattr(products, "square", lambda *args, kernel: reference.square(*args))
    monkeypatch.setattr(products, "product", lambda *args, kernel: reference.product(*args))
    library = ModuleType("quack")
    library.__spec__ = importlib.machinery.ModuleSpec("quack", None)
    monkeypatch.setitem(sys.modules, "quack", library)
    interface = quack_with(gemm_symmetric=lambda a, b, out: torch.bmm(a, b, out=out))
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


KERNELS = [
    *((elementwise, name) for name in ("advance_rounded", "advance_codes", "apply_")),
    *((elementwise, name) for name in ("advance_runs", "apply_runs_")),
    *((products, name) for name in ("square", "product", "multiply")),
]


@pytest.mark.parametrize(("where", "name"), KERNELS, ids=lambda value: getattr(value, "__name__", value))
def test_a_kernel_that_raises_or_errs_is_a_reason(
    gpu: None, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, raising)
    assert (
        chosen() == "torch (faster kernels are not used; cuda: Triton's kernels fail: RuntimeError: misaligned address)"
    )
    original = getattr(reference, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = original(*args)
        for arg in args[2:] if name in ("product", "multiply") else args:
            if isinstance(arg, Symmetric | Tensor):
                (arg.rest if isinstance(arg, Symmetric) else arg).mul_(2)
        return result

    monkeypatch.setattr(where, name, wrong)
    kind = name.replace("apply_runs_", "apply_ of runs").replace("advance_runs", "advance of runs")
    assert chosen().startswith(
        f"torch (faster kernels are not used; cuda: Triton's kernels fail: the result of {kind} is wrong, by "
    )


def test_a_kernel_that_is_not_cautious_is_a_reason(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "apply_", lambda *args: reference.apply_(*args[:5], False, Workspace()))
    assert "the result of cautious apply_ is wrong, by " in chosen()


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("triton", "ModuleNotFoundError: "),
        ("triton.language", "ModuleNotFoundError: "),
        (None, "TypeError: "),
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
        monkeypatch.setattr(triton, "autotune", lambda configs, key, warmup, rep: None)  # as of 3.1, with torch 2.5
    assert chosen().startswith(f"torch (faster kernels are not used; cuda: Triton's kernels fail: {reason}")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "ModuleNotFoundError: "),
        (quack_with(), "ImportError: cannot import name 'gemm_symmetric'"),
        (quack_with(gemm_symmetric=raising), "RuntimeError: misaligned address"),
        (quack_with(gemm_symmetric=lambda a, b, out: out.fill_(1.0)), "the result of square is wrong, by "),
    ],
    ids=["incomplete", "old", "raises", "wrong"],
)
def test_a_quack_that_does_not_work_is_a_reason(
    gpu: None, library: ModuleType | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", library)
    why = f"its kernels fail (version 0.6.5 is known to work): {reason}"
    assert chosen().startswith(f"triton + torch (faster kernels are not used; quack: {why}")


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
