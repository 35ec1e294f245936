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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.bound import Bound, Call
from deepspeed.muon.exchange.buffers import BucketBuffers, elements_of, grids, put_back
from deepspeed.muon.exchange.exchange import Phase
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.math.bf16 import in_fp32
from deepspeed.muon.math.momentum import MOMENTUM, Blocks, Fragment, State
from deepspeed.muon.math.newton_schulz import orthogonalize
from deepspeed.muon.plan.bucket import Bucket, Run
from deepspeed.muon.plan.program import Collective, Look
from deepspeed.muon.second_moments import SecondMoments
from deepspeed.muon.step_stats import ABSENT, StepStats


@dataclass(kw_only=True)
class PartitionStep:
    """Steps one partition.

    Args:
        group: its parameter group with the rates of this step, and with its tensors.
        states: of the optimizer.
        blocks_of: where the blocks of a tensor's momentum in int8 begin.
        phase: entered around each phase, by name.
        stats: measures the step, if set.
    """

    bound: Bound
    group: dict[str, Any]
    states: Mapping[Tensor, State]
    blocks_of: Callable[[Tensor], Blocks]
    second_moments: SecondMoments
    phase: Phase
    stats: StepStats | None = None
    #: Names of the matrices without a gradient in this step, whose weight and momentum stay as they are.
    absent: frozenset[str] = frozenset()
    #: Of each fragment whose momentum in int8 was advanced with its run: the index of its tensor, and its position.
    advanced: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._work, self._kernels, self._config = self.bound.exchange.work, self.bound.elementwise, self.bound.config

    def run(self) -> frozenset[str]:
        """Step; return the names of the matrices that have no gradient."""
        self.bound.exchange.run(self.bound.plan, self.bound.program, self, self.phase)
        if self._config.momentum_dtype == "int8":
            with self.phase("prepare"):
                self._advance_rest()
        return self.absent

    # ---- on the shard: which matrices have a gradient -----------------------------------------------------

    def look(self, operation: Look) -> None:
        """Find the matrices that have no gradient on any rank."""
        self.absent = self.bound.gradients.absent(self.group["params"], operation)
        if self.stats is not None:
            self.stats.add(ABSENT, len(self.absent) / self.bound.sharers, 0)

    # ---- on the shard: momentum and Nesterov --------------------------------------------------------------

    def prepare(self, buffers: BucketBuffers) -> None:
        """Advance the momentum of a bucket's runs, and write its look-ahead to where it is sent from.

        The look-ahead is ``g + momentum * (m - g)`` of the gradient g and the new average m with Nesterov, else m, in
        the dtype of the exchange.
        """
        for call in self.bound.calls[buffers.index]:
            tensor: Tensor = self.group["params"][call.tensor]
            if tensor.grad is None:
                # The plan sends every run, also of a parameter that has no gradient.
                for index in call.runs:
                    buffers.slice_of(index).zero_()
                continue
            grad, average = tensor.grad.contiguous(), self.states[tensor].get(MOMENTUM)
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
        momentum, nesterov = self.group["momentum"], self.group["nesterov"]
        if self.bound.multi_run_kernels is not None:
            self.bound.multi_run_kernels.advance(average, grad, targets, call.tiles, momentum, nesterov)
            return
        for start, at, numel in call.spans:
            shard, target = slice(start, start + numel), targets[at : at + numel]
            self._kernels.advance(average[shard], grad[shard], target, momentum, nesterov, self._work)

    def _advance(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        """Advance the momentum of one run; ``target``: 1-D, for its look-ahead."""
        if self._config.momentum_dtype == "int8":
            self._advance_in_int8(tensor, grad, run, target)
            return
        state, momentum, nesterov = self.states[tensor], self.group["momentum"], self.group["nesterov"]
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

    # ---- on the shard: momentum in int8, whose blocks are rounded once each and may lie in several runs ------

    def _advance_in_int8(self, tensor: Tensor, grad: Tensor, run: Run, target: Tensor) -> None:
        """Write a run's look-ahead to ``target``, and advance its momentum if this rank has no more of the parameter.

        Otherwise :meth:`_advance_rest` advances it.
        """
        state, copy = self.states[tensor], run.copy
        fragment, codes, absmax, skipped = self.blocks_of(tensor).around(state, copy.start, copy.extent)
        gradient = grad.view(-1)[copy.start : copy.start + copy.extent]
        if copy.numel == fragment.numel:
            self._advance_codes(state, fragment, codes, absmax, gradient, target)
            self.advanced.add((run.tensor, fragment.position))
            return
        momentum, nesterov = self.group["momentum"], self.group["nesterov"]
        self._kernels.look_ahead(
            codes, absmax, skipped, gradient, target, copy.cols, copy.pitch, momentum, nesterov, self._work
        )

    def _advance_codes(
        self, state: State, fragment: Fragment, codes: Tensor, absmax: Tensor, grad: Tensor, target: Tensor | None
    ) -> None:
        momentum, nesterov = self.group["momentum"], self.group["nesterov"]
        key, first = key_of(fragment.name, int(state["step"])), fragment.first
        self._kernels.advance_codes(codes, absmax, grad, target, momentum, nesterov, key, first, self._work)

    def _advance_rest(self) -> None:
        """After the last bucket: advance the fragments of several runs, except their absent matrices."""
        absent_runs: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for bucket in self.bound.plan.buckets if self.absent else ():
            for run in bucket.runs:
                if run.matrix in self.absent:
                    tensor = self.group["params"][run.tensor]
                    fragment, *_ = self.blocks_of(tensor).around(self.states[tensor], run.copy.start, run.copy.extent)
                    absent_runs[run.tensor, fragment.position].append(run)
        for index, tensor in enumerate(self.group["params"]):
            if tensor.grad is None:
                continue
            grad, state = tensor.grad.contiguous().view(-1), self.states[tensor]
            for fragment, codes, absmax in self.blocks_of(tensor).parts(state):
                runs = absent_runs.get((index, fragment.position), ())
                is_absent = sum(run.copy.numel for run in runs) >= fragment.numel
                if is_absent or (index, fragment.position) in self.advanced:
                    continue
                gradient = grad[fragment.position :][: fragment.numel]
                if runs:
                    gradient = self._with_momentum(tensor, gradient, fragment.position, runs)
                self._advance_codes(state, fragment, codes, absmax, gradient, None)

    def _with_momentum(self, tensor: Tensor, grad: Tensor, position: int, runs: Iterable[Run]) -> Tensor:
        """Return a copy of a fragment's gradient, 1-D, that has the momentum itself in place of these runs.

        The average of a momentum and itself is what it was, so its codes stay, unless it shares a block with elements
        of another matrix whose magnitude changes the block's.
        """
        grad, state = grad.clone(), self.states[tensor]
        for run in runs:
            start, stop = run.copy.start, run.copy.start + run.copy.extent
            momentum = self.blocks_of(tensor).read(state, start, stop, grad.device)
            grids(grad, run.copy._replace(start=start - position)).copy_(grids(momentum, run.copy._replace(start=0)))
        return grad

    # ---- at the owner: Newton-Schulz ----------------------------------------------------------------------

    def orthogonalize(self, buffers: BucketBuffers, calls: Iterator[Collective]) -> None:
        """Orthogonalize the matrices of a bucket, equal shapes in one batch ``[batch, rows, cols]``.

        ``calls``: those that the owners of one matrix make meanwhile, by the program.
        """
        how, rules, stats = self.bound.newton_schulz, self.bound.rules, self.stats
        for batch in buffers.bucket.batches:
            shape = batch.count, batch.rows, batch.cols
            matrices = buffers.matrices[batch.start : batch.start + math.prod(shape)].view(shape)
            # With rules a matrix has one owner: they need whole rows and columns.
            if rules is not None:
                rules.before(matrices, batch.axis, self._work)
            if stats is not None:
                stats.before_newton_schulz(batch.names, matrices)
            rows, cols = batch.shape
            kernels = self.bound.kernels(rows, cols)
            if batch.owners > 1:
                kernels = self.bound.exchange.owner_set(batch, buffers.number, calls).operations(kernels)
            orthogonalize(
                matrices,
                how.schedule,
                method=how.method(rows, cols),
                dtype=self.bound.dtype,
                work=self._work,
                kernels=kernels,
                normalization=self._config.ns_normalization,
                gram_axis=batch.gram_axis,
            )
            if stats is not None:
                stats.after_newton_schulz(batch.names, matrices)
            if rules is not None:
                rules.after(matrices, batch.axis, self.second_moments.of(batch.names), self._work)

    # ---- on the shard: decay and update -------------------------------------------------------------------

    def apply(self, buffers: BucketBuffers) -> None:
        """Decay the weights of a bucket's runs, and subtract the learning rate times the scaled result."""
        if self.stats is not None:
            cautious = self._config.cautious_weight_decay
            self.stats.before_apply(self._updates(buffers), self.group, cautious)
        for call in self.bound.calls[buffers.index]:
            tensor: Tensor = self.group["params"][call.tensor]
            # As in torch's optimizers, weights without a gradient do not decay either.
            if tensor.grad is None:
                continue
            if self._is_one_pass(call, buffers.bucket, tensor):
                self._apply_spans(call, tensor.view(-1), buffers.beside_the_shards(call.in_place))
                continue
            for run, update in self._present_runs(call, buffers):
                weights = elements_of(tensor, run.copy, self._work, "parameter")
                for part, wide in self._in_fp32(weights, run, step=int(self.states[tensor]["step"])):
                    self._apply(call, wide, update[part])
                put_back(weights, tensor, run.copy)

    def _apply_spans(self, call: Call, weights: Tensor, results: Tensor) -> None:
        """Update the weights of all runs of a call; both tensors are 1-D."""
        if self.bound.multi_run_kernels is not None:
            lr, decay, cautious = (
                self.group["lr"],
                self.group["weight_decay"],
                self._config.cautious_weight_decay,
            )
            self.bound.multi_run_kernels.apply_(weights, results, call.tiles, lr, call.scale, decay, cautious)
            return
        for start, at, numel in call.spans:
            self._apply(call, weights[start : start + numel], results[at : at + numel])

    def _apply(self, call: Call, weights: Tensor, update: Tensor) -> None:
        lr, decay, cautious = self.group["lr"], self.group["weight_decay"], self._config.cautious_weight_decay
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
        for call in self.bound.calls[buffers.index]:
            tensor: Tensor = self.group["params"][call.tensor]
            if tensor.grad is not None:
                for run, update in self._present_runs(call, buffers):
                    weights = elements_of(tensor, run.copy, self._work, "parameter")
                    yield run.parameter, weights, update, call.scale
