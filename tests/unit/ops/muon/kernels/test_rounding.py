# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to bf16: unbiased, to a neighbour, with reproducible bits; and what nearest rounding loses."""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.rounding import BLOCK, decode, encode, key_of, noise, round_

MAX = torch.finfo(torch.bfloat16).max
INT = torch.int32


def bits(numel: int, name: str = "w", step: int = 1, first: int = 0) -> Tensor:
    return noise(torch.empty(numel, dtype=INT), torch.empty(numel, dtype=INT), key_of(name, step), first)


def rounded(source: Tensor, random: Tensor) -> Tensor:
    """`source` rounded with these bits, bf16."""
    target = torch.empty_like(source, dtype=torch.bfloat16)
    round_(target, source.clone(), random.clone(), torch.empty_like(source, dtype=INT))
    return target


def neighbours(source: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 values next to `source` towards zero and away from it, as fp64; equal where bf16 has it."""
    below = (source.view(INT) & -0x10000).view(torch.float32)
    above = ((source.view(INT) + 0xFFFF) & -0x10000).view(torch.float32)
    return below.double(), above.double()


def samples() -> Tensor:
    """Both signs, magnitudes of all exponents, subnormal ones included, and values that bf16 has."""
    generator = torch.Generator().manual_seed(0)
    mantissas = 1 + torch.rand(2048, generator=generator)
    exponents = torch.randint(-145, 127, (2048,), generator=generator)
    values = torch.cat([mantissas * torch.exp2(exponents.float()), torch.arange(64.0)])
    return torch.cat([values, -values])


# ---- rounding ---------------------------------------------------------------------------------------------


def test_the_mean_over_all_noise_is_exact() -> None:
    """Every one of the 2^16 numbers once: a neighbour each time, and in the mean the value itself."""
    random = torch.arange(2**16, dtype=INT)
    some = torch.cat([samples()[::67], torch.tensor([1.0 + 3 * 2**-20, -0.3, 1e-40, 3.0e38, 1.0])])
    below, above = neighbours(some)
    assert 3 <= (below == above).sum() < 10, "some are in bf16"
    for value, towards, away in zip(some, below, above, strict=True):
        found = rounded(value.expand(2**16), random).double()
        assert bool(((found == towards) | (found == away)).all()), "never more than one unit away"
        assert found.mean().item() == pytest.approx(value.item(), rel=1e-12)


def test_values_at_the_ends() -> None:
    """No finite value becomes infinite, infinity stays, a carry goes into the exponent, the sign of zero stays."""
    random = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=INT)
    largest = torch.finfo(torch.float32).max
    for value, results in (
        (math.inf, {math.inf}),
        (-math.inf, {-math.inf}),
        (largest, {MAX}),
        (-largest, {-MAX}),
        (MAX, {MAX}),
        (math.nextafter(2.0, 0.0), {2.0}),
        (2.0 - 2.0**-20, {2.0 - 2.0**-7, 2.0}),
        (0.0, {0.0}),
    ):
        assert set(rounded(torch.full((4,), value), random).tolist()) == results, value
    assert rounded(torch.full((4,), -0.0), random).signbit().all()


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7FFFFFFF, 0x7FC00001, 0xFFC00000, 0xFFFFFFFF])
def test_not_a_number_stays_so(pattern: int) -> None:
    """With the patterns that CPUs and GPUs produce; the second would overflow into a number."""
    source = torch.full((4,), pattern - 2**32 * (pattern >= 2**31), dtype=INT).view(torch.float32)
    assert rounded(source, torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=INT)).isnan().all()


# ---- the bits ---------------------------------------------------------------------------------------------


def mixed(name: str, step: int, element: int) -> int:
    """The bits of one element, in Python's integers."""
    digest = hashlib.blake2s(f"{name}\0{step}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[part], "little") for part in (slice(0, 4), slice(4, 8)))
    x = (element + first) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x + second) % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x >> 16


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 2, 2**40 + 7])
def test_the_bits_are_those_of_the_definition(first: int) -> None:
    """Other bits in another version, or on another machine, would not resume exactly."""
    assert bits(6, "layers.0.weight", 7, first).tolist() == [
        mixed("layers.0.weight", 7, first + index) for index in range(6)
    ]


# ---- a momentum of 0.95 -------------------------------------------------------------------------------------


def rounded_to_bf16(values: Tensor, step: int, to_nearest: bool) -> Tensor:
    return values.bfloat16() if to_nearest else rounded(values, bits(values.numel(), step=step))


def rounded_to_int8(values: Tensor, step: int, to_nearest: bool) -> Tensor:
    uniform: Any = 0.5 if to_nearest else (bits(values.numel(), step=step) | 1) / 2**16
    codes, absmax = torch.empty(values.numel(), dtype=torch.int8), torch.empty(values.numel() // BLOCK)
    encode(values.clone(), codes, absmax, uniform)
    return decode(codes, absmax, torch.empty_like(values)).clone()


@pytest.mark.parametrize(
    ("rounding", "at_random", "nearest"), [(rounded_to_bf16, 5e-4, 0.03), (rounded_to_int8, 1e-3, 0.25)]
)
def test_a_large_decay_does_not_stall(rounding: Callable[..., Tensor], at_random: float, nearest: float) -> None:
    """How far from a steady gradient its average stays, relative, as the mean over elements and the later steps.

    One unit in the last place of bf16 is 0.4 to 0.8 %: 5 % of what is missing must exceed half of that to move nearest.
    In int8, where each block has an element four times as large as the others, up to 10 of the 127 units are lost.
    """
    gradient = 0.2 + 0.1 * torch.rand(32, BLOCK, generator=torch.Generator().manual_seed(1))
    gradient[:, 0] = 1.0
    shortfalls = []
    for to_nearest in (False, True):
        average, total = (gradient * (gradient == 1.0)).view(-1), torch.zeros(32, BLOCK, dtype=torch.float64)
        for step in range(400):
            average = rounding(average.float().lerp_(gradient.view(-1), 0.05), step, to_nearest)
            total += average.view(32, BLOCK) if step >= 200 else 0
        shortfalls.append(abs(float((total / 200 / gradient - 1)[:, 1:].mean())))
    assert shortfalls[0] <= at_random and shortfalls[1] >= nearest
