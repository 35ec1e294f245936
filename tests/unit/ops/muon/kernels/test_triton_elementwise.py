# SPDX-License-Identifier: Apache-2.0
"""Triton's table without a GPU: every kernel under Triton's interpreter, against float64 and its twin in PyTorch.

The interpreter cuts fp32 to bf16 where a GPU rounds: here outputs are fp32 or fp16. Products: test_triton_products.py.
Whether the kernels compile for a GPU is test_triton_compile.py's; what they do on one is test_gpu.py's.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import codes as codes_
from deepspeed.muon.kernels import reference, triton_table
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from helpers.kernels import FLOATS, OPERATIONS, Interpret, interpreted_table, needs_triton, randn, relative

MAX = torch.finfo(torch.bfloat16).max


# ---- elementwise --------------------------------------------------------------------------------------------


def advance(numel: int, grad_dtype: torch.dtype, out_dtype: torch.dtype, nesterov: bool, momentum: float) -> None:
    kernels = interpreted_table()
    buffer, grad = randn(numel), randn(numel, seed=1, dtype=grad_dtype)
    out = torch.full((numel,), torch.nan).to(out_dtype)
    expected = momentum * buffer.double() + (1 - momentum) * grad.double()
    ahead = momentum * expected + (1 - momentum) * grad.double() if nesterov else expected
    kernels.advance(buffer, grad, out, momentum, nesterov, Workspace())
    assert relative(buffer, expected) <= 1e-7
    assert relative(out, ahead) <= {torch.float32: 1e-7, torch.float16: 2**-11, torch.bfloat16: 2**-7}[out_dtype]


@needs_triton
@pytest.mark.parametrize(("numel", "momentum"), [(1, 0.95), (2049, 0.3), (5000, 0.95)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_momentum_is_an_average(
    interpret: Interpret, dtype: torch.dtype, nesterov: bool, numel: int, momentum: float
) -> None:
    other = {torch.float32: torch.float16, torch.float16: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    interpret(advance, numel=numel, grad_dtype=dtype, out_dtype=other, nesterov=nesterov, momentum=momentum)


def round_as_the_twin(name: str, step: int, first: int) -> None:
    """Averages of these with weight 1/4 are rounded once in any arithmetic, so that the noise alone decides."""
    normal = randn(3000).bfloat16().float()
    start = torch.cat([normal, torch.tensor([0.0, -0.0, 0.0, MAX, -MAX, 0.0])])
    edges = torch.tensor([0.0, -0.0, 1.5 * 2.0**-133, 3.4e38, -3.4e38, math.inf])
    grad = torch.cat([normal * (1 + 2.0**-8 + 2.0**-15), edges])
    outs = torch.empty(2, start.numel())
    for nesterov in (True, False):
        twin, ours = start.bfloat16(), start.bfloat16()
        for kernels, kept, out in ((reference.OPERATIONS, twin, outs[0]), (interpreted_table(), ours, outs[1])):
            kernels.advance_rounded(kept, grad, out, 0.75, nesterov, key_of(name, step), first, Workspace())
        assert ours.view(torch.int16).equal(twin.view(torch.int16))
        assert outs[0, :-1].equal(outs[1, :-1])
    assert (ours != start.bfloat16()).float().mean() > 0.1
    assert ours[-3:].tolist() == [MAX, -MAX, math.inf]


@needs_triton
@pytest.mark.parametrize("first", [0, 2**31 - 100, 2**32 - 5, 2**40 + 7])
def test_a_rounded_momentum_has_the_twins_bits(interpret: Interpret, first: int) -> None:
    for name in ("w", "layers.0.weight"):
        interpret(round_as_the_twin, name=name, step=first % 1000 + 1, first=first)


def codes_as_the_twin(numel: int, cols: int, pitch: int, skipped: int, first: int, dtype: torch.dtype) -> None:
    """Averages with weight 1/4 of such values are rounded once in any arithmetic."""
    codes = torch.randint(-127, 128, (skipped + numel,), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    absmax = torch.exp2(torch.arange(codes_.blocks_of(codes.numel())) % 30 - 15.0)
    absmax[1::7], grad = 0.0, randn(codes.numel(), seed=1).bfloat16().to(dtype)
    grad[3 * codes_.BLOCK : 4 * codes_.BLOCK] = 0.0
    rows = (numel - cols) // pitch + 1
    found = []
    for kernels in (reference.OPERATIONS, interpreted_table()):
        out, state = torch.empty(2, rows * cols), (codes.clone(), absmax.clone())
        for nesterov in (False, True):
            args = state[0][skipped:], state[1], skipped, grad[skipped:], out[int(nesterov)], cols, pitch
            kernels.look_ahead(*args, 0.75, nesterov, Workspace())
        both = torch.empty(codes.numel())
        kernels.advance_codes(*state, grad, both, 0.75, nesterov, key_of("w", 3), first, Workspace())
        kernels.advance_codes(*state, grad, None, 0.75, nesterov, key_of("w", 4), first, Workspace())
        found.append((torch.cat([out.view(-1), both]), *state))
    (out, codes, absmax), (ours, *state) = found
    assert relative(ours, out) <= 1e-7
    assert state[0].equal(codes) and state[1].equal(absmax)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("numel", "cols", "pitch", "skipped", "first"),
    [(5000, 5000, 5000, 0, 0), (2049, 2049, 2049, 77, 2**32 - 5), (6000, 37, 101, 5, 2**31 - 100), (1, 1, 1, 0, 0)],
)
def test_a_momentum_in_int8_has_the_twins_codes(
    interpret: Interpret, numel: int, cols: int, pitch: int, skipped: int, first: int, dtype: torch.dtype
) -> None:
    place = {"cols": cols, "pitch": pitch, "skipped": skipped}
    interpret(codes_as_the_twin, numel=numel, first=first, dtype=dtype, **place)


def apply_(weight_decay: float, cautious: bool, dtype: torch.dtype) -> None:
    param, update = randn(50, 90), randn(50, 90, seed=1, dtype=dtype)
    decays = param.double() * update.double() >= 0 if cautious else torch.ones(50, 90)
    expected = param.double() * (1 - 0.02 * weight_decay * decays) - 0.02 * 1.7 * update.double()
    interpreted_table().apply_(param, update, 0.02, 1.7, weight_decay, cautious, Workspace())
    assert relative(param, expected) <= 1e-7


@needs_triton
@pytest.mark.parametrize(("weight_decay", "cautious"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decay_and_update(interpret: Interpret, dtype: torch.dtype, weight_decay: float, cautious: bool) -> None:
    interpret(apply_, weight_decay=weight_decay, cautious=cautious, dtype=dtype)


def step(kernels: Operations, given: dict[str, Tensor], start: int = 0) -> None:
    buffer, grad, rounded, param, out = given.values()
    kernels.advance(buffer, grad, out, 0.95, True, Workspace())
    kernels.apply_(param, out, 0.1, 0.7, 0.1, False, Workspace())
    kernels.advance_rounded(rounded, grad, out, 0.95, True, key_of("w", 7), start, Workspace())
    kernels.apply_(param, out, 0.1, 0.7, 0.0, False, Workspace())
    kernels.apply_(param, out, 0.1, 0.7, 0.3, True, Workspace())


def step_in_slices() -> None:
    kernels = interpreted_table()
    names = ("buffer", "grad", "rounded", "param", "out")
    whole = {name: randn(6000, seed=seed) for seed, name in enumerate(names)}
    whole["rounded"] = whole["rounded"].bfloat16()
    sliced = {name: tensor.clone() for name, tensor in whole.items()}
    step(kernels, whole)
    for start, stop in ((0, 1), (1, 78), (78, 2500), (2500, 6000)):
        step(kernels, {name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    assert [name for name, tensor in whole.items() if not tensor.equal(sliced[name])] == []


@needs_triton
def test_slices_change_no_bit(interpret: Interpret) -> None:
    interpret(step_in_slices)


# ---- normalization ------------------------------------------------------------------------------------------


def normalize(dtype: torch.dtype) -> None:
    """Magnitudes whose squares leave fp32, parts of a matrix of very different magnitude, and zero.

    Subnormal numbers in fp32 alone: the interpreter misreads those of bf16.
    """
    kernels = interpreted_table()
    matrices, tiny = randn(5, 130, 200).double(), 1e-39 if dtype == torch.float32 else 1e-35
    matrices *= torch.tensor([1.0, 1e-25, 1e18, tiny, 0.0], dtype=torch.float64)[:, None, None]
    matrices[0, 70:] *= 1e-20
    given = matrices.to(dtype)
    expected = given.double() / given.double().norm(dim=(1, 2), keepdim=True).clamp(min=1e-300)
    result = kernels.normalize(given.clone(), torch.empty_like(given))
    error = (result.double() - expected).norm(dim=(1, 2))
    assert float(error.max()) <= (1e-6 if dtype == torch.float32 else 2**-7)
    assert not result[4].any()
    assert kernels.normalize(given[2:3].clone(), torch.empty_like(given[2:3]))[0].equal(result[2]), (
        "no matrix knows the others of its batch"
    )
    for wrong in (math.inf, math.nan):
        given[1, 100, 100] = wrong
        assert not kernels.normalize(given.clone(), torch.empty_like(given))[1].isfinite().all()
        assert kernels.normalize(given.clone(), torch.empty_like(given))[0].equal(result[0])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalization(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(normalize, dtype=dtype)


# ---- the table ----------------------------------------------------------------------------------------------


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


@needs_triton
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
