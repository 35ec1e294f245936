# SPDX-License-Identifier: Apache-2.0
"""What the wrappers have in common that flatten each group into one tensor and cut it into equal partitions.

A matrix may straddle a border between ranks. The offsets are those of the order in which the group was flattened, which
``round_robin_gradients`` changes; DeepSpeed's own ``_hp_mapping`` does not follow it and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero import state_access
from deepspeed.muon.zero.wrappers.adapter import Adapter


class FlatGroup(NamedTuple):
    """One group: its parameters in the order in which they were flattened, where each begins, the whole flat tensor,
    and this rank's fp32 partition of it.
    """

    params: list[Any]
    offsets: list[int]
    flat: Tensor
    partition: Tensor


def offsets_of(params: list[Any]) -> list[int]:
    """Where parameters begin that lie one after the other."""
    return [0, *accumulate(param.numel() for param in params)][: len(params)]


class Flat(Adapter):
    """The layout of stages 1 and 2, and the state by name that goes with it."""

    def groups(self) -> Iterator[FlatGroup]:
        """Of each parameter group."""
        raise NotImplementedError

    def partitions(self) -> list[Partition]:
        """One per group."""
        from deepspeed import comm  # type: ignore[attr-defined]

        result = []
        for index, group in enumerate(self.groups()):
            ranks = self.wrapper.real_dp_process_group[index]
            world_size = comm.get_world_size(group=ranks)
            span = group.flat.numel() // world_size
            shards = tuple(
                Shard(self.optimizer.specs[param], 0, Placement(offset, span, 0))
                for param, offset in zip(group.params, group.offsets, strict=True)
            )
            rank = comm.get_rank(group=ranks)
            result.append(Partition(index, (group.partition,), shards, ranks, rank, world_size))
        return result

    def open_states(self) -> None:
        """DeepSpeed links parameters to their state once; loading a checkpoint replaces the tensors."""
        self.replace("load_state_dict", self._load_and_link)
        state_access.link(self.wrapper)

    def _load_and_link(self, load: Callable, *args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        state_access.link(self.wrapper)
        return result

    def read_universal(self, load: Callable[..., None]) -> None:
        """The converter asks where each parameter lies in this rank's tensors; DeepSpeed's own answer is that of the
        parameters in order.
        """
        from deepspeed.utils.tensor_fragment import fragment_address

        self.replace("_load_universal_checkpoint", lambda original, *args: load(*args))
        partitions = sorted(self.optimizer.all_partitions, key=lambda partition: partition.index)
        self.wrapper._param_slice_mappings = [
            {
                shard.spec.name: fragment_address(stop - start, position)
                for shard, start, stop, position in held.pieces()
            }
            for held in partitions
        ]
