# SPDX-License-Identifier: Apache-2.0
"""One step of a partition of the Muon half, from gradient to weight.

    look           on the shard     which matrices have a gradient; the others are left alone
    prepare        on the shard     momentum and Nesterov, rounded to the dtype of the exchange
    orthogonalize  at the owner     Newton-Schulz on whole matrices, between the update rules
    apply          on the shard     weight decay, and the update scaled by learning rate and shape

Each phase but the first works on one bucket at a time. Between them the shards travel to the owner and back: the
exchange calls the phases in the order of the program (:mod:`deepspeed.muon.plan.program`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.bound import Bound, Call
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.buffers import BucketBuffers, elements_of, put_back
from deepspeed.muon.exchange.exchange import Phase
from deepspeed.muon.int8_step import Int8Step
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.bf16 import in_fp32
from deepspeed.muon.math.momentum import MOMENTUM, Blocks, State
from deepspeed.muon.math.newton_schulz import orthogonalize
from deepspeed.muon.math.rules import Rules
from deepspeed.muon.plan.bucket import Bucket, Run
from deepspeed.muon.plan.program import Collective, Look
from deepspeed.muon.second_moments import SecondMoments
from deepspeed.muon.step_stats import ABSENT, StepStats


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the steps of all partitions share.

    ``rules``: beyond plain Muon; ``None`` without any. ``kernels``: of everything but the products of Newton-Schulz;
    equal on all ranks. ``states``: of the optimizer. ``blocks_of``: where the blocks of a tensor's momentum in int8
    begin. ``phase``: entered around each phase, by name. ``stats``: measures the step, if set.
    """

    config: MuonConfig
    rules: Rules | None
    kernels: Operations
    states: Mapping[Tensor, State]
    blocks_of: Callable[[Tensor], Blocks]
    second_moments: SecondMoments
    work: Workspace
    phase: Phase
    stats: StepStats | None = None


class PartitionStep:
    """Steps one partition. ``group``: its parameter group with the rates of this step, and with its tensors."""

    def __init__(self, bound: Bound, group: dict[str, Any], tools: Tools) -> None:
        self._bound, self._group, self._tools = bound, group, tools
        self._work, self._kernels = tools.work, tools.kernels
        #: Names of the matrices without a gradient in this step, whose weight and momentum stay as they are.
        self.absent: frozenset[str] = frozenset()
        is_int8 = tools.config.momentum_dtype == "int8"
        self._int8 = (
            Int8Step(bound.plan, group, tools.states, tools.kernels, tools.blocks_of, tools.work) if is_int8 else None
        )

    def run(self) -> frozenset[str]:
        """Step; return the names of the matrices that have no gradient."""
        self._bound.exchange.run(self._bound.plan, self._bound.program, self, self._tools.phase)
        if self._int8 is not None:
            with self._tools.phase("prepare"):
                self._int8.finish(self.absent)
        return self.absent

    # ---- on the shard: which matrices have a gradient -----------------------------------------------------

    def look(self, operation: Look) -> None:
        """Find the matrices that have no gradient on any rank."""
        self.absent = self._bound.gradients.absent(self._group["params"], operation)
        if self._tools.stats is not None:
            self._tools.stats.add(ABSENT, len(self.absent) / self._bound.sharers, 0)

    # ---- on the shard: momentum and Nesterov --------------------------------------------------------------

    def prepare(self, buffers: BucketBuffers) -> None:
        """Advance the momentum of a bucket's runs, and write its look-ahead to where it is sent from.

        The look-ahead is ``g + momentum * (m - g)`` of the gradient g and the new average m with Nesterov, else m, in
        the dtype of the exchange.
        """
        for call in self._bound.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            if tensor.grad is None:
                # The plan sends every run, also of a parameter that has no gradient.
                for index in call.runs:
                    buffers.slice_of(index).zero_()
                continue
            grad, average = tensor.grad.contiguous(), self._tools.states[tensor].get(MOMENTUM)
            if average is not None and self._is_one_pass(call, buffers.bucket, average):
                self._advance_spans(call, average.view(-1), grad.view(-1), buffers.beside_the_shards(call.in_place))
                continue
            for index in call.runs:
                run = buffers.bucket.runs[index]
                if run.matrix in self.absent:  # Newton-Schulz of zero is zero
                    buffers.slice_of(index).zero_()
                else:
                    self._advance(tensor, grad, run, buffers.slice_of(index))

    def _advance_spans(self, call: Call, average: Tensor, grad: Tensor, targets: Tensor) -> None:
        """Advance the momentum of all runs of a call; all tensors are 1-D."""
        momentum, nesterov = self._group["momentum"], self._group["nesterov"]
        if self._bound.together is not None:
            self._bound.together.advance(average, grad, targets, call.tiles, momentum, nesterov)
            return
        for start, at, numel in call.spans:
            shard, target = slice(start, start + numel), targets[at : at + numel]
            self._kernels.advance(average[shard], grad[shard], target, momentum, nesterov, self._work)

    def _advance(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        """Advance the momentum of one run; ``target``: 1-D, for its look-ahead."""
        if self._int8 is not None:
            self._int8.advance(tensor, grad, run, target)
            return
        state, momentum, nesterov = self._tools.states[tensor], self._group["momentum"], self._group["nesterov"]
        gradient = elements_of(grad, run.copy, self._work, "gradient")
        average = elements_of(state[MOMENTUM], run.copy, self._work, "momentum")
        if average.dtype == torch.bfloat16:
            # Random numbers belong to the elements of a matrix, whatever rank has them.
            name, first = run.draws
            key = key_of(name, int(state["step"]))
            self._kernels.advance_rounded(average, gradient, target, momentum, nesterov, key, first, self._work)
        else:
            self._kernels.advance(average, gradient, target, momentum, nesterov, self._work)
        put_back(average, state[MOMENTUM], run.copy)

    # ---- at the owner: Newton-Schulz ----------------------------------------------------------------------

    def orthogonalize(self, buffers: BucketBuffers, calls: Iterator[Collective]) -> None:
        """Orthogonalize the matrices of a bucket, equal shapes in one batch ``[batch, rows, cols]``.

        ``calls``: those that the owners of one matrix make meanwhile, by the program.
        """
        how, rules, stats = self._bound.newton_schulz, self._tools.rules, self._tools.stats
        for batch in buffers.bucket.batches:
            shape = batch.count, batch.rows, batch.cols
            matrices = buffers.matrices[batch.start : batch.start + math.prod(shape)].view(shape)
            # With rules a matrix has one owner: they need whole rows and columns.
            if rules is not None:
                rules.before(matrices, batch.axis, self._work)
            if stats is not None:
                stats.before_newton_schulz(batch.names, matrices)
            rows, cols = batch.shape
            kernels = self._bound.kernels(rows, cols)
            if batch.owners > 1:
                kernels = self._bound.exchange.owner_set(batch, buffers.number, calls).operations(kernels)
            orthogonalize(
                matrices,
                how.schedule,
                method=how.method(rows, cols),
                dtype=self._bound.dtype,
                work=self._work,
                kernels=kernels,
                normalization=self._tools.config.ns_normalization,
                gram_axis=batch.gram_axis,
            )
            if stats is not None:
                stats.after_newton_schulz(batch.names, matrices)
            if rules is not None:
                rules.after(matrices, batch.axis, self._tools.second_moments.of(batch.names), self._work)

    # ---- on the shard: decay and update -------------------------------------------------------------------

    def apply(self, buffers: BucketBuffers) -> None:
        """Decay the weights of a bucket's runs, and subtract the learning rate times the scaled result."""
        if self._tools.stats is not None:
            cautious = self._tools.config.cautious_weight_decay
            self._tools.stats.before_apply(self._updates(buffers), self._group, cautious)
        for call in self._bound.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            # As in torch's optimizers, weights without a gradient do not decay either.
            if tensor.grad is None:
                continue
            if self._is_one_pass(call, buffers.bucket, tensor):
                self._apply_spans(call, tensor.view(-1), buffers.beside_the_shards(call.in_place))
                continue
            for run, update in self._present_runs(call, buffers):
                weights = elements_of(tensor, run.copy, self._work, "parameter")
                for part, wide in self._in_fp32(weights, run, step=int(self._tools.states[tensor]["step"])):
                    self._apply(call, wide, update[part])
                put_back(weights, tensor, run.copy)

    def _apply_spans(self, call: Call, weights: Tensor, results: Tensor) -> None:
        """Update the weights of all runs of a call; both tensors are 1-D."""
        if self._bound.together is not None:
            lr, decay, cautious = (
                self._group["lr"],
                self._group["weight_decay"],
                self._tools.config.cautious_weight_decay,
            )
            self._bound.together.apply_(weights, results, call.tiles, lr, call.scale, decay, cautious)
            return
        for start, at, numel in call.spans:
            self._apply(call, weights[start : start + numel], results[at : at + numel])

    def _apply(self, call: Call, weights: Tensor, update: Tensor) -> None:
        lr, decay, cautious = self._group["lr"], self._group["weight_decay"], self._tools.config.cautious_weight_decay
        self._kernels.apply_(weights, update, lr, call.scale, decay, cautious, self._work)

    def _in_fp32(self, weights: Tensor, run: Run, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weights of a run, all at once; those kept in bf16 in chunks of fp32, which are rounded back."""
        if weights.dtype != torch.bfloat16:
            yield slice(None), weights
            return
        name, first = run.draws
        for part, (wide,) in in_fp32([weights], [key_of(f"{name} weight", step)], first, self._kernels, self._work):
            yield part, wide

    # ---- runs of a call -----------------------------------------------------------------------------------

    def _is_one_pass(self, call: Call, bucket: Bucket, tensor: Tensor) -> bool:
        """Return whether all runs of a call are updated without regard to where in their matrices the elements lie.

        Not if ``tensor`` is rounded stochastically, nor if a matrix among them is left alone.
        """
        return bool(call.spans) and tensor.dtype != torch.bfloat16 and not bucket.lacks(call.runs, self.absent)

    def _present_runs(self, call: Call, buffers: BucketBuffers) -> Iterator[tuple[Run, Tensor]]:
        """Yield the runs of matrices with a gradient, each with its result, 1-D."""
        for index in call.runs:
            run = buffers.bucket.runs[index]
            if run.matrix not in self.absent:
                yield run, buffers.slice_of(index)

    def _updates(self, buffers: BucketBuffers) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """Yield (parameter, weights, result, scale) of every run that :meth:`apply` will update; tensors are 1-D."""
        for call in self._bound.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            if tensor.grad is not None:
                for run, update in self._present_runs(call, buffers):
                    weights = elements_of(tensor, run.copy, self._work, "parameter")
                    yield run.parameter, weights, update, call.scale
