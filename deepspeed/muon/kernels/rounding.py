# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of fp32 to bf16, with random bits that depend only on the element and the step.

Gupta, Agrawal, Gopalakrishnan and Narayanan, "Deep Learning with Limited Numerical Precision" (arXiv 1502.02551),
section 3: a value between two neighbours is rounded up with the probability that keeps its mean. bf16 is the upper 16
bits of fp32, so this adds 16 uniform random bits to the lower ones and then drops those (Zamirai, Zhang, Aberger and
De Sa, "Revisiting BFloat16 Training", arXiv 2010.06192).
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

#: Multipliers and shifts of a 32-bit mixer with little bias: Wellons, "Prospecting for Hash Functions" (2018),
#: ``lowbias32``. The second multiplier is 0x846ca68b as a signed number.
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
SHIFTS = (16, 15)
#: The largest finite bf16, as the bits of an fp32.
LARGEST = 0x7F7F0000
Key = tuple[int, int]


def key_of(name: str, step: int) -> Key:
    """Return the key of the random numbers for rounding a parameter at one step: two signed 32-bit numbers.

    It depends on ``name`` and ``step`` only, so all ranks get the same key.
    """
    # Experts of one name on different ranks share a key; their values are never summed, so errors do not add up.
    return struct.unpack("<ii", hashlib.blake2s(f"{name}\0{step}".encode(), digest_size=8).digest())


def noise(out: Tensor, spare: Tensor, key: Key, first: int) -> Tensor:
    """Write uniform random integers from 0 to 2^16 - 1 to ``out``, and return ``out``.

    Element i depends only on ``key`` and ``first + i``. If ``first`` is the index of the first element in its matrix,
    an element gets the same bits whatever part of the matrix a rank holds. This is the counter-based scheme of Salmon,
    Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).

    ``out`` and ``spare``: int32, 1-D, equal in length; ``spare`` is overwritten.
    """
    torch.arange(out.numel(), out=out)
    out.add_(signed(key[0] + first))
    _mix(out, spare, SHIFTS[0], MULTIPLIERS[0])
    out.add_(key[1])
    _mix(out, spare, SHIFTS[1], MULTIPLIERS[1])
    return out.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _mix(x: Tensor, spare: Tensor, shift: int, multiplier: int) -> None:
    """Set ``x <- (x ^ x >> shift) multiplier`` modulo 2^32. ``x``: int32; ``spare``: int32, same shape, overwritten."""
    torch.bitwise_right_shift(x, shift, out=spare)  # copies of the sign bit move in from the left; the mask drops them
    x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)


def signed(value: int) -> int:
    """Return the signed 32-bit number equal to ``value`` modulo 2^32."""
    return (value + 2**31) % 2**32 - 2**31


def round_(target: Tensor, source: Tensor, noise: Tensor, spare: Tensor) -> None:
    """Round ``source`` stochastically to ``target``: to a bf16 neighbour, so that the expected value is the element.

    Values that bf16 can represent stay as they are, infinities and quiet NaNs too. A finite value never becomes
    infinite: one beyond bf16's largest value is rounded down to it.

    ``target``: bf16. The others have the same shape and are overwritten: ``source``, fp32; ``noise``, int32, uniform
    from 0 to 2^16 - 1; ``spare``, int32.
    """
    bits = source.view(torch.int32)
    torch.bitwise_and(bits, 0x7FFFFFFF, out=spare)
    is_below = spare.sub_(LARGEST).bitwise_right_shift_(31)  # all bits where a carry stays finite, otherwise none
    bits.add_(noise.bitwise_and_(is_below)).bitwise_and_(-0x10000)
    target.copy_(source)
