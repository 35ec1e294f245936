# SPDX-License-Identifier: Apache-2.0
"""Symmetric products of quack-kernels (Dao-AILab), written in CuTe for Hopper and Blackwell; the extra ``hopper``.

Importable without the library; :func:`operations` then raises.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Operations

#: From this smaller dimension on; the tile of one of its clusters, as in gram-newton-schulz.
SYMMETRIC_FROM = 512
#: Its copies move sixteen bytes: sizes are multiples of so many 16-bit numbers.
MULTIPLE = 8


def why_not() -> str | None:
    """What keeps quack's kernels from this process's accelerator, in words; ``None`` where nothing does."""
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "the GPU is neither a Hopper nor a Blackwell of the data centre"
    return None


def operations(other: Operations) -> Operations:
    """``other`` with the symmetric products of 16-bit matrices on a GPU replaced.

    Raises:
        ImportError: quack-kernels is not installed; see :func:`why_not`.
    """
    from quack.gemm_interface import gemm_symmetric

    def square(x: Tensor, out: Tensor) -> Tensor:
        if not _fits(x, out):
            return other.square(x, out)
        wide = x if x.size(-2) <= x.size(-1) else x.mT
        gemm_symmetric(wide, wide.mT, out=out)
        return out

    def product(a: Tensor, b: Tensor, add: Tensor, out: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
        if not _fits(a, out):
            return other.product(a, b, add, out, beta, alpha)
        # The library does not say that its C may be its output.
        c = add.clone() if add.data_ptr() == out.data_ptr() else add
        gemm_symmetric(a, b, C=c, out=out, alpha=float(alpha), beta=float(beta))
        return out

    return dataclasses.replace(other, name="quack", square=square, product=product)


def _fits(x: Tensor, out: Tensor) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return (
        x.is_cuda and is_half and out.size(-1) >= SYMMETRIC_FROM and all(size % MULTIPLE == 0 for size in x.shape[-2:])
    )
