# SPDX-License-Identifier: Apache-2.0
"""Tensors that are kept in bf16 without an fp32 copy: updated in fp32, a chunk at a time, and rounded stochastically.

To nearest, an update below half a unit in the last place, 2^-9 of a weight, would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import chunks
from deepspeed.muon.kernels.rounding import Key
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace


def in_fp32(
    tensors: Sequence[Tensor], keys: Sequence[Key], first: int, kernels: Operations, work: Workspace
) -> Iterator[tuple[slice, list[Tensor]]]:
    """For each chunk its place and fp32 copies, which are rounded back into the tensors when the loop goes on.

    Args:
        tensors: bf16, 1-D, of one length.
        keys: of the random numbers of each, from :func:`deepspeed.muon.kernels.rounding.key_of`.
        first: index of the first element among those drawn under the keys.
        work: holds the copies, valid until the loop goes on.
    """
    for part in chunks(tensors[0]):
        shape, device = (part.stop - part.start,), tensors[0].device
        wide = [work.get(f"in fp32 {index}", shape, torch.float32, device) for index in range(len(tensors))]
        for copy, tensor in zip(wide, tensors, strict=True):
            copy.copy_(tensor[part])
        yield part, wide
        for copy, tensor, key in zip(wide, tensors, keys, strict=True):
            kernels.copy_rounded(tensor[part], copy, key, first + part.start, work)
