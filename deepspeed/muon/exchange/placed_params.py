# SPDX-License-Identifier: Apache-2.0
"""The parameters of one parameter group that a step updates, their layout over the ranks, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from deepspeed.muon.layout import Block, MatrixSpec, Placement, Spread, spread_of
from deepspeed.muon.math.momentum_storage import Fragment, Rows


@dataclass(frozen=True)
class Shard:
    """One parameter, and which ranks store which of its elements.

    Args:
        spec: the parameter's name, shape and matrices.
        tensor: index of the tensor that holds this rank's part of the parameter, among those that a step updates.
        placement: which rank holds each element.
        tp_placements: with tensor parallelism, the placement of each tensor-parallel rank's parameter; otherwise empty.
    """

    spec: MatrixSpec
    tensor: int
    placement: Placement
    tp_placements: tuple[Placement, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return the placement of each tensor-parallel rank's parameter; a single one without tensor parallelism."""
        return self.tp_placements or (self.placement,)

    @cached_property
    def items(self) -> tuple[PlacedBlock, ...]:
        """Return the matrices to orthogonalize in this parameter."""
        return tuple(PlacedBlock(self, block) for block in self.spec.blocks)


@dataclass(frozen=True)
class PlacedBlock:
    """One matrix to orthogonalize, and which ranks store which of its elements.

    ``shard``: the parameter that contains the matrix. ``block``: the shape of the matrix, and where in that parameter
    it is.
    """

    shard: Shard
    block: Block

    @property
    def name(self) -> str:
        """Return the name of the matrix, such as ``qkv.weight[4096]``.

        The number is the index of its first element in the parameter; it is left out if it is 0.
        """
        return f"{self.shard.spec.name}[{self.block.offset}]" if self.block.offset else self.shard.spec.name

    @property
    def shape(self) -> tuple[int, int]:
        """Return (rows, columns) of the matrix."""
        return self.block.rows, self.block.cols

    @property
    def axis(self) -> int:
        """Return 0 if each row of the matrix belongs to one output feature, 1 if each column does, and 0 if unknown."""
        return self.shard.spec.output_axis or 0

    @cached_property
    def spread(self) -> Spread:
        """Return which ranks hold which elements of the matrix."""
        rules = tuple(placement.rule for placement in self.shard.placements)
        return spread_of(self.block, self.shard.spec.sharding, rules)


@dataclass(frozen=True)
class Partition:
    """The parameters of one parameter group that one call of ``step`` updates, and how ranks share them.

    Args:
        index: index of the parameter group in the optimizer.
        tensors: the group's ``params`` when ``step`` is called: flat partitions under ZeRO, otherwise parameters.
        shards: where each parameter is stored in ``tensors``.
        group: process group of the ranks that share the parameters or their work; ``None`` for a single rank.
        rank, world_size: this rank's index in ``group``, and the size of ``group``.
        planned: ``shards`` and, under tensor parallelism, parameters that only other tensor-parallel ranks hold.
    """

    index: int
    tensors: tuple[Tensor, ...]
    shards: tuple[Shard, ...]
    group: Any = None
    rank: int = 0
    world_size: int = 1
    planned: tuple[Shard, ...] = ()

    def __post_init__(self) -> None:
        if not self.planned:
            object.__setattr__(self, "planned", self.shards)

    @property
    def is_replicated(self) -> bool:
        """Return whether several ranks hold complete copies of all parameters of the partition."""
        return any(shard.placement.copies > 1 for shard in self.shards)

    @property
    def blocks(self) -> list[PlacedBlock]:
        """Return the matrices of all parameters in :attr:`planned`, in the same order on all ranks."""
        return [item for shard in self.planned for item in shard.items]

    def pieces(self) -> Iterator[tuple[Shard, int, int, int]]:
        """Yield (shard, start, stop, position) for each parameter of which this rank holds elements.

        This rank holds elements ``start`` to ``stop - 1`` of the flattened parameter. In ``tensors[shard.tensor]`` they
        begin at index ``position``.
        """
        for shard in self.shards:
            start, stop = shard.placement.held_range(self.rank, 0, shard.spec.numel)
            if start < stop:
                yield shard, start, stop, shard.placement.position(start)

    def matrix_pieces(self) -> list[list[Rows]]:
        """Return, for each tensor in :attr:`tensors`, the pieces of matrices (:class:`Rows`) in it on this rank."""
        pieces_of_tensors: list[list[Rows]] = [[] for _ in self.tensors]
        for shard in self.shards:
            for piece in (piece for item in shard.items for piece in item.spread.pieces(self.rank)):
                start = shard.placement.position(piece.element)
                pieces_of_tensors[shard.tensor].append(Rows(start, piece.rows, piece.cols, piece.stride))
        return pieces_of_tensors

    def fragments(self) -> list[list[Fragment]]:
        """Return, for each tensor in :attr:`tensors`, the parts of parameters (:class:`Fragment`) in it on this rank.

        A fragment has the parameter's name. Under tensor parallelism the tensor-parallel rank follows: ``fc.weight@1``.
        """
        fragments_of_tensors: list[list[Fragment]] = [[] for _ in self.tensors]
        for shard, start, stop, position in self.pieces():
            part = f"@{shard.placement.first}" if shard.spec.sharding else ""
            fragments_of_tensors[shard.tensor].append(Fragment(shard.spec.name + part, start, position, stop - start))
        return fragments_of_tensors


def whole_shards(specs: Iterable[MatrixSpec], copies: int) -> tuple[Shard, ...]:
    """Return a :class:`Shard` for each parameter in ``specs``, which ``copies`` ranks hold whole, as one tensor."""
    return tuple(Shard(spec, i, Placement(0, spec.numel, 0, copies)) for i, spec in enumerate(specs))


def whole_partition(
    index: int,
    tensors: Sequence[Tensor],
    specs: Sequence[MatrixSpec],
    group: Any = None,
    rank: int = 0,
    copies: int = 1,
) -> Partition:
    """Return the partition of a parameter group that ZeRO does not shard: every rank of ``group`` holds it whole.

    ``index``: the parameter group's index in the optimizer. ``tensors``: its parameters, or fp32 copies of them.
    ``specs``: descriptions of the parameters, in the same order.
    ``rank``: this rank's index in ``group``. ``copies``: the number of ranks in ``group``.

    Raises:
        ValueError: a Muon parameter is not contiguous, such as a convolution in channels_last.
    """
    for tensor, spec in zip(tensors, specs, strict=True):
        if spec.use_muon and not tensor.is_contiguous():
            raise ValueError(
                f"{spec.name}: Muon needs a contiguous parameter; do not set memory_format=torch.channels_last, or use "
                "ZeRO stage 1, 2 or 3"
            )
    return Partition(index, tuple(tensors), whole_shards(specs, copies), group, rank, copies)
