# SPDX-License-Identifier: Apache-2.0
"""The momentum as it is stored: in the tensor's dtype, which is fp32 under ZeRO, in bf16, or in int8."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.codes import BLOCK, blocks_of, decode, encode

#: Keys of a state: the momentum, or its two parts in int8.
MOMENTUM, CODES, ABSMAX = "momentum_buffer", "momentum_codes", "momentum_absmax"
#: Blocks that are converted at a time.
CHUNK = 2**14
State = dict[str, Any]


class Fragment(NamedTuple):
    """Consecutive elements of one parameter in a tensor: ``first`` is the index of the first in the parameter."""

    name: str
    first: int
    position: int
    numel: int


class Blocks:
    """Where the blocks of a tensor's momentum in int8 lie: they begin anew with each parameter.

    So a parameter's momentum does not depend on its neighbours' or on padding, which may hold anything.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self.fragments = sorted(fragments, key=lambda fragment: fragment.position)
        self._positions = [fragment.position for fragment in self.fragments]
        counts = [blocks_of(fragment.numel) for fragment in self.fragments]
        self._ends = list(accumulate(counts, initial=0))
        self.count = self._ends[-1]

    def parts(self, state: State) -> Iterator[tuple[Fragment, Tensor, Tensor]]:
        """Yield each fragment with its codes and the magnitudes of its blocks, which are views of the state."""
        codes = state[CODES].view(-1)
        for fragment, (start, end) in zip(self.fragments, pairwise(self._ends), strict=True):
            yield fragment, codes[fragment.position :][: fragment.numel], state[ABSMAX][start:end]

    def around(self, state: State, start: int, numel: int) -> tuple[Fragment, Tensor, Tensor, int]:
        """Return the fragment of some elements, codes, blocks' magnitudes, and how many precede in the first block."""
        at = bisect_right(self._positions, start) - 1
        block, skipped = divmod(start - self._positions[at], BLOCK)
        first = self._ends[at] + block
        absmax = state[ABSMAX][first : first + blocks_of(skipped + numel)]
        return self.fragments[at], state[CODES].view(-1)[start : start + numel], absmax, skipped

    def read(self, state: State, start: int, stop: int, device: torch.device) -> Tensor:
        """Return elements ``start`` to ``stop`` of the tensor in fp32 on a device; zeros between the fragments."""
        return self.read_into(torch.zeros(stop - start, dtype=torch.float32, device=device), state, start)

    def read_into(self, result: Tensor, state: State, start: int = 0) -> Tensor:
        """Write the elements from ``start`` on to the fragments' places in ``result``, fp32, and return it."""
        stop = start + result.numel()
        for fragment, codes, absmax in self.parts(state):
            low, high = max(start, fragment.position), min(stop, fragment.position + fragment.numel)
            for first in range(low, high, CHUNK * BLOCK):
                end = min(high, first + CHUNK * BLOCK)
                block, skipped = divmod(first - fragment.position, BLOCK)
                magnitudes = absmax[block : block + blocks_of(skipped + end - first)]
                wide = torch.empty(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                place = slice(first - fragment.position, end - fragment.position)
                result[first - start : end - start] = decode(codes[place], magnitudes, skipped, wide)
        return result

    def write(self, state: State, start: int, values: Tensor) -> None:
        """Round ``values``, 1-D, to nearest, for the elements from ``start`` on: whole fragments, and between them."""
        stop = start + values.numel()
        for fragment, codes, absmax in self.parts(state):
            if fragment.position + fragment.numel <= start or stop <= fragment.position:
                continue
            assert start <= fragment.position and fragment.position + fragment.numel <= stop, "a part of a parameter"
            rounded = values[fragment.position - start :][: fragment.numel]
            for block in range(0, absmax.numel(), CHUNK):
                magnitudes, part = absmax[block : block + CHUNK], slice(block * BLOCK, (block + CHUNK) * BLOCK)
                wide = torch.zeros(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                wide[: codes[part].numel()] = rounded[part]
                encode(wide, codes[part], magnitudes, 0.5)


def whole(tensor: Tensor) -> Blocks:
    """Return the blocks of a tensor that is one parameter."""
    return Blocks([Fragment("", 0, 0, tensor.numel())])


def state_of(state: State, tensor: Tensor, momentum_dtype: str, blocks: Callable[[Tensor], Blocks]) -> State:
    """Return ``state`` with a momentum for the tensor, and ``step``, fp32 on the CPU; zeros at first.

    The momentum is ``momentum_buffer`` of the tensor's shape or, in int8, ``momentum_codes`` of that shape and
    ``momentum_absmax``, fp32, one per block.
    """
    if MOMENTUM not in state and CODES not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        dtype = kept_dtype(tensor, momentum_dtype)
        if dtype == torch.int8:
            state |= codes_of(tensor.shape, blocks(tensor), tensor.device)
        else:
            state[MOMENTUM] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    return state


def codes_of(shape: torch.Size, blocks: Blocks, device: torch.device) -> State:
    """Return a momentum of zeros in int8."""
    return {
        CODES: torch.zeros(shape, dtype=torch.int8, device=device),
        ABSMAX: torch.zeros(blocks.count, dtype=torch.float32, device=device),
    }


def kept_dtype(tensor: Tensor, momentum_dtype: str) -> torch.dtype:
    """Return the dtype of a tensor's momentum."""
    return {"bf16": torch.bfloat16, "int8": torch.int8}.get(momentum_dtype, tensor.dtype)
