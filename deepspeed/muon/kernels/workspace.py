# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that is allocated once, and how many matrices share it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: The most bytes of matrices and temporaries that a CPU orthogonalizes together, so that they stay in its caches from
#: one product to the next: Newton-Schulz on matrices of 512 and more takes 5 to 10 % less time.
CACHED_BYTES = 8 << 20
#: The most bytes of temporaries of the matrices that an accelerator orthogonalizes together, unless one has more: those
#: of four matrices of 2048 x 8192 in bf16, which are enough work to fill a chip.
BATCH_BYTES = 256 << 20


def is_accelerator(device: torch.device) -> bool:
    """Return whether memory on a device is scarce, and fast to get from an allocator that caches it."""
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
        """Return an uninitialized contiguous tensor of this shape, valid until the next request of this name.

        ``pin``: return a copy in page-locked host memory, which an accelerator copies from and to asynchronously.
        """
        numel, key = math.prod(shape), (name, dtype, device)
        if key not in self._storage or self._storage[key].numel() < numel:
            self._storage.pop(key, None)  # first, so that the two never exist at the same time
            storage = torch.empty(numel, dtype=dtype, device=device)
            self._storage[key] = storage if pin is None else pin(storage)
        return self._storage[key][:numel].view(shape)

    def release(self) -> None:
        """Give the storage on accelerators back to their caching allocators, for the next forward and backward."""
        # That of the host stays, pinned memory too, which is slow to get.
        self._storage = {key: buffer for key, buffer in self._storage.items() if not is_accelerator(buffer.device)}

    def clear(self) -> None:
        """Free all storage."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Return the bytes of all storage."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


def matrices_together(x: Tensor, dtype: torch.dtype, small: int, threads: int | None = None) -> int:
    """Return how many matrices ``[batch, rows, cols]``, with Gram matrices of size ``small``, to orthogonalize at once.

    On an accelerator as many as :data:`BATCH_BYTES` of temporaries allow; on a CPU as many as its caches hold, and at
    least one for each of ``threads``, by default torch's.
    """
    return batch_limit(x.size(-2) * x.size(-1), small, dtype.itemsize, is_accelerator(x.device), threads)


def batch_limit(numel: int, small: int, itemsize: int, accelerator: bool, threads: int | None = None) -> int:
    """Return :func:`matrices_together` by elements of a matrix, size of its Gram matrix, and bytes of an element."""
    nbytes = max(1, itemsize * (numel + 4 * small * small))  # a second X, and up to four small matrices
    if accelerator:
        return max(1, BATCH_BYTES // nbytes)
    return max(threads or torch.get_num_threads(), CACHED_BYTES // (nbytes + itemsize * numel))
