# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against the map that it makes of singular values, computed in float64 without iterating matrices."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.muon import orthogonalize as module
from deepspeed.muon.coefficients import NAMED, SIMPLE, Schedule, schedule
from deepspeed.muon.orthogonalize import (
    METHODS,
    Workspace,
    bf16_is_fast,
    choose_method,
    flops,
    normalize_,
    orthogonalize,
    resolve_dtype,
)

#: Triples that all differ, so that any confusion of steps shows; each keeps singular values within (0, 1.3).
VARIED: Schedule = (
    (3.4445, -4.7750, 2.0315),
    (2.8769, -3.1427, 1.2046),
    (2.3465, -1.7098, 0.4232),
    (1.8750, -1.2500, 0.3750),
    (1.5000, -0.5000, 0.0000),
    (2.0000, -1.5000, 0.5000),
    (1.7000, -0.9000, 0.2000),
)
SCHEDULES = (
    {f"varied[:{n}]": VARIED[:n] for n in range(1, 8)}
    | {f"simple*{n}": schedule("simple", n) for n in range(1, 8)}
    | {name: schedule(name) for name in NAMED}
)
#: (batch, rows, cols)
SHAPES = {
    "wide": (1, 12, 40),
    "tall": (1, 40, 12),
    "square": (1, 24, 24),
    "batch": (3, 10, 33),
    "tall_batch": (4, 21, 8),
    "odd": (2, 17, 31),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(x: Tensor, triples: Schedule) -> Tensor:
    """U diag(p(s)) V' in float64 for x = U diag(s) V' of norm one, where p composes the steps."""
    x = x.double()
    u, s, vh = torch.linalg.svd(x / torch.linalg.matrix_norm(x, keepdim=True), full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def quick_reference(x: Tensor, triples: Schedule) -> Tensor:
    """The same from the eigenvalues of the smaller Gram matrix, several times faster than an SVD."""
    if x.size(-2) > x.size(-1):
        return quick_reference(x.mT, triples).mT
    x = x.double() / x.double().norm()
    squares, u = torch.linalg.eigh(x @ x.mT)
    factor = torch.ones_like(squares)
    for a, b, c in triples:
        step = a + b * squares + c * squares**2
        factor, squares = factor * step, squares * step**2
    return (u * factor) @ (u.mT @ x)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


# ---- fp32: the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_fp32_is_the_polynomial_of_singular_values(method: str, shape: tuple[int, int, int], name: str) -> None:
    x = torch.randn(shape, generator=generator(0))
    result = orthogonalize(x.clone(), SCHEDULES[name], method)
    for i, expected in enumerate(reference(x, SCHEDULES[name])):
        assert relative_error(result[i], expected) < 1e-4


@pytest.mark.parametrize("shape", [(30, 100), (100, 30), (40, 40)])
def test_the_two_references_agree(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=generator(0))
    assert relative_error(quick_reference(x, VARIED), reference(x, VARIED)) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_a_larger_matrix_in_fp32(method: str) -> None:
    x = torch.randn(1, 128, 384, generator=generator(0))
    assert (
        relative_error(orthogonalize(x.clone(), schedule("simple"), method)[0], reference(x[0], (SIMPLE,) * 5)) < 1e-4
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 16, 48), (1, 48, 16), (1, 24, 24)])
def test_many_steps_give_an_orthogonal_matrix(shape: tuple[int, int, int], method: str) -> None:
    """(1.875, -1.25, 0.375) converges to exactly one, unlike the fast schedules."""
    x = torch.randn(shape, generator=generator(0))
    y = orthogonalize(x, ((1.875, -1.25, 0.375),) * 20, method)[0].double()
    gram = y @ y.mT if shape[1] <= shape[2] else y.mT @ y
    torch.testing.assert_close(gram, torch.eye(16 if shape[1] != 24 else 24, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_transpose_of_a_matrix_gives_the_transpose(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 12, 30, generator=generator(0)).to(dtype)
    wide = orthogonalize(x.clone(), schedule("simple"), method)
    tall = orthogonalize(x.mT.contiguous(), schedule("simple"), method)
    torch.testing.assert_close(tall.mT, wide, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16, 40), (5, 40, 16), (3, 24, 24)])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_matrices_one_by_one(method: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of very different magnitudes, so that anything shared between matrices shows."""
    x = torch.randn(shape, generator=generator(0)) * torch.logspace(-20, 20, shape[0])[:, None, None]
    x = x.to(dtype)
    single = torch.cat([orthogonalize(matrix.clone()[None], schedule("simple"), method) for matrix in x])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(orthogonalize(x.clone(), schedule("simple"), method), single, rtol=0, atol=tolerance)


# ---- bf16: against torch.optim.Muon ---------------------------------------------------------------------


def gaussian(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=generator(seed))


def log_spaced(rows: int, cols: int, seed: int) -> Tensor:
    """Singular values from 1 to 1e-5."""
    rank, gen = min(rows, cols), generator(seed)
    u, v = (torch.linalg.qr(torch.randn(size, rank, generator=gen))[0] for size in (rows, cols))
    return (u * torch.logspace(0, -5, rank)) @ v.T


def low_rank(rank: int) -> Callable[[int, int, int], Tensor]:
    def make(rows: int, cols: int, seed: int) -> Tensor:
        gen = generator(seed)
        return torch.randn(rows, rank, generator=gen) @ torch.randn(rank, cols, generator=gen)

    return make


def recorded(rows: int, cols: int, seed: int) -> Tensor:
    """The gradient of a rows x cols layer of a two-layer MLP after three steps of training."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(cols, rows), nn.Tanh(), nn.Linear(rows, 32))
    inputs, targets = torch.randn(96, cols), torch.randn(96, 32)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(layers(inputs), targets).backward()
        optimizer.step()
    gradient = layers[0].weight.grad
    assert gradient is not None
    assert gradient.shape == (rows, cols)
    return gradient


MATRICES: dict[str, Callable[[int, int, int], Tensor]] = {
    "gaussian": gaussian,
    "log_spaced": log_spaced,
    "rank_8": low_rank(8),
    "rank_64": low_rank(64),
    "recorded": recorded,
}


def bf16_errors(shape: tuple[int, int], make: Callable[[int, int, int], Tensor], seeds: int = 3) -> tuple[float, float]:
    """Mean relative error to float64 of ours and of torch's, on the same bf16 matrices.

    A norm near a power of two makes the division by it nearly exact for one side and not for the other,
    which is luck; norms of random mantissas measure the method.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz

    ours = torchs = 0.0
    for seed in range(seeds):
        mantissa = 1 + torch.rand((), generator=generator(seed + 100))
        x = (mantissa * make(*shape, seed)).bfloat16()
        expected = quick_reference(x, schedule("simple"))
        result = orthogonalize(x.clone()[None], schedule("simple"), choose_method(*shape))[0]
        ours += relative_error(result, expected) / seeds
        torchs += relative_error(_zeropower_via_newtonschulz(x.clone(), SIMPLE, 5, 1e-7), expected) / seeds
    return ours, torchs


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (192, 192), (192, 768), (48, 116), (512, 2048)])
def test_bf16_is_as_accurate_as_torch(shape: tuple[int, int], kind: str) -> None:
    ours, torchs = bf16_errors(shape, MATRICES[kind])
    assert ours <= 1.1 * torchs, f"{ours:.4f} against torch's {torchs:.4f}"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(128, 512), (192, 192), (512, 128)])
def test_bf16_is_near_the_definition(shape: tuple[int, int], name: str) -> None:
    """For the schedules that torch does not have; the fp32 tests hold their numbers."""
    x = gaussian(*shape, 0).bfloat16()
    result = orthogonalize(x.clone()[None], schedule(name), choose_method(*shape))[0]
    assert result.dtype == torch.bfloat16
    assert relative_error(result, reference(x, schedule(name))) < 0.03


# ---- normalize_ -----------------------------------------------------------------------------------------

MAGNITUDES = [(torch.float32, 10.0**e) for e in (-44, -42, -38, -30, -19, -3, 0, 8, 19, 25, 38)]
MAGNITUDES += [(torch.bfloat16, 10.0**e) for e in (-38, -30, -19, -3, 0, 8, 19, 25, 38)]


@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
@pytest.mark.parametrize("shape", [(1, 6, 10), (3, 33, 7)])
def test_norm_is_one_whatever_the_magnitude(shape: tuple[int, ...], dtype: torch.dtype, magnitude: float) -> None:
    x = (magnitude * (6 * torch.rand(shape, generator=generator(0), dtype=torch.float64) - 3)).to(dtype)
    stored = x.double()
    result = normalize_(x)
    assert result is x
    expected = stored / torch.linalg.matrix_norm(stored, keepdim=True)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=0)
    norms = torch.linalg.matrix_norm(result.double())
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-126, -100, -3, 1, 60, 125])
def test_a_power_of_two_changes_no_bit(exponent: int, dtype: torch.dtype) -> None:
    x = 1 + torch.rand(2, 5, 9, generator=generator(0))
    x = x.to(dtype)
    scaled = (x.double() * 2.0**exponent).to(dtype)
    assert torch.equal(normalize_(scaled), normalize_(x.clone()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
def test_orthogonalization_does_not_see_the_magnitude(dtype: torch.dtype, magnitude: float, method: str) -> None:
    x = (magnitude * (6 * torch.rand(1, 8, 24, generator=generator(0), dtype=torch.float64) - 3)).to(dtype)
    stored = x.double() / x.double().abs().max()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (
        relative_error(orthogonalize(x, schedule("simple"), method), reference(stored, schedule("simple"))) < tolerance
    )


def test_one_entry_and_extreme_neighbours() -> None:
    x = torch.zeros(1, 4, 6)
    x[0, 2, 3] = -1e-44
    assert normalize_(x.clone())[0, 2, 3] == -1.0
    x[0, 1, 1] = 3e38
    result = normalize_(x)
    assert result[0, 1, 1] == 1.0
    assert result[0, 2, 3] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_zero_gives_zero(method: str, dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        assert not orthogonalize(torch.zeros(shape, dtype=dtype), schedule("simple"), method).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_entry_stays_visible_in_its_own_matrix(method: str, dtype: torch.dtype, value: float) -> None:
    x = torch.randn(4, 6, 10, generator=generator(0)).to(dtype)
    x[3] = 0
    alone = orthogonalize(x.clone(), schedule("simple"), method)
    x[1, 3, 2] = value
    assert not normalize_(x.clone())[1].isfinite().all()
    result = orthogonalize(x, schedule("simple"), method)
    assert not result[1].isfinite().all()
    torch.testing.assert_close(result[[0, 2, 3]], alone[[0, 2, 3]])


# ---- out, work ------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Lists the operators that return a storage of several elements which none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in given:
                self.found.append(str(func))
        return result


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("shape", [(2, 8, 20), (2, 20, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_the_result_is_where_it_was_asked_for(method: str, shape: tuple[int, int, int], steps: int) -> None:
    """An odd and an even number of products end in different buffers."""
    x = torch.randn(shape, generator=generator(0))
    expected = reference(x, VARIED[:steps])
    out = torch.full(shape, torch.nan)
    assert orthogonalize(x.clone(), VARIED[:steps], method, out=out) is out
    assert relative_error(out, expected) < 1e-4
    place = x.data_ptr()
    assert orthogonalize(x, VARIED[:steps], method) is x
    assert x.data_ptr() == place
    assert relative_error(x, expected) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_slices_of_one_buffer_are_orthogonalized_in_place(method: str) -> None:
    flat = torch.randn(600, generator=generator(0))
    kept = flat.clone()
    view = flat[100:500].view(2, 10, 20)
    orthogonalize(view, schedule("simple"), method)
    assert relative_error(flat[100:500].view(2, 10, 20), reference(kept[100:500].view(2, 10, 20), (SIMPLE,) * 5)) < 1e-4
    assert torch.equal(flat[:100], kept[:100])
    assert torch.equal(flat[500:], kept[500:])


@pytest.mark.parametrize("own_out", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_steady_state_allocates_nothing(method: str, own_out: bool) -> None:
    work = Workspace()
    xs = [torch.randn(shape, generator=generator(0)) for shape in SHAPES.values()]
    outs = [torch.empty_like(x) if own_out else None for x in xs]

    def step() -> None:
        for x, out in zip(xs, outs, strict=True):
            orthogonalize(x, schedule("simple"), method, out=out, work=work)

    with Allocations() as first:
        step()
    held = work.nbytes()
    assert first.found, "the first call fills the workspace"
    assert held > 0
    for _ in range(3):
        with Allocations() as later:
            step()
        assert not later.found
        assert work.nbytes() == held


def test_workspace_reuses_and_grows() -> None:
    work, cpu = Workspace(), torch.device("cpu")
    first = work.get("a", (4, 6), torch.float32, cpu)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((4, 6), torch.float32, True)
    assert work.get("a", (3, 8), torch.float32, cpu).data_ptr() == first.data_ptr()
    assert work.get("a", (2, 1, 3), torch.float32, cpu).data_ptr() == first.data_ptr()
    assert work.nbytes() == 24 * 4
    assert work.get("b", (4, 6), torch.float32, cpu).data_ptr() != first.data_ptr()
    assert work.get("a", (4, 6), torch.bfloat16, cpu).data_ptr() != first.data_ptr()
    assert work.nbytes() == 24 * (4 + 4 + 2)
    grown = work.get("a", (5, 6), torch.float32, cpu)
    assert work.nbytes() == (30 + 24) * 4 + 24 * 2, "the smaller one is let go"
    assert work.get("a", (30,), torch.float32, cpu).data_ptr() == grown.data_ptr()
    assert work.get("empty", (0, 7), torch.float32, cpu).shape == (0, 7)


# ---- flops, choose_method -------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (9, 9)])
@pytest.mark.parametrize("method", METHODS)
def test_flops_is_the_count_of_the_products(
    monkeypatch: pytest.MonkeyPatch, method: str, shape: tuple[int, int], steps: int
) -> None:
    counted: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Tensor], skip: int) -> Callable[..., Tensor]:
        def product(*args: Tensor, **kwargs: Any) -> Tensor:
            left, right = args[skip], args[skip + 1]
            counted[name] += 2 * left.size(0) * left.size(1) * left.size(2) * right.size(2)
            return original(*args, **kwargs)

        return product

    monkeypatch.setattr(torch, "bmm", counting("bmm", torch.bmm, 0))
    monkeypatch.setattr(torch, "baddbmm", counting("baddbmm", torch.baddbmm, 1))
    for other in ("mm", "addmm", "matmul", "einsum"):
        monkeypatch.delattr(torch, other)
    orthogonalize(torch.randn(3, *shape), schedule("simple", steps), method)
    assert all(counted[name] for name in ("bmm", "baddbmm"))
    assert counted.total() == 3 * flops(*shape, steps, method)


def test_flops_of_five_steps() -> None:
    m, n = 6, 17
    for shape in ((m, n), (n, m)):
        assert flops(*shape, 5, "standard") == 20 * m * m * n + 10 * m**3
        assert flops(*shape, 5, "gram") == 14 * m * m * n + 20 * m**3


@pytest.mark.parametrize(
    ("rows", "cols", "expected"),
    [
        (128, 256, "gram"),
        (128, 255, "standard"),
        (127, 1024, "standard"),
        (128, 128, "standard"),
        (4096, 11008, "gram"),
        (4096, 4096, "standard"),
        (4096, 8191, "standard"),
        (48, 116, "standard"),
        (1, 10**6, "standard"),
    ],
)
def test_choice_of_the_method(rows: int, cols: int, expected: str) -> None:
    assert choose_method(rows, cols) == choose_method(cols, rows) == expected
    for method in METHODS:
        assert choose_method(rows, cols, method) == choose_method(cols, rows, method) == method


@pytest.mark.parametrize("steps", range(1, 51))
def test_the_choice_never_costs_more_operations(steps: int) -> None:
    for shape in [(128, 256), (128, 300), (512, 2048), (11008, 4096)]:
        assert choose_method(*shape) == "gram"
        assert flops(*shape, steps, "gram") <= flops(*shape, steps, "standard")


# ---- dtype ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns_dtype", "everywhere", "expected"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("bf16", True, torch.bfloat16),
        ("bf16", False, torch.bfloat16),
        ("fp32", True, torch.float32),
        ("fp32", False, torch.float32),
    ],
)
def test_dtype(ns_dtype: str, everywhere: bool, expected: torch.dtype) -> None:
    assert resolve_dtype(ns_dtype, everywhere) == expected


@pytest.mark.parametrize(
    ("cpu", "mkldnn", "fast"),
    [("AVX512", True, True), ("AVX512", False, False), ("AVX2", True, False), ("DEFAULT", True, False)],
)
def test_bf16_on_a_cpu(monkeypatch: pytest.MonkeyPatch, cpu: str, mkldnn: bool, fast: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    assert bf16_is_fast() is fast


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_on_an_accelerator_is_not_emulated(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: asked.append(options) or fast)
    assert bf16_is_fast() is fast
    assert asked == [{"including_emulation": False}]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(KeyError):
        orthogonalize(torch.randn(1, 2, 2), schedule("simple"), "auto")
    assert {"standard", "gram"} == set(module.METHODS)
