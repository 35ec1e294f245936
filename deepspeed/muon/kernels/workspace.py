# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that is reused, and the number of matrices that are orthogonalized at a time in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: Maximum bytes of the matrices, with temporaries, that a CPU orthogonalizes at a time, so that they stay in its caches
#: from one product to the next: Newton-Schulz on matrices of 512 x 512 and more takes 5 to 10 % less time.
CACHED_BYTES = 8 << 20
#: Maximum bytes of the temporaries of the matrices that an accelerator orthogonalizes at a time, unless a single matrix
#: needs more. Four matrices of 2048 x 8192 in bf16 need so much, and are enough work to keep it busy.
BATCH_BYTES = 256 << 20


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is not the CPU."""
    return device.type != "cpu"


def has_fp64(device: torch.device) -> bool:
    """Return whether all devices of this type compute in fp64: Apple's never do, nor some of Intel's and Huawei's."""
    return device.type in ("cpu", "cuda")


class Workspace:
    """Scratch tensors, cached by name and grown on demand.

    On a CPU they live as long as the optimizer, so that the steady state allocates nothing: page faults cost as much as
    the arithmetic of a small product. On an accelerator they live for one step, see :meth:`release`.
    """

    def __init__(self) -> None:
        self._storage: dict[tuple, Tensor] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        pin: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return an uninitialized contiguous tensor, valid until the next request of this name, dtype and device.

        ``pin``: returns a copy of a tensor in pinned (page-locked) memory; called for newly allocated storage.
        """
        numel, key = math.prod(shape), (name, dtype, device)
        if key not in self._storage or self._storage[key].numel() < numel:
            self._storage.pop(key, None)  # first, so that the two never exist at the same time
            storage = torch.empty(numel, dtype=dtype, device=device)
            self._storage[key] = storage if pin is None else pin(storage)
        return self._storage[key][:numel].view(shape)

    def release(self) -> None:
        """Free the storage on accelerators, so that the next forward and backward can use the memory."""
        # Host memory stays: page faults and pinning are slow.
        self._storage = {key: buffer for key, buffer in self._storage.items() if not is_accelerator(buffer.device)}

    def clear(self) -> None:
        """Free all storage."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Return the bytes of all storage."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


def matrices_together(x: Tensor, dtype: torch.dtype, small: int, threads: int | None = None) -> int:
    """Return how many of the matrices in ``x``, ``[batch, rows, cols]``, to orthogonalize at a time.

    On an accelerator :data:`BATCH_BYTES` limits the number. On a CPU :data:`CACHED_BYTES` limits it, but it is at least
    ``threads`` (``None``: the number of torch's threads). ``dtype``: of the products. ``small``: number of rows of a
    Gram matrix.
    """
    return batch_limit(x.size(-2) * x.size(-1), small, dtype.itemsize, is_accelerator(x.device), threads)


def batch_limit(numel: int, small: int, itemsize: int, accelerator: bool, threads: int | None = None) -> int:
    """Return how many matrices to orthogonalize at a time, as :func:`matrices_together` does, but from their sizes.

    ``numel``: elements of a matrix. ``itemsize``: bytes of an element. ``accelerator``: whether an accelerator
    orthogonalizes them. ``small``, ``threads``: as in that function.
    """
    nbytes = max(1, itemsize * (numel + 4 * small * small))  # a second X, and up to four small matrices
    if accelerator:
        return max(1, BATCH_BYTES // nbytes)
    return max(threads or torch.get_num_threads(), CACHED_BYTES // (nbytes + itemsize * numel))
