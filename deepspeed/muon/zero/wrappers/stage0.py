# SPDX-License-Identifier: Apache-2.0
"""Stage 0: every rank holds every parameter whole, and the same averaged gradient."""

from __future__ import annotations

from typing import Any

from deepspeed.muon.exchange.partition import Partition, whole_partition
from deepspeed.muon.zero import state_access
from deepspeed.muon.zero.consensus import on_all_ranks
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.experts import holders


class Stage0(Adapter):
    """``FP16_UnfusedOptimizer``, which steps fp32 clones of bf16 parameters. Clones carry no attributes: the index in
    the group tells whose they are.
    """

    MODULE, CLASS = "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"

    def params(self, index: int) -> list[Any]:
        """The model's parameters of a group, in the order of the tensors that are stepped."""
        return list(self.wrapper.fp16_groups[index])

    def partitions(self) -> list[Partition]:
        """One per group: its tensors, whole."""
        from deepspeed import comm  # type: ignore[attr-defined]

        result = []
        for index, group in enumerate(self.optimizer.param_groups):
            ranks = holders(self.engine, group)
            rank, copies = comm.get_rank(group=ranks), comm.get_world_size(group=ranks)
            specs = [self.optimizer.specs[param] for param in self.params(index)]
            result.append(whole_partition(index, group["params"], specs, ranks, rank, copies))
        return result

    def watch_gradients(self) -> None:
        """Gradients are the same on all ranks, but for experts."""
        if self.engine.has_moe_layers:
            self.optimizer.is_finite = on_all_ranks(self.optimizer.is_finite)

    def open_states(self) -> None:
        """DeepSpeed's functions find the state through methods of each parameter."""
        for index, group in enumerate(self.optimizer.param_groups):
            for param, master in zip(self.params(index), group["params"], strict=True):
                state_access.attach(param, master, self.optimizer)

    def refresh_masters(self) -> None:
        """Else the next step would put back the weights from before."""
        self.wrapper.refresh_fp32_params()

    def drop_gradients(self) -> None:
        """Those of the model and of the clones."""
        super().drop_gradients()
        self.wrapper.zero_grad(set_to_none=True)


class Plain(Stage0):
    """No wrapper: the parameters themselves are stepped."""

    @property
    def name(self) -> str:
        """The optimizer's, as DeepSpeed has no other object."""
        return "MuonWithAuxAdam"

    def params(self, index: int) -> list[Any]:
        """The group's own."""
        return self.optimizer.param_groups[index]["params"]

    def refresh_masters(self) -> None:
        """The weights are their own masters."""
