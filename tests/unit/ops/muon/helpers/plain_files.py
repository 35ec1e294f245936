# SPDX-License-Identifier: Apache-2.0
"""A Python replacement of DeepSpeed's async_io, so that NVMe tests need neither libaio nor minutes of compiling.

Reads and writes happen only when `wait` is called: as late as they may.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


class Handle:
    """The methods of an `aio_handle` that DeepSpeed's swappers call."""

    def __init__(self, **settings: Any) -> None:
        self._locked: list[tuple[int, int]] = []
        self._submitted: list[tuple[Callable[[Tensor, str], None], Tensor, str]] = []

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        """Return a buffer with arbitrary contents, here with all bits set: NaN in floating point."""
        buffer = torch.empty(numel, dtype=example.dtype)
        buffer.view(torch.uint8).fill_(255)
        self._locked.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Take a buffer back."""
        before = len(self._locked)
        self._locked = [place for place in self._locked if place[0] != buffer.data_ptr()]
        return len(self._locked) < before

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in one of the buffers."""
        return any(start <= tensor.data_ptr() < stop for start, stop in self._locked)

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        """Submit a read of a file into a tensor of the same size."""
        return self._submit(_read, tensor, path, offset)

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        """Submit a write of a tensor to a file."""
        return self._submit(_write, tensor, path, offset)

    def wait(self) -> int:
        """Carry out all submitted reads and writes; return their number."""
        submitted, self._submitted = self._submitted, []
        for act, tensor, path in submitted:
            act(tensor, path)
        return len(submitted)

    def _submit(self, act: Callable[[Tensor, str], None], tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0 and tensor.is_contiguous()
        self._submitted.append((act, tensor, path))
        return 0


def _read(tensor: Tensor, path: str) -> None:
    with Path(path).open("rb") as file:
        assert file.readinto(_bytes(tensor)) == tensor.nbytes and not file.read(1), f"{path} has another size"


def _write(tensor: Tensor, path: str) -> None:
    Path(path).write_bytes(_bytes(tensor))


@contextmanager
def instead_of_async_io() -> Iterator[None]:
    """Make DeepSpeed use this handle within the context."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncIOBuilder, "load", lambda self, verbose=True: SimpleNamespace(aio_handle=Handle))
        patch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
        yield
