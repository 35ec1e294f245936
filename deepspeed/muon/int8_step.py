# SPDX-License-Identifier: Apache-2.0
"""The momentum in int8 of one step. Its blocks are rounded once each, and may lie in several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from deepspeed.muon.exchange.buffers import grids
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.momentum import Blocks, Fragment, State
from deepspeed.muon.plan.bucket import Run
from deepspeed.muon.plan.plan import Plan


class Int8Step:
    """Advances the momentum in int8 of one partition.

    ``group``: with the rates of this step. ``blocks_of``: where the blocks of a tensor's momentum begin.
    """

    def __init__(
        self,
        plan: Plan,
        group: dict[str, Any],
        states: Mapping[Tensor, State],
        kernels: Operations,
        blocks_of: Callable[[Tensor], Blocks],
        work: Workspace,
    ) -> None:
        self._plan, self._group, self._states = plan, group, states
        self._kernels, self._blocks_of, self._work = kernels, blocks_of, work
        #: Index of the tensor, and position, of each fragment that has been advanced with its run.
        self._advanced: set[tuple[int, int]] = set()

    def advance(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        """Write a run's look-ahead, and advance its momentum if the run is all that this rank has of the parameter.

        ``grad``: contiguous. ``target``: 1-D, for the look-ahead.
        """
        state, start, extent = self._states[tensor], run.copy.start, run.copy.extent
        fragment, codes, absmax, skipped = self._blocks_of(tensor).around(state, start, extent)
        gradient = grad.view(-1)[start : start + extent]
        if run.copy.numel == fragment.numel:
            self._advance(state, fragment, codes, absmax, gradient, target)
            self._advanced.add((run.tensor, fragment.position))
            return
        momentum, nesterov, cols, pitch = (
            self._group["momentum"],
            self._group["nesterov"],
            run.copy.cols,
            run.copy.pitch,
        )
        self._kernels.look_ahead(codes, absmax, skipped, gradient, target, cols, pitch, momentum, nesterov, self._work)

    def _advance(
        self, state: State, fragment: Fragment, codes: Tensor, absmax: Tensor, grad: Tensor, target: Tensor | None
    ) -> None:
        """Advance the momentum of a fragment, and write its look-ahead to ``target``, if any."""
        momentum, nesterov = self._group["momentum"], self._group["nesterov"]
        key, first = key_of(fragment.name, int(state["step"])), fragment.first
        self._kernels.advance_codes(codes, absmax, grad, target, momentum, nesterov, key, first, self._work)

    def finish(self, absent: frozenset[str]) -> None:
        """After the last bucket: advance what :meth:`advance` has not, except the matrices of ``absent``."""
        runs_of = self._runs_of(absent)
        for index, tensor in enumerate(self._group["params"]):
            state = self._states[tensor]
            if tensor.grad is None:
                continue
            grad = tensor.grad.contiguous().view(-1)
            for fragment, codes, absmax in self._blocks_of(tensor).parts(state):
                place = index, fragment.position
                runs = runs_of.get(place, ())
                if place not in self._advanced and sum(run.copy.numel for run in runs) < fragment.numel:
                    gradient = grad[fragment.position :][: fragment.numel]
                    if runs:
                        gradient = self._with_momentum(tensor, gradient, fragment.position, runs)
                    self._advance(state, fragment, codes, absmax, gradient, None)

    def _runs_of(self, absent: frozenset[str]) -> dict[tuple[int, int], list[Run]]:
        """Return the runs of these matrices, by the index of their tensor and the position of their fragment."""
        found: dict[tuple[int, int], list[Run]] = {}
        for bucket in self._plan.buckets if absent else ():
            for run in bucket.runs:
                if run.matrix in absent:
                    tensor = self._group["params"][run.tensor]
                    around = self._blocks_of(tensor).around(self._states[tensor], run.copy.start, run.copy.extent)
                    found.setdefault((run.tensor, around[0].position), []).append(run)
        return found

    def _with_momentum(self, tensor: Tensor, grad: Tensor, position: int, runs: Iterable[Run]) -> Tensor:
        """Return a copy of a fragment's gradient, 1-D, that has the momentum itself in place of these runs.

        The average of a momentum and itself is what it was, so its codes stay, unless it shares a block with elements
        of another matrix whose magnitude changes the block's.
        """
        grad, state = grad.clone(), self._states[tensor]
        for run in runs:
            start, stop = run.copy.start, run.copy.start + run.copy.extent
            momentum = self._blocks_of(tensor).read(state, start, stop, grad.device)
            grids(grad, run.copy._replace(start=start - position)).copy_(grids(momentum, run.copy._replace(start=0)))
        return grad
