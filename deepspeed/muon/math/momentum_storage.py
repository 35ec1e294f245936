# SPDX-License-Identifier: Apache-2.0
"""The stored form of the momentum: in the tensor's dtype (fp32 under ZeRO), in bf16, or in int8."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.codes import BLOCK, block_count, decode, encode

#: Keys of a parameter's state: the momentum; or, in int8, its codes and the largest magnitude of each block.
MOMENTUM, CODES, ABSMAX = "momentum_buffer", "momentum_codes", "momentum_absmax"
#: Number of blocks that are converted at a time.
CHUNK = 2**14
State = dict[str, Any]


class Fragment(NamedTuple):
    """A contiguous part of a parameter inside a tensor that may hold many, such as ZeRO's flat partition.

    ``name``: name of the parameter. ``first``: index of the part's first element in the flattened parameter.
    ``position``: index of the same element in the tensor. ``numel``: number of elements.
    """

    name: str
    first: int
    position: int
    numel: int


class Blocks:
    """The quantization blocks of one tensor's int8 momentum. All elements of a block share one scale.

    Each parameter in the tensor begins a new block. So the momentum of a parameter does not depend on its neighbors in
    the tensor, nor on padding, which may be NaN. ``fragments``: the parts of parameters that the tensor holds.
    Methods take ``state``, the tensor's optimizer state.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self.fragments = sorted(fragments, key=lambda fragment: fragment.position)
        self._positions = [fragment.position for fragment in self.fragments]
        counts = [block_count(fragment.numel) for fragment in self.fragments]
        self._ends = list(accumulate(counts, initial=0))
        self.count = self._ends[-1]

    def parts(self, state: State) -> Iterator[tuple[Fragment, Tensor, Tensor]]:
        """Yield (fragment, codes, magnitudes) for each :class:`Fragment` in the tensor.

        ``codes``: the fragment's momentum, int8. ``magnitudes``: the largest magnitude in each of the fragment's
        quantization blocks, fp32. Both are 1-D views into ``state``, the tensor's optimizer state.
        """
        codes = state[CODES].view(-1)
        for fragment, (start, end) in zip(self.fragments, pairwise(self._ends), strict=True):
            yield fragment, codes[fragment.position :][: fragment.numel], state[ABSMAX][start:end]

    def fragment_at(self, state: State, start: int, numel: int) -> tuple[Fragment, Tensor, Tensor, int]:
        """Return (fragment, codes, magnitudes, skipped) for ``numel`` elements of the tensor from index ``start`` on.

        The elements must belong to one :class:`Fragment`. ``codes``: their momentum, int8. ``magnitudes``: the largest
        magnitude of each quantization block that contains some of them, fp32. ``skipped``: number of elements of the
        first block before ``start``. Codes and magnitudes are 1-D views into ``state``, the tensor's optimizer state.
        """
        at = bisect_right(self._positions, start) - 1
        block, skipped = divmod(start - self._positions[at], BLOCK)
        first = self._ends[at] + block
        absmax = state[ABSMAX][first : first + block_count(skipped + numel)]
        return self.fragments[at], state[CODES].view(-1)[start : start + numel], absmax, skipped

    def read(self, state: State, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the momentum of the tensor's elements ``start`` to ``stop - 1`` as fp32, 1-D; padding becomes zero."""
        return self.read_into(torch.zeros(stop - start, dtype=torch.float32, device=device), state, start)

    def read_into(self, result: Tensor, state: State, start: int = 0) -> Tensor:
        """Write the momentum of the tensor's elements from index ``start`` on to ``result``, and return ``result``.

        ``result``: fp32, 1-D. Its entries for padding do not change.
        """
        stop = start + result.numel()
        for fragment, codes, absmax in self.parts(state):
            low, high = max(start, fragment.position), min(stop, fragment.position + fragment.numel)
            for first in range(low, high, CHUNK * BLOCK):
                end = min(high, first + CHUNK * BLOCK)
                block, skipped = divmod(first - fragment.position, BLOCK)
                magnitudes = absmax[block : block + block_count(skipped + end - first)]
                wide = torch.empty(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                place = slice(first - fragment.position, end - fragment.position)
                result[first - start : end - start] = decode(codes[place], magnitudes, skipped, wide)
        return result

    def write(self, state: State, start: int, values: Tensor) -> None:
        """Quantize ``values``, 1-D, and store them as the momentum of the tensor's elements from index ``start`` on.

        Values are rounded to nearest. For each :class:`Fragment`, they must contain all elements or none.
        """
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


def whole_parameter(tensor: Tensor) -> Blocks:
    """Return the quantization blocks of a tensor that is one whole parameter."""
    return Blocks([Fragment("", 0, 0, tensor.numel())])


def state_of(state: State, tensor: Tensor, momentum_dtype: str, blocks: Callable[[Tensor], Blocks]) -> State:
    """Return ``state``, the Muon state of ``tensor``. If it has no momentum, add ``step`` and a momentum of zeros.

    ``step`` is an fp32 scalar tensor on the CPU. The momentum is ``momentum_buffer``, with the tensor's shape. An int8
    momentum is ``momentum_codes``, with the tensor's shape, and ``momentum_absmax``, fp32, one element for each
    quantization block. ``momentum_dtype``: as for :func:`storage_dtype`. ``blocks``: function that returns a tensor's
    quantization blocks; called only for int8.
    """
    if MOMENTUM not in state and CODES not in state:
        # On the CPU, because each step reads the count, for schedules and random numbers, and would wait for a device.
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        dtype = storage_dtype(tensor, momentum_dtype)
        if dtype == torch.int8:
            state |= zero_codes(tensor.shape, blocks(tensor), tensor.device)
        else:
            state[MOMENTUM] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    return state


def zero_codes(shape: torch.Size, blocks: Blocks, device: torch.device) -> State:
    """Return an int8 momentum of zeros: the entries ``momentum_codes`` and ``momentum_absmax`` of a tensor's state."""
    return {
        CODES: torch.zeros(shape, dtype=torch.int8, device=device),
        ABSMAX: torch.zeros(blocks.count, dtype=torch.float32, device=device),
    }


def storage_dtype(tensor: Tensor, momentum_dtype: str) -> torch.dtype:
    """Return the torch dtype of a tensor's stored momentum, for ``momentum_dtype`` in the config.

    ``bf16`` and ``int8`` mean themselves; ``fp32`` means the dtype of the tensor.
    """
    return {"bf16": torch.bfloat16, "int8": torch.int8}.get(momentum_dtype, tensor.dtype)
