# SPDX-License-Identifier: Apache-2.0
"""Record a step: measure it on all ranks, sum, and write the values through DeepSpeed's monitor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepspeed.muon.exchange.groups import summed, union
from deepspeed.muon.monitor.step_stats import (
    ABSENT,
    CAUTIOUS,
    CHANGE,
    LOGIT,
    PREFIX,
    RECORD,
    SAMPLED,
    SIZES,
    Sample,
    StepStats,
    label,
    values_of,
)


class Recorder:
    """The part of the monitor that measures steps on all ranks; rank 0 writes the values through DeepSpeed's monitor.

    The constructor and :meth:`record` are collectives. ``optimizer``: a
    :class:`deepspeed.muon.optimizer.MuonWithAuxAdam` that an engine already uses. ``synchronize``: function that waits
    for the accelerator.
    """

    def __init__(self, optimizer: Any, synchronize: Callable[[], None]) -> None:
        self._optimizer, self._synchronize = optimizer, synchronize
        #: :func:`label` of a parameter -> its matrices.
        self._matrices: dict[str, list[str]] = {}
        for plan in optimizer.plans:
            for item in plan.of_all.items:
                self._matrices.setdefault(label(item.shard.spec.name), []).append(item.name)
        #: Labels and attention layers of all pipeline stages, because all ranks add up the same list of values.
        self._labels = union(self._matrices)
        self._layers = union(layer.name for layer in (optimizer.qk_clip.layers if optimizer.qk_clip else ()))

    def is_due(self, engine: Any) -> bool:
        """Return whether the engine's next step is to be recorded, according to ``monitor_interval``."""
        return (engine.global_steps + 1) % self._optimizer.config.monitor_interval == 0

    def record(self, step: Callable[[], None], engine: Any, outer: Callable[[str], AbstractContextManager]) -> None:
        """Make an optimizer step by calling ``step()``, measure it, and write the values. A collective.

        ``outer``: function (name of a phase) -> context manager, such as a timer, in which the phase is run as well.
        """
        optimizer = self._optimizer
        sample = self.sample((engine.global_steps + 1) // optimizer.config.monitor_interval - 1)
        stats = StepStats(self._synchronize, sample)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            with outer(name), stats.phase(name):
                yield

        groups = reversed(optimizer.param_groups)  # so that the first Muon and the first AdamW group win
        rates = {f"lr_{'muon' if group['use_muon'] else 'adamw'}": float(group["lr"]) for group in groups}
        with optimizer.observed(phase, stats), stats.phase("step"):
            step()
        with stats.phase(RECORD):
            stats.add(ABSENT, 0.0, float(engine.global_rank == 0))  # sum over ranks / 1: a count
            values = self._summed(stats, sample)
        values |= rates | {f"{name}_ms": 1e3 * spent for name, spent in stats.seconds.items()}
        if (norm := engine.get_global_grad_norm()) is not None:
            values["grad_norm"] = float(norm)
        if engine.global_rank == 0:
            events = [(PREFIX + name, value, engine.global_samples) for name, value in values.items()]
            engine.monitor.write_events(events)

    def sample(self, turn: int) -> Sample:
        """Return the matrix whose singular values to measure in record number ``turn``, counted from 0.

        All ranks choose the same parameter, also after a resume. The parameters take turns, and successive ones are far
        apart in the network. A parameter with several matrices has another one measured in each of its turns.
        """
        count = len(self._labels)
        if not count:  # the user has left every matrix to AdamW
            return Sample()
        # Coprime to the count, so that each label gets its turn; the golden ratio keeps successive turns far apart.
        stride = next((n for n in range(round(0.618 * count), count) if math.gcd(n, count) == 1), 1)
        name = self._labels[turn * stride % count]
        matrices = self._matrices.get(name) or [""]  # none in another stage of a pipeline
        return Sample(name, matrices[turn // count % len(matrices)])

    def _summed(self, stats: StepStats, sample: Sample) -> dict[str, float]:
        """Return {name: value} for all values except times, learning rates and the gradient norm. A collective.

        They are computed from the sums of :class:`StepStats` over all ranks.
        """
        clip = self._optimizer.qk_clip
        for layer, logit in clip.largest.items() if clip else ():  # equal on all ranks that train the layer
            stats.add(f"{LOGIT}/{layer}", logit, 1)
        measures = (CHANGE, CAUTIOUS) if self._optimizer.config.cautious_weight_decay else (CHANGE,)
        names = [ABSENT, *SIZES.values(), *(f"{measure}/{name}" for measure in measures for name in self._labels)]
        names += [*(f"{LOGIT}/{layer}" for layer in self._layers), *(f"{m}/{sample.label}" for m in SAMPLED)]
        return values_of(names, summed(stats.sums(names)))
