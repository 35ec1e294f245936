# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes a rank sends, by wrapping the collectives of `torch.distributed`.

Install it before DeepSpeed is imported, which keeps references to some of the functions. Ring algorithms are assumed:
among W ranks, a collective of B bytes costs each B (W-1)/W, an all-reduce twice that. All-to-all, gather, scatter and
point-to-point count as what the rank addresses to others. A collective called by another counts once. Calls of a
process group's own methods and torch's functional collectives are not seen.
"""

import collections
import functools
import inspect
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

#: Bytes sent by one call, from its arguments, the rank and the number of ranks.
Cost = Callable[[dict, int, int], float]


def nbytes(tensors: torch.Tensor | list) -> int:
    """Of a tensor or of a list of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(nbytes(tensor) for tensor in tensors)


def _ring(argument: str, passes: int = 1) -> Cost:
    return lambda call, rank, world: passes * nbytes(call[argument]) * (world - 1) / world


def _to_others(argument: str) -> Cost:
    """All but the rank's own of a list of tensors, which is empty where the rank sends nothing."""
    return lambda call, rank, world: nbytes(call[argument]) - nbytes(call[argument][rank]) if call[argument] else 0.0


def _all_to_all_single(call: dict, rank: int, world: int) -> float:
    """The rows of the input that go to other ranks."""
    tensor, splits = call["input"], call["input_split_sizes"]
    if not splits:
        return nbytes(tensor) * (world - 1) / world
    return nbytes(tensor) / max(1, tensor.shape[0]) * (sum(splits) - splits[rank])


COSTS: dict[str, Cost] = {
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
    "all_to_all": _to_others("input_tensor_list"),
    "gather": lambda call, rank, world: 0.0 if call["gather_list"] else nbytes(call["tensor"]),
    "scatter": _to_others("scatter_list"),
    "send": lambda call, rank, world: nbytes(call["tensor"]),
    "isend": lambda call, rank, world: nbytes(call["tensor"]),
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
        """Megabytes (10^6 bytes) that this rank has sent in a phase."""
        return sum(sent for (of, _), sent in self.sent.items() if of == phase) / 1e6

    def by_collective(self) -> dict[str, list[float]]:
        """Phase and collective, calls and megabytes."""
        return {f"{p} {c}": [self.calls[p, c], round(sent / 1e6, 6)] for (p, c), sent in sorted(self.sent.items())}

    def reset(self) -> None:
        """Forget what was counted so far."""
        self.sent.clear()
        self.calls.clear()

    def _counted(self, name: str, function: Callable, cost: Cost) -> Callable:
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

    def _record(self, name: str, call: dict, cost: Cost) -> None:
        group = call.get("group")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        if rank >= 0:  # else not a member of the group
            self.sent[self.phase, name] += cost(call, rank, world)
            self.calls[self.phase, name] += 1
