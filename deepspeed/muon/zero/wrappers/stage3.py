# SPDX-License-Identifier: Apache-2.0
"""Stage 3: each parameter is cut over all ranks; a sub-group's parts lie one after the other.

The last ranks' parts may end in padding, which holds anything, even NaN: it never travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero import nvme, state_access
from deepspeed.muon.zero.checkpoint.nvme_load import NvmeLoad
from deepspeed.muon.zero.seams import Seam
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.grad_norm import NORM_METHODS, NormWatch


class Stage3(Adapter):
    """``DeepSpeedZeroOptimizer_Stage3``."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
    REPLACED = (
        "step",
        *NORM_METHODS,
        "set_full_hp_param",
        "set_local_hp_param",
        "offload_states",
        "reload_states",
        "_prepare_sub_group",
        "_load_universal_checkpoint",
    )
    REPLACED_IN_LOADS = ("_rigid_load_state_dict", "_restore_from_bit16_weights")
    ELSEWHERE = tuple(
        Seam(f"deepspeed.runtime.swap_tensor.{kind}_optimizer_swapper", f"{name}.swap_out_optimizer_state", "engine")
        for kind, name in {
            "partitioned": "PartitionedOptimizerSwapper",
            "pipelined": "PipelinedOptimizerSwapper",
        }.items()
    )

    def partitions(self) -> list[Partition]:
        """One per sub-group."""
        from deepspeed import comm  # type: ignore[attr-defined]

        wrapper, result = self.wrapper, []
        for index, (params, ranks) in enumerate(
            zip(wrapper.fp16_groups, wrapper.sub_group_process_groups, strict=True)
        ):
            shards, base = [], 0
            for param in params:
                part = param.partition_numel()
                shards.append(Shard(self.optimizer.specs[param], 0, Placement(0, part, base)))
                base += part
            tensor, group = wrapper.fp32_partitioned_groups_flat[index], wrapper.sub_group_to_group_id[index]
            rank, world_size = comm.get_rank(group=ranks), comm.get_world_size(group=ranks)
            result.append(Partition(group, (tensor,), tuple(shards), ranks, rank, world_size))
        return result

    def watch_gradients(self) -> None:
        """ZeRO's norms are those of all ranks."""
        self.optimizer.is_finite = NormWatch(self.replace)

    @property
    def bounds_memory_by_sub_groups(self) -> bool:
        """On NVMe."""
        return bool(self.wrapper.swap_optimizer)

    def create_states(self) -> None:
        """States on NVMe get their files at once."""
        if self.wrapper.swap_optimizer:
            swapper = self.wrapper.optimizer_swapper
            self.replace("swap_out_optimizer_state", nvme.swap_out_and_release(self.wrapper), swapper)
            self.replace("_prepare_sub_group", nvme.prepare_without_holes(self.wrapper))
            nvme.create_states(self.wrapper, self.optimizer)

    def open_states(self) -> None:
        """DeepSpeed's functions ask the wrapper."""
        states = state_access.Stage3States(self.wrapper, self.optimizer)
        self.replace("set_full_hp_param", states.set_full)
        self.replace("set_local_hp_param", states.set_local)
        self.replace("offload_states", states.offload)
        self.replace("reload_states", states.reload)

    def read_universal(self, load: Callable[..., None]) -> None:
        """DeepSpeed's loader knows one kind of group."""
        self.replace("_load_universal_checkpoint", lambda original, *args: load(*args))

    def resident_partitions(self) -> Iterator[Partition]:
        """What is written to the tensors goes to the model, too."""
        found = {id(partition.tensors[0]): partition for partition in self.optimizer.all_partitions}
        for _, flat in nvme.each_sub_group(self.wrapper):
            yield found[id(flat)]

    def loading(self, folder: Path, tag: str | None, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        """Replaces DeepSpeed's loading where NVMe takes part, in the engine or in the checkpoint."""
        return NvmeLoad(self.engine, self.optimizer).around(folder, tag, arguments)

    def drop_gradients(self) -> None:
        """Also those that are accumulated in the wrapper."""
        super().drop_gradients()
        self.wrapper.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            getattr(self.wrapper, name, {}).clear()
