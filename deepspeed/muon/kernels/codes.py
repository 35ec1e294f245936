# SPDX-License-Identifier: Apache-2.0
"""Tensors stored in int8: a code per element, and in fp32 the largest magnitude of each block of elements.

Blockwise quantization as in Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
(arXiv 2110.02861), with linear codes, which Gupta et al., "Effective Quantization of Muon Optimizer States" (arXiv
2509.23106), find sufficient for the momentum of Muon. A value is code / 127 times the magnitude of its block. The
element with that magnitude has the code 127 or -127, however the block is rounded, so that decoded values give the same
codes and magnitudes again when they are encoded to nearest.
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
    """Return the number of blocks that ``numel`` elements form; the last block may be shorter."""
    return -(-numel // BLOCK)


def decode(codes: Tensor, absmax: Tensor, skipped: int, out: Tensor) -> Tensor:
    """Decode the int8 codes of consecutive elements into ``out``, and return their values, fp32, a view of ``out``.

    Args:
        codes: int8, 1-D.
        absmax: fp32, 1-D: the largest magnitude of each block that contains some of the elements.
        skipped: number of elements of the first block that precede ``codes``.
        out: fp32, 1-D, with ``BLOCK`` elements for each element of ``absmax``; overwritten.
    """
    values = out[skipped : skipped + codes.numel()]
    values.copy_(codes)
    out.view(-1, BLOCK).mul_(1 / LEVELS).mul_(absmax.unsqueeze(-1))
    return values


def encode(values: Tensor, codes: Tensor, absmax: Tensor, noise: Tensor | float) -> None:
    """Write the codes and the blocks' magnitudes of ``values``. A code is floor(127 value / magnitude + ``noise``).

    Args:
        values: fp32, 1-D, whole blocks, with zeros after the last element; overwritten.
        codes: int8, 1-D: receives one code per element.
        absmax: fp32, 1-D: receives the largest magnitude of each block.
        noise: 1/2 rounds to nearest. A tensor of uniform random numbers, fp32, as long as ``values``, rounds
            stochastically; they are from 2^-16 to 1 - 2^-16, which is farther from 0 and 1 than the rounding error of a
            block's largest value, so that its code is always 127 or -127.
    """
    blocks = values.view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=-1)
    torch.maximum(high, low.neg_(), out=absmax)
    absmax.masked_fill_(absmax < SMALLEST, 0.0)
    factors = torch.full_like(absmax, LEVELS).div_(absmax).masked_fill_(absmax == 0, 0.0)
    blocks.mul_(factors.unsqueeze(-1))
    codes.copy_(values.add_(noise).floor_()[: codes.numel()])
