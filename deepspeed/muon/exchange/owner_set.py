# SPDX-License-Identifier: Apache-2.0
"""The operations of Newton-Schulz on a slice of a matrix whose other slices are on neighbouring ranks.

With X = [X_1 ... X_k], X X^T is the sum of the X_j X_j^T, and P X is [P X_1 ... P X_k]: each rank squares and
multiplies its own slice. The norm and the Gram matrix of the whole matrix are summed over the ranks and equal on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.groups import group_of
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.newton_schulz import SPLIT_FROM
from deepspeed.muon.plan.memory import SUM_ELEMENTS
from deepspeed.muon.plan.owners import count_ranks_per_node


def owner_ranks(group: Any, size: int) -> tuple[int, ...]:
    """Return the world ranks, this one included, that together orthogonalize matrices with ``size`` owners.

    Example: if ``group`` has the ranks 0 to 3 and ``size`` is 2, the result on rank 3 is ``(2, 3)``.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    first = torch.distributed.get_rank(group) // size * size
    return tuple(ranks[first : first + size])


def owner_group(group: Any, size: int) -> Any:
    """Return the process group of the ranks that together orthogonalize matrices with ``size`` owners.

    Call :func:`~deepspeed.muon.exchange.groups.make_groups` for the ranks first, unless they are all of ``group``.
    """
    return group if size == torch.distributed.get_world_size(group) else group_of(owner_ranks(group, size))


def aligned_ranks_per_node(group: Any, ranks_per_node: int) -> int:
    """Return the largest n such that ranks 0 to n - 1 of ``group`` share a node, ranks n to 2n - 1 do, and so on.

    n divides the number of ranks. ``ranks_per_node``: number of consecutive world ranks on each node.
    """
    return count_ranks_per_node([rank // ranks_per_node for rank in torch.distributed.get_process_group_ranks(group)])


@dataclass(frozen=True)
class OwnerSet:
    """The ranks that orthogonalize some matrices together (their owners), and the collectives among these ranks.

    Each owner holds one slice of every matrix. All owners make the same calls in the same order.

    Args:
        group: process group of the owners.
        size: number of owners.
        call: function that launches a collective and waits for it. It takes the collective's kind, such as
            "all_reduce", this rank's tensor, and a function that launches it and returns its handle.
    """

    group: Any
    size: int
    call: Callable[[str, Tensor, Callable[[], Any]], None]

    def operations(self, kernels: Operations) -> Operations:
        """Return kernels that do the work of ``kernels`` on this rank's slice of each matrix.

        ``normalize`` and ``square`` communicate with the other owners. So does ``product`` if there are at least
        :data:`SPLIT_FROM` owners.
        """
        square = functools.partial(self._square, kernels)
        ours = replace(kernels, normalize=self._normalize, square=square, is_slice=True)
        if self.size < SPLIT_FROM:
            return ours
        return replace(ours, product=functools.partial(self._product, kernels), in_place=True)

    def _normalize(self, x: Tensor, out: Tensor, norm: float = 1.0) -> Tensor:
        """Scale this rank's slices ``x``, so that each whole matrix has the Frobenius norm ``norm``. Return ``out``.

        The arguments are those of :func:`deepspeed.muon.kernels.reference.normalize`.
        """
        sizes = torch.stack([torch.stack(reference.exponent_and_norm(matrix)) for matrix in x])
        found = torch.empty((self.size, x.size(0), 2), dtype=torch.float32, device=x.device)
        self._gather(found, sizes)
        exponents, lengths = found.unbind(-1)
        # Each length is relative to its owner's power of two. Make all relative to the largest: squares stay in range.
        exponent = exponents.amax(dim=0)
        length = torch.linalg.vector_norm(lengths * torch.exp2(exponents - exponent), dim=0)
        # `exponent_and_norm` has divided the slice by its own power of two, 2^sizes[:, 0]; the owners' powers differ.
        factors = torch.where(length == 0, 1.0, torch.exp2(sizes[:, 0] - exponent) * norm / length)
        return torch.mul(x, factors.view(-1, 1, 1), out=out)

    def _square(self, kernels: Operations, x: Tensor, out: Symmetric, work: Workspace) -> None:
        kernels.square(x, out, work)
        # Sum in fp32, a chunk at a time, so that a sum is rounded once, however many owners there are.
        for part in out.rest.view(-1).split(SUM_ELEMENTS):
            wide = part
            if part.dtype != torch.float32:
                wide = work.get("sum", tuple(part.shape), torch.float32, part.device).copy_(part)
            self._add(wide)
            if wide is not part:
                part.copy_(wide)
        if not out.is_whole:
            self._add(out.diagonal)

    def _product(
        self, kernels: Operations, a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN
    ) -> None:
        """Compute :func:`deepspeed.muon.kernels.reference.product`. Each owner computes some rows, and all gather them.

        ``out`` may be ``a`` or ``b``.
        """
        # The rows are computed as those of B A, which equals A B. `out` may be A or B: each matrix is written only when
        # this rank no longer needs its factors.
        count = out.rest.size(-1) // self.size
        first = torch.distributed.get_rank(self.group) * count
        mine = slice(first, first + count)
        for one_a, one_b, one_out in zip(_each(a), _each(b), _each(out), strict=True):
            rows = work.get("rows", (1, count, out.rest.size(-1)), out.rest.dtype, out.rest.device)
            kernels.multiply(one_a, one_b.rest[:, mine].mT, rows.mT, work)
            parts = max(1, SUM_ELEMENTS // rows.size(-1))
            diagonals = [
                _complete(part, one_a, one_b, slice(start, start + part.size(1)), coeffs, work)
                for start, part in zip(range(first, first + count, parts), rows.split(parts, dim=1), strict=True)
            ]
            self._gather(one_out.rest, rows)
            if not out.is_whole:
                self._gather(one_out.diagonal, torch.cat(diagonals, dim=1))

    def _add(self, tensor: Tensor) -> None:
        launch = functools.partial(torch.distributed.all_reduce, tensor, group=self.group, async_op=True)
        self.call("all_reduce", tensor, launch)

    def _gather(self, into: Tensor, part: Tensor) -> None:
        gather = torch.distributed.all_gather_into_tensor
        launch = functools.partial(gather, into.view(-1), part.contiguous().view(-1), group=self.group, async_op=True)
        self.call("all_gather", part, launch)


def _each(matrices: Symmetric) -> list[Symmetric]:
    return [Symmetric(rest, d) for rest, d in zip(matrices.rest.split(1), matrices.diagonal.split(1), strict=True)]


def _complete(rows: Tensor, a: Symmetric, b: Symmetric, mine: slice, coeffs: Scalars, work: Workspace) -> Tensor:
    """Turn ``rows``, the rows ``mine`` of ``A B``, in place, into rows of ``alpha A B + beta A + shift I``.

    If A and B store their diagonals separately (:class:`Symmetric`), ``rows`` comes without the term of B's diagonal
    and is left with a zero diagonal; the result's diagonal at ``mine`` is returned. Otherwise return an empty tensor.
    ``coeffs``: (alpha, beta, shift).
    """
    alpha, beta, shift = coeffs
    of_a, on_diagonal = a.rest[:, mine], rows.diagonal(offset=mine.start, dim1=-2, dim2=-1)
    if a.is_whole:
        rows.mul_(alpha).add_(of_a, alpha=beta)
        on_diagonal.add_(shift)
        return a.diagonal
    wide = work.get("cross", tuple(rows.shape), torch.float32, rows.device)
    torch.sum(wide.copy_(of_a).mul_(b.rest[:, mine]), dim=-1, out=(diagonal := torch.empty_like(a.diagonal[:, mine])))
    diagonal.addcmul_(a.diagonal[:, mine], b.diagonal[:, mine]).mul_(alpha).add_(a.diagonal[:, mine], alpha=beta)
    wide.copy_(of_a).mul_((b.diagonal[:, mine] * alpha + beta).unsqueeze(-1))
    rows.copy_(wide.add_(rows, alpha=alpha))
    on_diagonal.zero_()
    return diagonal.add_(shift)
