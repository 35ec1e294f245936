# SPDX-License-Identifier: Apache-2.0
"""The stored form of the momentum: in the tensor's dtype (fp32 under ZeRO), in bf16, or in int8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """A contiguous part of a parameter inside a tensor that may hold many parameters, such as ZeRO's flat partition.

    ``name``: name of the parameter; under tensor parallelism with the tensor-parallel rank, as in ``fc.weight@1``.
    ``first``: index of the part's first element in the flattened parameter. ``position``: index of the same element in
    the tensor. ``numel``: number of elements.
    """

    name: str
    first: int
    position: int
    numel: int


class Rows(NamedTuple):
    """A piece of a matrix in a flat tensor: ``rows`` rows of ``cols`` contiguous elements.

    The first row begins at index ``start``, each other row ``pitch`` elements after the row before it.
    """

    start: int
    rows: int
    cols: int
    pitch: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols

    def of(self, tensor: Tensor, first: int = 0) -> Tensor:
        """Return the piece as a view ``[rows, cols]`` of ``tensor``.

        ``tensor``: the flat tensor, or its part from element ``first`` on.
        """
        return torch.as_strided(tensor.reshape(-1)[self.start - first :], (self.rows, self.cols), (self.pitch, 1))


class QuantizationBlocks:
    """The quantization blocks of one tensor's int8 momentum. All elements of a block share one scale.

    Each piece of a matrix (a rectangle that the tensor holds) begins a new block. So the momentum of a matrix does not
    depend on other matrices in the tensor, nor on padding, which may be NaN. ``pieces``: the pieces of matrices that
    the tensor holds. Methods take ``state``, the tensor's optimizer state.
    """

    def __init__(self, pieces: Iterable[Rows]) -> None:
        self.pieces = list(pieces)
        ends = list(accumulate((block_count(piece.numel) for piece in self.pieces), initial=0))
        self._blocks = {piece.start: slice(*pair) for piece, pair in zip(self.pieces, pairwise(ends), strict=True)}
        self.count = ends[-1]

    def absmax(self, state: State, start: int) -> Tensor:
        """Return the scales of the blocks in one piece of a matrix, as a view of the state, 1-D.

        A scale is the largest magnitude in its block, fp32. ``start``: index of the piece's first element.
        """
        return state[ABSMAX][self._blocks[start]]

    def read(self, state: State, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the momentum of the tensor's elements ``start`` to ``stop - 1`` as fp32, 1-D; padding becomes zero."""
        return self.read_into(torch.zeros(stop - start, dtype=torch.float32, device=device), state, start)

    def read_into(self, out: Tensor, state: State, start: int = 0) -> Tensor:
        """Write the momentum of the tensor's elements from index ``start`` on to ``out``, and return ``out``.

        ``out``: fp32, 1-D; its length is the number of elements. They must include each piece of a matrix whole or not
        at all. Entries for padding do not change.
        """
        for piece in self._within(start, start + out.numel()):
            codes, absmax = piece.of(state[CODES]).reshape(-1), self.absmax(state, piece.start)
            values = piece.of(out, start) if piece.rows == 1 else torch.empty_like(codes, dtype=torch.float32)
            for part, magnitudes in _chunks(absmax):
                wide = torch.empty(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                values.view(-1)[part] = decode(codes[part], magnitudes, wide)
            if piece.rows > 1:
                piece.of(out, start).copy_(values.view(piece.rows, piece.cols))
        return out

    def write(self, state: State, start: int, momentum: Tensor) -> None:
        """Quantize ``momentum``, 1-D, to nearest, and store it for the tensor's elements from index ``start`` on.

        The elements must include each piece of a matrix whole or not at all.
        """
        for piece in self._within(start, start + momentum.numel()):
            given, absmax = piece.of(momentum, start).reshape(-1), self.absmax(state, piece.start)
            codes = torch.empty(piece.numel, dtype=torch.int8, device=absmax.device)
            for part, magnitudes in _chunks(absmax):
                wide = torch.zeros(magnitudes.numel() * BLOCK, dtype=torch.float32, device=absmax.device)
                wide[: codes[part].numel()] = given[part]
                encode(wide, codes[part], magnitudes, 0.5)
            piece.of(state[CODES]).copy_(codes.view(piece.rows, piece.cols))

    def _within(self, start: int, stop: int) -> Iterator[Rows]:
        """Yield the pieces of matrices in the tensor's elements ``start`` to ``stop - 1``; none may be cut."""
        for piece in self.pieces:
            end = piece.start + (piece.rows - 1) * piece.pitch + piece.cols
            if start < end and piece.start < stop:
                assert start <= piece.start and end <= stop, "a part of a piece"
                yield piece


def _chunks(absmax: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of a piece's elements, scales of their blocks), :data:`CHUNK` blocks at a time.

    ``absmax``: the scales of all blocks of the piece.
    """
    for block in range(0, absmax.numel(), CHUNK):
        yield slice(block * BLOCK, (block + CHUNK) * BLOCK), absmax[block : block + CHUNK]
