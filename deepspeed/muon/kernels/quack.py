# SPDX-License-Identifier: Apache-2.0
"""Symmetric products by the optional library quack-kernels (Dao-AILab); the package's extra ``hopper`` installs it."""

from __future__ import annotations

import dataclasses
import importlib.util

import torch
from torch import Tensor

from deepspeed.muon.kernels import probe, reference
from deepspeed.muon.kernels.table import PLAIN, Operations, Scalars, Symmetric
from deepspeed.muon.kernels.triton_table import takes_product, takes_square
from deepspeed.muon.kernels.workspace import Workspace


def unavailable() -> str | None:
    """Return why the kernels of the library quack cannot run on this process's GPU; ``None`` if they can.

    Call it only if Triton's kernels can run, because quack's are combined with them.
    """
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    reason = probe.why_wrong(lambda: operations(reference.OPERATIONS))
    return reason and f"its kernels fail (version 0.6.5 is known to work): {reason}"


def operations(other: Operations) -> Operations:
    """Return a copy of ``other`` whose ``square`` and ``product`` call quack for large 16-bit matrices on a GPU.

    Raises:
        ImportError: quack-kernels or Triton is not installed.
    """
    from quack.gemm_interface import gemm_symmetric

    from deepspeed.muon.kernels import triton_products

    def square(x: Tensor, out: Symmetric, work: Workspace) -> None:
        if not takes_square(x, out):
            return other.square(x, out, work)
        gemm_symmetric(x, x.mT, out=out.rest)
        reference.separate_diagonal(x, out)

    def product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN) -> None:
        if not takes_product(a, b, out):
            return other.product(a, b, out, work, coeffs)
        gemm_symmetric(a.rest, b.rest, out=out.rest)  # rounds before the next line adds what the diagonals contribute
        triton_products.complete(a, b, out, coeffs)

    return dataclasses.replace(other, name=f"quack + {other.name}", square=square, product=product)
