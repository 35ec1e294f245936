# SPDX-License-Identifier: Apache-2.0
"""All operations but products, in every kernel set: against float64, their twin in PyTorch, and each other.

Triton's interpreter cuts fp32 to bf16 where a GPU rounds. Whether its kernels compile for a GPU is
test_triton_compile.py's; what they do on one is test_gpu_kernels.py's.
"""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.muon.kernels import cpp_kernels, kernel_set
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import key_of, noise, round_
from helpers.kernels import (
    FLOATS,
    Interpret,
    check_slices,
    interpreted_table,
    is_interpreted,
    native_only,
    needs_triton,
    operands,
    randn,
    relative,
    step,
    threads,
)

ULP = 2.0**-7
"""The largest distance of two neighbours in bf16, relative."""
MAX = torch.finfo(torch.bfloat16).max
SIZES = [1, 15, 16, 33, 1000, 2**17 + 13]


def sizes(kernels: KernelSet) -> list[int]:
    return [1, 2049] if is_interpreted(kernels) else SIZES


def update_dtypes(kernels: KernelSet) -> list[torch.dtype]:
    """Those of what is orthogonalized; C++ has no fp16 there."""
    return FLOATS if is_interpreted(kernels) else [torch.float32, torch.bfloat16]


def assert_equals(kernels: KernelSet, actual: Tensor, expected: Tensor) -> None:
    """To a few roundings of fp32, or one of 16 bits."""
    bf16 = 2.0**-7 if is_interpreted(kernels) else 2.0**-8
    tolerance = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: bf16}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-6)
    assert actual.dtype != torch.float32 or actual.numel() == 1 or relative(actual, expected) <= 1e-7


# ---- advance ----------------------------------------------------------------------------------------------


def average(kernels: KernelSet, grad_dtype: torch.dtype) -> None:
    momenta = [0.3, 0.95] if is_interpreted(kernels) else [0.0, 0.3, 0.5, 0.95, 0.999]
    cases = itertools.product(sizes(kernels), update_dtypes(kernels), (True, False), momenta)
    for numel, out_dtype, nesterov, momentum in cases:
        buffer, grad = randn(numel), randn(numel, seed=1, dtype=grad_dtype)
        out = torch.full((numel,), torch.nan).to(out_dtype)
        expected = momentum * buffer.double() + (1 - momentum) * grad.double()
        ahead = momentum * expected + (1 - momentum) * grad.double() if nesterov else expected
        place, kept = buffer.data_ptr(), grad.clone()
        kernels.advance(buffer, grad, out, momentum, nesterov, Workspace())
        assert_equals(kernels, buffer, expected)
        assert_equals(kernels, out, ahead)
        assert buffer.data_ptr() == place and grad.equal(kept)


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_momentum_is_an_average(on: Any, grad_dtype: torch.dtype) -> None:
    on(average, grad_dtype=grad_dtype)


# ---- advance_rounded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_a_step_is_computed_in_fp32_and_kept_rounded(kernels: KernelSet, grad_dtype: torch.dtype) -> None:
    """Over several chunks, from an element in the middle; the look-ahead is that of the unrounded momentum."""
    numel = 2 * kernel_set.CPU_CHUNK + 1000
    start, grad, out = randn(numel), randn(numel, seed=1, dtype=grad_dtype), torch.empty(numel)
    whole = start.bfloat16()
    momentum = whole.float().lerp(grad.float(), 0.05)
    for nesterov, expected in ((True, torch.lerp(grad.float(), momentum, 0.95)), (False, momentum)):
        buffer = whole.clone()
        kernels.advance_rounded(buffer, grad, out, 0.95, nesterov, key_of("w", 3), 0, Workspace())
        assert out.equal(expected)
        assert ((buffer.float() - momentum).abs() <= ULP * momentum.abs()).all()
        assert (buffer != momentum.bfloat16()).float().mean() > 0.1, "some go to the farther neighbour"
        part = whole[1001:].clone()
        kernels.advance_rounded(part, grad[1001:], out[1001:], 0.95, nesterov, key_of("w", 3), 1001, Workspace())
        assert part.equal(buffer[1001:]), "where chunks begin changes nothing"


def round_as_the_twin(kernels: KernelSet, name: str, step: int, first: int) -> None:
    """Averages of these with weight 1/4 are rounded once in any arithmetic, so that the noise alone decides."""
    normal = randn(3000).bfloat16().float()
    start = torch.cat([normal, torch.tensor([0.0, -0.0, 0.0, MAX, -MAX, 0.0])])
    edges = torch.tensor([0.0, -0.0, 1.5 * 2.0**-133, 3.4e38, -3.4e38, math.inf])
    grad = torch.cat([normal * (1 + 2.0**-8 + 2.0**-15), edges])
    outs = torch.empty(2, start.numel())
    for nesterov in (True, False):
        twin, ours = start.bfloat16(), start.bfloat16()
        for table, kept, out in ((kernel_set.TORCH, twin, outs[0]), (kernels, ours, outs[1])):
            table.advance_rounded(kept, grad, out, 0.75, nesterov, key_of(name, step), first, Workspace())
        assert ours.view(torch.int16).equal(twin.view(torch.int16))
        assert outs[0, :-1].equal(outs[1, :-1])
    assert (ours != start.bfloat16()).float().mean() > 0.1
    assert ours[-3:].tolist() == [MAX, -MAX, math.inf]


@pytest.mark.parametrize("first", [0, 2**31 - 100, 2**32 - 5, 2**40 + 7])
def test_a_rounded_momentum_has_the_twins_bits(on: Any, first: int) -> None:
    on(round_as_the_twin, name="layers.0.weight", step=first % 1000 + 1, first=first)


def test_a_copy_is_rounded_with_the_same_random_numbers(kernels: KernelSet) -> None:
    numel = 2 * kernel_set.CPU_CHUNK + 1000
    source, key = randn(numel), key_of("w", 3)
    bits, spare = torch.empty(2, numel, dtype=torch.int32)
    expected, target = torch.empty(2, numel, dtype=torch.bfloat16)
    round_(expected, source.clone(), noise(bits, spare, key, 7), spare)
    kernels.copy_rounded(target, source.clone(), key, 7, Workspace())
    assert target.equal(expected)
    kernels.copy_rounded(target[:-1001], source[1001:].clone(), key, 1008, Workspace())
    assert target[:-1001].equal(expected[1001:]), "where chunks begin changes nothing"


# ---- apply_ -----------------------------------------------------------------------------------------------


def decay_and_update(kernels: KernelSet, lr: float) -> None:
    """The decay by the unscaled rate, before the update."""
    decays = [(0.0, False), (0.1, False), (0.1, True), (0.0, True)]
    for numel, (weight_decay, cautious), dtype in itertools.product(sizes(kernels), decays, update_dtypes(kernels)):
        param, update = randn(numel), randn(numel, seed=1, dtype=dtype)
        does_decay = param.double() * update.double() >= 0 if cautious else torch.ones(numel)
        expected = param.double() * (1 - lr * weight_decay * does_decay) - lr * 1.7 * update.double()
        place, before = param.data_ptr(), param.clone()
        kernels.apply_(param, update, lr, 1.7, weight_decay, cautious, Workspace())
        assert param.data_ptr() == place
        assert_equals(kernels, param, expected)
        assert lr or param.equal(before), "a zero rate changes nothing"


@pytest.mark.parametrize("lr", [0.02, 0.0])
def test_decay_and_update(on: Any, lr: float) -> None:
    on(decay_and_update, lr=lr)


def decay_cautiously(kernels: KernelSet) -> None:
    param, update = torch.tensor([2.0, -2.0, 0.0, 1e-30, 2.0]), torch.tensor([0.0, -0.0, 1.0, -1e-30, torch.nan])
    param, update = (x.repeat(16) for x in (param, update))  # more than a vector register holds
    kernels.apply_(param, update, 0.5, 1.0, 1.0, True, Workspace())
    for found in param.view(16, 5).tolist():
        assert found[:4] == pytest.approx([1.0, -1.0, -0.5, 1.5e-30], rel=1e-6, abs=0) and math.isnan(found[4])


def test_cautious_decay_of_zeros_and_of_what_would_underflow(on: Any) -> None:
    """An update of zero opposes nothing; 1e-30 times -1e-30 is zero in fp32, and still of two signs."""
    on(decay_cautiously)


def test_autograd_sees_the_update(kernels: KernelSet) -> None:
    weight = randn(40).requires_grad_()
    loss = weight.square().sum()
    with torch.no_grad():
        kernels.apply_(weight.view(-1)[:40], randn(40, seed=1), 0.1, 1.0, 0.1, False, Workspace())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- normalize -------------------------------------------------------------------------------------------


def matrices(shape: tuple[int, ...], magnitude: float, dtype: torch.dtype) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (magnitude * (6 * uniform - 3)).to(dtype)


def exact(x: Tensor, norm: float = 1.0) -> Tensor:
    return norm * x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_one_whatever_the_magnitude(kernels: KernelSet, dtype: torch.dtype) -> None:
    """A power of two changes no bit."""
    exponents = (-44, -42, -38, -30, -19, -3, 0, 8, 19, 25, 38) if dtype == torch.float32 else (-38, -30, -3, 0, 19, 38)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for exponent, shape in itertools.product(exponents, [(1, 6, 10), (3, 33, 7), (2, 130, 300)]):
        x = matrices(shape, 10.0**exponent, dtype)
        expected, twin = exact(x), kernel_set.normalize(x.clone(), x.clone())
        assert kernels.normalize(x, x) is x
        torch.testing.assert_close(x.double(), expected, rtol=4 * tolerance, atol=1e-30)
        torch.testing.assert_close(x, twin, rtol=4 * tolerance, atol=1e-30)
        if math.prod(shape) < 1000:  # sums of a few squares
            torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=0)
            torch.testing.assert_close(exact(x), x.double(), rtol=tolerance, atol=0)
    x = (1 + torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0))).to(dtype)
    for exponent in (-126, -100, -3, 1, 60, 125):
        scaled = (x.double() * 2.0**exponent).to(dtype)
        assert kernels.normalize(scaled, scaled).equal(kernels.normalize(x.clone(), x.clone()))


def normalize_extremes(kernels: KernelSet, dtype: torch.dtype) -> None:
    """Magnitudes whose squares leave fp32, parts of a matrix of very different magnitude, and zero.

    Subnormal numbers in fp32 alone: Triton's interpreter misreads those of bf16.
    """
    x, tiny = randn(5, 130, 200).double(), 1e-39 if dtype == torch.float32 else 1e-35
    x *= torch.tensor([1.0, 1e-25, 1e18, tiny, 0.0], dtype=torch.float64)[:, None, None]
    x[0, 70:] *= 1e-20
    given = x.to(dtype)
    result = kernels.normalize(given.clone(), torch.empty_like(given))
    error = (result.double() - exact(given)).norm(dim=(1, 2))
    bf16 = 2**-7 if is_interpreted(kernels) else 2**-8
    assert float(error.max()) <= (1e-6 if dtype == torch.float32 else bf16)
    assert not result[4].any()
    single = kernels.normalize(given[2:3].clone(), torch.empty_like(given[2:3]))
    assert single[0].equal(result[2]), "no matrix knows the others of its batch"
    for wrong in (math.inf, math.nan):
        given[1, 100, 100] = wrong
        assert not kernels.normalize(given.clone(), torch.empty_like(given))[1].isfinite().all()
        assert kernels.normalize(given.clone(), torch.empty_like(given))[0].equal(result[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_matrices(on: Any, dtype: torch.dtype) -> None:
    on(normalize_extremes, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_batches_nor_threads_change_a_bit(kernels: KernelSet, dtype: torch.dtype) -> None:
    x = matrices((5, 301, 257), 1e-3, dtype)
    many, single = x.clone(), x.clone()
    with threads(2):
        kernels.normalize(many, many)
    with threads(1):
        one_by_one = [kernels.normalize(matrix.clone()[None], torch.empty_like(matrix[None])) for matrix in x]
        assert kernels.normalize(single, single).equal(torch.cat(one_by_one)), "whatever the batch"
    if kernels.name != "torch":
        assert many.equal(single), "PyTorch's own sums depend on the threads"


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalized_into_another_dtype(kernels: KernelSet, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Rounded once, and only by the dtype of the result; a norm that is a power of two rounds nothing."""
    x, results = matrices((3, 33, 47), 1e-9, dtype), []
    for norm in (1.0, 16.0):
        out = torch.full_like(x, torch.nan, dtype=out_dtype)
        assert kernels.normalize(x.clone(), out, norm) is out
        rounding = 0.51 * torch.finfo(out_dtype).eps + 2e-6
        torch.testing.assert_close(out.double(), exact(x, norm), rtol=rounding, atol=1e-6)
        results.append(out / norm)
    assert out_dtype == torch.float16 or results[0].equal(results[1])


# ---- every operation --------------------------------------------------------------------------------------


def assert_twins(kernels: KernelSet, tensors: dict[str, Tensor]) -> None:
    """Every tensor after a step has the bits that PyTorch gives it."""
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    step(kernels, tensors)
    step(kernel_set.TORCH, expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("extreme", [None, math.inf, -math.inf, math.nan, 3.4e38, 1e-40, -1e-45, -0.0])
def test_the_bits_of_cpp_are_those_of_the_twin(extreme: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to nearest, at random, and once at the end of a product and a sum: on every CPU with such products."""
    kernels = native_only(monkeypatch)
    for numel in (*SIZES, 0) if extreme is None else (70,):
        tensors = operands(numel)
        for tensor in tensors.values() if extreme is not None else ():
            tensor[5::7] = torch.tensor(extreme).to(tensor.dtype)
        assert_twins(kernels, tensors)


def test_what_cpp_is_not_made_for_falls_to_the_twin() -> None:
    """Strides, dtypes, and shapes that do not match, which the twin may refuse."""
    if cpp_kernels.unavailable():
        pytest.skip("no C++ compiler")
    module = MuonBuilder().load()
    wide, narrow = randn(64), randn(64, seed=1, dtype=torch.bfloat16)
    for grad, out in ((wide[::2], wide[32:]), (wide[:32].double(), wide[32:]), (wide[:31], wide[32:])):
        kept = wide.clone()
        assert not module.advance(wide[:32], grad, out, 0.9, True)
        assert wide.equal(kept)
    assert not module.advance(narrow, wide, wide, 0.9, True)
    assert not module.advance_rounded(wide, wide, wide, 0.9, True, (1, 2), 0)
    assert not module.apply_(narrow, narrow, 0.1, 1.0, 0.1, False)
    for x in (wide.view(2, 4, 8).mT, wide.double().view(2, 4, 8)):
        assert not module.normalize(x, x, 1.0)
    codes, magnitudes = torch.ones(64, dtype=torch.int8), torch.ones(1)
    for wrong in (wide.double(), wide[:63], torch.cat([wide, wide])[::2]):
        assert not module.advance_codes(codes, magnitudes, wrong, wide, 0.9, True, (1, 2), 0)
        assert not module.advance_codes(codes, magnitudes, wide, wrong, 0.9, True, (1, 2), 0)
    assert not module.advance_codes(codes.int(), magnitudes, wide, wide, 0.9, True, (1, 2), 0)
    assert not module.advance_codes(codes, magnitudes.double(), wide, wide, 0.9, True, (1, 2), 0)
    assert codes.eq(1).all()
    for name in ("buffer", "param"):
        tensors = operands(64)
        tensors[name] = torch.cat([tensors[name], tensors[name]])[::2]
        assert_twins(cpp_kernels.operations(), tensors)


def step_in_slices(kernels: KernelSet) -> None:
    if is_interpreted(kernels):
        check_slices(kernels, 6000, (0, 1, 78, 2500))
    else:
        check_slices(kernels, 100_003, (0, 1, 14, 77, 130, 1000, 40_001))


def test_neither_slices_nor_threads_change_a_bit(on: Any) -> None:
    on(step_in_slices)


# ---- many runs in one launch ------------------------------------------------------------------------------

Places = list[tuple[int, int, int]]
LENGTHS = {"odd": [1, 5000, 77, 2048, 2049], "aligned": [16, 4096, 2064]}


def places_of(lengths: list[int], gap: int) -> Places:
    """Runs of these lengths with gaps between them, in another order in the other tensor."""
    starts = list(itertools.accumulate((length + gap for length in lengths), initial=gap))[:-1]
    order, places, at = random.Random(0).sample(range(len(lengths)), len(lengths)), [], 0
    for index in order:
        places.append((starts[index], at, lengths[index]))
        at += lengths[index]
    return places


@needs_triton
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=9), st.integers(0, 40))
def test_tiles_hold_each_element_once(lengths: list[int], gap: int) -> None:
    from deepspeed.muon.kernels.triton_elementwise import BLOCK, tiles

    places = places_of(lengths, gap)
    table, aligned = tiles(places, torch.device("cpu"))
    wanted = [(here + k, there + k) for here, there, length in places for k in range(length)]
    found = [(here + k, there + k) for here, there, length in table.tolist() for k in range(length)]
    assert found == wanted and 1 <= int(table[:, 2].min()) <= int(table[:, 2].max()) <= BLOCK
    assert aligned == all(number % 16 == 0 for place in places for number in place)


def step_by_runs(lengths: list[int], gap: int, grad_dtype: torch.dtype, weight_decay: float, nesterov: bool) -> None:
    """Both passes, together and run by run; what lies between the runs keeps its value. Cautious with Nesterov."""
    kernels, places, size = interpreted_table(), places_of(lengths, gap), sum(lengths) + gap * (len(lengths) + 1)
    assert kernels.runs is not None and kernels.runs.fits(randn(3)) and not kernels.runs.fits(randn(3).bfloat16())
    before = [randn(size), randn(size, seed=1), randn(size, seed=2, dtype=grad_dtype), randn(sum(lengths), seed=3)]
    ours, single, twin = ([tensor.clone() for tensor in before] for _ in range(3))
    for runs, (buffer, param, grad, out) in ((kernels.runs, ours), (kernel_set.RUNS, twin)):
        tiles = runs.tiles(places, buffer.device)
        runs.advance(buffer, grad, out, tiles, 0.9, nesterov)
        runs.apply_(param, out, tiles, 0.1, 0.7, weight_decay, nesterov)
    buffer, param, grad, out = single
    for here, there, length in places:
        part, result = slice(here, here + length), out[there : there + length]
        kernels.advance(buffer[part], grad[part], result, 0.9, nesterov, Workspace())
        kernels.apply_(param[part], result, 0.1, 0.7, weight_decay, nesterov, Workspace())
    for mine, one_by_one, expected in zip(ours, single, twin, strict=True):
        assert mine.equal(one_by_one)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert not ours[0].equal(before[0]) and not ours[1].equal(before[1])


@needs_triton
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_many_runs_in_one_launch_have_the_bits_of_single_ones(interpret: Interpret, kind: str, nesterov: bool) -> None:
    gap, dtype = (0 if kind == "aligned" else 3), torch.float32 if nesterov else torch.float16
    decay = 0.1 * nesterov
    interpret(step_by_runs, lengths=LENGTHS[kind], gap=gap, grad_dtype=dtype, weight_decay=decay, nesterov=nesterov)
