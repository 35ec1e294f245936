# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.matrices.routing import TAG
from deepspeed.muon.optimizer import are_finite
from deepspeed.muon.zero.tp_ranks import tp_rank
from deepspeed.muon.zero.wrappers.experts import with_all_experts
from deepspeed.muon.zero.wrappers.flat import Flat, FlatGroup
from deepspeed.muon.zero.wrappers.grad_norm import NORM_METHODS
from deepspeed.muon.zero.wrappers.loss_scale import share_autocast_scale


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
        return zip(
            wrapper.round_robin_bit16_groups,
            wrapper.round_robin_bit16_offsets,
            wrapper.bit16_groups_flat,
            wrapper.single_partition_of_fp32_groups,
            strict=True,
        )

    def prepare(self, group_count: int) -> None:
        """Stock runs its Muon where a parameter is tagged ``use_muon`` and the name of the optimizer's class contains
        "muon". Here it asks for both while it builds the flat gradient of a partition, and nowhere else; stage 3 and
        ``BF16_Optimizer`` ask for the class itself.

        Each group's norm is a collective over the pipeline, but a stage without matrices has no Muon group.
        """
        share_autocast_scale(self.engine)
        self.replace("get_flat_partition", _without_tags)
        self.replace("_is_muon_group", lambda original, params: False)
        if self.wrapper.cpu_offload:
            self.keep_gradients_of_each_step_apart()
        if self.engine.has_moe_layers and tp_rank(self.engine)[1] > 1:
            for name in NORM_METHODS:
                self.replace(name, partial(with_all_experts, self.wrapper))
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
        """Look at the gradients themselves where ``compute_grad_norm: false`` leaves no norm to listen to."""
        if getattr(self.wrapper, "compute_grad_norm", True):
            return super().watch_gradients()
        self.around("step", self._with_a_look_at_gradients)
        return lambda: self._are_finite

    @contextmanager
    def _with_a_look_at_gradients(self) -> Iterator[None]:
        """Look before the first group is updated, while the gradients of all groups are there."""
        groups = self.wrapper.averaged_gradients.values()
        self._are_finite = agreed(are_finite([grad for group in groups for grad in group or () if grad is not None]))
        yield

    def open_states(self) -> None:
        """DeepSpeed moves state by putting other tensors in its place, which parameters do not find by themselves."""
        super().open_states()
        self.around("offload_states", self._moving)
        self.around("reload_states", self._moving)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self.optimizer.release_workspace()
        yield
        self.link()  # also while states are away: DeepSpeed's setters would ignore a value without a link

    def drop_gradients(self) -> None:
        """Also the count of micro-batches, of which the first replaces what is accumulated."""
        super().drop_gradients()
        self.wrapper.micro_step_id = -1  # counted up before the first


def with_norms_of_all_stages(wrapper: Any, missing: int, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``scaled_global_norm`` with the norms of ``missing`` more groups of the pipeline, zero on this rank.

    Stages of a pipeline differ in their parameter groups: one without matrices has no Muon group.
    """
    from deepspeed.runtime import utils

    if wrapper.cpu_offload:
        none = partial(wrapper.complete_grad_norm_calculation_for_cpu_offload, [])
    else:
        none = partial(wrapper.get_grad_norm_direct, [], [])
    norms = [original(*args, **kwargs), *(none() for _ in range(missing))]
    tensors = [torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms]
    combine = getattr(utils, "combine_grad_norm_groups", None)  # as this DeepSpeed combines the norms of groups
    return combine(tensors) if combine else torch.linalg.vector_norm(torch.stack(tensors))


def _without_tags(get_flat_partition: Callable, tensor_list: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``get_flat_partition``, from which the tags are hidden, whoever set them."""
    hidden = [(param, vars(param).pop(TAG)) for param in tensor_list if TAG in vars(param)]
    try:
        return get_flat_partition(tensor_list, *args, **kwargs)
    finally:
        for param, tag in hidden:
            setattr(param, TAG, tag)
