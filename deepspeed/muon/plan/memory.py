# SPDX-License-Identifier: Apache-2.0
"""The peak of a step's scratch memory on one rank, by arithmetic: nothing is allocated.

Names and sizes are those of the requests that :class:`deepspeed.muon.kernels.workspace.Workspace` gets. Requests of one
name share storage, so the peak is the sum over the names of the largest request. Left out are the kilobytes of norms,
and copies of columns that an elementwise pass makes contiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.muon.kernels.workspace import batch_limit
from deepspeed.muon.math.newton_schulz import DTYPES, SPLIT_FROM
from deepspeed.muon.plan.bucket import OwnedBlocks, batches_of
from deepspeed.muon.plan.placement import PlacedBlock, Spread
from deepspeed.muon.plan.plan import GlobalPlan

#: Small symmetric matrices of a method of Newton-Schulz; in 16 bits each has a diagonal in fp32.
SYMMETRIC = {"standard": ("gram", "factor"), "gram": ("gram", "factor", "q", "t")}
#: Elements of a Gram matrix, or of rows of it, that its owners widen to fp32 at a time.
SUM_ELEMENTS = 2**22


class BatchSize(NamedTuple):
    """What of a :class:`deepspeed.muon.plan.bucket.Batch` decides its memory. Equal on many ranks."""

    rows: int
    cols: int
    shape: tuple[int, int]
    owners: int
    number: int


class Demand(NamedTuple):
    """What one rank needs for one bucket: elements of its buffers and of its longest run, and its batches.

    ``longest_grid``: elements of the longest run that is not contiguous in the shard and therefore copied.
    """

    buffers: int
    longest_run: int
    longest_grid: int
    batches: tuple[BatchSize, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What decides how many bytes a demand takes.

    Args:
        wire: dtype of the exchange: bf16 or fp32.
        dtype: of Newton-Schulz, a key of :data:`deepspeed.muon.math.newton_schulz.DTYPES`. Where it is not that of the
            wire, Newton-Schulz works on a copy.
        device_type: where Newton-Schulz runs: ``cpu``, or an accelerator's.
        staged: shards are on the host and Newton-Schulz on an accelerator.
        plain: all operations are those of plain PyTorch, whose products of 16-bit numbers have temporaries in fp32.
    """

    wire: str
    dtype: str
    device_type: str
    staged: bool = False
    plain: bool = False

    @property
    def wire_bytes(self) -> int:
        """Return the bytes of an element of the exchange."""
        return DTYPES[self.wire].itemsize


class Peak(NamedTuple):
    """Bytes on the device of Newton-Schulz."""

    exchange: int
    newton_schulz: int

    @property
    def total(self) -> int:
        """Return the sum of both."""
        return self.exchange + self.newton_schulz


@dataclass(frozen=True)
class PartDemand:
    """The buckets of one partition on one rank, the storage that each takes, and the method by rows and columns."""

    buckets: Sequence[Demand]
    storages: Sequence[int]
    method: Callable[[int, int], str]


def peak(parts: Iterable[PartDemand], memory: Memory) -> Peak:
    """Return the most bytes that one rank holds in a step of all parts, which share their storage."""
    exchange, newton_schulz = Counter[str](), Counter[str]()
    for part in parts:
        for storage, demand in zip(part.storages, part.buckets, strict=True):
            exchange |= Counter({f"bucket{storage}": demand.buffers * memory.wire_bytes})
            if memory.plain and not memory.staged:
                exchange |= Counter(shard=4 * demand.longest_run)
            if not memory.staged:
                exchange |= Counter(dict.fromkeys(("gradient", "momentum", "parameter"), 4 * demand.longest_grid))
            for batch in demand.batches:
                rows, cols = batch.shape
                newton_schulz |= _temporaries(batch, part.method(rows, cols), memory)
    return Peak(exchange.total(), newton_schulz.total())


def _temporaries(batch: BatchSize, method: str, memory: Memory) -> Counter[str]:
    """Return bytes by name for the matrices of a batch that are orthogonalized at once."""
    numel, small, itemsize = batch.rows * batch.cols, min(batch.shape), DTYPES[memory.dtype].itemsize
    on_cpu = memory.device_type == "cpu"
    sizes = {"spare": numel * itemsize}
    if memory.wire != memory.dtype:
        sizes["iterate"] = numel * itemsize
    writes_in_place = batch.owners >= SPLIT_FROM
    for name in (name for name in SYMMETRIC[method] if not (writes_in_place and name == "t")):
        sizes[name] = small * small * itemsize
        if memory.dtype != "fp32":
            sizes[f"{name} diagonal"] = 4 * small
    if memory.plain and memory.dtype != "fp32":
        sizes |= {"cross0": 4 * numel} | ({} if writes_in_place else {"cross1": 4 * small * small})
    # Owners must form the same batches, whatever their numbers of threads.
    threads = {"threads": 1} if batch.owners > 1 else {}
    together = min(batch.number, batch_limit(numel, small, itemsize, not on_cpu, **threads))
    of_owners = _of_owners(small, batch.owners, together, memory.dtype) if batch.owners > 1 else {}
    return Counter({name: together * size for name, size in sizes.items()} | of_owners)


def _of_owners(small: int, owners: int, together: int, dtype: str) -> dict[str, int]:
    """Return the extra scratch of several owners: an fp32 part of the Gram sum, and one rank's rows of a product."""
    sizes = {} if dtype == "fp32" else {"sum": 4 * min(together * small * small, SUM_ELEMENTS)}
    if owners >= SPLIT_FROM:
        sizes["rows"] = small * small // owners * DTYPES[dtype].itemsize
        sizes |= {} if dtype == "fp32" else {"cross": 4 * min(small * small // owners, SUM_ELEMENTS)}
    return sizes


# ---- demands of all ranks -----------------------------------------------------------------------------------------


def demands_of(plan: GlobalPlan) -> list[list[Demand]]:
    """Return the demands of all ranks by rank and bucket.

    A bucket takes time O(matrices + ranks x kinds of matrices). The demands are exact where an owner has one matrix in
    it. Several may happen to be received in order; a receive buffer is counted then.
    """
    by_bucket = []
    for matrices, only_results in plan.buckets:
        demands = _gathered if plan.copies == 1 else _results if only_results else _local
        by_bucket.append(demands(matrices, plan.world_size))
    return [list(of_rank) for of_rank in zip(*by_bucket, strict=True)]


def _gathered(matrices: OwnedBlocks, world_size: int) -> list[Demand]:
    owned = _by_owner(matrices, world_size)
    sizes = [sum(item.block.numel for item in own) for own in owned]
    others, runs, grids = _others(owned, matrices)
    buffers = [size + more for size, more in zip(sizes, others, strict=True)]
    return [*map(Demand, buffers, runs, grids, map(_sizes, owned))]


def _local(matrices: OwnedBlocks, world_size: int) -> list[Demand]:
    """Return the demands of each owner's matrices where every rank holds all matrices whole."""
    return [_whole(own, _sizes(own)) for own in _by_owner(matrices, world_size)]


def _results(part: OwnedBlocks, world_size: int) -> list[Demand]:
    """Return the demands of a bucket of results, in which each rank receives the others' results."""
    of_all, numels = _whole([item for _, item in part]), [0] * world_size
    for owner, item in part:
        numels[owner] += item.block.numel
    return [of_all._replace(buffers=of_all.buffers - own) for own in numels]


def _sizes(items: Iterable[PlacedBlock]) -> tuple[BatchSize, ...]:
    batches = batches_of(items)
    return tuple(BatchSize(batch.rows, batch.cols, batch.shape, batch.owners, batch.count) for batch in batches)


def _by_owner(matrices: OwnedBlocks, world_size: int) -> list[list[PlacedBlock]]:
    owned: list[list[PlacedBlock]] = [[] for _ in range(world_size)]
    for owner, item in matrices:
        owned[owner].append(item)
    return owned


def _whole(items: Sequence[PlacedBlock], batches: tuple[BatchSize, ...] = ()) -> Demand:
    numels = [item.block.numel for item in items]
    longest_grid = max((_longest_grid(item, 0) for item in items), default=0)
    return Demand(sum(numels), max(numels, default=0), longest_grid, batches)


def _longest_grid(item: PlacedBlock, rank: int) -> int:
    if item.block.stride == item.block.cols:
        return 0
    return max((piece.numel for piece in item.spread.pieces(rank) if piece.rows > 1), default=0)


def _others(owned: Sequence[Sequence[PlacedBlock]], matrices: OwnedBlocks) -> tuple[list[int], list[int], list[int]]:
    """Return by rank the elements to send and receive, of the longest run, and of the longest one on a grid."""
    sent, received, longest, grids = ([0] * len(owned) for _ in range(4))
    # Matrices that are cut alike are counted at once: at stage 3 those are all of one shape.
    alike: dict[Spread, tuple[PlacedBlock, list[int]]] = {}
    for owner, item in matrices:
        alike.setdefault(item.spread, (item, []))[1].append(owner)
    for item, owners in alike.values():
        for rank in item.spread.holders:
            held = item.spread.held(rank)
            sent[rank] += len(owners) * held
            longest[rank] = max(longest[rank], held)
            grids[rank] = max(grids[rank], _longest_grid(item, rank))
        for owner in owners:
            held = item.spread.held(owner)
            sent[owner] -= held
            if len(owned[owner]) > 1:
                received[owner] += item.block.numel - held
            elif owner in item.spread.holders[1:-1]:  # see sends_own_part
                received[owner] += min(held, item.block.numel - held)
    return [there + back for there, back in zip(sent, received, strict=True)], longest, grids
