# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.muon.zero import state_access
from deepspeed.muon.zero.wrappers.flat import Flat, FlatGroup
from deepspeed.muon.zero.wrappers.grad_norm import NORM_METHODS, NormWatch
from deepspeed.muon.zero.wrappers.pipeline_stages import with_norms_of_all_stages
from deepspeed.muon.zero.wrappers.stock_muon import without_stocks_muon


class Stage12(Flat):
    """``DeepSpeedZeroOptimizer``."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
    REPLACED = (
        "step",
        *NORM_METHODS,
        "scaled_global_norm",
        "get_flat_partition",
        "_is_muon_group",
        "load_state_dict",
        "offload_states",
        "reload_states",
        "_load_universal_checkpoint",
    )

    def groups(self) -> Iterator[FlatGroup]:
        """In the order that ``round_robin_gradients`` may have changed."""
        wrapper = self.wrapper
        flats = wrapper.bit16_groups_flat, wrapper.single_partition_of_fp32_groups
        lists = wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, *flats
        return (FlatGroup(*group) for group in zip(*lists, strict=True))

    def watch_gradients(self) -> None:
        """ZeRO's norms are those of all ranks."""
        self.optimizer.is_finite = NormWatch(self.replace)

    def stay_clear_of_stock(self) -> None:
        """Stock's own Muon must not change the gradients of tagged parameters."""
        self.replace("get_flat_partition", without_stocks_muon)
        self.replace("_is_muon_group", lambda original, params: False)

    def join_pipeline(self, group_count: int) -> None:
        """Each group's norm is a collective over the pipeline."""
        missing = group_count - len(self.optimizer.param_groups)
        if missing > 0:
            self.replace("scaled_global_norm", with_norms_of_all_stages(self.wrapper, missing))

    def open_states(self) -> None:
        """DeepSpeed moves state by putting other tensors in its place, which parameters do not find by themselves."""
        super().open_states()
        self.replace("offload_states", self._move)
        self.replace("reload_states", self._move)

    def _move(self, move: Callable, *args: Any, **kwargs: Any) -> None:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        self.optimizer.release_workspace()
        move(*args, **kwargs)
        if OffloadStateTypeEnum.hp_params not in self.wrapper.offloaded_states:
            state_access.link(self.wrapper)

    def drop_gradients(self) -> None:
        """Also those that are accumulated in the wrapper."""
        super().drop_gradients()
        self.wrapper.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            getattr(self.wrapper, name, {}).clear()
        self.wrapper.micro_step_id = -1  # counted up before the first micro-batch, which replaces what is accumulated
