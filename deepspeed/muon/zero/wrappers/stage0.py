# SPDX-License-Identifier: Apache-2.0
"""Adapters for stage 0, at which every rank holds every parameter whole and the same averaged gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import deepspeed.comm as comm
import torch
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.exchange.partition import Partition, whole_partition
from deepspeed.muon.seam import Seam
from deepspeed.muon.zero.tp_ranks import tp_group, tp_rank
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.experts import shard_group
from deepspeed.muon.zero.wrappers.grad_norm import is_valid, mark_gradients
from deepspeed.muon.zero.wrappers.loss_scale import is_fp16_autocast, unfused_scaler


class Stage0(Adapter):
    """Adapter for ``FP16_UnfusedOptimizer``, with which the optimizer updates fp32 clones of 16-bit parameters.

    Clones lack the parameters' attributes; a clone and its parameter have the same index in their group.
    """

    MODULE, CLASS = "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"
    REPLACED: ClassVar[tuple[str, ...]] = ("step", "_update_scale")
    MORE_SEAMS = (Seam("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients"),)

    def params(self, index: int) -> list[Any]:
        """Return the model's parameters in group ``index``, in the order of the tensors that the optimizer updates."""
        return list(self.wrapper.fp16_groups[index])

    def partitions(self) -> list[Partition]:
        """Return one partition per group, with whole tensors."""
        result = []
        for index, group in enumerate(self.optimizer.param_groups):
            ranks = shard_group(self.engine, group)
            rank, copies = comm.get_rank(ranks), comm.get_world_size(ranks)
            specs = [self.optimizer.specs[param] for param in self.params(index)]
            result.append(whole_partition(index, group["params"], specs, ranks, rank, copies))
        return result

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that checks the wrapper's gradient norm or, if that is not enough, the gradients.

        Ranks have the same gradients, except for experts, pipeline stages and tensor-parallel parts: then they must
        agree. Before DeepSpeed 0.19.8 the wrapper steps with an infinite norm if all elements are finite.
        """
        engine, wrapper, is_finite = self.engine, self.wrapper, self.optimizer.has_finite_gradients
        if engine.has_moe_layers or engine.pipeline_parallelism:
            return lambda: agreed(is_finite())
        if tp_rank(engine)[1] > 1:
            return lambda: agreed(is_finite(), group=tp_group(engine))
        if hasattr(wrapper, "_skip_invalid_grad_norm"):
            return lambda: agreed(is_valid(wrapper._global_grad_norm), is_common=True)
        return lambda: agreed(is_finite(), is_common=True)

    def prepare(self, group_count: int) -> None:
        """Scale the loss in fp16; under tensor parallelism and in a pipeline, correct the wrapper's gradient norm.

        The wrapper computes it from gradients, which lack the marks that tell which ranks share a parameter, and in
        one collective per group over all stages, which a stage with fewer groups would not join.
        """
        if tp_rank(self.engine)[1] > 1 or self.engine.pipeline_parallelism:
            missing_groups = group_count - len(self.optimizer.param_groups)
            self.around("step", partial(self._with_all_norms, missing_groups))
        if self.wrapper.loss_scale_config.use_grad_scaling:
            self.engine.torch_autocast_z0_gradscaler = unfused_scaler(self.wrapper, self.replace)

    @contextmanager
    def _with_all_norms(self, missing_groups: int) -> Iterator[None]:
        """Mark the gradients, and add ``missing_groups`` groups with zero gradients while the context lasts."""
        mark_gradients(param for group in self.wrapper.fp16_groups for param in group)
        with ExitStack() as undo:
            for groups in (self.wrapper.fp16_groups, self.wrapper.fp32_groups):
                for _ in range(missing_groups):
                    nothing = torch.zeros(1, dtype=torch.float32, device=self.wrapper.fp32_groups[0][0].device)
                    nothing.grad = torch.zeros_like(nothing)
                    groups.append([nothing])
                    undo.callback(groups.pop)
            yield

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Copy the tensors that the optimizer updates to the model's parameters."""
        for index, group in enumerate(self.optimizer.param_groups):
            for param, master in zip(self.params(index), group["params"], strict=True):
                if param is not master:
                    param.copy_(master)

    def patch_state_access(self) -> None:
        """Give each parameter the methods that ``safe_get_*`` and ``safe_set_*`` call."""
        for index, group in enumerate(self.optimizer.param_groups):
            for param, master in zip(self.params(index), group["params"], strict=True):
                whole = _Whole(self.optimizer, master)
                param._hp_mapping = None
                param.get_full_hp_param, param.set_full_hp_param = whole.get, whole.set
                param.get_full_hp_grad = _Whole().get  # returns None: gradients are in param.grad only


class Plain(Stage0):
    """Adapter for an engine without a wrapper, whose optimizer updates the model's parameters themselves."""

    MODULE, CLASS = "deepspeed.muon.optimizer", "MuonWithAuxAdam"
    REPLACED = ()

    def params(self, index: int) -> list[Any]:
        """Return the parameters of group ``index``."""
        return self.optimizer.param_groups[index]["params"]

    def prepare(self, group_count: int) -> None:
        """Make checkpoints include the scaler of fp16 autocast; clip a pipeline by the norm of all its stages."""
        if self.engine.pipeline_parallelism:
            self.replace("clip_fp32_gradients", lambda _: self._clip_by_the_whole_norm(), owner=self.engine)
        is_fp16 = is_fp16_autocast(self.engine)
        self.optimizer.saved_form.scaler = self.engine.torch_autocast_z0_gradscaler if is_fp16 else None

    def _clip_by_the_whole_norm(self) -> None:
        """Clip the gradients by their norm over all stages, as at stage 1; ``step`` handles a non-finite one."""
        from deepspeed.runtime.utils import get_weight_norm

        params = [param for param in self.engine.module.parameters() if param.grad is not None]
        mark_gradients(params)
        norm = self.engine._global_grad_norm = get_weight_norm([param.grad for param in params], mpu=self.engine.mpu)
        if norm > self.engine.gradient_clipping():
            torch._foreach_mul_([param.grad for param in params], self.engine.gradient_clipping() / (norm + 1e-6))


class _Whole:
    """What ``safe_get_*`` and ``safe_set_*`` call to access a parameter that every rank holds whole.

    Pickling or copying it drops the optimizer, as a pickled or copied model has none; it then returns ``None``.
    """

    def __init__(self, optimizer: Any = None, master: Any = None) -> None:
        self._optimizer, self._master = optimizer, master

    def __reduce__(self) -> tuple:
        return _Whole, ()

    def _check(self, key: str) -> None:
        if key not in (keys := self._optimizer.state_keys(self._master)):
            raise ValueError(f"the optimizer state of this parameter has no {key!r}; it has {', '.join(keys)}")

    def get(self, optim_state_key: str | None = None) -> Tensor | None:
        if self._optimizer is None:
            return None
        if optim_state_key is None:
            return self._master.detach().to(torch.float32, copy=True)
        self._check(optim_state_key)
        return self._optimizer.read_state(self._master, optim_state_key).view(self._master.shape)

    def set(self, value: Tensor, optim_state_key: str | None = None) -> None:
        if self._optimizer is None:
            return
        if optim_state_key is None:
            self._master.detach().copy_(value.reshape(self._master.shape))
            return
        self._check(optim_state_key)
        self._optimizer.write_state(self._master, optim_state_key, value)
