# SPDX-License-Identifier: Apache-2.0
"""Compute the peak of a step's scratch memory on one rank, without allocating anything.

Names and sizes are those that a step requests from :class:`~deepspeed.muon.kernels.kernel_set.Workspace`. Requests of
one name share storage, so the peak is the sum of the largest request of each name. The kilobytes of norms are not
counted, nor are the copies that a step makes of columns in a shard where tensor parallelism splits matrices by columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.muon.exchange.bucket import OwnedBlocks, batches_of
from deepspeed.muon.exchange.placed_params import PlacedBlock
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.kernels.kernel_set import batch_limit
from deepspeed.muon.layout import Spread
from deepspeed.muon.math.newton_schulz import DTYPES, SYMMETRIC


class BatchSize(NamedTuple):
    """The size of a :class:`deepspeed.muon.exchange.bucket.Batch`: ``number`` matrices of shape (``rows``, ``cols``).

    It contains no names or indices, so that many ranks can share one object.
    """

    rows: int
    cols: int
    number: int


class Demand(NamedTuple):
    """The sizes that decide how much scratch memory one rank needs for a bucket.

    A bucket is the matrices that ranks exchange in one collective.

    Args:
        buffers: elements of the bucket's three buffers on this rank together: the matrices that it orthogonalizes, the
            send buffer and the receive buffer.
        longest_run: elements of the largest part of a matrix in the rank's shard.
        longest_grid: elements of the largest such part that is not contiguous in the shard; 0 if there is none.
        batches: the sizes of the batches of matrices that the rank orthogonalizes.
    """

    buffers: int
    longest_run: int
    longest_grid: int
    batches: tuple[BatchSize, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The dtypes and devices that decide how many bytes of scratch memory a :class:`Demand` takes.

    Args:
        wire: dtype of what the ranks exchange, ``bf16`` or ``fp32``.
        dtype: dtype of the matrix products, a key of :data:`deepspeed.muon.math.newton_schulz.DTYPES`.
        device_type: where Newton-Schulz runs, such as ``cpu``.
        staged: whether shards are in host memory while Newton-Schulz runs on an accelerator (CPU offload).
        plain: whether all kernels are plain PyTorch.
    """

    wire: str
    dtype: str
    device_type: str
    staged: bool = False
    plain: bool = False

    @property
    def wire_bytes(self) -> int:
        """Return the bytes of each element that the ranks exchange."""
        return DTYPES[self.wire].itemsize

    @property
    def has_native_products(self) -> bool:
        """Return whether the C++ kernels compute matrix products.

        For products in bf16 they store the diagonals of symmetric matrices separately in fp32, which takes memory.
        """
        return self.device_type == "cpu" and self.dtype != "fp16" and not self.plain


class Peak(NamedTuple):
    """The peak of a step's scratch memory on the device that runs Newton-Schulz, in bytes.

    ``exchange``: the buffers of matrices that ranks exchange, and copies of parts of shards. ``newton_schulz``: the
    temporaries of Newton-Schulz.
    """

    exchange: int
    newton_schulz: int

    @property
    def total(self) -> int:
        """Return ``exchange`` + ``newton_schulz``."""
        return self.exchange + self.newton_schulz


@dataclass(frozen=True)
class PartitionDemand:
    """What decides one rank's scratch memory for one parameter group (or sub-group of ZeRO stage 3).

    ``demands``: the :class:`Demand` of each bucket, in the order of the step. ``slots``: how many buckets are in memory
    at a time. ``method``: (rows, columns) of a matrix -> method of Newton-Schulz, such as ``gram``.
    """

    demands: Sequence[Demand]
    slots: int
    method: Callable[[int, int], str]


def peak(partitions: Iterable[PartitionDemand], memory: Memory) -> Peak:
    """Return the peak of a step's scratch memory on one rank.

    ``partitions``: one object for each parameter group, or sub-group of ZeRO stage 3, that Muon updates. They are
    updated one after another and use the same scratch memory.
    """
    exchange, newton_schulz = Counter[str](), Counter[str]()
    for partition in partitions:
        for index, demand in enumerate(partition.demands):
            exchange |= Counter({f"bucket{index % partition.slots}": demand.buffers * memory.wire_bytes})
            if memory.plain and not memory.staged:
                exchange |= Counter(shard=4 * demand.longest_run)
            if not memory.staged:
                exchange |= Counter(dict.fromkeys(("gradient", "momentum", "parameter"), 4 * demand.longest_grid))
            for batch in demand.batches:
                newton_schulz |= _temporaries(batch, partition.method(batch.rows, batch.cols), memory)
    return Peak(exchange.total(), newton_schulz.total())


def _temporaries(batch: BatchSize, method: str, memory: Memory) -> Counter[str]:
    """Return {name: bytes} of the temporaries that Newton-Schulz needs for one batch.

    If the batch is too large, it is processed in parts (``batch_limit``), and the result is for one part.
    """
    numel, small, itemsize = batch.rows * batch.cols, min(batch.rows, batch.cols), DTYPES[memory.dtype].itemsize
    sizes = {"spare": numel * itemsize}
    if memory.wire != memory.dtype:
        sizes["iterate"] = numel * itemsize
    for name in SYMMETRIC[method]:
        sizes[name] = small * small * itemsize
        if memory.has_native_products and memory.dtype == "bf16":
            sizes[f"{name} diagonal"] = 4 * small
    limit = batch_limit(numel, small, len(SYMMETRIC[method]), itemsize, memory.device_type != "cpu")
    together = min(batch.number, limit)
    return Counter({name: together * size for name, size in sizes.items()})


# ---- demands of all ranks -----------------------------------------------------------------------------------------


def demands_of(plan: Plan) -> list[list[Demand]]:
    """Return the :class:`Demand` of each rank for each bucket in a step, as lists ``[rank][bucket]``.

    A demand may be too large: if a rank orthogonalizes several matrices of a bucket, its demand includes a receive
    buffer, even if none is needed.
    """
    # Time for each bucket: O(matrices + ranks x distinct layouts of matrices).
    demands = _sent if plan.copies == 1 else _replicated
    by_bucket = [demands(owned, plan.world_size) for owned in plan.pairs]
    return [list(of_rank) for of_rank in zip(*by_bucket, strict=True)]


def _sent(owned: OwnedBlocks, world_size: int) -> list[Demand]:
    """Return each rank's :class:`Demand` for a bucket of matrices whose parts are sent to their owners.

    ``owned``: all (owner, matrix) pairs of the bucket. An owner orthogonalizes its matrices.
    """
    by_owner = _by_owner(owned, world_size)
    sizes = [sum(item.block.numel for item in of_rank) for of_rank in by_owner]
    others, runs, grids = _exchange_sizes(by_owner, owned)
    buffers = [size + more for size, more in zip(sizes, others, strict=True)]
    return [*map(Demand, buffers, runs, grids, map(_sizes, by_owner))]


def _replicated(owned: OwnedBlocks, world_size: int) -> list[Demand]:
    """Return each rank's :class:`Demand` for a bucket at ZeRO stage 0, where every rank gets all results.

    ``owned``: all (owner, matrix) pairs of the bucket. An owner orthogonalizes its matrices.
    """
    by_owner = _by_owner(owned, world_size)
    part = max(sum(item.block.numel for item in of_rank) for of_rank in by_owner)
    longest = max(item.block.numel for _, item in owned)
    grid = max(_longest_grid(item, 0) for _, item in owned)
    return [Demand(world_size * part, longest, grid, _sizes(of_rank)) for of_rank in by_owner]


def _sizes(items: Iterable[PlacedBlock]) -> tuple[BatchSize, ...]:
    return tuple(BatchSize(batch.rows, batch.cols, batch.count) for batch in batches_of(items))


def _by_owner(owned: OwnedBlocks, world_size: int) -> list[list[PlacedBlock]]:
    by_owner: list[list[PlacedBlock]] = [[] for _ in range(world_size)]
    for owner, item in owned:
        by_owner[owner].append(item)
    return by_owner


def _longest_grid(item: PlacedBlock, rank: int) -> int:
    """Return the elements of the largest piece of a matrix that is not contiguous in the shard of ``rank``, or 0."""
    if item.block.stride == item.block.cols:
        return 0
    return max((piece.numel for piece in item.spread.pieces(rank) if piece.rows > 1), default=0)


def _exchange_sizes(
    by_owner: Sequence[Sequence[PlacedBlock]], owned: OwnedBlocks
) -> tuple[list[int], list[int], list[int]]:
    """Return (buffers, longest_run, longest_grid) of :class:`Demand`, each as a list with one number for each rank.

    ``buffers`` are the send and receive buffers only. ``by_owner``: for each rank, the matrices of one bucket that it
    orthogonalizes. ``owned``: the same matrices as (owner, matrix) pairs.
    """
    sent, received, longest, grids = ([0] * len(by_owner) for _ in range(4))
    # Matrices that are spread alike are counted at once: at stage 3 all matrices of one shape are.
    alike: dict[Spread, tuple[PlacedBlock, list[int]]] = {}
    for owner, item in owned:
        alike.setdefault(item.spread, (item, []))[1].append(owner)
    for item, owners in alike.values():
        for rank in item.spread.holders:
            held = item.spread.held_elements(rank)
            sent[rank] += len(owners) * held
            longest[rank] = max(longest[rank], held)
            grids[rank] = max(grids[rank], _longest_grid(item, rank))
        for owner in owners:
            held = item.spread.held_elements(owner)
            sent[owner] -= held
            if len(by_owner[owner]) > 1:
                received[owner] += item.block.numel - held
            elif owner in item.spread.holders[1:-1]:  # see sends_own_part
                received[owner] += min(held, item.block.numel - held)
    return [there + back for there, back in zip(sent, received, strict=True)], longest, grids
