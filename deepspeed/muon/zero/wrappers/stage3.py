# SPDX-License-Identifier: Apache-2.0
"""Adapter for stage 3: each parameter is divided over all ranks; a rank's parts of a sub-group form one flat tensor.

The last ranks' parts may end in padding, whose values are arbitrary, even NaN; it is never sent. Only this module knows
how DeepSpeed forms sub-groups: :func:`sub_groups` predicts them before there is an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.exchange.placed_params import Partition
from deepspeed.muon.layout import Placement
from deepspeed.muon.math.momentum_storage import ABSMAX, CODES, MOMENTUM
from deepspeed.muon.zero.checkpoint import nvme
from deepspeed.muon.zero.wrappers.adapter import Adapter, Seam, patched
from deepspeed.muon.zero.wrappers.gradient_norms import NORM_METHODS, share_autocast_scale

MOMENTUM_KEYS = (MOMENTUM, CODES, ABSMAX)
#: Pinned copies of weights and gradients that DeepSpeed keeps after a reload.
_PINNED = ("lp_param_contiguous_pin_buffer", "lp_grad_partitions_flat_pin_buffers")
_SWAP, _SWAP_OUT = "deepspeed.runtime.swap_tensor", "OptimizerSwapper.swap_out_optimizer_state"


def part_size(numel: int, world_size: int) -> int:
    """Return how many elements, with padding, each of ``world_size`` ranks holds of a parameter with ``numel``."""
    return -(-numel // world_size)


def sub_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the sub-groups into which DeepSpeed divides a parameter group, in the order in which it updates them.

    A sub-group is a list of indices into ``sizes``, in the order in which its parameters are stored.

    Args:
        sizes: elements that one rank holds of each parameter of the group (:func:`part_size`).
        limit: ``sub_group_size``; a sub-group ends with the parameter that makes it as large as that.
    """
    indices_of_sub_groups: list[list[int]] = []
    held = limit
    for index, size in enumerate(sizes):
        if held >= limit:
            indices_of_sub_groups.append([])
            held = 0
        indices_of_sub_groups[-1].append(index)
        held += size
    return indices_of_sub_groups


def limit_without_cuts(numels: Iterable[int]) -> int:
    """Return a ``sub_group_size`` so large that no parameter group is divided into several sub-groups.

    ``numels``: number of elements that one rank holds of each current sub-group.
    """
    return sum(numels)


def placements(sizes: Iterable[int]) -> list[Placement]:
    """Return a :class:`Placement`, which says where the elements lie, for each parameter of one sub-group.

    ``sizes``: elements that one rank holds of each parameter.
    """
    sizes = list(sizes)
    return [Placement(0, size, base) for size, base in zip(sizes, accumulate(sizes, initial=0), strict=False)]


class Stage3(Adapter):
    """The adapter for ``DeepSpeedZeroOptimizer_Stage3``, the wrapper at ZeRO stage 3."""

    MODULE, CLASS = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
    PATCHED = (
        *("step", *NORM_METHODS, "_prepare_sub_group"),
        *("set_full_hp_param", "set_local_hp_param", "_get_fp32_opt_state_partition"),
        *("offload_states", "reload_states", "_load_universal_checkpoint", "state_dict"),
        *("_rigid_load_state_dict", "_restore_from_bit16_weights"),
    )
    MORE_SEAMS = (
        Seam("deepspeed.runtime.engine", "DeepSpeedEngine.zero_nvme_offload_optimizer"),
        Seam(f"{_SWAP}.partitioned_optimizer_swapper", f"Partitioned{_SWAP_OUT}"),
        Seam(f"{_SWAP}.pipelined_optimizer_swapper", f"Pipelined{_SWAP_OUT}"),
    )

    def partitions(self) -> list[Partition]:
        """Return a :class:`Partition`, which says where ranks store the parameters, for each of ZeRO's sub-groups."""
        wrapper, result = self.wrapper, []
        for index, params in enumerate(wrapper.fp16_groups):
            placed = dict(zip(params, placements(param.partition_numel() for param in params), strict=True))
            group, flat = wrapper.sub_group_to_group_id[index], wrapper.fp32_partitioned_groups_flat[index]
            result.append(self.sharded_partition(group, flat, placed, wrapper.sub_group_process_groups[index]))
        return result

    def prepare(self, group_count: int) -> None:
        """Correct the wrapper's loss scale and gradients. With NVMe, also create the files of all optimizer states.

        With ``save_muon_momentum_buffer_in_memory`` the momentum stays in memory instead.
        """
        share_autocast_scale(self.engine)
        self.wrap_method("step", self._with_complete_gradients)
        wrapper, optimizer = self.wrapper, self.optimizer
        if not self.is_swapped:
            return
        swap_out = partial(nvme.swap_out_and_release, wrapper)
        self.patch("swap_out_optimizer_state", swap_out, wrapper.optimizer_swapper)
        self.patch("_prepare_sub_group", partial(nvme.prepare_with_zero_filled_grads, wrapper))
        for index, partition in enumerate(self.partitions()):
            with nvme.swapped_in(wrapper, index) as flat:
                optimizer.create_states(partition)
                for key in MOMENTUM_KEYS if wrapper.save_muon_momentum_buffer_in_memory else ():
                    if key in optimizer.state[flat]:
                        optimizer.state[flat][key].swappable = False  # type: ignore[attr-defined]

    @contextmanager
    def _with_complete_gradients(self) -> Iterator[None]:
        """Return a context for a step: with offload, complete the gradients at its start; zero them at its end.

        By itself DeepSpeed offloads only gradients of parameters that the last micro-batch has used.
        """
        # DeepSpeed passes on only gradients of parameters that took part in the last micro-batch.
        wrapper = self.wrapper
        if wrapper.offload_optimizer:
            seen, done = wrapper._offload_boundary_param_ids, wrapper.norm_for_param_grads
            params = (param for group in wrapper.fp16_groups for param in group)
            missing = {p.ds_id for p in params if p.ds_id in seen and wrapper.get_param_id(p) not in done}
            if missing:
                wrapper._offload_boundary_param_ids = missing
                wrapper._finalize_offload_gradient_accumulation()  # as after an announced last micro-batch
        yield
        masters = wrapper.fp32_partitioned_groups_flat if wrapper.offload_optimizer else ()
        for buffer in (getattr(wrapper, "grad_partitions_flat_buffer", None), *(flat.grad for flat in masters)):
            if buffer is not None:
                buffer.zero_()  # what no backward overwrites would act again in the next step
        if self.is_swapped:
            nvme.forget_gradients(wrapper)

    def gradients(self, partition: Partition) -> Sequence[Tensor] | None:
        """Return this rank's flat gradient of a sub-group, as tensors to concatenate; see :meth:`Adapter.gradients`.

        Return ``None`` with NVMe, because the gradient may not be in memory.
        """
        if self.uses_nvme:
            return None
        flat = partition.tensors[0]
        if self.wrapper.offload_optimizer:
            return [] if flat.grad is None else [flat.grad]
        index = next(i for i, one in enumerate(self.wrapper.fp32_partitioned_groups_flat) if one is flat)
        return self.wrapper.averaged_gradients.get(index) or ()

    def resident_partitions(self) -> Iterator[Partition]:
        """Yield the :class:`Partition` of each sub-group, with weights and states in memory even if NVMe holds them.

        The caller may change the weights. The changes are copied to the model's parameters and written back to NVMe.
        """
        partition_of = {partition.tensors[0]: partition for partition in self.optimizer.all_partitions}
        for _, flat in nvme.each_sub_group(self.wrapper):
            yield partition_of[flat]

    def patch_state_access(self) -> None:
        """Make ``safe_get_*``, ``safe_set_*``, ``offload_states`` and, with NVMe, saving work with Muon's state."""
        self.patch("set_full_hp_param", self._set_full)
        self.patch("set_local_hp_param", self._set_local)
        self.patch("_get_fp32_opt_state_partition", self._get_local)
        self.patch("offload_states", self._offload)
        self.patch("reload_states", self._reload)
        if self.uses_nvme:
            # DeepSpeed would add copies of swap files to the checkpoint, and load nothing but them.
            self.patch("zero_nvme_offload_optimizer", lambda original: False, self.engine)
            self.patch("_rigid_load_state_dict", self._load_zero_file)
            self.patch("_restore_from_bit16_weights", self._load_weights)
        if self.is_swapped:
            # The wrapper saves its weights outside the optimizer's state dict, where torch's hooks do not see them.
            self.patch("state_dict", self._save_weights)
            self.optimizer.saved_form.read_swapped = partial(nvme.mapped_if_swapped, self.wrapper)

    def publish_weights(self) -> None:
        """Gather the small parameters that ZeRO keeps whole on all ranks, from the parts on each rank; a collective.

        Call this after changing fp32 weights in :meth:`resident_partitions`, which copies them into the parts.
        """
        self.wrapper.checkpoint_event_epilogue()

    def release(self) -> None:
        """Release the optimizer's memory, and remove the model from a list and a cache that DeepSpeed never empties."""
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        super().release()
        running, modules = getattr(parameter_offload, "FWD_MODULE_STACK", []), set(self.engine.module.modules())
        running[:] = [module for module in running if module not in modules]
        cached = getattr(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__params_to_release", None)
        for cell in getattr(cached, "__closure__", None) or ():  # its decorator hides the cache in a closure
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()

    def _save_weights(self, original: Callable) -> dict[str, Any]:
        """Replace the wrapper's ``state_dict``, so that it includes the fp32 weights that lie in files on NVMe."""
        state_dict = original()
        state_dict["fp32_flat_groups"] = [
            nvme.mapped_if_swapped(self.wrapper, flat, flat) for flat in state_dict["fp32_flat_groups"]
        ]
        return state_dict

    def _load_zero_file(
        self, original: Callable, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        """Load saved ZeRO state into tensors on NVMe, which the wrapper's ``_rigid_load_state_dict`` would not fill."""
        nvme.restore(self.wrapper, self.optimizer, state_dict, load_optimizer_states and self.weights_from is None)

    def _load_weights(self, original: Callable) -> None:
        """Set the fp32 weights on NVMe, in place of the wrapper's ``_restore_from_bit16_weights``.

        DeepSpeed calls that method at the end of a load of only the weights. The values come from the saved ZeRO state
        in ``weights_from`` or, if that is ``None``, from the model's 16-bit weights.
        """
        if self.weights_from is None:
            nvme.refresh_fp32_weights(self.wrapper)
        else:
            nvme.restore(self.wrapper, self.optimizer, self.weights_from, load_states=False)

    def _set_full(self, original: Callable, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Replace the wrapper's ``set_full_hp_param``, which fails if ranks hold parts of different sizes.

        ``value``: new fp32 weights of the whole parameter or, with ``optim_state_key``, new values of this state.
        """
        if not param.requires_grad:
            return
        if value.numel() != param.ds_numel:
            shape = tuple(param.ds_shape)
            raise ValueError(
                f"safe_set_full_* needs all {param.ds_numel} elements of this parameter, whose shape is {shape}, got "
                f"{value.numel()}"
            )
        part = param.partition_numel()
        start = part * self.wrapper._get_param_partition_rank(param)
        local = value.flatten()[start : start + part]
        padded = torch.nn.functional.pad(local, (0, part - local.numel()))
        self.wrapper.set_local_hp_param(padded, param, optim_state_key)

    def _set_local(self, original: Callable, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Replace the wrapper's ``set_local_hp_param``, so that it works with NVMe and with an int8 momentum.

        ``value``: new fp32 weights of this rank's part or, with ``optim_state_key``, new values of this state.
        """
        if not param.requires_grad:
            return
        index, start, count = self.wrapper.grad_position[self.wrapper.get_param_id(param)]
        if value.numel() != count:
            raise ValueError(
                f"safe_set_local_* needs the {count} elements of this parameter on this rank, got {value.numel()}"
            )
        with nvme.swapped_in(self.wrapper, index) as flat:
            if optim_state_key is None:
                flat.data[start : start + count].copy_(value.flatten())
            else:
                self.optimizer.write_state(flat, optim_state_key, value, start)

    def _get_local(
        self, original: Callable, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[Tensor, int]:
        """Replace the wrapper's ``_get_fp32_opt_state_partition``, so that it decodes an int8 momentum.

        Return (this rank's part of the fp32 weights or optimizer state, index of the sub-group).
        """
        index, start, count = self.wrapper.grad_position[self.wrapper.get_param_id(param)]
        flat = self.wrapper.fp32_partitioned_groups_flat[index]
        if optim_state_key in self.optimizer.state[flat] or optim_state_key not in self.optimizer.state_keys(flat):
            return original(param, release_swap_buffers, optim_state_key)
        return self.optimizer.read_state(flat, optim_state_key, start, start + count), index

    def _offload(
        self,
        original: Callable,
        include: Any = None,
        device: Any = None,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Replace the wrapper's ``offload_states``: move fp32 weights and optimizer states, then call the original.

        The original moves the other kinds of state. It does not know Muon's state.
        """
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

        for kind, tensors in self._movable().items():
            if kind in self.wrapper.offloaded_states or (include is not None and kind not in include):
                continue
            for tensor in tensors:
                host = torch.empty_like(tensor, device="cpu", requires_grad=False)
                host = get_accelerator().pin_memory(host) if pin_memory else host
                tensor.data = host.copy_(tensor.detach(), non_blocking=non_blocking)
            self.wrapper.offloaded_states.add(kind)
        self.optimizer.workspace.clear()
        if not pin_memory:
            for name in _PINNED:  # DeepSpeed would reload what an earlier pinned offload has left in them
                vars(self.wrapper).pop(name, None)
        # DeepSpeed divides the weight buffer by the model's parameters in order, frozen ones included. But the buffer
        # holds only trained parameters, in the order of the groups: let DeepSpeed see those as the model's.
        in_order = [param for group in self.wrapper.fp16_groups for param in group]
        with patched(self.wrapper.module, parameters=lambda original: iter(in_order)):
            original(include, device or OffloadDeviceEnum.cpu, pin_memory, non_blocking)

    def _reload(self, original: Callable, non_blocking: bool = False) -> None:
        """Replace the wrapper's ``reload_states``: move back what :meth:`_offload` has moved, and call the original."""
        device = get_accelerator().current_device_name()
        hosts = []  # alive until the copies are done
        for kind, tensors in self._movable().items():
            if kind in self.wrapper.offloaded_states:
                for tensor in tensors:
                    hosts.append(tensor.data)
                    tensor.data = tensor.data.to(device, non_blocking=non_blocking)
                self.wrapper.offloaded_states.remove(kind)
        original(non_blocking)
        if non_blocking:
            get_accelerator().synchronize()

    def _movable(self) -> dict[Any, list[Tensor]]:
        """Return {DeepSpeed's kind of state: tensors to offload}, for the fp32 weights and the optimizer states."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if torch.is_tensor(value) and value.ndim]
        return {Kind.hp_params: list(self.wrapper.fp32_partitioned_groups_flat), Kind.optim_states: tensors}
