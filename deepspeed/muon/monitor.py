# SPDX-License-Identifier: Apache-2.0
"""Measure an optimizer step on all ranks, and write the results to DeepSpeed's monitor.

The six values, with the prefix ``Train/Muon/``: ``update_rms``, ``weight_rms``, ``update_to_weight``, ``grad_norm``,
``matrices_without_gradient`` and ``newton_schulz_seconds``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.consensus import all_maxima, summed
from deepspeed.muon.kernels.kernel_set import chunks

#: Name of a phase of a step -> a context manager, in which the phase runs.
Phase = Callable[[str], AbstractContextManager]
#: Prefix of the names of all recorded values.
PREFIX = "Train/Muon/"


class StepStats:
    """One rank's measurements of one optimizer step, for the elements of Muon's matrices that the rank holds.

    Args:
        synchronize: function that waits for the accelerator.

    Attributes:
        seconds: time spent in Newton-Schulz.
        without_gradient: number of matrices without a gradient. Each of n ranks that share a matrix counts it as 1 / n,
            so that the sum over all ranks is the number in the model.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds = self.without_gradient = 0.0
        self._numel = self._weights = self._updates = self._changes = 0.0
        self._synchronize = synchronize

    @contextmanager
    def newton_schulz(self) -> Iterator[None]:
        """Return a context that adds the time spent within it to :attr:`seconds`."""
        self._synchronize()  # work that was started before is not counted
        started = time.perf_counter()
        yield
        self._synchronize()
        self.seconds += time.perf_counter() - started

    def before_apply(self, updates: Iterable[tuple[Tensor, Tensor, float]], lr: float, copies: int) -> None:
        """Add up the squares of this rank's weights and updates. Call it before the weights change.

        ``updates``: (weights, result of Newton-Schulz, scale of the update) for each piece of a matrix on this rank.
        Weights and result are 1-D. The weights are valid until the next item is taken. ``copies``: number of ranks that
        measure the same elements, by which the sums are divided.
        """
        norms, scales = [], []
        for weights, update, scale in updates:
            self._numel += weights.numel() / copies
            for part in chunks(weights):
                pair = [torch.linalg.vector_norm(x[part], dtype=torch.float32) for x in (weights, update)]
                norms.append(torch.stack(pair))
                scales.append(scale)
        of_host = torch.stack(norms).tolist() if norms else []  # one copy from the device
        for (of_weights, of_update), scale in zip(of_host, scales, strict=True):
            squares = (scale * of_update) ** 2 / copies
            self._weights += of_weights**2 / copies
            self._updates += squares
            self._changes += lr**2 * squares

    def of_all_ranks(self) -> dict[str, float]:
        """Return {name: value} to record, computed from the measurements of all ranks; a collective.

        ``matrices_without_gradient``: their number. ``newton_schulz_seconds``: the time of the slowest rank.
        ``update_rms``, ``weight_rms``: RMS of all updated matrices' updates, without the learning rate, and of their
        weights; missing if no matrix was updated. ``update_to_weight``: norm of all changes, except decay, divided by
        the norm of the weights; missing if that is 0.
        """
        local = [self.without_gradient, self._numel, self._weights, self._updates, self._changes]
        sums = summed(torch.tensor(local, dtype=torch.float64, device="cpu"))
        slowest = all_maxima(torch.tensor([self.seconds], dtype=torch.float32, device=sums.device), None)
        without_gradient, numel, weights, updates, changes = sums.tolist()
        values = {"matrices_without_gradient": without_gradient, "newton_schulz_seconds": slowest.item()}
        if numel:
            values |= {"update_rms": math.sqrt(updates / numel), "weight_rms": math.sqrt(weights / numel)}
        if weights:
            values["update_to_weight"] = math.sqrt(changes / weights)
        return values


class Recorder:
    """Records every ``monitor_interval``-th step of a DeepSpeed engine in DeepSpeed's monitor.

    ``optimizer``: the engine's :class:`deepspeed.muon.optimizer.MuonWithAuxAdam`. ``synchronize``: function that waits
    for the accelerator.
    """

    def __init__(self, optimizer: Any, synchronize: Callable[[], None]) -> None:
        self._optimizer, self._synchronize = optimizer, synchronize

    def is_due(self, engine: Any) -> bool:
        """Return whether the engine's next step is to be recorded, according to ``monitor_interval``."""
        return (engine.global_steps + 1) % self._optimizer.config.monitor_interval == 0

    def record(self, take_step: Callable[[], None], engine: Any, outer: Phase) -> None:
        """Call ``take_step``, which makes an optimizer step, and measure it; rank 0 writes the results. A collective.

        ``outer``: function (name of a phase) -> context manager, such as a timer, in which that phase runs.
        """
        stats = StepStats(self._synchronize)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            with outer(name):
                if name == "newton_schulz":
                    with stats.newton_schulz():
                        yield
                else:
                    yield

        with self._optimizer.observed(phase, stats):
            take_step()
        values = stats.of_all_ranks()
        if (norm := engine.get_global_grad_norm()) is not None:
            values["grad_norm"] = float(norm)
        if engine.global_rank == 0:
            events = [(PREFIX + name, value, engine.global_samples) for name, value in values.items()]
            engine.monitor.write_events(events)
