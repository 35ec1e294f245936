# SPDX-License-Identifier: Apache-2.0
"""Adapters for stages 1 and 2, whose wrappers flatten each group into one tensor and partition it evenly.

A matrix may straddle the border between two ranks. Parameters are located by the order in which the group was
flattened, which ``round_robin_gradients`` changes; DeepSpeed's ``_hp_mapping`` ignores that change. Only this module
knows how DeepSpeed flattens groups: :func:`flat_group` predicts it before there is an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.consensus import Agreed, agreed, same_on_all_ranks
from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.layout import Placement
from deepspeed.muon.math.momentum_storage import CODES, MOMENTUM
from deepspeed.muon.model.routing import TAG
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.step import are_finite
from deepspeed.muon.zero.wrappers.adapter import Adapter, patch
from deepspeed.muon.zero.wrappers.gradient_norms import (
    NORM_METHODS,
    is_valid,
    share_autocast_scale,
    with_all_experts,
    with_norms_of_all_stages,
)
from deepspeed.muon.zero.wrappers.grids import tp_rank

#: The flat tensor of a group is padded to a multiple of this many elements per rank (``nccl_start_alignment_factor``).
FLAT_ALIGNMENT = 2
#: With ``parameter_alignment``, each parameter starts at a multiple of this many bytes.
ALIGNED_BYTES = 16


class FlatGroup(NamedTuple):
    """How a parameter group is flattened.

    Args:
        order: indices of the group's parameters, in the order in which they are stored.
        placements: which rank holds which elements of each of them, in the same order.
        span: elements of one rank's part of the flat tensor, with padding.
    """

    order: list[int]
    placements: list[Placement]
    span: int


def flat_group(numels: Sequence[int], world_size: int, round_robin: bool = False, alignment: int = 1) -> FlatGroup:
    """Return how DeepSpeed flattens a parameter group and divides it among ``world_size`` ranks.

    Args:
        numels: elements of each parameter of the group.
        round_robin: the setting ``round_robin_gradients``.
        alignment: a parameter starts at a multiple of this many elements.
    """
    order = [*range(len(numels))]
    if round_robin:
        order = [index for first in range(world_size) for index in order[first::world_size]]
    sizes = [_round_up(numels[index], alignment) for index in order]
    padding = sizes[-1] - numels[order[-1]] if order else 0  # behind the last parameter, there is none for alignment
    span = _round_up(sum(sizes) - padding, FLAT_ALIGNMENT * world_size) // world_size
    return FlatGroup(order, placements(sizes, span), span)


def placements(sizes: Iterable[int], span: int) -> list[Placement]:
    """Return a :class:`Placement`, which says where the elements lie, for each parameter of a flat group.

    ``sizes``: elements of each parameter, in the order in which they are stored, with the padding behind it. ``span``:
    elements of one rank's part of the group.
    """
    return [Placement(start, span, 0) for start in accumulate(sizes, initial=0)][:-1]


def alignment_of(zero_config: Any, itemsize: int) -> int:
    """Return the argument ``alignment`` of :func:`flat_group` for parameters with ``itemsize`` bytes per element."""
    return ALIGNED_BYTES // itemsize if getattr(zero_config, "parameter_alignment", False) else 1


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


class Flat(Adapter):
    """The base of the adapters for ZeRO stages 1 and 2, whose wrappers flatten each parameter group into one tensor."""

    def flat_partitions(
        self, params_of_groups: list[list[Any]], offsets: list[list[int]], flats: list[Tensor], masters: list[Tensor]
    ) -> list[Partition]:
        """Return a :class:`Partition`, which says where ranks store the parameters, for each parameter group.

        All lists have one item for each group. ``params_of_groups``: the group's parameters, in the order in which they
        were flattened. ``offsets``: the index at which each of these parameters begins in the flat tensor. ``flats``:
        the group's flat tensor with all elements. ``masters``: this rank's fp32 part of the flat tensor.
        """
        result = []
        for index, (params, starts, flat, master) in enumerate(
            zip(params_of_groups, offsets, flats, masters, strict=True)
        ):
            group = self.wrapper.real_dp_process_group[index]
            span = flat.numel() // comm.get_world_size(group)
            placed = {param: Placement(start, span, 0) for param, start in zip(params, starts, strict=True)}
            result.append(self.sharded_partition(index, master, placed, group))
        return result

    def publish_weights(self) -> None:
        """Copy the optimizer's fp32 weights into the model's parameters; a collective."""
        self.wrapper.update_lp_params()

    def patch_state_access(self) -> None:
        """Link parameters to their optimizer state for ``safe_get_*`` (:meth:`link`), now and whenever it is replaced.

        DeepSpeed replaces the state's tensors when it loads or offloads them.

        Also correct the wrapper's ``_param_slice_mappings``, in which a checkpoint records where each parameter lies in
        this rank's tensors. DeepSpeed makes these mappings as if ``round_robin_gradients`` were off.
        """
        from deepspeed.utils.tensor_fragment import fragment_address

        for name in ("load_state_dict", "offload_states", "reload_states"):
            if name in self.PATCHED:  # BF16_Optimizer has no offload_states
                self.wrap_method(name, self._relinking)
        self.link()
        self.wrapper._param_slice_mappings = [
            {shard.spec.name: fragment_address(stop - start, at) for shard, start, stop, at in partition.pieces()}
            for partition in sorted(self.optimizer.all_partitions, key=lambda partition: partition.index)
        ]

    @contextmanager
    def _relinking(self) -> Iterator[None]:
        """Return a context to load or move state: free the optimizer's scratch memory, call :meth:`link` at the end."""
        self.optimizer.workspace.clear()
        yield
        self.link()  # also while states are away: DeepSpeed's setters would ignore a value without a link

    def link(self) -> None:
        """Link each parameter to its fragments of the fp32 weights and of the optimizer state, for ``safe_get_*``."""
        wrapper = self.wrapper
        if getattr(wrapper, "round_robin_gradients", False):
            # DeepSpeed looks up round-robin positions only in groups with padding between parameters: pretend there is.
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
        param_of: dict[str, Any] = {spec.name: param for param, spec in self.optimizer.specs.items()}
        for partition in self.optimizer.partitions:
            for shard, start, stop, position in partition.pieces():
                tensor = partition.tensors[shard.tensor]
                if CODES in self.optimizer.state[tensor]:
                    _link_int8_momentum(self.optimizer, param_of[shard.spec.name], slice(start, stop), tensor, position)


class Stage12(Flat):
    """The adapter for ``DeepSpeedZeroOptimizer``, the usual wrapper at ZeRO stages 1 and 2."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
    PATCHED = (
        *("step", *NORM_METHODS, "scaled_global_norm"),
        *("get_flat_partition", "_is_muon_group"),
        *("load_state_dict", "offload_states", "reload_states", "_load_universal_checkpoint"),
    )

    def partitions(self) -> list[Partition]:
        """Return a :class:`Partition`, which says where ranks store the parameters, for each parameter group.

        Its parameters are in the order in which ``round_robin_gradients`` has arranged them.
        """
        wrapper = self.wrapper
        return self.flat_partitions(
            wrapper.round_robin_bit16_groups,
            wrapper.round_robin_bit16_offsets,
            wrapper.bit16_groups_flat,
            wrapper.single_partition_of_fp32_groups,
        )

    def prepare(self, group_count: int) -> None:
        """Keep DeepSpeed from running its own Muon, and correct the wrapper's gradients and gradient norms.

        DeepSpeed leaves out gradients under CPU offload. Its norms are wrong for experts under tensor parallelism, and
        for pipelines whose stages have different numbers of parameter groups.
        """
        share_autocast_scale(self.engine)
        # DeepSpeed runs its own Muon if the name of the optimizer's class contains "muon".
        self.patch("get_flat_partition", _without_tags)
        self.patch("_is_muon_group", lambda original, params: False)
        if self.wrapper.cpu_offload:
            self.wrap_method("step", self._with_complete_gradients)
        if self.engine.has_moe_layers and tp_rank(self.engine)[1] > 1:
            for name in NORM_METHODS:
                self.patch(name, partial(with_all_experts, self.wrapper))
        if (missing := group_count - len(self.optimizer.param_groups)) > 0:
            self.patch("scaled_global_norm", partial(with_norms_of_all_stages, self.wrapper, missing))

    @contextmanager
    def _with_complete_gradients(self) -> Iterator[None]:
        """Return a context for a step with CPU offload: complete the gradients at its start, zero them at its end.

        By itself DeepSpeed copies to the CPU only gradients of parameters that the last micro-batch has used.
        """
        # DeepSpeed passes on only gradients of parameters that took part in the last micro-batch.
        wrapper = self.wrapper
        if missing := wrapper._offload_accumulated_param_ids - wrapper.norm_for_param_grads.keys():
            wrapper._offload_accumulated_param_ids = missing
            wrapper._finalize_cpu_offload_gradient_accumulation()  # as after an announced last micro-batch
        yield
        masters = [flat.grad for flat in wrapper.single_partition_of_fp32_groups if flat.grad is not None]
        for buffer in (*masters, *getattr(wrapper, "accumulated_grads_in_cpu", {}).values()):
            buffer.zero_()  # what no backward overwrites would act again in the next step

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called during a step, whether the gradients are finite on all ranks.

        It checks the gradient norms or, with ``compute_grad_norm: false``, the gradients themselves.
        """
        if getattr(self.wrapper, "compute_grad_norm", True):
            return super().watch_gradients()
        self.wrap_method("step", self._with_gradient_check)
        return lambda: self._are_finite

    @contextmanager
    def _with_gradient_check(self) -> Iterator[None]:
        """Return a context for a step: at its start set ``_are_finite``, whether all ranks' gradients are finite.

        Entering it is a collective.
        """
        groups = self.wrapper.averaged_gradients.values()
        self._are_finite = agreed(are_finite([grad for group in groups for grad in group or () if grad is not None]))
        yield

    def gradients(self, partition: Partition) -> Sequence[Tensor] | None:
        """Return this rank's flat gradient of a partition, as tensors to concatenate; see :meth:`Adapter.gradients`."""
        if self.wrapper.cpu_offload:
            return [tensor.grad for tensor in partition.tensors if tensor.grad is not None]
        return self.wrapper.averaged_gradients.get(partition.index) or ()

    def drop_gradients(self) -> None:
        """Discard all gradients. The next micro-batch overwrites accumulated gradients instead of adding to them."""
        super().drop_gradients()
        self.wrapper.micro_step_id = -1  # DeepSpeed increments it before the first micro-batch


class Bf16(Flat):
    """The adapter for ``BF16_Optimizer``, which DeepSpeed uses for bf16 models at stage 1 with fp32 gradients."""

    MODULE, CLASS = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"
    PATCHED = ("load_state_dict", "state_dict", "_load_universal_checkpoint")

    def partitions(self) -> list[Partition]:
        """Return a :class:`Partition`, which says where ranks store the parameters, for each parameter group.

        The flat tensor of the group has no gaps between parameters.
        """
        wrapper, offsets = self.wrapper, []
        for params in wrapper.bf16_groups:
            ends = accumulate(param.numel() for param in params)
            offsets.append([0, *ends][:-1])
        return self.flat_partitions(
            wrapper.bf16_groups, offsets, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition
        )

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called during a step, whether the global gradient norm is finite."""
        return lambda: same_on_all_ranks(is_valid(self.wrapper._global_grad_norm))

    def patch_state_access(self) -> None:
        """Link parameters to their state (:meth:`Flat.link`), and add the key ``zero_stage`` to saved states.

        ``zero_to_fp32`` recognizes ZeRO checkpoints by this key. Its value is 1, because the layout is that of stage 1.
        """
        super().patch_state_access()
        self.patch("state_dict", lambda state_dict: {"zero_stage": 1, **state_dict()})


def _link_int8_momentum(optimizer: MuonWithAuxAdam, param: Any, part: slice, tensor: Tensor, position: int) -> None:
    """Make ``safe_get_*`` and ``safe_set_*`` convert the int8 momentum of ``param`` to fp32 and back.

    ``part``: the elements of the flattened parameter that this rank holds. ``tensor``: this rank's flat tensor of the
    parameter group. ``position``: index in ``tensor`` at which ``part`` begins.
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

    patch(param._hp_mapping, "get_hp_fragment", get)
    patch(param, "set_full_hp_param", write)


def _without_tags(get_flat_partition: Callable, tensor_list: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``get_flat_partition``: hide the tensors' tag ``use_muon``, which makes DeepSpeed run its own Muon."""
    hidden = [(param, vars(param).pop(TAG)) for param in tensor_list if TAG in vars(param)]
    try:
        return get_flat_partition(tensor_list, *args, **kwargs)
    finally:
        for param, tag in hidden:
            setattr(param, TAG, tag)
