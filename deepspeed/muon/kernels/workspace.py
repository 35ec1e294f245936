# SPDX-License-Identifier: Apache-2.0
"""Reusable scratch memory, and how many matrices are orthogonalized at a time in it."""

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
    """Return whether every device of this type supports fp64: True for the CPU and for NVIDIA and AMD GPUs only."""
    return device.type in ("cpu", "cuda")


class Workspace:
    """Scratch tensors, cached by name and grown on demand.

    On a CPU they stay until :meth:`clear`, because page faults are slow. On an accelerator :meth:`release` frees them
    after each step.
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
        """Return an uninitialized contiguous tensor, valid until the next request for this name, dtype and device.

        ``pin``: copies a new CPU tensor to page-locked memory; ``None`` to use pageable memory.
        """
        numel, key = math.prod(shape), (name, dtype, device)
        if key not in self._storage or self._storage[key].numel() < numel:
            self._storage.pop(key, None)  # first, so that the two never exist at the same time
            storage = torch.empty(numel, dtype=dtype, device=device)
            self._storage[key] = storage if pin is None else pin(storage)
        return self._storage[key][:numel].view(shape)

    def release(self) -> None:
        """Free the tensors on accelerators, so that the next forward and backward can use their memory."""
        # Host memory stays: page faults and pinning are slow.
        self._storage = {key: buffer for key, buffer in self._storage.items() if not is_accelerator(buffer.device)}

    def clear(self) -> None:
        """Free all tensors of the workspace."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Return how many bytes the tensors of the workspace take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


def matrices_together(x: Tensor, dtype: torch.dtype, smalls: int = 4) -> int:
    """Return how many matrices of ``x``, ``[batch, rows, cols]``, Newton-Schulz should process at a time.

    ``dtype``: that of the products. ``smalls``: as for :func:`batch_limit`.
    """
    rows, cols = x.shape[-2:]
    return batch_limit(rows * cols, min(rows, cols), smalls, dtype.itemsize, is_accelerator(x.device))


def batch_limit(numel: int, small: int, smalls: int, itemsize: int, accelerator: bool) -> int:
    """Return how many matrices of ``numel`` elements Newton-Schulz should process at a time, at least one.

    If ``accelerator``, :data:`BATCH_BYTES` limits their temporaries. On a CPU :data:`CACHED_BYTES` limits the matrices
    with their temporaries, but not to fewer than torch has threads.

    ``small``: the number of rows of a Gram matrix. ``smalls``: the number of temporaries of its size that the method
    needs. ``itemsize``: bytes of an element in the products.
    """
    if accelerator:
        return max(1, BATCH_BYTES // max(1, itemsize * (numel + smalls * small * small)))  # with a second X
    nbytes = max(1, itemsize * (numel + 4 * small * small))  # the limit for CPUs was measured with four, by any method
    return max(torch.get_num_threads(), CACHED_BYTES // (nbytes + itemsize * numel))
