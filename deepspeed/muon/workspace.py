# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that is taken once."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Scratch tensors that live as long as the optimizer: the steady state allocates nothing.

    Fresh pages cost as much as the arithmetic of a small product, so every temporary is asked for
    here by name. Two requests of one name share storage; a larger one replaces it.
    """

    def __init__(self) -> None:
        self._storage: dict[tuple, Tensor] = {}

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False
    ) -> Tensor:
        """An uninitialized contiguous tensor of this shape, valid until the next request of this name.

        ``pinned``: in memory of the host that an accelerator copies from and to by itself.
        """
        numel = 1
        for size in shape:
            numel *= size
        key = (name, dtype, device)
        held = self._storage.get(key)
        if held is None or held.numel() < numel:
            held = self._storage[key] = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        return held[:numel].view(shape)

    def clear(self) -> None:
        """Give back all storage."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Bytes held at present."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())
