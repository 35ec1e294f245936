# SPDX-License-Identifier: Apache-2.0
"""Storage in fewer bits: stochastic rounding to bf16, and int8 codes with a scale for each block of elements.

Blockwise quantization as in Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861), with linear codes, which Gupta et al., "Effective Quantization of Muon Optimizer States" (arXiv
2509.23106), find sufficient for the momentum of Muon. A value is code / 127 times the largest magnitude of its block.
The element with that magnitude has the code 127 or -127, however the block is rounded, so encoding decoded values to
nearest gives the same codes and magnitudes again.
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


def key_of(name: str, step_number: int) -> Key:
    """Return the key of the random numbers with which a tensor is rounded at one step: two signed 32-bit numbers.

    It depends on ``name``, such as that of a parameter or matrix, and ``step_number`` only. So all ranks get the same
    key. Pass it to :func:`noise`.
    """
    # Experts of one name on different ranks share a key; their values are never summed, so errors do not add up.
    return struct.unpack("<ii", hashlib.blake2s(f"{name}\0{step_number}".encode(), digest_size=8).digest())


def noise(out: Tensor, spare: Tensor, random_key: Key, first: int) -> Tensor:
    """Write uniform random integers from 0 to 2^16 - 1 to ``out``, and return ``out``.

    Element i depends only on ``random_key`` and ``first + i``. If ``first`` is the index of the first element in its
    matrix, an element gets the same bits whatever part of the matrix a rank holds. This is the counter-based scheme of
    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).

    ``out`` and ``spare``: int32, 1-D, equal in length; ``spare`` is overwritten.
    """
    torch.arange(out.numel(), out=out)
    out.add_(signed(random_key[0] + first))
    _mix(out, spare, SHIFTS[0], MULTIPLIERS[0])
    out.add_(random_key[1])
    _mix(out, spare, SHIFTS[1], MULTIPLIERS[1])
    return out.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _mix(x: Tensor, spare: Tensor, shift: int, multiplier: int) -> None:
    """Set ``x`` to ``(x ^ (x >> shift)) * multiplier`` modulo 2^32, with a zero-filling shift.

    ``x``: int32. ``spare``: int32, same shape; overwritten.
    """
    torch.bitwise_right_shift(x, shift, out=spare)  # copies of the sign bit move in from the left; the mask drops them
    x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)


def signed(number: int) -> int:
    """Return the number from -2^31 to 2^31 - 1 that is congruent to ``number`` modulo 2^32."""
    return (number + 2**31) % 2**32 - 2**31


def round_(target: Tensor, source: Tensor, noise: Tensor, spare: Tensor) -> None:
    """Round each element of ``source`` at random to one of its bf16 neighbours, and write it to ``target``.

    The expected value of the result is the element. Values that bf16 can represent do not change, nor do infinities and
    quiet NaNs. A finite value never becomes infinite: a magnitude above bf16's largest is rounded down to the largest.

    ``target``: bf16. The others have the same shape and are overwritten: ``source``, fp32; ``noise``, int32, uniform
    from 0 to 2^16 - 1; ``spare``, int32.
    """
    bits = source.view(torch.int32)
    torch.bitwise_and(bits, 0x7FFFFFFF, out=spare)
    is_below = spare.sub_(LARGEST).bitwise_right_shift_(31)  # all bits where a carry stays finite, otherwise none
    bits.add_(noise.bitwise_and_(is_below)).bitwise_and_(-0x10000)
    target.copy_(source)


#: Number of elements in a block.
BLOCK = 128
#: The largest code. In fp32, 1 / 127 times 127 is exactly 1.
LEVELS = 127
#: A block whose largest magnitude is below this becomes zero. From it on, 1 / 127 of it is a normal number in fp32.
SMALLEST = 2.0**-119


def block_count(numel: int) -> int:
    """Return ``numel / BLOCK``, rounded up: the number of quantization blocks in a tensor with ``numel`` elements."""
    return -(-numel // BLOCK)


def decode(codes: Tensor, absmax: Tensor, out: Tensor) -> Tensor:
    """Decode int8 codes, and return the fp32 values: code / 127 times the largest magnitude of its block.

    The result is a view of the beginning of ``out``.

    Args:
        codes: int8, 1-D, from the beginning of a block; may end within a block.
        absmax: fp32, 1-D: the largest magnitude of each block.
        out: fp32, 1-D, with ``BLOCK`` elements for each element of ``absmax``; overwritten.
    """
    values = out[: codes.numel()]
    values.copy_(codes)
    out.view(-1, BLOCK).mul_(1 / LEVELS).mul_(absmax.unsqueeze(-1))
    return values


def encode(values: Tensor, codes: Tensor, absmax: Tensor, offset: Tensor | float) -> None:
    """Quantize ``values`` to int8: code = floor(127 value / m + ``offset``), where m is the block's largest magnitude.

    Args:
        values: fp32, 1-D: whole blocks, the last one padded with zeros; overwritten.
        codes: int8, 1-D: receives a code for each element before the padding.
        absmax: fp32, 1-D: receives m of each block.
        offset: 1/2 to round to nearest. To round stochastically: uniform random numbers from 2^-16 to 1 - 2^-16, fp32,
            one for each element of ``values``.
    """
    # An offset is farther from 0 and 1 than the rounding error of a block's largest value: its code is 127 or -127.
    blocks = values.view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=-1)
    torch.maximum(high, low.neg_(), out=absmax)
    absmax.masked_fill_(absmax < SMALLEST, 0.0)
    factors = torch.full_like(absmax, LEVELS).div_(absmax).masked_fill_(absmax == 0, 0.0)
    blocks.mul_(factors.unsqueeze(-1))
    codes.copy_(values.add_(offset).floor_()[: codes.numel()])
