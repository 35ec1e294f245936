# SPDX-License-Identifier: Apache-2.0
"""Stages 1 and 2: the wrappers that flatten each group into one tensor and partition it evenly.

A matrix may straddle a border between ranks. The offsets are those of the order in which the group was flattened, which
``round_robin_gradients`` changes; DeepSpeed's own ``_hp_mapping`` does not follow it and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import deepspeed.comm as comm
import torch
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.math.momentum import CODES, MOMENTUM
from deepspeed.muon.matrices.routing import TAG
from deepspeed.muon.optimizer import MuonWithAuxAdam, are_finite
from deepspeed.muon.patch import replace
from deepspeed.muon.plan.placement import Placement
from deepspeed.muon.zero.tp_ranks import tp_rank
from deepspeed.muon.zero.wrappers.adapter import NORM_METHODS, Adapter, is_valid
from deepspeed.muon.zero.wrappers.experts import with_all_experts
from deepspeed.muon.zero.wrappers.loss_scale import share_autocast_scale


class Flat(Adapter):
    """The layout of stages 1 and 2, and the state by name that goes with it."""

    def flat_partitions(
        self, groups: list[list[Any]], offsets: list[list[int]], flats: list[Tensor], masters: list[Tensor]
    ) -> list[Partition]:
        """Return one partition per group.

        Args:
            groups: parameters in the order in which they were flattened.
            offsets: where each of them begins.
            flats: the flat tensors.
            masters: this rank's part of each in fp32.
        """
        result = []
        for index, (params, starts, flat, master) in enumerate(zip(groups, offsets, flats, masters, strict=True)):
            ranks = self.wrapper.real_dp_process_group[index]
            span = flat.numel() // comm.get_world_size(ranks)
            placements = {param: Placement(start, span, 0) for param, start in zip(params, starts, strict=True)}
            result.append(self.sharded(index, master, placements, ranks))
        return result

    def patch_state_access(self) -> None:
        """Link parameters to their state now, and whenever DeepSpeed has put other tensors in its place.

        DeepSpeed links them once, after the first step. Its converter asks where each parameter lies in this rank's
        tensors; DeepSpeed's own answer is that of the parameters in order.
        """
        from deepspeed.utils.tensor_fragment import fragment_address

        for name in ("load_state_dict", "offload_states", "reload_states"):
            if name in self.REPLACED:  # BF16_Optimizer moves no states
                self.around(name, self._moving)
        self.link()
        self.wrapper._param_slice_mappings = [
            {shard.spec.name: fragment_address(stop - start, at) for shard, start, stop, at in partition.pieces()}
            for partition in sorted(self.optimizer.all_partitions, key=lambda partition: partition.index)
        ]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self.optimizer.workspace.clear()
        yield
        self.link()  # also while states are away: DeepSpeed's setters would ignore a value without a link

    def link(self) -> None:
        """Link parameters again to their parts of the weights and the state, wherever these lie now."""
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


class Stage12(Flat):
    """``DeepSpeedZeroOptimizer``."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
    REPLACED = (
        *("step", *NORM_METHODS, "scaled_global_norm"),
        *("get_flat_partition", "_is_muon_group"),
        *("load_state_dict", "offload_states", "reload_states", "_load_universal_checkpoint"),
    )

    def partitions(self) -> list[Partition]:
        """Return one per group, in the order that ``round_robin_gradients`` may have changed."""
        wrapper = self.wrapper
        return self.flat_partitions(
            wrapper.round_robin_bit16_groups,
            wrapper.round_robin_bit16_offsets,
            wrapper.bit16_groups_flat,
            wrapper.single_partition_of_fp32_groups,
        )

    def prepare(self, group_count: int) -> None:
        """Keep stock from running its own Muon.

        It does so where a parameter is tagged ``use_muon`` and the name of the optimizer's class contains "muon". This
        wrapper asks for both while it builds the flat gradient of a partition, and nowhere else; stage 3 and
        ``BF16_Optimizer`` ask for the class itself.

        Each group's norm is a collective over the pipeline, but a stage without matrices has no Muon group.
        """
        share_autocast_scale(self.engine)
        self.replace("get_flat_partition", _without_tags)
        self.replace("_is_muon_group", lambda original, params: False)
        if self.wrapper.cpu_offload:
            self.around("step", self._with_own_gradients)
        if self.engine.has_moe_layers and tp_rank(self.engine)[1] > 1:
            for name in NORM_METHODS:
                self.replace(name, partial(with_all_experts, self.wrapper))
        if (missing := group_count - len(self.optimizer.param_groups)) > 0:
            self.replace("scaled_global_norm", partial(with_norms_of_all_stages, self.wrapper, missing))

    @contextmanager
    def _with_own_gradients(self) -> Iterator[None]:
        """Let a step under offload have the gradients of all its micro-batches and none of an earlier step.

        DeepSpeed hands over those of parameters that take part in the last micro-batch, and writes into its buffers
        only what a backward computes.
        """
        wrapper = self.wrapper
        if missing := wrapper._offload_accumulated_param_ids - wrapper.norm_for_param_grads.keys():
            wrapper._offload_accumulated_param_ids = missing
            wrapper._finalize_cpu_offload_gradient_accumulation()  # as in steps whose last micro-batch is announced
        yield
        masters = [flat.grad for flat in wrapper.single_partition_of_fp32_groups if flat.grad is not None]
        for buffer in (*masters, *getattr(wrapper, "accumulated_grads_in_cpu", {}).values()):
            buffer.zero_()

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

    def drop_gradients(self) -> None:
        """Also reset the micro-batch counter, so that the next micro-batch overwrites the accumulated gradient."""
        super().drop_gradients()
        self.wrapper.micro_step_id = -1  # counted up before the first


class Bf16(Flat):
    """``BF16_Optimizer``."""

    MODULE, CLASS = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"
    REPLACED = ("load_state_dict", "state_dict", "_load_universal_checkpoint")

    def partitions(self) -> list[Partition]:
        """Return one per group, whose parameters lie one after the other."""
        wrapper, offsets = self.wrapper, []
        for params in wrapper.bf16_groups:
            ends = accumulate(param.numel() for param in params)
            offsets.append([0, *ends][:-1])
        return self.flat_partitions(
            wrapper.bf16_groups, offsets, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition
        )

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a look at the norm of all ranks, which the wrapper keeps."""
        return lambda: agreed(is_valid(self.wrapper._global_grad_norm), is_common=True)

    def patch_state_access(self) -> None:
        """Also save the key by which ``zero_to_fp32`` knows a ZeRO checkpoint; the layout is that of stage 1."""
        super().patch_state_access()
        self.replace("state_dict", lambda state_dict: {"zero_stage": 1, **state_dict()})


def _link_codes(optimizer: MuonWithAuxAdam, param: Any, part: slice, tensor: Tensor, position: int) -> None:
    """Let DeepSpeed's functions find a momentum in int8, which they copy out of and into a fragment in fp32.

    Args:
        part: what this rank has of the parameter.
        tensor: has the part, which begins at ``position``.
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
