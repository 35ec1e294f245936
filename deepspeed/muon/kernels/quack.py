# SPDX-License-Identifier: Apache-2.0
"""Symmetric products of quack-kernels (Dao-AILab), written in CuTe for Hopper and Blackwell; the extra ``hopper``.

The module imports without the library; :func:`operations` then raises.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import torch
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.triton_table import is_half_and_aligned
from deepspeed.muon.kernels.workspace import Workspace

#: The least smaller dimension: the tile of one of its clusters, as in gram-newton-schulz.
SYMMETRIC_FROM = 512


def why_not() -> str | None:
    """Why quack's kernels cannot run on this process's accelerator; ``None`` if they can."""
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "the GPU is neither a Hopper nor a Blackwell of the data centre"
    return None


def operations(other: Operations) -> Operations:
    """``other``, with the symmetric products of 16-bit matrices on a GPU replaced.

    The library's output is rounded before a Triton pass adds the contribution of the diagonals.

    Raises:
        ImportError: quack-kernels or Triton is not installed; see :func:`why_not`.
    """
    from quack.gemm_interface import gemm_symmetric

    from deepspeed.muon.kernels import triton_diagonals

    def square(x: Tensor, out: Symmetric, work: Workspace) -> None:
        if not _fits(x, out):
            return other.square(x, out, work)
        wide = x if x.size(-2) <= x.size(-1) else x.mT
        gemm_symmetric(wide, wide.mT, out=out.rest)
        reference.separate(wide, out)

    def product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, by: Scalars = PLAIN) -> None:
        if not _fits(a.rest, out):
            return other.product(a, b, out, work, by)
        gemm_symmetric(a.rest, b.rest, out=out.rest)
        triton_diagonals.complete(a, b, out, by)

    return dataclasses.replace(other, name=f"quack + {other.name}", square=square, product=product)


def _fits(x: Tensor, out: Symmetric) -> bool:
    return x.is_cuda and is_half_and_aligned(x) and out.rest.size(-1) >= SYMMETRIC_FROM
