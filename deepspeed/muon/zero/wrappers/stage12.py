# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from deepspeed.muon.exchange.agreed import Agreed
from deepspeed.muon.matrices.routing import TAG
from deepspeed.muon.zero.tp_ranks import tp_rank
from deepspeed.muon.zero.wrappers.experts import with_all_experts
from deepspeed.muon.zero.wrappers.flat import Flat, FlatGroup
from deepspeed.muon.zero.wrappers.grad_norm import NORM_METHODS, GradientCheck
from deepspeed.muon.zero.wrappers.pipeline_stages import with_norms_of_all_stages


class Stage12(Flat):
    """``DeepSpeedZeroOptimizer``."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
    REPLACED = (
        *("step", *NORM_METHODS, "scaled_global_norm"),
        *("get_flat_partition", "_is_muon_group"),
        *("load_state_dict", "offload_states", "reload_states", "_load_universal_checkpoint"),
    )

    def groups(self) -> Iterator[FlatGroup]:
        """In the order that ``round_robin_gradients`` may have changed."""
        wrapper = self.wrapper
        flats = wrapper.bit16_groups_flat, wrapper.single_partition_of_fp32_groups
        lists = wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, *flats
        return zip(*lists, strict=True)

    def prepare(self, group_count: int) -> None:
        """Stock runs its Muon where a parameter is tagged ``use_muon`` and the name of the optimizer's class contains
        "muon". Here it asks for both while it builds the flat gradient of a partition, and nowhere else; stage 3 and
        ``BF16_Optimizer`` ask for the class itself.

        Each group's norm is a collective over the pipeline, but a stage without matrices has no Muon group.
        """
        super().prepare(group_count)
        self.replace("get_flat_partition", _without_tags)
        self.replace("_is_muon_group", lambda original, params: False)
        if self.wrapper.cpu_offload:
            self.keep_gradients_of_each_step_apart()
        if self.engine.has_moe_layers and tp_rank(self.engine)[1] > 1:
            for name, position in zip(NORM_METHODS, (1, 0), strict=True):  # of the parameters among the arguments
                self.replace(name, partial(with_all_experts, self.wrapper, position))
        if (missing := group_count - len(self.optimizer.param_groups)) > 0:
            self.replace("scaled_global_norm", partial(with_norms_of_all_stages, self.wrapper, missing))

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield, under offload, those of the master weights and those that micro-batches accumulate."""
        flats = [flat.grad for flat in self.wrapper.single_partition_of_fp32_groups if flat.grad is not None]
        return iter([*flats, *getattr(self.wrapper, "accumulated_grads_in_cpu", {}).values()])

    def complete_gradients(self) -> None:
        """Call DeepSpeed's own function for steps whose last micro-batch nobody announces."""
        wrapper = self.wrapper
        if missing := wrapper._offload_accumulated_param_ids - wrapper.norm_for_param_grads.keys():
            wrapper._offload_accumulated_param_ids = missing
            wrapper._finalize_cpu_offload_gradient_accumulation()

    def watch_gradients(self) -> Callable[[], Agreed]:
        """``compute_grad_norm: false`` leaves no norm to listen to."""
        if getattr(self.wrapper, "compute_grad_norm", True):
            return super().watch_gradients()
        return GradientCheck(self.wrapper, self.replace)

    def open_states(self) -> None:
        """DeepSpeed moves state by putting other tensors in its place, which parameters do not find by themselves."""
        super().open_states()
        self.replace("offload_states", self._move)
        self.replace("reload_states", self._move)

    def _move(self, move: Callable, *args: Any, **kwargs: Any) -> None:
        self.optimizer.release_workspace()
        move(*args, **kwargs)
        self.link()  # also while states are away: DeepSpeed's setters would ignore a value without a link

    def drop_gradients(self) -> None:
        """Also the count of micro-batches, of which the first replaces what is accumulated."""
        super().drop_gradients()
        self.wrapper.micro_step_id = -1  # counted up before the first


def _without_tags(get_flat_partition: Callable, tensor_list: list[Any], *args: Any, **kwargs: Any) -> Any:
    """``get_flat_partition``, from which the tags are hidden, whoever set them."""
    hidden = [(param, vars(param).pop(TAG)) for param in tensor_list if TAG in vars(param)]
    try:
        return get_flat_partition(tensor_list, *args, **kwargs)
    finally:
        for param, tag in hidden:
            setattr(param, TAG, tag)
