# SPDX-License-Identifier: Apache-2.0
"""One optimizer step on a partition, the Muon parameters that one call of ``step`` updates, from gradient to weight.

    look           on the shard     which matrices have a gradient; whether gradients are finite
    prepare        on the shard     momentum and Nesterov, rounded to the dtype of the exchange
    orthogonalize  at the owner     Newton-Schulz on whole matrices, between the update rules
    apply          on the shard     weight decay, and the update scaled by learning rate and shape

The shard is the part of the parameters that this rank holds. The owner of a matrix is the rank that orthogonalizes it.

The optimizer runs the first phase for several partitions together, before it updates any of them. The other three work
on one bucket at a time, which is the matrices that ranks send to the owners together. :meth:`PartitionStep.run` is the
loop over the buckets.

A piece of a matrix in this rank's shard, which is consecutive elements or equally spaced rows, is a ``ShardRun``, in
names "run". Pieces that are updated together form a :class:`Call`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.exchange.bucket import Bucket, GridCopy, Scale, ShardRun, Span
from deepspeed.muon.exchange.consensus import Agreed, short_hash
from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.exchange.plan import Plan, cost_model, plan_partition, without_collector
from deepspeed.muon.exchange.run import BucketBuffers, Exchange, copy_from_grid, copy_to_grid, grid_view
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, RunKernels, Tiles
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.selection import Unavailable
from deepspeed.muon.math.momentum_storage import CODES, MOMENTUM, QuantizationBlocks, State
from deepspeed.muon.math.newton_schulz import DTYPES, Schedule, exact_method, flops, method_of, name_of, orthogonalize
from deepspeed.muon.math.rules import Rule, scale_factor
from deepspeed.muon.math.wide_arithmetic import in_fp32
from deepspeed.muon.monitor import Phase, StepStats
from deepspeed.muon.saved_state import OwnerState

# ---- look: which matrices have a gradient, and whether gradients are finite ----------------------------------------
#
# ZeRO passes a gradient of zeros for a parameter that took no part in the loss. Its momentum then shrinks, but updates
# keep their full size, so the matrix would move on until the momentum is zero: for some 1,900 steps in fp32, if it was
# about .001 and shrinks to .95 of its size in each. Therefore a matrix whose whole gradient is exactly zero is not
# updated, like a parameter whose ``grad`` is ``None`` in torch's optimizers.

#: How many elements of each matrix's gradient to test first. The others are read only if all of these are zero.
PROBES = 16
GOLDEN = (math.sqrt(5) - 1) / 2
#: For each tensor of a partition, its gradient as consecutive 1-D tensors; none if it has no gradient.
Gradients = Sequence[Sequence[Tensor]]


class _Probes(NamedTuple):
    """The elements of one tensor's gradient that :class:`GradientProbe` tests.

    Example, with :data:`PROBES` 2: a flat tensor holds the partition's matrix 4 in elements 0 to 99, and matrix 7 in
    elements 100 to 199. Then ``numbers`` is ``[4, 7]``, and ``positions`` is ``[[61, 23], [161, 123]]``. If the
    gradient is two tensors of 100 elements, ``indices[100, 100]`` is ``[tensor([[61, 23]]), tensor([[61, 23]])]``.

    Args:
        tensor: the tensor's index in the partition.
        runs_of_matrices: for each matrix with elements in the tensor, its pieces there. The matrices are in the order
            of their elements.
        numbers, matrix_indices: for each of these matrices, its index in the partition, as integers and as an int64
            tensor.
        positions: for each of these matrices, the indices in the tensor of the :data:`PROBES` elements to test first.
        indices: cache of :meth:`sampled`, lengths of the tensors that form the gradient -> for each of them, the
            ``positions`` in it, counted from its first element, int64 ``[matrices in it, PROBES]``.
    """

    tensor: int
    runs_of_matrices: list[list[ShardRun]]
    numbers: list[int]
    matrix_indices: Tensor
    positions: list[list[int]]
    indices: dict[tuple[int, ...], list[Tensor]]

    def sampled(self, gradient: Sequence[Tensor]) -> Tensor:
        """Return the elements of the gradient at :attr:`positions`, ``[matrices, PROBES]``.

        ``gradient``: the tensor's gradient, as consecutive 1-D tensors.
        """
        lengths = tuple(piece.numel() for piece in gradient)
        if lengths not in self.indices:
            self.indices[lengths] = self._indices(lengths)
        pairs = zip(gradient, self.indices[lengths], strict=True)
        return torch.cat([piece[index] for piece, index in pairs if index.numel()])

    def _indices(self, lengths: Sequence[int]) -> list[Tensor]:
        result, start = [], 0
        for length in lengths:
            # A matrix lies in one tensor, because it belongs to one parameter.
            inside = [[p - start for p in of_one] for of_one in self.positions if 0 <= of_one[0] - start < length]
            index = torch.tensor(inside, dtype=torch.int64, device=self.matrix_indices.device)
            result.append(index.view(-1, PROBES))
            start += length
        return result


class GradientProbe:
    """Finds the matrices of one :class:`Partition` whose gradient is zero, with few tensor operations.

    ``plan``: says where in the partition's tensors each matrix is. ``exchange``: used to compare with other ranks.
    """

    def __init__(self, partition: Partition, plan: Plan, exchange: Exchange) -> None:
        self._exchange, self._is_shared = exchange, plan.exchanges_gradient_flags
        self._device = partition.tensors[0].device
        #: Names of all matrices; the same order on all ranks.
        self.names = [item.name for item in partition.blocks]
        index = {name: number for number, name in enumerate(self.names)}
        runs_by_tensor: dict[int, dict[int, list[ShardRun]]] = defaultdict(lambda: defaultdict(list))
        for bucket in plan.buckets:
            for run in bucket.runs:
                runs_by_tensor[run.tensor][index[run.matrix]].append(run)
        self._probes = []
        for tensor, of_tensor in runs_by_tensor.items():
            # Matrices in the order of their elements in the tensor.
            in_order = dict(sorted(of_tensor.items(), key=lambda pair: pair[1][0].copy.start))
            numbers, runs_of_matrices = list(in_order), list(in_order.values())
            matrix_indices = torch.tensor(numbers, dtype=torch.int64, device=partition.tensors[tensor].device)
            positions = [*map(_probe_positions, runs_of_matrices)]
            self._probes.append(_Probes(tensor, runs_of_matrices, numbers, matrix_indices, positions, {}))

    def sampled(self, gradients: Gradients) -> Tensor:
        """Return an int32 flag for each matrix in :attr:`names`: whether a sample of its gradient is nonzero.

        The flag is 1 if the sample of any rank is nonzero, otherwise 0. Each rank samples :data:`PROBES` elements of
        its part of a matrix. A collective, unless every rank holds every matrix whole. ``gradients``: those of the
        partition's tensors.
        """
        present = torch.zeros(len(self.names), dtype=torch.int32, device=self._device)
        found = [(probes, gradient) for probes in self._probes if (gradient := _joined(gradients[probes.tensor]))]
        if found:  # few operations for all tensors: at stage 0 each matrix is a tensor of its own
            sampled = torch.cat([probes.sampled(gradient) for probes, gradient in found])
            matrices = torch.cat([probes.matrix_indices for probes, _ in found])
            present[matrices] = sampled.ne(0).any(dim=1).to(torch.int32)
        return self._of_all_ranks(present)

    def read(self, gradients: Gradients, numbers: Sequence[int]) -> Tensor:
        """Return an int32 flag for each matrix in ``numbers``: 1 if its gradient is nonzero on any rank, otherwise 0.

        Unlike :meth:`sampled`, this tests every element. A collective, unless every rank holds every matrix whole.
        ``gradients``: those of the partition's tensors. ``numbers``: indices in :attr:`names`, equal on all ranks.
        """
        present = torch.zeros(len(numbers), dtype=torch.int32, device=self._device)
        places = {number: place for place, number in enumerate(numbers)}
        for probes in self._probes:
            gradient = _joined(gradients[probes.tensor])
            for number, runs in zip(probes.numbers, probes.runs_of_matrices, strict=True):
                if gradient and number in places:
                    present[places[number]] = torch.stack([_of_run(gradient, run.copy).any() for run in runs]).any()
        return self._of_all_ranks(present)

    def _of_all_ranks(self, present: Tensor) -> Tensor:
        """Return the maximum of each flag over the ranks that share the partition."""
        present = present.to(self._exchange.device)
        if self._is_shared:
            self._exchange.largest(present)
        return present


def without_gradient(
    probes: Sequence[GradientProbe],
    gradients_of_partitions: Sequence[Gradients],
    read_flags: Callable[[Tensor], list[int]],
) -> list[frozenset[str]]:
    """Return for each partition the names of its matrices whose gradient is zero on all ranks; a collective.

    First test a few elements of each matrix, then all elements of those matrices whose sample is zero on all ranks. The
    host waits for the device once, or twice if there are such matrices.

    Args:
        probes: one for each partition.
        gradients_of_partitions: the gradients of each partition.
        read_flags: function that returns the elements of an int32 tensor as a list, for which it waits for the device.
    """
    if not probes:
        return []
    pairs = list(zip(probes, gradients_of_partitions, strict=True))
    # A gradient that is not zero is hardly ever zero at all sampled positions, so most steps read no more of it.
    flags = iter(read_flags(torch.cat([probe.sampled(of_part) for probe, of_part in pairs])))
    # Equal on all ranks, so all of them read on, or none.
    unsure = [[number for number in range(len(probe.names)) if not next(flags)] for probe in probes]
    if not any(unsure):
        return [frozenset() for _ in probes]
    looks = [(probe, of_part, numbers) for (probe, of_part), numbers in zip(pairs, unsure, strict=True) if numbers]
    # By ``tolist``: the first call of ``read_flags`` has already fetched the gradient norms for ``is_finite``.
    flags = iter(torch.cat([probe.read(of_part, numbers) for probe, of_part, numbers in looks]).tolist())
    return [
        frozenset(probe.names[number] for number in numbers if not next(flags))
        for probe, numbers in zip(probes, unsure, strict=True)
    ]


def _joined(gradient: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient's elements, in order, as few 1-D tensors: those that are adjacent in memory become one."""
    joined: list[Tensor] = []
    for piece in (piece.reshape(-1) for piece in gradient if piece.numel()):
        last = joined[-1] if joined else piece
        is_next = last.storage_offset() + last.numel() == piece.storage_offset() and last.dtype == piece.dtype
        if is_next and last.untyped_storage()._cdata == piece.untyped_storage()._cdata:
            joined[-1] = torch.as_strided(last, (last.numel() + piece.numel(),), (1,))
        else:
            joined.append(piece)
    return joined


def _of_run(gradient: Sequence[Tensor], copy: GridCopy) -> Tensor:
    """Return the elements of a gradient that ``copy`` selects, as a view of the tensor that contains them.

    ``gradient``: consecutive 1-D tensors. ``copy``: equally spaced rows of their concatenation (:class:`GridCopy`).
    """
    number = 0
    while copy.start >= gradient[number].numel():
        copy = copy._replace(start=copy.start - gradient[number].numel())
        number += 1
    return grid_view(gradient[number], copy)


def _probe_positions(runs: Sequence[ShardRun]) -> list[int]:
    """Choose PROBES elements of one matrix, spread over its rows and columns; return their indices in the flat tensor.

    ``runs``: the pieces of the matrix that the tensor holds.
    """
    ends, positions = list(accumulate(run.copy.numel for run in runs)), []
    for probe in range(PROBES):
        # Multiples of the golden ratio: equal distances would often be whole rows, and the gradient of one column is
        # zero if its input is.
        element = int((probe + 1) * GOLDEN % 1 * ends[-1])
        number = bisect_right(ends, element)
        copy = runs[number].copy
        row, column = divmod(element - ends[number] + copy.numel, copy.cols)
        positions.append(copy.start + row * copy.pitch + column)
    return positions


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Return ``[tensor.grad]``; an empty list if the tensor has no gradient, or a sparse one."""
    grad = tensor.grad
    return [] if grad is None or grad.layout != torch.strided else [grad]


def are_finite(tensors: list[Tensor]) -> bool:
    """Return whether the norm of every gradient in ``tensors`` is finite; True for an empty list.

    Raise RuntimeError if a gradient is sparse.
    """
    if not tensors:
        return True
    if any(t.layout != torch.strided for t in tensors):
        raise RuntimeError(
            "MuonWithAuxAdam does not support sparse gradients, and the gradient of at least one parameter is sparse; "
            "use nn.Embedding(..., sparse=False), or another optimizer for this parameter, such as "
            "torch.optim.SparseAdam"
        )
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    # In fp16 the norm of a finite gradient may overflow.
    dtype = torch.promote_types(max((t.dtype for t in tensors), key=lambda d: d.itemsize), torch.float32)
    norms = torch._foreach_norm(tensors, dtype=dtype)
    return bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all())


# ---- how the step of a partition is planned ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Facts besides the config that a step depends on.

    :mod:`deepspeed.muon.zero.bind` finds them under DeepSpeed, :mod:`deepspeed.muon.replicas` in plain PyTorch.

    Args:
        is_logging: whether this rank writes the log lines that would be equal on all ranks; true on one rank.
        kernels: the kernels of every operation; equal on all ranks.
        dtype: dtype of Newton-Schulz where ``ns_dtype`` is ``auto``; equal on all ranks.
        unavailable: device type -> why the package's fast kernels cannot be used on it; ``None`` if they can.
        peers: process group of the ranks that train the same layers; ``None``: all ranks.
        muon_of_all_stages: with a pipeline, {Muon parameter of any stage: hash of how it is split into matrices}. The
            hash is empty for a parameter that is one matrix. ``None`` without a pipeline.
        is_stepped_in_parts: whether one engine step calls the optimizer's ``step`` several times. The engine then calls
            the optimizer's ``begin_step`` before the first call, and releases the workspace after the last.
        is_finite: function that returns whether the current gradients are finite on all ranks; may be a collective.
            ``None``: the optimizer checks them by itself, because they are equal on all ranks.
        read_flags: function that returns the elements of an int32 tensor, for which the host waits for the device.
            Call it before ``is_finite``: if that tests ZeRO's gradient norms (``NormWatch``), which may be on the
            device too, the same transfer fetches them.
        gradients_of: function of a partition that the current call of ``step`` does not update. It returns
            its flat gradient as consecutive 1-D tensors, or ``None`` if the gradient is not in memory.
    """

    is_logging: bool = True
    kernels: KernelSet = kernel_set.TORCH
    dtype: str = "fp32"
    unavailable: Unavailable = field(default_factory=dict)
    peers: Any = None
    muon_of_all_stages: dict[str, str] | None = None
    is_stepped_in_parts: bool = False
    is_finite: Callable[[], Agreed] | None = None
    read_flags: Callable[[Tensor], list[int]] = Tensor.tolist
    gradients_of: Callable[[Partition], Sequence[Tensor] | None] = lambda partition: None


@without_collector()
def bind_partition(
    partition: Partition,
    group: Mapping[str, Any],
    *,
    config: MuonConfig,
    dtype: str,
    context: StepContext,
    exchange: Exchange,
    momentum_blocks: Mapping[Tensor, QuantizationBlocks],
    owner_state: OwnerState,
) -> PartitionStep:
    """Plan the step of one :class:`Partition`. Return the :class:`PartitionStep` that carries it out.

    Planning chooses the rank that orthogonalizes each matrix, and which matrices are sent together.

    Args:
        partition: the Muon parameters that one call of ``step`` updates, and how ranks share them.
        group: the partition's parameter group.
        dtype: dtype of the matrix products of Newton-Schulz, a key of :data:`DTYPES`.
        exchange: communication among the ranks of the partition.
        momentum_blocks: tensor -> the quantization blocks of its int8 momentum; empty for other momentum dtypes.
        owner_state: the state that the update rules keep, of all partitions.
    """
    newton_schulz = _newton_schulz(group, config, dtype, context.kernels, exchange.device.type)
    cost = cost_model(newton_schulz.flops, exchange.dtype.itemsize, exchange.device.type)
    # Kept, because ``partition`` may become one for a single rank below. All ranks then count every matrix, and the sum
    # of their statistics must still be divided by this number.
    sharers, is_replicated = partition.world_size, partition.is_replicated
    planned = plan_partition(partition.planned, sharers, cost, config.bucket_bytes, partition.rank)
    if planned.world_size < sharers:  # each rank does all the work
        partition = replace(partition, shards=planned.shards, planned=planned.shards, group=None, rank=0, world_size=1)
        exchange = replace(exchange, group=None)
    # Kernels for many runs read the shards directly, so they cannot be used if the shards are staged in other buffers.
    run_kernels = context.kernels.runs if exchange.staging is None else None
    return PartitionStep(
        config=config,
        partition=partition,
        plan=planned,
        exchange=exchange,
        newton_schulz=newton_schulz,
        kernels=context.kernels,
        multi_run_kernels=run_kernels if run_kernels and all(map(run_kernels.fits, partition.tensors)) else None,
        scale=_scale(group, config),
        settings_text=_settings_text(group),
        sharers=sharers,
        copies=sharers if is_replicated else 1,
        momentum_blocks=momentum_blocks,
        owner_state=owner_state,
    )


def with_settings(step: PartitionStep, group: Mapping[str, Any]) -> PartitionStep:
    """Return ``step`` with the settings that its ``group`` has after a load; the same object if they are unchanged."""
    settings_text = _settings_text(group)
    if settings_text == step.settings_text:
        return step
    return replace(
        step,
        newton_schulz=_newton_schulz(
            group, step.config, step.newton_schulz.dtype, step.kernels, step.exchange.device.type
        ),
        scale=_scale(group, step.config),
        settings_text=settings_text,
    )


def _settings_text(group: Mapping[str, Any]) -> str:
    """Return the settings of a parameter group, all entries but ``params``, as a string to compare with another."""
    return repr(sorted((key, value) for key, value in group.items() if key != "params"))


def _newton_schulz(
    group: Mapping[str, Any], config: MuonConfig, dtype: str, kernels: KernelSet, device_type: str
) -> NewtonSchulz:
    ns_method = exact_method(group["ns_method"], dtype, kernels.keeps_diagonals and device_type == "cpu")
    method = cache(partial(method_of, ns_method=ns_method, schedule=config.schedule, dtype=dtype))
    return NewtonSchulz(schedule=config.schedule, dtype=dtype, method=method)


def _scale(group: Mapping[str, Any], config: MuonConfig) -> Scale:
    return cache(partial(scale_factor, group["adjust_lr_fn"], rms_scale=config.rms_scale))


# ---- the step of a partition ---------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Pieces of matrices on this rank (:class:`ShardRun`) whose momentum or weights are updated together.

    They are in one :class:`Bucket`, the matrices that ranks send to the owners together.

    Args:
        run_indices: the pieces' indices in ``Bucket.runs``, from :meth:`Bucket.run_groups`.
        tensor: index, in the parameter group, of the tensor that holds all these pieces.
        in_place: whether the pieces are in the buffer of the bucket's matrices; otherwise in the send buffer.
        scale: factor by which the update of the pieces is multiplied.
        spans: the elements of the pieces as contiguous :class:`Span` objects; empty if a piece is not contiguous.
        tiles: ``spans`` as an argument of a kernel that updates many spans in one launch; ``None`` without such a
            kernel.
    """

    run_indices: tuple[int, ...]
    tensor: int
    in_place: bool
    scale: float
    spans: list[Span]
    tiles: Tiles | None


@dataclass(frozen=True, kw_only=True, eq=False)
class NewtonSchulz:
    """How the matrices of a :class:`Partition` are orthogonalized.

    Args:
        schedule: the coefficients, one triple for each step.
        dtype: dtype of the matrix products, a key of :data:`deepspeed.muon.math.newton_schulz.DTYPES`.
        method: (rows, columns) of a matrix -> method, such as ``gram``.
    """

    schedule: Schedule
    dtype: str
    method: Callable[[int, int], str]

    def flops(self, rows: int, cols: int) -> int:
        """Return the number of floating-point operations that it takes to orthogonalize a matrix."""
        return flops(rows, cols, self.schedule, self.method(rows, cols), self.dtype)


@dataclass(kw_only=True, eq=False)
class StepValues:
    """The inputs and the working memory of one step of a :class:`Partition`.

    Args:
        group: the parameter group, with its tensors and this step's learning rate, momentum and weight decay.
        state_of: tensor -> its optimizer state.
        without_gradient: names of the matrices whose gradient is zero on all ranks; the step leaves them alone.
        phase: function of a phase's name, such as ``prepare``, that returns a context manager for the phase to run in.
        stats: measures the step for the monitor; ``None``: nothing is measured.
    """

    group: dict[str, Any]
    state_of: Mapping[Tensor, State]
    without_gradient: frozenset[str]
    phase: Phase
    stats: StepStats | None
    #: Memory of each slot, for one bucket at a time.
    memory_of_slots: list[Tensor] = field(default_factory=list)
    #: Number of a bucket -> its buffers, while it is in memory.
    open_buckets: dict[int, BucketBuffers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors: list[Tensor] = self.group["params"]
        self.beta, self.nesterov = self.group["momentum"], self.group["nesterov"]
        self.lr, self.decay = self.group["lr"], self.group["weight_decay"]


@dataclass(kw_only=True, eq=False)
class PartitionStep:
    """The planned step of one :class:`Partition` of Muon parameters. It is made once and run in every training step.

    Args:
        plan: the owners of all matrices, and what this rank exchanges (:class:`Bucket`).
        newton_schulz: how matrices are orthogonalized.
        kernels: the kernels of every operation; equal on all ranks.
        multi_run_kernels: kernels that update a whole :class:`Call` in one launch; ``None``: one launch per span.
        scale: function of a matrix's (rows, columns) that returns the factor of its update.
        settings_text: a text of all settings that the bits of the results depend on, for :attr:`digest`.
        sharers: number of ranks that share the parameters or hold copies of them; statistics are divided by it.
        copies: number of ranks that each hold all of the partition's elements; 1 if ranks hold parts of them.
        momentum_blocks: tensor -> the quantization blocks of its int8 momentum; empty for other momentum dtypes.
        owner_state: the state that the update rules keep, of all partitions.
    """

    config: MuonConfig
    partition: Partition
    plan: Plan
    exchange: Exchange
    newton_schulz: NewtonSchulz
    kernels: KernelSet
    multi_run_kernels: RunKernels | None
    scale: Scale
    settings_text: str
    sharers: int
    copies: int
    momentum_blocks: Mapping[Tensor, QuantizationBlocks]
    owner_state: OwnerState

    def __post_init__(self) -> None:
        self._work, self._is_int8 = self.exchange.work, self.config.momentum_dtype == "int8"

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Return the update rules in use, such as NorMuon, in the order in which they act; empty for plain Muon."""
        return self.config.rules

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the dtype of Newton-Schulz's matrix products."""
        return DTYPES[self.newton_schulz.dtype]

    @cached_property
    def gradient_probe(self) -> GradientProbe:
        """Return the :class:`GradientProbe` that finds the partition's matrices whose gradient is zero."""
        return GradientProbe(self.partition, self.plan, self.exchange)

    @property
    def uses_all_to_all(self) -> bool:
        """Return whether ranks send parts of matrices to the ranks that orthogonalize them; equal on all ranks.

        At ZeRO stage 0 they do not: every rank holds all matrices, and an all-gather sends the results.
        """
        return any(bucket.travels and not bucket.gathered_part for bucket in self.plan.buckets)

    @cached_property
    def slots(self) -> int:
        """Return how many buckets (matrices that are sent together) are in memory at a time, each in one slot."""
        return self.plan.slots(self.plan.travels(self.exchange.is_staged))

    @cached_property
    def digest(self) -> str:
        """Return a hash of everything that the partition's collectives and the bits of its results depend on.

        Ranks that share the partition must have equal hashes.
        """
        how = self.newton_schulz.dtype, self.exchange.device.type
        facts = self.plan.digest, self.slots, name_of(self.exchange.dtype), how, self.settings_text
        return short_hash(repr(facts))

    @cached_property
    def calls(self) -> list[list[Call]]:
        """Return, for each bucket of the plan, its :class:`Call` objects, which say what is updated together.

        A bucket is the matrices that ranks send to the owners together.
        """
        return [[self._call(bucket, group) for group in bucket.run_groups(self.scale)] for bucket in self.plan.buckets]

    def _call(self, bucket: Bucket, indices: tuple[int, ...]) -> Call:
        """Return the :class:`Call` for the pieces ``bucket.runs[i]``, i in ``indices``."""
        first, tiles = bucket.runs[indices[0]], None
        spans = bucket.spans(indices, staged=self.exchange.is_staged)
        if self.multi_run_kernels is not None and spans:
            tiles = self.multi_run_kernels.tiles(spans, self.partition.tensors[first.tensor].device)
        rows, cols = first.shape
        return Call(indices, first.tensor, first.in_place, self.scale(rows, cols), spans, tiles)

    # ---- a step -------------------------------------------------------------------------------------------

    def run(self, values: StepValues) -> None:
        """Make one step: update the partition's weights and optimizer states in place.

        Ranks exchange the matrices bucket by bucket. With three buckets in memory at a time (:attr:`slots`), a step of
        three buckets has this form. What one line sends arrives during the next::

            prepare 0, send 0
            prepare 1, send 1       orthogonalize 0, send 0 back
            prepare 2, send 2       orthogonalize 1, send 1 back      apply 0
                                    orthogonalize 2, send 2 back      apply 1
                                                                      apply 2
        """
        # The order of the collectives follows from the number of buckets and of slots, which are equal on all ranks.
        # Slots: 1 if nothing travels, 2 if memory is tight, otherwise 3.
        lag, has_two_slots = int(self.slots > 1), self.slots == 2
        values.memory_of_slots = self.exchange.allocate(self.plan, self.slots)
        for turn in range(len(self.plan.buckets) + 2 * lag):
            if has_two_slots:  # the next bucket takes this one's memory
                self._finish(values, turn - 2 * lag)
            self._start(values, turn)
            self._turn_around(values, turn - lag)
            if not has_two_slots:  # results arrive while another bucket is orthogonalized
                self._finish(values, turn - 2 * lag)

    def _start(self, values: StepValues, number: int) -> None:
        """Update the momentum of bucket ``number`` of matrices, and start to send the input of Newton-Schulz.

        Do nothing if there is no bucket of this number.
        """
        if number < len(self.plan.buckets):
            slot = number % self.slots
            buffers = self.exchange.open(self.plan, number, values.memory_of_slots[slot], slot)
            values.open_buckets[number] = buffers
            with values.phase("prepare"):
                self._prepare(values, buffers)
            self.exchange.send(buffers)

    def _turn_around(self, values: StepValues, number: int) -> None:
        """Wait until bucket ``number`` has arrived, orthogonalize its matrices, and start to send the results back.

        Do nothing if there is no bucket of this number.
        """
        if 0 <= number < len(self.plan.buckets):
            buffers = values.open_buckets[number]
            with values.phase("exchange"):
                self.exchange.wait(buffers)
            with values.phase("newton_schulz"):
                self._orthogonalize(buffers)
            self.exchange.send_back(buffers)

    def _finish(self, values: StepValues, number: int) -> None:
        """Wait for the results of bucket ``number``, update this rank's weights with them, and drop its buffers.

        Do nothing if there is no bucket of this number.
        """
        if 0 <= number < len(self.plan.buckets):
            buffers = values.open_buckets.pop(number)
            with values.phase("exchange"):
                self.exchange.wait_back(buffers)
            with values.phase("apply"):
                self._apply(values, buffers)

    # ---- on the shard: momentum and Nesterov --------------------------------------------------------------

    def _prepare(self, values: StepValues, buffers: BucketBuffers) -> None:
        """Update this rank's momentum for one bucket of matrices, and write the input of Newton-Schulz to ``buffers``.

        With the gradient g and the updated momentum m, the input is ``g + beta * (m - g)`` if Nesterov is on, otherwise
        m, in the dtype in which matrices are sent.
        """
        for call in self.calls[buffers.index]:
            tensor = values.tensors[call.tensor]
            if tensor.grad is None:
                # The plan is fixed and sends every run, so a parameter without a gradient is sent as zeros.
                for index in call.run_indices:
                    buffers.slice_of(index).zero_()
                continue
            grad, momentum = tensor.grad.contiguous(), values.state_of[tensor].get(MOMENTUM)  # None if int8
            if momentum is not None and self._can_use_spans(values, call, buffers.bucket, momentum):
                targets = buffers.run_buffer(call.in_place)
                self._advance_spans(values, call, momentum.view(-1), grad.view(-1), targets)
                continue
            for index in call.run_indices:
                run = buffers.bucket.runs[index]
                if run.matrix in values.without_gradient:  # Newton-Schulz maps zero to zero
                    buffers.slice_of(index).zero_()
                else:
                    self._advance(values, tensor, grad, run, buffers.slice_of(index))

    def _advance_spans(self, values: StepValues, call: Call, momentum: Tensor, grad: Tensor, targets: Tensor) -> None:
        """Update the momentum of all pieces in a :class:`Call`, and write the input of Newton-Schulz to ``targets``.

        ``momentum``, ``grad``: momentum and gradient of the tensor that holds the pieces. All three tensors are 1-D.
        """
        if self.multi_run_kernels is not None:
            self.multi_run_kernels.advance(momentum, grad, targets, call.tiles, values.beta, values.nesterov)
            return
        for start, at, numel in call.spans:
            shard, target = slice(start, start + numel), targets[at : at + numel]
            self.kernels.advance(momentum[shard], grad[shard], target, values.beta, values.nesterov, self._work)

    def _advance(self, values: StepValues, tensor: Tensor, grad: Tensor, run: ShardRun, target: Tensor) -> None:
        """Update the momentum of ``run``, a piece of a matrix, and write the input of Newton-Schulz to ``target``, 1-D.

        ``tensor``, ``grad``: the tensor that contains the piece, and its gradient.
        """
        state, beta, nesterov = values.state_of[tensor], values.beta, values.nesterov
        stored = state[CODES] if self._is_int8 else state[MOMENTUM]
        gradient = copy_from_grid(grad, run.copy, self._work, "gradient")
        momentum = copy_from_grid(stored, run.copy, self._work, "momentum")
        # Each element of a matrix draws its own random number, so results do not depend on how ranks share it.
        name, first = run.draws
        key = key_of(name, int(state["step"]))
        if self._is_int8:
            absmax = self.momentum_blocks[tensor].absmax(state, run.copy.start)
            self.kernels.advance_codes(momentum, absmax, gradient, target, beta, nesterov, key, first, self._work)
        elif momentum.dtype == torch.bfloat16:
            self.kernels.advance_rounded(momentum, gradient, target, beta, nesterov, key, first, self._work)
        else:
            self.kernels.advance(momentum, gradient, target, beta, nesterov, self._work)
        copy_to_grid(momentum, stored, run.copy)

    # ---- at the owner: Newton-Schulz ----------------------------------------------------------------------

    def _orthogonalize(self, buffers: BucketBuffers) -> None:
        """Apply update rules and Newton-Schulz, in place, to the matrices of one bucket that this rank orthogonalizes.

        ``buffers``: those of the bucket, in which the matrices are whole.
        """
        how = self.newton_schulz
        for batch in buffers.bucket.batches:
            shape = batch.count, batch.rows, batch.cols
            matrices = buffers.matrices[batch.start : batch.start + math.prod(shape)].view(shape)
            with_state = [*zip(matrices, map(self.owner_state.of, batch.names), strict=True)] if self.rules else []
            for rule in self.rules:
                for matrix, state in with_state:
                    rule.before(matrix, batch.axis, state, self._work)
            orthogonalize(
                matrices,
                how.schedule,
                method=how.method(batch.rows, batch.cols),
                dtype=self.dtype,
                work=self._work,
                kernels=self.kernels,
            )
            for rule in self.rules:
                for matrix, state in with_state:
                    rule.after(matrix, batch.axis, state, self._work)

    # ---- on the shard: decay and update -------------------------------------------------------------------

    def _apply(self, values: StepValues, buffers: BucketBuffers) -> None:
        """Update this rank's weights in one bucket of matrices from the results of Newton-Schulz in ``buffers``.

        The weights decay, and learning rate x scale x result is subtracted.
        """
        if values.stats is not None:
            values.stats.before_apply(self._updates(values, buffers), values.lr, self.copies)
        for call in self.calls[buffers.index]:
            tensor = values.tensors[call.tensor]
            # As in torch's optimizers, weights without a gradient do not decay either.
            if tensor.grad is None:
                continue
            if self._can_use_spans(values, call, buffers.bucket, tensor):
                self._apply_spans(values, call, tensor.view(-1), buffers.run_buffer(call.in_place))
                continue
            for run, update in self._present_runs(values, call, buffers):
                weights = copy_from_grid(tensor, run.copy, self._work, "parameter")
                for part, wide in self._in_fp32(weights, run, int(values.state_of[tensor]["step"])):
                    self._subtract(values, call, wide, update[part])
                copy_to_grid(weights, tensor, run.copy)

    def _apply_spans(self, values: StepValues, call: Call, weights: Tensor, results: Tensor) -> None:
        """Update the weights of all pieces in a :class:`Call` from the orthogonalized ``results``.

        ``weights``: the tensor that holds the pieces. Both tensors are 1-D.
        """
        if self.multi_run_kernels is not None:
            cautious = self.config.cautious_weight_decay
            self.multi_run_kernels.apply_(weights, results, call.tiles, values.lr, call.scale, values.decay, cautious)
            return
        for start, at, numel in call.spans:
            self._subtract(values, call, weights[start : start + numel], results[at : at + numel])

    def _subtract(self, values: StepValues, call: Call, weights: Tensor, update: Tensor) -> None:
        cautious = self.config.cautious_weight_decay
        self.kernels.apply_(weights, update, values.lr, call.scale, values.decay, cautious, self._work)

    def _in_fp32(self, weights: Tensor, run: ShardRun, step_number: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, ``weights[slice]``) pairs that cover the 1-D ``weights``, for the caller to update in place.

        bf16 weights are yielded as fp32 copies and then rounded back stochastically. Rounding to nearest would lose
        updates below 2^-9 of a weight. ``run``: the piece of a matrix whose elements ``weights`` are; it and
        ``step_number`` seed the rounding.
        """
        if weights.dtype != torch.bfloat16:
            yield slice(None), weights
            return
        # " weight" draws other numbers than the momentum does: equal ones would give both errors the same sign.
        name, first = run.draws
        for part, (wide,) in in_fp32(
            [weights], [key_of(f"{name} weight", step_number)], first, self.kernels, self._work
        ):
            yield part, wide

    # ---- runs of a call -----------------------------------------------------------------------------------

    def _can_use_spans(self, values: StepValues, call: Call, bucket: Bucket, tensor: Tensor) -> bool:
        """Return whether contiguous spans (``call.spans``) can be updated, instead of one piece of a matrix at a time.

        False if the call has no spans, if one of its matrices has no gradient, or if ``tensor``, which holds the
        weights or the momentum to update, is bf16.
        """
        # Stochastic rounding of a bf16 element depends on its place in the matrix.
        if not call.spans or tensor.dtype == torch.bfloat16:
            return False
        without = values.without_gradient
        return not without or not any(bucket.runs[index].matrix in without for index in call.run_indices)

    def _present_runs(
        self, values: StepValues, call: Call, buffers: BucketBuffers
    ) -> Iterator[tuple[ShardRun, Tensor]]:
        """Yield (piece, its 1-D slice of the buffers) for each piece in ``call`` whose matrix has a gradient."""
        for index in call.run_indices:
            run = buffers.bucket.runs[index]
            if run.matrix not in values.without_gradient:
                yield run, buffers.slice_of(index)

    def _updates(self, values: StepValues, buffers: BucketBuffers) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield (weights, result of Newton-Schulz, scale of the update) for each piece of a matrix that is updated.

        The pieces are this rank's parts of the matrices in one bucket, to which ``buffers`` belong. Weights and result
        are 1-D.
        """
        for call in self.calls[buffers.index]:
            tensor = values.tensors[call.tensor]
            if tensor.grad is not None:
                for run, update in self._present_runs(values, call, buffers):
                    weights = copy_from_grid(tensor, run.copy, self._work, "parameter")
                    yield weights, update, call.scale
