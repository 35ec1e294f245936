# SPDX-License-Identifier: Apache-2.0
"""What a record tells of a step: sums over a part of a matrix, and measures of the singular values of a whole one.

The latter need one product with the smaller Gram matrix, G = X X^T or X^T X of k x k, k = min(rows, cols), and no
decomposition. They hold G and a chunk of X in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import CHUNK, chunks


def orthogonality_error(x: Tensor) -> float:
    """How far the singular values s of ``x``, ``[rows, cols]``, are from 1: ``|G - I|_F / sqrt(k)``.

    That is the root mean square of ``s^2 - 1``: 0 for an orthogonal matrix, 1 for zero.
    """
    gram = _gram(x, 1.0)
    gram.diagonal().sub_(1.0)
    return float(torch.linalg.vector_norm(gram)) / math.sqrt(gram.size(0))


def participation_ratio(x: Tensor) -> float:
    """How many singular values s of ``x``, ``[rows, cols]``, carry it: ``(sum s^2)^2 / sum s^4``, between 1 and k.

    The participation ratio of the eigenvalues of G (arXiv 2509.26560, section 1); k where all are equal, whatever the
    scale of ``x``. NaN for a zero matrix.
    """
    low, high = torch.aminmax(x)
    gram = _gram(x, float(torch.maximum(high, -low)))
    return (float(gram.trace()) / float(torch.linalg.vector_norm(gram))) ** 2 if high > low or high else math.nan


def _gram(x: Tensor, scale: float) -> Tensor:
    """G of ``x / scale``, fp32. Squares of tiny or huge entries leave fp32's range."""
    wide = x if x.size(0) <= x.size(1) else x.mT
    gram = torch.zeros(wide.size(0), wide.size(0), dtype=torch.float32, device=x.device)
    for part in wide.split(max(1, CHUNK // wide.size(0)), dim=1):
        part = part.float() if scale == 1.0 else part.float() / scale
        gram.addmm_(part, part.mT)
    return gram


def sums_of_update(weight: Tensor, update: Tensor, cautious: bool) -> Iterator[Tensor]:
    """Of each chunk: the number of elements, the norms of ``weight`` and ``update``, and how many decay cautiously.

    Args:
        weight: 1-D, before the update.
        update: of its shape, any floating dtype: orthogonalized, not yet scaled.
        cautious: whether to count those that decay; else none are.

    Yields:
        fp32, ``[4]``: of so few elements that fp32 is exact enough.
    """
    for part in chunks(weight):
        w, u = weight[part], update[part]
        count = torch.tensor(w.numel(), dtype=torch.float32, device=w.device)
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (w, u)]
        # As the update itself compares: a product could underflow to zero.
        opposed = torch.sign(w).mul_(u).lt_(0).sum() if cautious else count
        yield torch.stack([count, *norms, count - opposed])
