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
from collections.abc import Callable

import torch.distributed as dist


def nbytes(tensors) -> int:
    """Of a tensor or of a list of tensors."""
    return sum(map(nbytes, tensors)) if isinstance(tensors, (list, tuple)) else tensors.numel() * tensors.element_size()


def ring(argument: str, passes: int = 1) -> Callable:
    return lambda call, rank, world: passes * nbytes(call[argument]) * (world - 1) / world


def to_others(argument: str) -> Callable:
    """All but the rank's own of a list of tensors, which is empty where the rank sends nothing."""
    return lambda call, rank, world: nbytes(call[argument]) - nbytes(call[argument][rank]) if call[argument] else 0.0


def all_to_all_single(call: dict, rank: int, world: int) -> float:
    """The rows of the input that go to other ranks."""
    tensor, splits = call["input"], call["input_split_sizes"]
    share = (sum(splits) - splits[rank]) / max(1, tensor.shape[0]) if splits else (world - 1) / world
    return nbytes(tensor) * share


#: Bytes sent by one call, from its arguments, the rank and the number of ranks.
COSTS: dict[str, Callable[[dict, int, int], float]] = {
    "all_gather": ring("tensor_list"),
    "all_gather_coalesced": ring("output_tensor_lists"),
    "all_gather_into_tensor": ring("output_tensor"),
    "all_gather_single": ring("output_tensor"),
    "all_reduce": ring("tensor", passes=2),
    "all_reduce_coalesced": ring("tensors", passes=2),
    "reduce_scatter": ring("input_list"),
    "reduce_scatter_tensor": ring("input"),
    "reduce_scatter_single": ring("input"),
    "broadcast": ring("tensor"),
    "reduce": ring("tensor"),
    "all_to_all_single": all_to_all_single,
    "all_to_all": to_others("input_tensor_list"),
    "gather": lambda call, rank, world: 0.0 if call["gather_list"] else nbytes(call["tensor"]),
    "scatter": to_others("scatter_list"),
    "send": lambda call, rank, world: nbytes(call["tensor"]),
    "isend": lambda call, rank, world: nbytes(call["tensor"]),
}


class TrafficCounter:
    """Megabytes (10^6 bytes) that this rank has sent, by phase; set `phase` while measuring."""

    def __init__(self) -> None:
        """Replaces the collectives, under both names by which torch and its users look them up."""
        self.phase, self.megabytes, self._inside = "", collections.defaultdict(float), False
        for name, cost in COSTS.items():
            if hasattr(dist, name):
                counted = self._counted(getattr(dist, name), cost)
                setattr(dist, name, counted)
                setattr(dist.distributed_c10d, name, counted)

    def _counted(self, function: Callable, cost: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def counted(*args, **kwargs):
            if self._inside:
                return function(*args, **kwargs)
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            group = call.arguments.get("group")
            if (rank := dist.get_rank(group)) >= 0:  # else not a member of the group
                self.megabytes[self.phase] += cost(call.arguments, rank, dist.get_world_size(group)) / 1e6
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return counted
