# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on tensors in a wider dtype than their own. They are converted chunk by chunk, and rounded once.

fp32 is enough for matrices of ordinary entries; squares of tiny or huge ones leave its range and need fp64. Tensors
that are stored in bf16 without an fp32 copy are updated in fp32 and rounded stochastically. Rounding to nearest would
lose an update below half a unit in the last place, 2^-9 of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import CHUNK, KernelSet, Workspace, chunks, is_accelerator
from deepspeed.muon.kernels.rounding import Key

#: Elements processed at a time on a CPU: they fit in its caches, and are enough work for all of its threads.
CPU_CHUNK = 2**18


def widened(x: Tensor, work: Workspace, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view, copy in ``dtype``) for each chunk of rows of ``x``, ``[rows, cols]``.

    ``work`` allocates the copies. Each copy overwrites the one before. The caller may write results to the view.
    """
    rows = max(1, (CHUNK if is_accelerator(x.device) else CPU_CHUNK) // x.size(1))
    for part in x.split(rows):
        yield part, work.get("widened", tuple(part.shape), dtype, x.device).copy_(part)


def sums_of_squares(x: Tensor, axis: int, work: Workspace, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of squares of each row (axis 0) or column (axis 1) of ``x``, ``[rows, cols]``.

    The result is ``[rows, 1]`` or ``[1, cols]``, computed in ``dtype``.
    """
    sums = [wide.square_().sum(dim=1 - axis, keepdim=True) for _, wide in widened(x, work, dtype)]
    return torch.cat(sums) if axis == 0 else torch.stack(sums).sum(dim=0)


def scale(x: Tensor, factors: Tensor, work: Workspace) -> None:
    """Multiply each row or each column of ``x``, ``[rows, cols]``, by its own factor, in place.

    ``factors``: ``[rows, 1]`` for rows, ``[1, cols]`` for columns. The multiplication uses their dtype.
    """
    start = 0
    for part, wide in widened(x, work, factors.dtype):
        part.copy_(wide.mul_(factors[start : start + len(part)] if factors.size(0) > 1 else factors))
        start += len(part)


def in_fp32(
    tensors: Sequence[Tensor], random_keys: Sequence[Key], first: int, kernels: KernelSet, work: Workspace
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield (slice, fp32 copies of this slice of each tensor) for each chunk of some bf16 tensors.

    The caller updates the copies in place. Before the next chunk they are rounded stochastically back into the tensors.

    Args:
        tensors: bf16, 1-D, of equal length.
        random_keys: the key of each tensor's random numbers, from :func:`deepspeed.muon.kernels.rounding.key_of`.
        first: index of the random number for the first element of each tensor; the next element takes the next number.
        kernels: the kernels that round.
        work: allocates the copies.
    """
    for part in chunks(tensors[0]):
        shape, device = (part.stop - part.start,), tensors[0].device
        wide = [work.get(f"in fp32 {index}", shape, torch.float32, device) for index in range(len(tensors))]
        for copy, tensor in zip(wide, tensors, strict=True):
            copy.copy_(tensor[part])
        yield part, wide
        for copy, tensor, random_key in zip(wide, tensors, random_keys, strict=True):
            kernels.copy_rounded(tensor[part], copy, random_key, first + part.start, work)
