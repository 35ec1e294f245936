# SPDX-License-Identifier: Apache-2.0
"""One step of a partition of Muon parameters, from gradient to weight.

    look           on the shard     find the matrices that have a gradient; the others are not updated
    prepare        on the shard     momentum and Nesterov, rounded to the dtype of the exchange
    orthogonalize  at the owner     Newton-Schulz on whole matrices, between the update rules
    apply          on the shard     weight decay, and the update scaled by learning rate and shape

The last three phases work on one bucket of matrices at a time. The exchange calls them in the order of the program
(:mod:`deepspeed.muon.plan.program`), and sends shards to the owner after prepare and results back before apply. A "run"
is a contiguous piece of a matrix that this rank holds, or a grid of such pieces (``ShardRun``).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.buffers import BucketBuffers, copy_from_grid, copy_to_grid, grid_view
from deepspeed.muon.exchange.exchange import Exchange, Phase
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.kernels.probe import warm
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations, RunOperations, Tiles
from deepspeed.muon.kernels.workspace import batch_limit
from deepspeed.muon.math.momentum_storage import MOMENTUM, Blocks, Fragment, State
from deepspeed.muon.math.newton_schulz import DTYPES, name_of, orthogonalize
from deepspeed.muon.math.rules import Rules
from deepspeed.muon.math.wide_arithmetic import in_fp32
from deepspeed.muon.monitor.step_stats import ABSENT, StepStats
from deepspeed.muon.plan.bucket import Bucket, ShardRun, Span
from deepspeed.muon.plan.plan import Plan
from deepspeed.muon.plan.program import Collective, Look, NewtonSchulz, Program, program_of
from deepspeed.muon.step.gradient_checks import GradientProbe
from deepspeed.muon.step.normuon_moments import SecondMoments


def short_hash(text: str, digits: int = 16) -> str:
    """Return the first ``digits`` hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


class Call(NamedTuple):
    """Some runs of one :class:`Bucket` that are updated together. A run is a part of a matrix on this rank.

    Args:
        runs: indices of the :class:`ShardRun` objects in the bucket.
        tensor: index, in the parameter group, of the tensor that holds all these runs.
        in_place: whether the runs are in the buffer of the matrices that this rank owns; otherwise in the send buffer.
        scale: factor by which the update of the runs is multiplied.
        spans: the elements of the runs as contiguous :class:`Span` objects; empty if a run is not contiguous.
        tiles: ``spans`` as an argument of a kernel that updates many spans in one launch; ``None`` without such a
            kernel.
    """

    runs: tuple[int, ...]
    tensor: int
    in_place: bool
    scale: float
    spans: list[Span]
    tiles: Tiles | None


@dataclass(kw_only=True, eq=False)
class PartitionStep:
    """The planned step of one :class:`Partition` of Muon parameters. It is made once and run in every training step.

    Args:
        plan: this rank's part of the plan, with its :class:`Bucket` objects: matrices that ranks exchange together.
        newton_schulz: schedule, methods and dtype of Newton-Schulz.
        kernels: function of a matrix's (rows, columns) that returns the kernels for its Newton-Schulz.
        elementwise: kernels for everything except the matrix products of Newton-Schulz; equal on all ranks.
        multi_run_kernels: kernels that update all runs of a :class:`Call` in one launch; ``None``: one launch per span.
        scale: function of a matrix's (rows, columns) that returns the factor of its update.
        settings: a text of all settings that the bits of the results depend on, for :attr:`digest`.
        sharers: number of ranks that share the parameters or hold copies of them; statistics are divided by it.
        owner_counts: {matrix shape, such as ``16x64``: number of ranks that own such a matrix together}, where it is
            more than one. Checkpoints store it.
        blocks: tensor -> the quantization blocks of its int8 momentum; empty for other momentum dtypes.
        second_moments: NorMuon's second moments of all partitions.
    """

    config: MuonConfig
    partition: Partition
    plan: Plan
    exchange: Exchange
    newton_schulz: NewtonSchulz
    kernels: Callable[[int, int], Operations]
    elementwise: Operations
    multi_run_kernels: RunOperations | None
    scale: Callable[[int, int], float]
    settings: str
    sharers: int
    owner_counts: dict[str, int]
    blocks: Mapping[Tensor, Blocks]
    second_moments: SecondMoments

    def __post_init__(self) -> None:
        self._work, self._is_int8 = self.exchange.work, self.config.momentum_dtype == "int8"

    @cached_property
    def rules(self) -> Rules | None:
        """Return the options that change Muon's update (:class:`Rules`); ``None`` for plain Muon."""
        return self.config.rules or None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of Newton-Schulz's matrix products."""
        return DTYPES[self.newton_schulz.dtype]

    @cached_property
    def gradients(self) -> GradientProbe:
        """Return the :class:`GradientProbe` that finds the partition's matrices without a gradient."""
        return GradientProbe(self.partition, self.plan, self.exchange)

    @cached_property
    def program(self) -> Program:
        """Return this rank's operations in a step, computations and collectives, in order."""
        is_staged = self.exchange.staging is not None
        return program_of(self.plan, name_of(self.exchange.dtype), is_staged, self.newton_schulz)

    @cached_property
    def digest(self) -> str:
        """Return a hash of everything that the partition's collectives and the bits of its results depend on.

        Ranks that share the partition must have equal hashes.
        """
        wire, travels = name_of(self.exchange.dtype), self.plan.travels(self.exchange.staging is not None)
        how = self.newton_schulz.dtype, self.newton_schulz.device_type
        plan = self.plan.of_all
        facts = plan.digest, plan.slots(travels), plan.shared_owner_counts, wire, how, self.settings
        return short_hash(repr(facts))

    @cached_property
    def calls(self) -> list[list[Call]]:
        """Return a list of :class:`Call` objects for each bucket of the plan: which runs are updated together."""
        return [[self._call(bucket, runs) for runs in bucket.run_groups(self.scale)] for bucket in self.plan.buckets]

    def warm_up(self) -> None:
        """Compile and autotune the partition's Newton-Schulz kernels on an accelerator, before the first step."""
        sizes: dict[tuple[int, int], set[tuple[int, int, int, int, torch.dtype]]] = defaultdict(set)
        for bucket in self.plan.buckets:
            for batch in bucket.batches:
                limit = batch_limit(batch.rows * batch.cols, min(batch.shape), self.dtype.itemsize, accelerator=True)
                size = min(batch.count, limit), batch.rows, batch.cols, batch.gram_axis, self.dtype
                sizes[batch.shape].add(size)
        for (rows, cols), of_shape in sorted(sizes.items()):
            warm(self.kernels(rows, cols), of_shape, self.exchange.device)

    def _call(self, bucket: Bucket, indices: tuple[int, ...]) -> Call:
        first, tiles = bucket.runs[indices[0]], None
        spans = bucket.spans(indices, staged=self.exchange.staging is not None)
        if self.multi_run_kernels is not None and spans:
            tiles = self.multi_run_kernels.tiles(spans, self.partition.tensors[first.tensor].device)
        rows, cols = first.shape
        return Call(indices, first.tensor, first.in_place, self.scale(rows, cols), spans, tiles)

    # ---- a step -------------------------------------------------------------------------------------------

    def run(
        self, group: dict[str, Any], states: Mapping[Tensor, State], phase: Phase, stats: StepStats | None
    ) -> frozenset[str]:
        """Make one step: update the partition's weights and optimizer states in place.

        Return the names of the matrices that were not updated, because their gradient is zero on all ranks.

        Args:
            group: the parameter group, with its tensors and this step's learning rate, momentum and weight decay.
            states: tensor -> its optimizer state.
            phase: function of a phase's name, such as ``prepare``, that returns a context manager for the phase to run
                in.
            stats: measures the step for the monitor; ``None``: nothing is measured.
        """
        self._group, self._states, self._stats = group, states, stats
        self._momentum, self._nesterov = group["momentum"], group["nesterov"]
        self._lr, self._decay = group["lr"], group["weight_decay"]
        self._absent: frozenset[str] = frozenset()
        #: (tensor index, position) of each fragment whose int8 momentum :meth:`prepare` has already updated.
        self._advanced: set[tuple[int, int]] = set()
        self.exchange.run(self.plan, self.program, self, phase)
        if self._is_int8:
            with phase("prepare"):
                self._advance_rest()
        return self._absent

    # ---- on the shard: which matrices have a gradient -----------------------------------------------------

    def look(self, operation: Look) -> None:
        """Find the matrices whose gradient is missing or zero on all ranks, which the step skips.

        A collective, unless ``operation.collectives`` is empty.
        """
        self._absent = self.gradients.without_gradient(self._group["params"], operation)
        if self._stats is not None:
            # All ranks that share the plan count the same matrices, and their counts are added up.
            self._stats.add(ABSENT, len(self._absent) / self.sharers, 0)

    # ---- on the shard: momentum and Nesterov --------------------------------------------------------------

    def prepare(self, buffers: BucketBuffers) -> None:
        """Update the momentum of this rank's part of one bucket's matrices, and write the input of Newton-Schulz.

        ``buffers``: receives the input in the dtype in which matrices are sent. With the gradient g and the updated
        momentum m, the input is ``g + momentum * (m - g)`` if Nesterov is on, otherwise m. Some int8 momenta are
        updated only after the last bucket (:meth:`_advance_rest`).
        """
        for call in self.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            if tensor.grad is None:
                # The plan is fixed and sends every run, so a parameter without a gradient is sent as zeros.
                for index in call.runs:
                    buffers.slice_of(index).zero_()
                continue
            grad, average = tensor.grad.contiguous(), self._states[tensor].get(MOMENTUM)
            if average is not None and self._is_one_pass(call, buffers.bucket, average):
                self._advance_spans(call, average.view(-1), grad.view(-1), buffers.shard_side_buffer(call.in_place))
                continue
            for index in call.runs:
                run = buffers.bucket.runs[index]
                if run.matrix in self._absent:  # Newton-Schulz maps zero to zero
                    buffers.slice_of(index).zero_()
                else:
                    self._advance(tensor, grad, run, buffers.slice_of(index))

    def _advance_spans(self, call: Call, average: Tensor, grad: Tensor, targets: Tensor) -> None:
        """Update the momentum of all runs of a :class:`Call`, and write their input of Newton-Schulz to ``targets``.

        ``average``, ``grad``: momentum and gradient of the call's tensor. All three tensors are 1-D.
        """
        if self.multi_run_kernels is not None:
            self.multi_run_kernels.advance(average, grad, targets, call.tiles, self._momentum, self._nesterov)
            return
        for start, at, numel in call.spans:
            shard, target = slice(start, start + numel), targets[at : at + numel]
            self.elementwise.advance(average[shard], grad[shard], target, self._momentum, self._nesterov, self._work)

    def _advance(self, tensor: Tensor, grad: Tensor, run: ShardRun, target: Tensor) -> None:
        """Update the momentum of one run (:class:`ShardRun`), and write its input of Newton-Schulz to ``target``, 1-D.

        ``tensor``, ``grad``: the tensor that contains the run, and its gradient.
        """
        if self._is_int8:
            self._advance_in_int8(tensor, grad, run, target)
            return
        state, momentum, nesterov = self._states[tensor], self._momentum, self._nesterov
        gradient = copy_from_grid(grad, run.copy, self._work, "gradient")
        average = copy_from_grid(state[MOMENTUM], run.copy, self._work, "momentum")
        if average.dtype == torch.bfloat16:
            # Each element of a matrix draws its own random number, so results do not depend on how ranks share it.
            name, first = run.draws
            key = key_of(name, int(state["step"]))
            self.elementwise.advance_rounded(average, gradient, target, momentum, nesterov, key, first, self._work)
        else:
            self.elementwise.advance(average, gradient, target, momentum, nesterov, self._work)
        copy_to_grid(average, state[MOMENTUM], run.copy)

    # ---- on the shard: momentum in int8 ----------------------------------------------------------------------
    # A quantization block must be rounded once per step, but may span runs of different buckets. So prepare computes
    # the look-ahead from the old codes, and the codes are updated after the last bucket.

    def _advance_in_int8(self, tensor: Tensor, grad: Tensor, run: ShardRun, target: Tensor) -> None:
        """Write the Newton-Schulz input of ``run``, a part of a matrix with int8 momentum, to ``target``.

        The momentum is updated, too, if the run is all that this rank holds of its parameter; otherwise
        :meth:`_advance_rest` updates it. The arguments are those of :meth:`_advance`.
        """
        state, copy = self._states[tensor], run.copy
        fragment, codes, absmax, skipped = self.blocks[tensor].fragment_at(state, copy.start, copy.extent)
        gradient = grad.view(-1)[copy.start : copy.start + copy.extent]
        # The run is all that this rank holds of the parameter, so no other run shares its blocks: one pass does both.
        if copy.numel == fragment.numel:
            self._advance_codes(state, fragment, codes, absmax, gradient, target)
            self._advanced.add((run.tensor, fragment.position))
            return
        cols, pitch, momentum, nesterov = copy.cols, copy.pitch, self._momentum, self._nesterov
        self.elementwise.look_ahead(
            codes, absmax, skipped, gradient, target, cols, pitch, momentum, nesterov, self._work
        )

    def _advance_codes(
        self, state: State, fragment: Fragment, codes: Tensor, absmax: Tensor, grad: Tensor, target: Tensor | None
    ) -> None:
        """Update the int8 ``codes`` and their ``absmax`` in place. They are the momentum of one :class:`Fragment`.

        ``absmax``: the largest magnitude of each quantization block, fp32. ``state``: the optimizer state of the
        fragment's tensor. ``grad``: the fragment's gradient, 1-D. ``target``: receives the input of Newton-Schulz, 1-D;
        ``None``: only the momentum is updated.
        """
        key, momentum, nesterov = key_of(fragment.name, int(state["step"])), self._momentum, self._nesterov
        self.elementwise.advance_codes(codes, absmax, grad, target, momentum, nesterov, key, fragment.first, self._work)

    def _advance_rest(self) -> None:
        """Update, after the last bucket, the int8 momenta that :meth:`prepare` has not updated.

        The momenta of matrices without a gradient do not change.
        """
        absent_runs: dict[tuple[int, int], list[ShardRun]] = defaultdict(list)
        for bucket in self.plan.buckets if self._absent else ():
            for run in bucket.runs:
                if run.matrix in self._absent:
                    tensor = self._group["params"][run.tensor]
                    fragment, *_ = self.blocks[tensor].fragment_at(
                        self._states[tensor], run.copy.start, run.copy.extent
                    )
                    absent_runs[run.tensor, fragment.position].append(run)
        for index, tensor in enumerate(self._group["params"]):
            if tensor.grad is None:
                continue
            grad, state = tensor.grad.contiguous().view(-1), self._states[tensor]
            for fragment, codes, absmax in self.blocks[tensor].parts(state):
                runs = absent_runs.get((index, fragment.position), ())
                is_absent = sum(run.copy.numel for run in runs) >= fragment.numel
                if is_absent or (index, fragment.position) in self._advanced:
                    continue
                gradient = grad[fragment.position :][: fragment.numel]
                if runs:
                    gradient = self._with_momentum(tensor, gradient, fragment.position, runs)
                self._advance_codes(state, fragment, codes, absmax, gradient, None)

    def _with_momentum(self, tensor: Tensor, grad: Tensor, position: int, runs: Iterable[ShardRun]) -> Tensor:
        """Return a copy of ``grad`` with the zeros of ``runs`` replaced by their momentum, which updates then keep.

        The codes of ``runs`` may still change if they share a quantization block with a matrix whose momentum changes.
        ``grad``: the 1-D gradient of a :class:`Fragment` of a parameter. ``runs``: parts of matrices without a
        gradient. ``position``: index of the fragment's first element in ``tensor``.
        """
        grad, state = grad.clone(), self._states[tensor]
        for run in runs:
            start, stop = run.copy.start, run.copy.start + run.copy.extent
            momentum = self.blocks[tensor].read(state, start, stop, grad.device)
            grid_view(grad, run.copy._replace(start=start - position)).copy_(
                grid_view(momentum, run.copy._replace(start=0))
            )
        return grad

    # ---- at the owner: Newton-Schulz ----------------------------------------------------------------------

    def orthogonalize(self, buffers: BucketBuffers, calls: Iterator[Collective]) -> None:
        """Orthogonalize ``buffers.matrices`` in place: the matrices of one bucket that this rank owns, shape by shape.

        ``calls``: the planned collectives among ranks that own matrices together, in order.
        """
        how, rules, stats = self.newton_schulz, self.rules, self._stats
        for batch in buffers.bucket.batches:
            shape = batch.count, batch.rows, batch.cols
            matrices = buffers.matrices[batch.start : batch.start + math.prod(shape)].view(shape)
            # Rules need whole rows and columns; the plan therefore gives each matrix one owner if there are rules.
            if rules is not None:
                rules.apply_before(matrices, batch.axis, self._work)
            if stats is not None:
                stats.before_newton_schulz(batch.names, matrices)
            rows, cols = batch.shape
            kernels = self.kernels(rows, cols)
            if batch.owners > 1:
                kernels = self.exchange.owner_set(batch, buffers.number, calls).operations(kernels)
            orthogonalize(
                matrices,
                how.schedule,
                method=how.method(rows, cols),
                dtype=self.dtype,
                work=self._work,
                kernels=kernels,
                gram_axis=batch.gram_axis,
            )
            if stats is not None:
                stats.after_newton_schulz(batch.names, matrices)
            if rules is not None:
                rules.apply_after(matrices, batch.axis, self.second_moments.of_matrices(batch.names), self._work)

    # ---- on the shard: decay and update -------------------------------------------------------------------

    def apply(self, buffers: BucketBuffers) -> None:
        """Update the weights of this rank's part of one bucket's matrices from the results in ``buffers``.

        The weights decay, and learning rate x scale x result is subtracted.
        """
        if self._stats is not None:
            cautious = self.config.cautious_weight_decay
            self._stats.before_apply(self._updates(buffers), self._group, cautious)
        for call in self.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            # As in torch's optimizers, weights without a gradient do not decay either.
            if tensor.grad is None:
                continue
            if self._is_one_pass(call, buffers.bucket, tensor):
                self._apply_spans(call, tensor.view(-1), buffers.shard_side_buffer(call.in_place))
                continue
            for run, update in self._present_runs(call, buffers):
                weights = copy_from_grid(tensor, run.copy, self._work, "parameter")
                for part, wide in self._in_fp32(weights, run, step=int(self._states[tensor]["step"])):
                    self._apply(call, wide, update[part])
                copy_to_grid(weights, tensor, run.copy)

    def _apply_spans(self, call: Call, weights: Tensor, results: Tensor) -> None:
        """Update the weights of all runs of a :class:`Call` from the orthogonalized ``results``.

        ``weights``: the tensor of the call. Both tensors are 1-D.
        """
        if self.multi_run_kernels is not None:
            cautious = self.config.cautious_weight_decay
            self.multi_run_kernels.apply_(weights, results, call.tiles, self._lr, call.scale, self._decay, cautious)
            return
        for start, at, numel in call.spans:
            self._apply(call, weights[start : start + numel], results[at : at + numel])

    def _apply(self, call: Call, weights: Tensor, update: Tensor) -> None:
        cautious = self.config.cautious_weight_decay
        self.elementwise.apply_(weights, update, self._lr, call.scale, self._decay, cautious, self._work)

    def _in_fp32(self, weights: Tensor, run: ShardRun, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, ``weights[slice]``) pairs that cover the 1-D ``weights``, for the caller to update in place.

        bf16 weights are yielded as fp32 copies and then rounded back stochastically. Rounding to nearest would lose
        updates below 2^-9 of a weight. ``run``, ``step``: seed the rounding; ``run`` says which part of a matrix
        ``weights`` is.
        """
        if weights.dtype != torch.bfloat16:
            yield slice(None), weights
            return
        # " weight" draws other numbers than the momentum does: equal ones would give both errors the same sign.
        name, first = run.draws
        for part, (wide,) in in_fp32([weights], [key_of(f"{name} weight", step)], first, self.elementwise, self._work):
            yield part, wide

    # ---- runs of a call -----------------------------------------------------------------------------------

    def _is_one_pass(self, call: Call, bucket: Bucket, tensor: Tensor) -> bool:
        """Return whether contiguous spans (``call.spans``) can be updated, instead of one :class:`ShardRun` at a time.

        False if the call has no spans, if one of its matrices has no gradient, or if ``tensor``, which holds the
        weights or the momentum to update, is bf16.
        """
        # Stochastic rounding of a bf16 element depends on its place in the matrix.
        if not call.spans or tensor.dtype == torch.bfloat16:
            return False
        return not self._absent or not any(bucket.runs[index].matrix in self._absent for index in call.runs)

    def _present_runs(self, call: Call, buffers: BucketBuffers) -> Iterator[tuple[ShardRun, Tensor]]:
        """Yield (run, its 1-D slice of the buffers) for each :class:`ShardRun` of ``call`` that has a gradient."""
        for index in call.runs:
            run = buffers.bucket.runs[index]
            if run.matrix not in self._absent:
                yield run, buffers.slice_of(index)

    def _updates(self, buffers: BucketBuffers) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """Yield (parameter name, weights, result of Newton-Schulz, scale) of each :class:`ShardRun` to update.

        Weights and result are 1-D.
        """
        for call in self.calls[buffers.index]:
            tensor: Tensor = self._group["params"][call.tensor]
            if tensor.grad is not None:
                for run, update in self._present_runs(call, buffers):
                    weights = copy_from_grid(tensor, run.copy, self._work, "parameter")
                    yield run.parameter, weights, update, call.scale
