# SPDX-License-Identifier: Apache-2.0
"""Facts about one step for the monitor: sizes of updates, measures of one matrix, and the seconds of each phase.

The measures of the singular values of a matrix X are computed, without a decomposition, from the smaller Gram matrix:
G = X X^T or X^T X, k x k with k = min(rows, cols). They need memory for G and a chunk of X in fp32.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.reference import CHUNK, chunks

#: Prefix of the names of all recorded values.
PREFIX = "Train/Muon/"
#: Measures of each parameter. A value is recorded under the name ``measure/label``.
CHANGE, CAUTIOUS = "update_to_weight", "cautious_decay"
#: Measures of the one matrix that is sampled in a step.
SAMPLED = ERROR, RANK = "orthogonality_error", "effective_rank"
#: Measure of each attention layer.
LOGIT = "max_logit"
PER_LAYER = (CHANGE, CAUTIOUS, ERROR, RANK, LOGIT)
#: RMS of the update divided by the learning rate, over all Muon parameters and over all AdamW parameters.
SIZES = {half: f"update_rms_{half}" for half in ("muon", "adamw")}
#: How many matrices had no gradient in the step.
ABSENT = "matrices_without_gradient"
#: Pseudo-phase for the cost of measuring itself; excluded from all other phases.
RECORD = "record"
_EXPERT = re.compile(r"(experts)\.\d+\.")


@cache
def label(parameter: str) -> str:
    """Return a parameter's name in the records. The experts of a layer share one name.

    ``mlp.experts.3.up`` -> ``mlp.experts.all.up``
    """
    return _EXPERT.sub(r"\1.all.", parameter)


class Sample(NamedTuple):
    """The matrix whose singular values the monitor measures in one recorded step.

    ``label``: name of its parameter in the records, from :func:`label`. ``matrix``: name of the matrix; empty if this
    pipeline stage has none to measure.
    """

    label: str = ""
    matrix: str = ""


class StepStats:
    """One rank's measurements of one step: seconds of each phase, and sums from which the other values are computed.

    Each of these values is a numerator divided by a denominator. Each rank sums up both for the elements that it holds.
    The sums over all ranks then give the value of the whole parameter, however it is sharded.

    Args:
        synchronize: function that waits for the accelerator, so that its work is charged to the phase that started it.
        sample: the matrix whose singular values are measured if this rank owns it; ``None``: no matrix.
    """

    def __init__(self, synchronize: Callable[[], None], sample: Sample | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._synchronize = synchronize
        self._sample = sample or Sample()
        self._rank_before = math.nan

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that adds its duration, without the time spent on measuring, to ``self.seconds[name]``."""
        started = self._now(name)
        try:
            yield
        finally:
            self.seconds[name] += self._now(name) - started

    def _now(self, name: str) -> float:
        # The clock of a phase does not advance during measurements, which are the phase ``record``.
        self._synchronize()
        return time.perf_counter() - (0.0 if name == RECORD else self.seconds[RECORD])

    # ---- called by the optimizer ----------------------------------------------------------------------

    def before_newton_schulz(self, names: Sequence[str], matrices: Tensor) -> None:
        """Measure the effective rank of the :class:`Sample`'s matrix, if it is in a batch that will be orthogonalized.

        ``names``: names of the batch's matrices. ``matrices``: the batch, ``[batch, rows, cols]``.
        """
        if self._sample.matrix in names:
            with self.phase(RECORD):
                self._rank_before = participation_ratio(matrices[names.index(self._sample.matrix)])

    def after_newton_schulz(self, names: Sequence[str], matrices: Tensor) -> None:
        """Measure the orthogonality error of the :class:`Sample`'s matrix, if it is in a batch just orthogonalized.

        Record it with the effective rank, unless the matrix has no gradient. Arguments: as in
        :meth:`before_newton_schulz`.
        """
        if self._sample.matrix in names and not math.isnan(self._rank_before):
            with self.phase(RECORD):
                error = orthogonality_error(matrices[names.index(self._sample.matrix)])
            for measure, value in zip(SAMPLED, (error, self._rank_before), strict=True):
                self.add(f"{measure}/{self._sample.label}", value, 1)

    def before_apply(
        self, runs: Iterable[tuple[str, Tensor, Tensor, float]], group: dict[str, Any], cautious: bool
    ) -> None:
        """Add up the squares of weights and of Muon's updates on this rank, and count the weights that will decay.

        Call it before the update. ``runs``: (parameter name, weights, orthogonalized update, scale of the update) for
        each part of a matrix on this rank. Weights and update are 1-D. The weights are valid until the next item is
        taken. ``group``: the parameter group, with ``lr`` and ``weight_decay``. ``cautious``: whether
        ``cautious_weight_decay`` is on.
        """
        lr, counts_decay = group["lr"], cautious and group["weight_decay"] != 0
        with self.phase(RECORD):
            parts = [
                (name, scale, chunk)
                for name, weight, update, scale in runs
                for chunk in sizes_of_update(weight, update, counts_decay)
            ]
            chunks = torch.stack([chunk for *_, chunk in parts]).tolist() if parts else []  # one copy to the host
            for (name, scale, _), (count, weight_norm, norm, decays) in zip(parts, chunks, strict=True):
                squares = (scale * norm) ** 2
                self.add(SIZES["muon"], squares, count)
                self.add(f"{CHANGE}/{label(name)}", lr**2 * squares, weight_norm**2)
                if counts_decay:
                    self.add(f"{CAUTIOUS}/{label(name)}", decays, count)

    def after_adamw(self, squares: Iterable[tuple[Tensor, int]]) -> None:
        """Add the updates of AdamW on this rank to the sums for ``update_rms_adamw``, their root mean square.

        ``squares``: for each update, (sum of its squares at learning rate 1, a 0-D tensor; number of its elements).
        """
        with self.phase(RECORD):
            for total, count in squares:
                self.add(SIZES["adamw"], float(total), count)

    # ---- the result -----------------------------------------------------------------------------------

    def add(self, name: str, numerator: float, denominator: float) -> None:
        """Add a numerator and a denominator to the sums whose quotient is recorded under ``name``."""
        sums = self._sums[name]
        sums[0] += numerator
        sums[1] += denominator

    def sums(self, names: Sequence[str]) -> Tensor:
        """Return this rank's numerator and denominator for each name, fp64 ``[names, 2]``, on the CPU.

        Both are 0 for a value that this rank has not measured. The caller adds them up over all ranks.
        """
        return torch.tensor([self._sums[name] for name in names], dtype=torch.float64, device="cpu").view(-1, 2)


def values_of(names: Sequence[str], sums: Tensor) -> dict[str, float]:
    """Return {name: value} from the ``sums`` of all ranks, ``[names, 2]``: numerators divided by denominators.

    For ``update_rms_*`` and ``update_to_weight``, whose sums are sums of squares, the value is the root of the
    quotient. Names with a denominator of 0, which no rank has measured, are left out.
    """
    pairs = zip(names, sums.tolist(), strict=True)
    found = {name: numerator / denominator for name, (numerator, denominator) in pairs if denominator}
    are_squares = (*SIZES.values(), CHANGE)
    return {n: math.sqrt(value) if n.partition("/")[0] in are_squares else value for n, value in found.items()}


# ---- measures ---------------------------------------------------------------------------------------------------


def orthogonality_error(x: Tensor) -> float:
    """Return the root mean square of ``s^2 - 1`` over the singular values s of ``x``, ``[rows, cols]``.

    The result is 0 for an orthogonal matrix, 1 for a zero matrix.
    """
    gram = _gram(x, 1.0)
    gram.diagonal().sub_(1.0)
    return float(torch.linalg.vector_norm(gram)) / math.sqrt(gram.size(0))


def participation_ratio(x: Tensor) -> float:
    """Return the effective rank of ``x``, ``[rows, cols]``: ``(sum s^2)^2 / sum s^4`` over its singular values s.

    This is the participation ratio of the s^2 (arXiv 2509.26560, section 1). It is 1 for a matrix of rank 1. If all s
    are equal, it is the smaller dimension. It does not depend on the scale of ``x``. It is NaN for a zero matrix.
    """
    low, high = torch.aminmax(x)
    gram = _gram(x, float(torch.maximum(high, -low)))
    return (float(gram.trace()) / float(torch.linalg.vector_norm(gram))) ** 2 if high > low or high else math.nan


def _gram(x: Tensor, scale: float) -> Tensor:
    """Return the smaller Gram matrix of ``x / scale``, fp32 ``[k, k]`` with k = min(rows, cols)."""
    # The scale keeps the squares of tiny or huge entries in fp32's range.
    wide = x if x.size(0) <= x.size(1) else x.mT
    gram = torch.zeros(wide.size(0), wide.size(0), dtype=torch.float32, device=x.device)
    for part in wide.split(max(1, CHUNK // wide.size(0)), dim=1):
        part = part.float() if scale == 1.0 else part.float() / scale
        gram.addmm_(part, part.mT)
    return gram


def sizes_of_update(weight: Tensor, update: Tensor, cautious: bool) -> Iterator[Tensor]:
    """Yield, for each chunk of a tensor, sizes of the weights and of their update, fp32 ``[4]``.

    The four are: number of elements, norm of the weights, norm of the update, number of elements that decay.

    ``weight``: weights before the update, 1-D. ``update``: orthogonalized update before scaling, 1-D, of any floating
    dtype. ``cautious``: whether to count the elements to which cautious weight decay applies; if not, 0.
    """
    for part in chunks(weight):
        w, u = weight[part], update[part]
        count = torch.tensor(w.numel(), dtype=torch.float32, device=w.device)
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (w, u)]
        # Signs, not a product of both, which could underflow to zero; the update kernel compares the same way.
        opposed = torch.sign(w).mul_(u).lt_(0).sum() if cautious else count
        yield torch.stack([count, *norms, count - opposed])
