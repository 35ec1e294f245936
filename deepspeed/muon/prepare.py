# SPDX-License-Identifier: Apache-2.0
"""The first phase of a step, on the shard: momentum and Nesterov, in the dtype in which the momentum is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.bound import Bound
from deepspeed.muon.exchange.exchange import BucketBuffers, gather, grids, scatter
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.momentum import CODES, MOMENTUM, Blocks, State
from deepspeed.muon.plan.plan import Run


class Prepare:
    """Advances the momentum of one group's tensors, bucket by bucket.

    Args:
        bound: the partition that is stepped.
        group: with the rates of this step.
        states: the optimizer's.
        momentum_dtype: of the config.
        kernels: equal on all ranks.
        blocks_of: where the blocks of a tensor's momentum in int8 begin.
        work: holds the temporaries.
        absent: names of the matrices without a gradient, whose momentum stays as it is.
    """

    def __init__(
        self,
        bound: Bound,
        group: dict[str, Any],
        states: Mapping[Tensor, State],
        momentum_dtype: str,
        kernels: Operations,
        blocks_of: Callable[[Tensor], Blocks],
        work: Workspace,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self._absent = absent
        self._bound, self._group, self._states, self._dtype = bound, group, states, momentum_dtype
        self._kernels, self._blocks_of, self._work = kernels, blocks_of, work
        self._rates = group["momentum"], group["nesterov"]
        #: Tensor and position of each fragment in int8 that has been advanced with its run.
        self._advanced: set[tuple[int, int]] = set()

    def bucket(self, buffers: BucketBuffers) -> None:
        """Write the input of Newton-Schulz, in the exchange dtype, to where it is sent from."""
        together = self._bound.together
        for call in self._bound.calls[id(buffers.bucket)]:
            tensor: Tensor = self._group["params"][call.tensor]
            grad, state = tensor.grad, self._states[tensor]
            if grad is None:
                for index in call.runs:
                    buffers.slice_of(index).zero_()
            elif (
                together is None
                or call.tiles is None
                or self._dtype != "fp32"
                or buffers.bucket.lacks(call.runs, self._absent)
            ):
                for index in call.runs:
                    run = buffers.bucket.runs[index]
                    if run.matrix in self._absent:  # Newton-Schulz of zero is zero
                        buffers.slice_of(index).zero_()
                    else:
                        self._run(tensor, grad, run, buffers.slice_of(index))
            else:
                average = state[MOMENTUM].view(-1), grad.contiguous().view(-1)
                together.advance(
                    *average, buffers.matrices if call.in_place else buffers.outbox, call.tiles, *self._rates
                )

    def _run(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        state = self._states[tensor]
        if CODES in state:
            self._run_of_codes(tensor, grad, run, target)
            return
        held = gather(grad.contiguous(), run.copy, self._work, "gradient")
        buffer = gather(state[MOMENTUM], run.copy, self._work, "momentum")
        if state[MOMENTUM].dtype == torch.bfloat16:
            name, first = run.draws
            key = key_of(name, int(state["step"]))
            self._kernels.advance_rounded(buffer, held, target, *self._rates, key, first, self._work)
        else:
            self._kernels.advance(buffer, held, target, *self._rates, self._work)
        scatter(buffer, state[MOMENTUM], run.copy)

    def _run_of_codes(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        """A fragment that is one run is advanced at once; else only the look-ahead is computed here."""
        state, start, extent = self._states[tensor], run.copy.start, run.copy.extent
        fragment, codes, absmax, skipped = self._blocks_of(tensor).around(state, start, extent)
        held = grad.contiguous().view(-1)[start : start + extent]
        if run.copy.numel == fragment.numel:
            key = key_of(fragment.name, int(state["step"]))
            self._kernels.advance_codes(codes, absmax, held, target, *self._rates, key, fragment.first, self._work)
            self._advanced.add((id(tensor), fragment.position))
        else:
            grid = run.copy.cols, run.copy.pitch
            self._kernels.look_ahead(codes, absmax, skipped, held, target, *grid, *self._rates, self._work)

    def finish(self) -> None:
        """After the last bucket: advance what is left in int8. A block is rounded once, and may lie in several runs."""
        if self._dtype != "int8":
            return
        absent = self._absent_parts()
        for tensor in self._group["params"]:
            state = self._states[tensor]
            if tensor.grad is None:
                continue
            grad = tensor.grad.contiguous().view(-1)
            for fragment, codes, absmax in self._blocks_of(tensor).parts(state):
                key = id(tensor), fragment.position
                runs = absent.get(key, ())
                if key not in self._advanced and sum(run.copy.numel for run in runs) < fragment.numel:
                    held = grad[fragment.position :][: fragment.numel]
                    if runs:
                        held = self._with_momentum(tensor, held, fragment.position, runs)
                    draws = key_of(fragment.name, int(state["step"])), fragment.first
                    self._kernels.advance_codes(codes, absmax, held, None, *self._rates, *draws, self._work)

    def _absent_parts(self) -> dict[tuple[int, int], list[Run]]:
        """Return the runs of matrices without a gradient, by their tensor's id and their fragment's position."""
        found: dict[tuple[int, int], list[Run]] = {}
        for bucket in self._bound.plan.buckets if self._absent else ():
            for run in bucket.runs:
                if run.matrix in self._absent:
                    tensor = self._group["params"][run.tensor]
                    around = self._blocks_of(tensor).around(self._states[tensor], run.copy.start, run.copy.extent)
                    found.setdefault((id(tensor), around[0].position), []).append(run)
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
