# SPDX-License-Identifier: Apache-2.0
"""What the wrappers have in common that flatten each group into one tensor and cut it into equal partitions.

A matrix may straddle a border between ranks. The offsets are those of the order in which the group was flattened, which
``round_robin_gradients`` changes; DeepSpeed's own ``_hp_mapping`` does not follow it and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.math.momentum import CODES, MOMENTUM
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import replace
from deepspeed.muon.plan.placement import Placement
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
            span = flat.numel() // comm.get_world_size(ranks)
            placements = {param: Placement(offset, span, 0) for param, offset in zip(params, offsets, strict=True)}
            result.append(self.sharded(index, partition, placements, ranks))
        return result

    def open_states(self) -> None:
        """DeepSpeed links parameters to their state once, after the first step; a load replaces the tensors."""
        self.around("load_state_dict", self._linking)
        self.link()

    @contextmanager
    def _linking(self) -> Iterator[None]:
        yield
        self.link()

    def link(self) -> None:
        """Let parameters find their parts of the weights and the state again, wherever these lie now."""
        wrapper = self.wrapper
        if getattr(wrapper, "round_robin_gradients", False):
            # DeepSpeed looks up where round-robin has put a parameter only in groups with padding between parameters.
            padding = wrapper.round_robin_bit16_padding
            wrapper.round_robin_bit16_padding = [[True]] * len(padding)
            try:
                wrapper._link_all_hp_params()
            finally:
                wrapper.round_robin_bit16_padding = padding
        else:
            wrapper._link_all_hp_params()
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
        params: dict[str, Any] = {spec.name: param for param, spec in self.optimizer.specs.items()}
        for partition in self.optimizer.partitions:
            for shard, start, stop, position in partition.pieces():
                tensor = partition.tensors[shard.tensor]
                if CODES in self.optimizer.state[tensor]:
                    _link_codes(self.optimizer, params[shard.spec.name], slice(start, stop), tensor, position)

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


def _link_codes(optimizer: MuonWithAuxAdam, param: Any, part: slice, tensor: Tensor, position: int) -> None:
    """Let DeepSpeed's functions find a momentum in int8, which they copy out of and into a fragment in fp32.

    Args:
        part: what this rank has of the parameter.
        tensor: of which the part begins at ``position``.
    """

    def get(original: Callable, optim_state_key: str | None = None) -> Tensor:
        if optim_state_key == MOMENTUM:
            return optimizer.read_state(tensor, MOMENTUM, position, position + part.stop - part.start)
        return original(optim_state_key)

    def write(original: Callable, value: Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key == MOMENTUM:
            optimizer.write_state(tensor, MOMENTUM, value.flatten()[part], position)
        else:
            original(value, optim_state_key)

    replace(param._hp_mapping, "get_hp_fragment", get)
    replace(param, "set_full_hp_param", write)
