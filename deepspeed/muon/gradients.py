# SPDX-License-Identifier: Apache-2.0
"""Find the matrices that have no gradient in a step, and gradients that are not finite.

ZeRO passes a gradient of zeros for a parameter that took no part in the loss. Its momentum then shrinks, but updates
keep their full size, so the matrix would move on for some 1,900 steps. Therefore a matrix whose whole gradient is
exactly zero is not updated, like a parameter whose ``grad`` is ``None`` in torch's optimizers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.exchange.bucket import ShardRun
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.exchange.run import Exchange, grid_view

#: How many elements of each matrix's gradient to test first. A matrix is read as a whole only if all of them are zero.
PROBES = 16


class _Probes(NamedTuple):
    """The elements of one tensor's gradient that :class:`GradientProbe` tests.

    ``tensor``: the tensor's index in the partition. The other fields have one item for each matrix of which the tensor
    holds elements. ``runs``: the parts of the matrix in the tensor. ``matrices``: index of the matrix in the partition,
    int64 ``[matrices]``. ``positions``: indices in the tensor of the elements to test first, int64
    ``[matrices, PROBES]``.
    """

    tensor: int
    runs: list[list[ShardRun]]
    matrices: Tensor
    positions: Tensor


class GradientProbe:
    """The check for matrices of one :class:`Partition` whose gradient is zero, made of a few tensor operations.

    ``plan``: says where in the partition's tensors each matrix is.
    """

    def __init__(self, partition: Partition, plan: Plan, exchange: Exchange) -> None:
        self._exchange, self._is_shared = exchange, plan.of_all.gradient_flag_count > 0
        #: Names of all matrices; the same order on all ranks.
        self.names = [item.name for item in partition.blocks]
        index = {name: number for number, name in enumerate(self.names)}
        runs: dict[int, dict[int, list[ShardRun]]] = defaultdict(lambda: defaultdict(list))
        for bucket in plan.buckets:
            for run in bucket.runs:
                runs[run.tensor][index[run.matrix]].append(run)
        self._probes = []
        for tensor, of_tensor in runs.items():
            device = partition.tensors[tensor].device
            integers = partial(torch.tensor, dtype=torch.int64, device=device)
            positions = integers([_spread(of_matrix) for of_matrix in of_tensor.values()])
            self._probes.append(_Probes(tensor, [*of_tensor.values()], integers([*of_tensor]), positions))

    def sampled(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return int32 ``[matrices]``: 1 where a sample of the matrix's gradient is not zero on some rank, otherwise 0.

        ``tensors``: the tensors of the partition; a ``grad`` of ``None`` counts as zero. A collective, unless this
        rank's gradients are enough to tell.
        """
        present = torch.zeros(len(self.names), dtype=torch.int32, device=tensors[0].device)
        for probes, grad in self._with_gradient(tensors):
            present[probes.matrices] = grad[probes.positions].ne(0).any(dim=1).to(torch.int32)
        return self._of_all_ranks(present)

    def read(self, tensors: Sequence[Tensor], matrices: Collection[int]) -> Tensor:
        """Return int32 ``[matrices]`` as :meth:`sampled` does, but read the whole gradient of the given matrices.

        ``matrices``: their indices, equal on all ranks; the result is 1 for all others.
        """
        present = torch.ones(len(self.names), dtype=torch.int32, device=tensors[0].device)
        present[list(matrices)] = 0
        for probes, grad in self._with_gradient(tensors):
            for number, runs in zip(probes.matrices.tolist(), probes.runs, strict=True):
                if number in matrices:
                    present[number] = torch.stack([grid_view(grad, run.copy).any() for run in runs]).any()
        return self._of_all_ranks(present)

    def _with_gradient(self, tensors: Sequence[Tensor]) -> Iterator[tuple[_Probes, Tensor]]:
        for probes in self._probes:
            if (grad := tensors[probes.tensor].grad) is not None:
                yield probes, grad.contiguous().view(-1)

    def _of_all_ranks(self, present: Tensor) -> Tensor:
        present = present.to(self._exchange.device)
        if self._is_shared:
            self._exchange.largest(present)
        return present


def without_gradient(probes: Sequence[GradientProbe], tensors: Sequence[Sequence[Tensor]]) -> list[frozenset[str]]:
    """Return for each partition the names of its matrices whose gradient is zero on all ranks; a collective.

    ``probes``: those of the partitions. ``tensors``: for each partition, its tensors. The host waits for the device
    once, or twice if a sample of some gradient is zero on all ranks.
    """
    # A gradient that is not zero is hardly ever zero at all sampled positions, so most steps read no more of it.
    found = torch.cat([probe.sampled(of_part) for probe, of_part in zip(probes, tensors, strict=True)]).tolist()
    result = []
    for probe, of_part in zip(probes, tensors, strict=True):
        present, found = found[: len(probe.names)], found[len(probe.names) :]
        # Equal on all ranks, so all of them read on, or none.
        unsure = {number for number, is_present in enumerate(present) if not is_present}
        if unsure:
            present = probe.read(of_part, unsure).tolist()
        result.append(frozenset(name for name, one in zip(probe.names, present, strict=True) if not one))
    return result


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
