# SPDX-License-Identifier: Apache-2.0
"""The stored form of the momentum: in the tensor's dtype (fp32 under ZeRO), in bf16, or in int8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.rounding import BLOCK, block_count, decode, encode

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


class Rows(NamedTuple):
    """A piece of a matrix in a flat tensor: ``rows`` rows of ``cols`` elements, each ``pitch`` after the one before."""

    start: int
    rows: int
    cols: int
    pitch: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols

    def of(self, tensor: Tensor, first: int = 0) -> Tensor:
        """Return the piece as a view ``[rows, cols]``; ``tensor`` begins with the flat tensor's element ``first``."""
        return torch.as_strided(tensor.reshape(-1)[self.start - first :], (self.rows, self.cols), (self.pitch, 1))


class Blocks:
    """The quantization blocks of one tensor's int8 momentum. All elements of a block share one scale.

    Each piece of a matrix begins a new block. So the momentum of a matrix does not depend on other matrices in the
    tensor, nor on padding, which may be NaN. ``pieces``: the pieces of matrices that the tensor holds. Methods take
    ``state``, the tensor's optimizer state.
    """

    def __init__(self, pieces: Iterable[Rows]) -> None:
        self.pieces = list(pieces)
        ends = list(accumulate((block_count(piece.numel) for piece in self.pieces), initial=0))
        self._blocks = {piece.start: slice(*pair) for piece, pair in zip(self.pieces, pairwise(ends), strict=True)}
        self.count = ends[-1]

    def absmax(self, state: State, start: int) -> Tensor:
        """Return the largest magnitude of each block, fp32, of the piece that begins at index ``start``; a view."""
        return state[ABSMAX][self._blocks[start]]

    def read(self, state: State, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the momentum of the tensor's elements ``start`` to ``stop - 1`` as fp32, 1-D; padding becomes zero."""
        return self.read_into(torch.zeros(stop - start, dtype=torch.float32, device=device), state, start)

    def read_into(self, result: Tensor, state: State, start: int = 0) -> Tensor:
        """Write the momentum of the tensor's elements from index ``start`` on to ``result``, and return ``result``.

        ``result``: fp32, 1-D, for all elements of a piece or none. Its entries for padding do not change.
        """
        for piece in self._within(start, start + result.numel()):
            codes, absmax = piece.of(state[CODES]).reshape(-1), self.absmax(state, piece.start)
            values = piece.of(result, start) if piece.rows == 1 else torch.empty_like(codes, dtype=torch.float32)
            for part, magnitudes in _chunks(absmax):
                wide = torch.empty(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                values.view(-1)[part] = decode(codes[part], magnitudes, wide)
            if piece.rows > 1:
                piece.of(result, start).copy_(values.view(piece.rows, piece.cols))
        return result

    def write(self, state: State, start: int, values: Tensor) -> None:
        """Quantize ``values``, 1-D, and store them as the momentum of the tensor's elements from index ``start`` on.

        Values are rounded to nearest. For each piece, they must contain all elements or none.
        """
        for piece in self._within(start, start + values.numel()):
            given, absmax = piece.of(values, start).reshape(-1), self.absmax(state, piece.start)
            codes = torch.empty(piece.numel, dtype=torch.int8, device=absmax.device)
            for part, magnitudes in _chunks(absmax):
                wide = torch.zeros(magnitudes.numel() * BLOCK, dtype=torch.float32, device=absmax.device)
                wide[: codes[part].numel()] = given[part]
                encode(wide, codes[part], magnitudes, 0.5)
            piece.of(state[CODES]).copy_(codes.view(piece.rows, piece.cols))

    def _within(self, start: int, stop: int) -> Iterator[Rows]:
        for piece in self.pieces:
            end = piece.start + (piece.rows - 1) * piece.pitch + piece.cols
            if start < end and piece.start < stop:
                assert start <= piece.start and end <= stop, "a part of a piece"
                yield piece


def _chunks(absmax: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of elements, magnitudes of their blocks), :data:`CHUNK` blocks at a time."""
    for block in range(0, absmax.numel(), CHUNK):
        yield slice(block * BLOCK, (block + CHUNK) * BLOCK), absmax[block : block + CHUNK]


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
