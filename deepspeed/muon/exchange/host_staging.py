# SPDX-License-Identifier: Apache-2.0
"""Copy shards from host memory to the accelerator, and results back (CPU offload).

Two streams run in parallel with that of the computation: while bucket k is orthogonalized, bucket k + 1 is copied from
pinned memory to the accelerator and the result of bucket k - 1 back, and the CPU works on the shards. Each bucket in
flight has its own buffer, so no buffer is overwritten before its result has arrived. On an accelerator without streams
(Apple's) each copy ends before the next operation begins.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.plan.bucket import Bucket


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in pinned host memory; ``tensor`` itself if the accelerator has no such memory."""
    return get_accelerator().pin_memory(tensor)


class Staging:
    """The copies of CPU offload between host memory and the accelerator. Each direction has a stream of its own."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        make: Any = self._accelerator.Stream or (lambda: None)
        self._up, self._down = make(), make()

    def host_memory(self, bucket: Bucket, dtype: torch.dtype, work: Workspace, slot: int) -> Tensor:
        """Return a 1-D tensor in pinned host memory, large enough for all elements of ``bucket`` in this rank's shard.

        ``slot``: index of the memory. Calls with the same index return the same memory, for one bucket after another.
        """
        return work.get(f"pinned{slot}", (bucket.host_elements,), dtype, torch.device("cpu"), pinned)

    def follow_the_computation(self) -> None:
        """Make later copies to the accelerator wait for all computation that is queued now.

        Call this after a step's buffers are allocated: queued computation may still use their memory.
        """
        if self._up is not None:
            self._up.wait_stream(self._accelerator.current_stream())

    def beside_the_computation(self, back: bool) -> AbstractContextManager:
        """Return a context in which copies and collectives go to a stream that runs in parallel with the computation.

        ``back``: whether they send results back. If so, the stream first waits for all computation queued so far.
        """
        if back and self._down is not None:
            self._down.wait_stream(self._accelerator.current_stream())
        return self._accelerator.stream(self._down if back else self._up)

    def copy(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """Queue a copy of each tensor in ``sources`` to the one at the same index of ``targets``.

        Return an event that marks the end of the copies, or ``None`` on an accelerator without streams, where the
        copies have already ended.
        """
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=self._up is not None)
        if self._up is None:
            return None
        event = self._accelerator.Event()
        event.record()
        return event
