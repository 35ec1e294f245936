# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes one rank sends, by wrapping the collectives of `torch.distributed`.

Install it before DeepSpeed is imported: DeepSpeed keeps references to some of the functions. Ring
algorithms are assumed, W ranks in the group: an all-gather, a reduce-scatter or a rooted collective of B
bytes costs B (W-1)/W per rank, an all-reduce twice that. All-to-all, gather, scatter and point-to-point
are counted as what this rank addresses to others. A collective called by another is counted once. What goes
to a process group's own methods or through torch's functional collectives is not seen.
"""

import collections
import functools
import inspect
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist


def nbytes(tensors: torch.Tensor | list) -> int:
    """Bytes of a tensor or of a list of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(nbytes(tensor) for tensor in tensors)


def _ring(argument: str, passes: int = 1) -> Callable:
    """Cost of a collective whose whole payload is the named argument."""

    def cost(call: dict, rank: int, world: int) -> float:
        return passes * nbytes(call[argument]) * (world - 1) / world

    return cost


def _all_to_all_single(call: dict, rank: int, world: int) -> float:
    """The rows of the input that go to other ranks."""
    tensor, splits = call["input"], call["input_split_sizes"]
    if not splits:
        return nbytes(tensor) * (world - 1) / world
    row_bytes = nbytes(tensor) / max(1, tensor.shape[0])
    return row_bytes * (sum(splits) - splits[rank])


def _all_to_all(call: dict, rank: int, world: int) -> float:
    """The tensors of the input list that go to other ranks."""
    inputs = call["input_tensor_list"]
    return nbytes(inputs) - nbytes(inputs[rank])


def _gather(call: dict, rank: int, world: int) -> float:
    """Everyone but the destination sends its tensor."""
    return 0.0 if call["gather_list"] else nbytes(call["tensor"])


def _scatter(call: dict, rank: int, world: int) -> float:
    """The source sends all but its own tensor."""
    inputs = call["scatter_list"]
    return nbytes(inputs) - nbytes(inputs[rank]) if inputs else 0.0


def _send(call: dict, rank: int, world: int) -> float:
    """Point to point: the whole tensor."""
    return nbytes(call["tensor"])


COSTS: dict[str, Callable] = {
    "all_gather": _ring("tensor_list"),
    "all_gather_coalesced": _ring("output_tensor_lists"),
    "all_gather_into_tensor": _ring("output_tensor"),
    "all_gather_single": _ring("output_tensor"),
    "all_reduce": _ring("tensor", passes=2),
    "all_reduce_coalesced": _ring("tensors", passes=2),
    "reduce_scatter": _ring("input_list"),
    "reduce_scatter_tensor": _ring("input"),
    "reduce_scatter_single": _ring("input"),
    "broadcast": _ring("tensor"),
    "reduce": _ring("tensor"),
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "isend": _send,
}


class TrafficCounter:
    """Bytes and calls by (phase, collective); set `phase` while measuring."""

    def __init__(self) -> None:
        self.phase = "init"
        self.sent: dict[tuple[str, str], float] = collections.defaultdict(float)
        self.calls: dict[tuple[str, str], int] = collections.defaultdict(int)
        self._nesting = threading.local()

    def install(self) -> "TrafficCounter":
        """Replace the collectives under both names by which torch and its users look them up."""
        for name, cost in COSTS.items():
            if hasattr(dist, name):
                counted = self._counted(name, getattr(dist, name), cost)
                setattr(dist, name, counted)
                setattr(dist.distributed_c10d, name, counted)
        return self

    def megabytes(self, phase: str) -> float:
        """Megabytes (10^6 bytes) this rank has sent in a phase."""
        return sum(sent for (of, _), sent in self.sent.items() if of == phase) / 1e6

    def by_collective(self) -> dict[str, dict[str, float]]:
        """`{"phase collective": {"calls": ..., "megabytes": ...}}`, for the record."""
        return {
            f"{phase} {name}": {"calls": self.calls[phase, name], "megabytes": round(sent / 1e6, 6)}
            for (phase, name), sent in sorted(self.sent.items())
        }

    def reset(self) -> None:
        """Forget what was counted so far."""
        self.sent.clear()
        self.calls.clear()

    def _counted(self, name: str, function: Callable, cost: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def counted(*args, **kwargs):
            if getattr(self._nesting, "inside", False):
                return function(*args, **kwargs)
            self._nesting.inside = True
            try:
                call = signature.bind(*args, **kwargs)
                call.apply_defaults()
                self._record(name, call.arguments, cost)
                return function(*args, **kwargs)
            finally:
                self._nesting.inside = False

        return counted

    def _record(self, name: str, call: dict, cost: Callable) -> None:
        group = call.get("group")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:  # not a member of the group: takes no part
            return
        self.sent[self.phase, name] += cost(call, rank, world)
        self.calls[self.phase, name] += 1


def disable_shared_memory_reduce() -> None:
    """Send DeepSpeed's CPU all-reduce through `torch.distributed`, where it is counted."""
    from deepspeed.comm import comm

    if hasattr(comm.cdb, "shm_vector_kernel_level"):
        comm.cdb.shm_vector_kernel_level = 0
