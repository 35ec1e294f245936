# SPDX-License-Identifier: Apache-2.0
"""Find the matrices that have no gradient in a step, and gradients that are not finite.

ZeRO passes a gradient of zeros for a parameter that took no part in the loss. Its momentum then shrinks, but updates
keep their full size, so the matrix would move on for some 1,900 steps. Therefore a matrix whose whole gradient is
exactly zero is not updated, like a parameter whose ``grad`` is ``None`` in torch's optimizers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.exchange.buffers import grid_view
from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.plan.bucket import GridCopy, ShardRun
from deepspeed.muon.plan.plan import Plan

#: How many elements of each matrix's gradient to test first. A matrix is read as a whole only if all of them are zero.
PROBES = 16


#: For each tensor of a partition, the consecutive pieces of its gradient, flattened; none if it has no gradient.
Gradients = Sequence[Sequence[Tensor]]


class _Probes(NamedTuple):
    """The elements of one tensor's gradient that :class:`GradientProbe` tests.

    ``tensor``: the tensor's index in the partition. The other fields have one item for each matrix of which the tensor
    holds elements, in the order of the elements. ``runs``: the parts of the matrix in the tensor. ``numbers``,
    ``matrices``: index of the matrix in the partition, as integers and as an int64 tensor. ``positions``: indices in
    the tensor of the :data:`PROBES` elements to test first. ``indices``: lengths of the gradient's pieces -> for each
    piece, the positions in it, int64 ``[matrices, PROBES]``.
    """

    tensor: int
    runs: list[list[ShardRun]]
    numbers: list[int]
    matrices: Tensor
    positions: list[list[int]]
    indices: dict[tuple[int, ...], list[Tensor]]

    def sampled(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the elements to test first, ``[matrices, PROBES]``; ``pieces``: the gradient, in 1-D pieces."""
        lengths = tuple(piece.numel() for piece in pieces)
        if lengths not in self.indices:
            self.indices[lengths] = self._indices(lengths)
        found = zip(pieces, self.indices[lengths], strict=True)
        return torch.cat([piece[index] for piece, index in found if index.numel()])

    def _indices(self, lengths: Sequence[int]) -> list[Tensor]:
        result, start = [], 0
        for length in lengths:
            # A matrix lies in one piece, because it belongs to one parameter.
            inside = [[p - start for p in of_one] for of_one in self.positions if 0 <= of_one[0] - start < length]
            index = torch.tensor(inside, dtype=torch.int64, device=self.matrices.device)
            result.append(index.view(-1, PROBES))
            start += length
        return result


class GradientProbe:
    """The check for matrices of one :class:`Partition` whose gradient is zero, made of a few tensor operations.

    ``plan``: says where in the partition's tensors each matrix is.
    """

    def __init__(self, partition: Partition, plan: Plan, exchange: Exchange) -> None:
        self._exchange, self._is_shared = exchange, plan.of_all.gradient_flag_count > 0
        self._device = partition.tensors[0].device
        #: Names of all matrices; the same order on all ranks.
        self.names = [item.name for item in partition.blocks]
        index = {name: number for number, name in enumerate(self.names)}
        runs: dict[int, dict[int, list[ShardRun]]] = defaultdict(lambda: defaultdict(list))
        for bucket in plan.buckets:
            for run in bucket.runs:
                runs[run.tensor][index[run.matrix]].append(run)
        self._probes = []
        for tensor, of_tensor in runs.items():
            in_order = dict(sorted(of_tensor.items(), key=lambda pair: pair[1][0].copy.start))
            numbers, parts = list(in_order), list(in_order.values())
            matrices = torch.tensor(numbers, dtype=torch.int64, device=partition.tensors[tensor].device)
            self._probes.append(_Probes(tensor, parts, numbers, matrices, [*map(_spread, parts)], {}))

    def sampled(self, gradients: Gradients) -> Tensor:
        """Return int32 ``[matrices]``: 1 where a sample of the matrix's gradient is not zero on some rank, otherwise 0.

        A collective, unless this rank's gradients are enough to tell.
        """
        present = torch.zeros(len(self.names), dtype=torch.int32, device=self._device)
        for probes in self._probes:
            if pieces := _joined(gradients[probes.tensor]):
                present[probes.matrices] = probes.sampled(pieces).ne(0).any(dim=1).to(torch.int32)
        return self._of_all_ranks(present)

    def read(self, gradients: Gradients, matrices: Sequence[int]) -> Tensor:
        """Return int32, one item for each of ``matrices``: 1 where its gradient is not zero on some rank, otherwise 0.

        ``matrices``: indices of matrices, equal on all ranks. Their gradients are read as a whole.
        """
        present = torch.zeros(len(matrices), dtype=torch.int32, device=self._device)
        places = {number: place for place, number in enumerate(matrices)}
        for probes in self._probes:
            pieces = _joined(gradients[probes.tensor])
            for number, runs in zip(probes.numbers, probes.runs, strict=True):
                if pieces and number in places:
                    present[places[number]] = torch.stack([_of_run(pieces, run.copy).any() for run in runs]).any()
        return self._of_all_ranks(present)

    def _of_all_ranks(self, present: Tensor) -> Tensor:
        present = present.to(self._exchange.device)
        if self._is_shared:
            self._exchange.largest(present)
        return present


def without_gradient(
    probes: Sequence[GradientProbe], gradients: Sequence[Gradients], read: Callable[[Tensor], list[int]]
) -> list[frozenset[str]]:
    """Return for each partition the names of its matrices whose gradient is zero on all ranks; a collective.

    The host waits for the device once, or twice if a sample of some gradient is zero on all ranks.

    Args:
        probes: those of the partitions.
        gradients: the gradients of each partition.
        read: function that returns the elements of an int32 tensor, which waits for the device.
    """
    if not probes:
        return []
    pairs = list(zip(probes, gradients, strict=True))
    # A gradient that is not zero is hardly ever zero at all sampled positions, so most steps read no more of it.
    flags = iter(read(torch.cat([probe.sampled(of_part) for probe, of_part in pairs])))
    # Equal on all ranks, so all of them read on, or none.
    unsure = [[number for number in range(len(probe.names)) if not next(flags)] for probe in probes]
    if not any(unsure):
        return [frozenset() for _ in probes]
    looks = [(probe, of_part, numbers) for (probe, of_part), numbers in zip(pairs, unsure, strict=True) if numbers]
    flags = iter(torch.cat([probe.read(of_part, numbers) for probe, of_part, numbers in looks]).tolist())
    return [
        frozenset(probe.names[number] for number in numbers if not next(flags))
        for probe, numbers in zip(probes, unsure, strict=True)
    ]


def _joined(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return the elements of ``pieces``, in order, as few 1-D tensors: neighbours in memory become one."""
    result: list[Tensor] = []
    for piece in (piece.reshape(-1) for piece in pieces if piece.numel()):
        last = result[-1] if result else piece
        is_next = last.storage_offset() + last.numel() == piece.storage_offset() and last.dtype == piece.dtype
        if is_next and last.untyped_storage()._cdata == piece.untyped_storage()._cdata:
            result[-1] = torch.as_strided(last, (last.numel() + piece.numel(),), (1,))
        else:
            result.append(piece)
    return result


def _of_run(pieces: Sequence[Tensor], copy: GridCopy) -> Tensor:
    """Return the elements that ``copy`` selects from a tensor which ``pieces`` make up, as a view of one of them."""
    number = 0
    while copy.start >= pieces[number].numel():
        copy = copy._replace(start=copy.start - pieces[number].numel())
        number += 1
    return grid_view(pieces[number], copy)


def _spread(runs: Sequence[ShardRun]) -> list[int]:
    """Return the indices in a tensor of PROBES elements of one matrix, spread evenly over its parts ``runs``."""
    ends, positions = list(accumulate(run.copy.numel for run in runs)), []
    for probe in range(PROBES):
        element = (2 * probe + 1) * ends[-1] // (2 * PROBES)
        number = bisect_right(ends, element)
        copy = runs[number].copy
        row, column = divmod(element - ends[number] + copy.numel, copy.cols)
        positions.append(copy.start + row * copy.pitch + column)
    return positions


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Return the gradient of a tensor as a list of one piece; an empty list if it has none, or a sparse one."""
    grad = tensor.grad
    return [] if grad is None or grad.layout != torch.strided else [grad]


def are_finite(tensors: list[Tensor]) -> bool:
    """Return whether the norm of every gradient in ``tensors`` is finite; True for an empty list.

    Raise RuntimeError if a gradient is sparse.
    """
    if not tensors:
        return True
    if any(t.layout != torch.strided for t in tensors):
        raise RuntimeError(
            "MuonWithAuxAdam does not support sparse gradients, and the gradient of at least one parameter is sparse; "
            "use nn.Embedding(..., sparse=False), or another optimizer for this parameter, such as "
            "torch.optim.SparseAdam"
        )
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    # In fp16 the norm of a finite gradient may overflow.
    dtype = torch.promote_types(max((t.dtype for t in tensors), key=lambda d: d.itemsize), torch.float32)
    norms = torch._foreach_norm(tensors, dtype=dtype)
    return bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all())
