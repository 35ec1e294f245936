# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to bf16: unbiased, to a neighbour, with reproducible bits; and what nearest rounding loses."""

import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.rounding import key_of, noise, round_

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
    """Every one of the 2^16 numbers once: the mean is the value itself."""
    random = torch.arange(2**16, dtype=INT)
    for value in (1.0 + 3 * 2**-20, -0.3, 1e-40, 3.0e38, 1.0):
        source = torch.full((2**16,), value)
        assert rounded(source, random).double().mean().item() == pytest.approx(source[0].item(), rel=1e-15)


def test_the_mean_over_many_keys_is_the_value() -> None:
    """Within 6 standard errors for each value, and within 4 for all together."""
    source, count = samples(), 1000
    below, above = neighbours(source)
    total = torch.zeros_like(below)
    for step in range(count):
        result = rounded(source, bits(source.numel(), step=step)).double()
        assert bool(((result == below) | (result == above)).all()), "never more than one unit away"
        total += result
    is_exact = below == above
    assert is_exact.sum() >= 128
    assert (total / count)[is_exact].equal(source.double()[is_exact])
    width = (above - below)[~is_exact]
    share = (source.double() - below)[~is_exact] / width
    error = (total / count - source.double())[~is_exact] / width
    deviation = (share * (1 - share) / count).sqrt()
    assert float((error / deviation).abs().max()) <= 6
    assert float(error.sum().abs()) <= 4 * float(deviation.square().sum().sqrt())


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


def test_the_bits_depend_on_name_step_and_element_alone() -> None:
    whole = bits(1000)
    assert whole.equal(bits(1000))
    assert whole[300:500].equal(bits(200, first=300))
    for other in (bits(1000, step=2), bits(1000, name="v"), bits(1000, first=1)):
        assert (whole == other).sum() < 5


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


def test_the_bits_are_uniform_and_uncorrelated() -> None:
    """Each within 5 standard deviations: the mean, each bit, 4096 classes, lags, and steps."""
    count, half = 2**19, 32767.5
    numbers = bits(count)
    assert int(numbers.min()) >= 0 and int(numbers.max()) < 2**16
    unit = (2**32 / 12) ** 0.5
    centred = (numbers.double() - half) / unit
    assert abs(float(centred.sum())) <= 5 * count**0.5
    for place in range(16):
        assert abs(int(((numbers >> place) & 1).sum()) - count / 2) <= 5 * count**0.5 / 2, place
    classes = torch.bincount(numbers >> 4, minlength=4096).double()
    chi = float(((classes - count / 4096).square() / (count / 4096)).sum())
    assert abs(chi - 4095) <= 5 * (2 * 4095) ** 0.5
    for lag in (1, 2, 64, 4096):
        assert abs(float((centred[lag:] * centred[:-lag]).sum())) <= 5 * count**0.5, lag
    for step in (2, 3, 1001):
        other = (bits(count, step=step).double() - half) / unit
        assert abs(float((centred * other).sum())) <= 5 * count**0.5, step


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    rounded(samples(), bits(samples().numel()))
    assert torch.get_rng_state().equal(before)


# ---- a momentum of 0.95 -------------------------------------------------------------------------------------


def to_nearest(source: Tensor, step: int) -> Tensor:
    return source.bfloat16()


def stochastically(source: Tensor, step: int) -> Tensor:
    return rounded(source, bits(source.numel(), step=step))


def shortfall(rounding: Callable[[Tensor, int], Tensor], steps: int = 400) -> float:
    """How far from a steady gradient its average stays, as the mean over 4096 elements of 1 to 2, relative."""
    gradient = 1 + torch.rand(4096, generator=torch.Generator().manual_seed(1))
    buffer = torch.zeros_like(gradient, dtype=torch.bfloat16)
    for step in range(steps):
        buffer = rounding(buffer.float().lerp_(gradient, 0.05), step)
    return abs(float((buffer.double() / gradient - 1).mean()))


def test_a_large_decay_does_not_stall() -> None:
    """One unit in the last place is 0.4 to 0.8 %: 5 % of what is missing must exceed half of that to move nearest."""
    assert shortfall(stochastically) <= 5e-4
    assert shortfall(to_nearest) >= 0.03
