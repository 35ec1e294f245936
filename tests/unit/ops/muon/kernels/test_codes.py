# SPDX-License-Identifier: Apache-2.0
"""A momentum in int8: its rounding, its kernels against their twin and float64, what rounding to nearest loses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.kernels.rounding import BLOCK, LEVELS, SMALLEST, block_count, decode, encode, key_of, noise
from deepspeed.muon.math.momentum_storage import ABSMAX, CODES, QuantizationBlocks, Rows
from deepspeed.muon.saved_state import zero_codes
from helpers.kernels import FLOATS, is_interpreted, randn, relative

SIZES = [1, 31, 127, 128, 129, 1000, kernel_set.CPU_CHUNK + 77]
LONG = kernel_set.CPU_CHUNK + 1000
LARGEST = torch.finfo(torch.float32).max
Codes = tuple[Tensor, Tensor]


def encoded(values: Tensor, uniform: Tensor | float = 0.5) -> Codes:
    """Codes and magnitudes, by default to nearest."""
    wide = torch.zeros(block_count(values.numel()) * BLOCK)
    wide[: values.numel()] = values
    codes, absmax = torch.empty(values.numel(), dtype=torch.int8), torch.empty(block_count(values.numel()))
    encode(wide, codes, absmax, uniform)
    return codes, absmax


def decoded(codes: Tensor, absmax: Tensor) -> Tensor:
    return decode(codes, absmax, torch.full((absmax.numel() * BLOCK,), torch.nan)).clone()


def uniform(numel: int, step: int = 1, name: str = "w") -> Tensor:
    """What a step adds before it rounds down, for whole blocks."""
    bits, spare = torch.empty(2, block_count(numel) * BLOCK, dtype=torch.int32)
    return (noise(bits, spare, key_of(name, step), 0) | 1) / 2**16


def samples() -> Tensor:
    """Blocks of all magnitudes, and for each power of two one whose largest element is hardest to divide by."""
    mantissas = randn(4096, seed=1).abs().clamp(1e-3, 1.0)
    exponents = torch.linspace(-118, 127, 32).round().repeat_interleave(BLOCK)
    return mantissas * torch.exp2(exponents) * randn(4096, seed=2).sign()


# ---- rounding ---------------------------------------------------------------------------------------------


def test_what_is_decoded_gets_the_same_codes_again() -> None:
    """However it was rounded: so fp32 in a checkpoint restores the bits."""
    for random in (0.5, 2.0**-16, 1 - 2.0**-16, uniform(4096)):
        codes, absmax = encoded(samples(), random)
        assert codes.abs().view(-1, BLOCK).amax(1).eq(LEVELS).all()
        again, same = encoded(decoded(codes, absmax))
        assert again.equal(codes) and same.equal(absmax)


def test_the_largest_element_of_a_block_is_exact() -> None:
    """For 2^16 mantissas, both signs and the noise at both ends: the product with the inverse is off by one unit."""
    largest = (1 + torch.arange(2**16) / 2**16).repeat_interleave(BLOCK) * 2.0**-13
    for sign in (1.0, -1.0):
        for random in (2.0**-16, 1 - 2.0**-16):
            codes, absmax = encoded(sign * largest, random)
            assert codes.eq(sign * LEVELS).all() and decoded(codes, absmax).equal(sign * largest)


def test_the_mean_is_the_value() -> None:
    """Over all noise: half of the 2^15 numbers lie on either side of 1/2. Errors are those of a product in fp32."""
    numbers = torch.arange(1, 2**16, 2) / 2**16
    for value in (0.3, -0.7, 1e-4, 126.4 / 127, -0.0):
        source = torch.zeros(numbers.numel(), BLOCK)
        source[:, 0], source[:, 1:] = 1.0, value
        codes, absmax = encoded(source.view(-1), numbers.repeat_interleave(BLOCK))
        mean = decoded(codes, absmax).view(-1, BLOCK)[:, 1].double().mean()
        assert float(mean) == pytest.approx(value, abs=1e-7)


def test_errors_are_a_unit_or_half_a_unit() -> None:
    values = samples()
    units = values.view(-1, BLOCK).abs().amax(1, keepdim=True).double() / LEVELS
    for random, most in ((0.5, 0.5), (uniform(values.numel()), 1.0)):
        error = (decoded(*encoded(values, random)).double() - values).view(-1, BLOCK) / units
        assert 0.9 * most < float(error.abs().max()) <= most * (1 + 1e-4)


def test_tiny_blocks_are_zero() -> None:
    """Below the smallest magnitude, where one code would be subnormal, and where all is zero."""
    for value, kept in ((SMALLEST, SMALLEST), (SMALLEST * 0.999, 0.0), (1e-45, 0.0), (0.0, 0.0), (-0.0, 0.0)):
        for random in (2.0**-16, 0.5, 1 - 2.0**-16):
            codes, absmax = encoded(torch.full((BLOCK,), value), random)
            assert absmax.item() == kept and codes.eq(LEVELS * (kept > 0)).all()
    assert decoded(*encoded(torch.tensor([LARGEST, -LARGEST]))).tolist() == [LARGEST, -LARGEST]


def test_what_is_not_finite_stays_so() -> None:
    """Its whole block becomes not a number; others are as before."""
    values = randn(3 * BLOCK)
    expected = decoded(*encoded(values))
    for wrong in (torch.inf, -torch.inf, torch.nan):
        values[BLOCK + 3] = wrong
        found = decoded(*encoded(values)).view(3, BLOCK)
        assert not found[1].isfinite().any()
        assert found[::2].equal(expected.view(3, BLOCK)[::2])


# ---- kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_a_step_is_computed_in_fp32_and_kept_rounded(kernels: KernelSet, grad_dtype: torch.dtype) -> None:
    """The input of Newton-Schulz is that of the unrounded momentum, whose codes are those of the definition."""
    for numel in SIZES:
        state, grad = encoded(randn(numel)), randn(numel, seed=1, dtype=grad_dtype)
        momentum = decoded(*state).lerp(grad.float(), 0.05)
        codes, absmax = encoded(momentum, uniform(numel))
        for nesterov, expected in ((True, torch.lerp(grad.float(), momentum, 0.95)), (False, momentum)):
            for out_dtype in (torch.float32, torch.bfloat16):
                out = torch.full((numel,), torch.nan, dtype=out_dtype)
                kept = [part.clone() for part in state]
                kernels.advance_codes(*kept, grad, out, 0.95, nesterov, key_of("w", 1), 0, Workspace())
                assert out.equal(expected.to(out_dtype))
                assert kept[0].equal(codes) and kept[1].equal(absmax), numel


def codes_as_the_twin(kernels: KernelSet, numel: int, first: int, dtype: torch.dtype) -> None:
    """Averages with weight 1/4 of such values are rounded once in any arithmetic. Some blocks become too small."""
    codes = torch.randint(-127, 128, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    absmax = torch.exp2(torch.arange(block_count(codes.numel())) * 7 % 30 - 15.0)
    absmax[10:15:2], absmax[11:15:2] = 2.0**-100, 2.0**120
    grad = randn(codes.numel(), seed=1).bfloat16().to(dtype)
    for block, magnitude in ((3, 1.0), (5, SMALLEST), (6, SMALLEST / 2), (8, 0.0), (15, 0.0)):
        absmax[block : block + 1] = magnitude
        grad[block * BLOCK : (block + 1) * BLOCK if block < 8 else 0] = 0.0
    found = []
    for table in (kernel_set.TORCH, kernels):
        out, state = torch.empty(2, numel), (codes.clone(), absmax.clone())
        for nesterov in (False, True):
            key = key_of("w", 3 + nesterov)
            table.advance_codes(*state, grad, out[int(nesterov)], 0.75, nesterov, key, first, Workspace())
        found.append((out, *state))
    (out, codes, absmax), (ours, *state) = found
    assert relative(ours[0], out[0]) <= 1e-7 and relative(ours[1], out[1]) <= 1e-7
    assert state[0].equal(codes) and state[1].equal(absmax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("numel", "first"), [(5000, 0), (2049, 2**32 - 5), (6000, 2**31 - 100), (1, 0)])
def test_the_codes_are_the_twins(on: Any, numel: int, first: int, dtype: torch.dtype) -> None:
    on(codes_as_the_twin, numel=numel, first=first, dtype=dtype)


def step_in_slices(kernels: KernelSet) -> None:
    numel = 6000 if is_interpreted(kernels) else LONG
    state, grad, (whole, parts) = encoded(randn(numel)), randn(numel, seed=1), torch.empty(2, numel)
    sliced = [part.clone() for part in state]
    kernels.advance_codes(*state, grad, whole, 0.95, True, (3, 4), 2**32 - 1000, Workspace())
    for first, end in ((0, 5 * BLOCK), (5 * BLOCK, numel)):
        here = sliced[0][first:end], sliced[1][first // BLOCK : block_count(end)]
        more = grad[first:end], parts[first:end], 0.95, True, (3, 4), 2**32 - 1000 + first
        kernels.advance_codes(*here, *more, Workspace())
    assert all(map(torch.equal, (*state, whole), (*sliced, parts)))


def test_slices_change_no_bit(on: Any) -> None:
    """Rounding from any block, with the number of its first element."""
    on(step_in_slices)


# ---- pieces of matrices in a tensor ---------------------------------------------------------------------------


def test_each_piece_has_blocks_of_its_own_wherever_its_rows_lie() -> None:
    """Rows of two matrices in turn, then columns of a third one, between padding that is not a number."""
    tensor = randn(4000)
    pieces = [Rows(10, 20, 37, 74), Rows(47, 20, 37, 74), Rows(1600, 1, 1500, 1500), Rows(3200, 30, 3, 21)]
    blocks = QuantizationBlocks(pieces)
    state = zero_codes(tensor.shape, blocks, tensor.device)
    assert blocks.count == state[ABSMAX].numel() == sum(block_count(piece.numel) for piece in pieces)
    blocks.write(state, 0, tensor)
    found = blocks.read_into(torch.full((4000,), torch.nan), state)
    for piece in pieces:
        values = piece.of(tensor).reshape(-1)
        codes, absmax = encoded(values.clone())
        assert piece.of(state[CODES]).reshape(-1).equal(codes) and blocks.absmax(state, piece.start).equal(absmax)
        assert piece.of(found).reshape(-1).equal(decoded(codes, absmax))
        piece.of(found).fill_(torch.nan)
    assert found.isnan().all()
    assert blocks.read(state, 1600, 3100, tensor.device).equal(decoded(*encoded(tensor[1600:3100].clone())))
