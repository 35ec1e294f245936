# SPDX-License-Identifier: Apache-2.0
"""What the wrappers have in common that flatten each group into one tensor and cut it into equal partitions.

A matrix may straddle a border between ranks. The offsets are those of the order in which the group was flattened, which
``round_robin_gradients`` changes; DeepSpeed's own ``_hp_mapping`` does not follow it and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.wrappers.adapter import Adapter

FlatGroup = tuple[list[Any], list[int], Tensor, Tensor]
"""Parameters in the order in which they were flattened, where each begins, the flat tensor, this rank's fp32 part."""


class Flat(Adapter):
    """The layout of stages 1 and 2, and the state by name that goes with it."""

    def groups(self) -> Iterator[FlatGroup]:
        """Of each parameter group."""
        raise NotImplementedError

    def partitions(self) -> list[Partition]:
        """One per group."""
        result = []
        for index, (params, offsets, flat, partition) in enumerate(self.groups()):
            ranks = self.wrapper.real_dp_process_group[index]
            rank, world_size = comm.get_rank(ranks), comm.get_world_size(ranks)
            specs = [self.optimizer.specs[param] for param in params]
            placements = [Placement(offset, flat.numel() // world_size, 0) for offset in offsets]
            shards = tuple(Shard(spec, 0, placement) for spec, placement in zip(specs, placements, strict=True))
            result.append(Partition(index, (partition,), shards, ranks, rank, world_size))
        return result

    def open_states(self) -> None:
        """DeepSpeed links parameters to their state once, after the first step; a load replaces the tensors."""
        self.replace("load_state_dict", self._load_and_link)
        self.link()

    def _load_and_link(self, load: Callable, *args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        self.link()
        return result

    def link(self) -> None:
        """Let parameters find their parts of the state again."""
        wrapper = self.wrapper
        if getattr(wrapper, "round_robin_gradients", False):
            # DeepSpeed looks up where round-robin has put a parameter only in groups with padding between parameters.
            padding = wrapper.round_robin_bit16_padding
            wrapper.round_robin_bit16_padding = [[True]] * len(padding)
            try:
                wrapper._link_all_hp_params()
            finally:
                wrapper.round_robin_bit16_padding = padding
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()

    def read_universal(self, load: Callable[..., None]) -> None:
        """The converter asks where each parameter lies in this rank's tensors; DeepSpeed's own answer is that of the
        parameters in order.
        """
        from deepspeed.utils.tensor_fragment import fragment_address

        super().read_universal(load)
        self.wrapper._param_slice_mappings = [
            {shard.spec.name: fragment_address(stop - start, at) for shard, start, stop, at in partition.pieces()}
            for partition in sorted(self.optimizer.all_partitions, key=lambda partition: partition.index)
        ]
