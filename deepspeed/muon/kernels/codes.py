# SPDX-License-Identifier: Apache-2.0
"""Storage of tensors in int8: a code for each element, and an fp32 magnitude for each block of 128 elements.

Blockwise quantization as in Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861), with linear codes, which Gupta et al., "Effective Quantization of Muon Optimizer States" (arXiv
2509.23106), find sufficient for the momentum of Muon. A value is code / 127 times the largest magnitude of its block.
The element with that magnitude has the code 127 or -127, however the block is rounded, so encoding decoded values to
nearest gives the same codes and magnitudes again.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """Decode int8 codes: code / 127 times the block's largest magnitude. Return the fp32 values, a view of ``out``.

    Args:
        codes: int8, 1-D, from the beginning of a block; may end within a block.
        absmax: fp32, 1-D: the largest magnitude of each block.
        out: fp32, 1-D, with ``BLOCK`` elements for each element of ``absmax``; overwritten.
    """
    values = out[: codes.numel()]
    values.copy_(codes)
    out.view(-1, BLOCK).mul_(1 / LEVELS).mul_(absmax.unsqueeze(-1))
    return values


def encode(values: Tensor, codes: Tensor, absmax: Tensor, noise: Tensor | float) -> None:
    """Quantize ``values`` to int8: code = floor(127 value / m + ``noise``), where m is the block's largest magnitude.

    Args:
        values: fp32, 1-D: whole blocks, the last one padded with zeros; overwritten.
        codes: int8, 1-D: receives a code for each element before the padding.
        absmax: fp32, 1-D: receives m of each block.
        noise: 1/2 to round to nearest. To round stochastically: uniform random numbers from 2^-16 to 1 - 2^-16, fp32,
            one for each element of ``values``.
    """
    # Noise is farther from 0 and 1 than the rounding error of a block's largest value, so its code is 127 or -127.
    blocks = values.view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=-1)
    torch.maximum(high, low.neg_(), out=absmax)
    absmax.masked_fill_(absmax < SMALLEST, 0.0)
    factors = torch.full_like(absmax, LEVELS).div_(absmax).masked_fill_(absmax == 0, 0.0)
    blocks.mul_(factors.unsqueeze(-1))
    codes.copy_(values.add_(noise).floor_()[: codes.numel()])
