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

from deepspeed.muon.exchange.consensus import Agreed, agreed, same_on_all_ranks
from deepspeed.muon.exchange.placed_params import Partition, whole_partition
from deepspeed.muon.zero.wrappers.adapter import Adapter, Seam
from deepspeed.muon.zero.wrappers.gradient_norms import is_fp16_autocast, is_valid, mark_gradients, unfused_scaler
from deepspeed.muon.zero.wrappers.grids import shard_group, tp_group, tp_rank


class Stage0(Adapter):
    """The adapter for ``FP16_UnfusedOptimizer``, which DeepSpeed uses at stage 0 for 16-bit models.

    The optimizer updates fp32 clones of the model's parameters. A clone has the same index in its parameter group as
    the parameter, but it lacks the parameter's attributes.
    """

    MODULE, CLASS = "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"
    PATCHED: ClassVar[tuple[str, ...]] = ("step", "_update_scale")
    MORE_SEAMS = (Seam("deepspeed.runtime.engine", "DeepSpeedEngine.clip_fp32_gradients"),)

    def params(self, index: int) -> list[Any]:
        """Return the model's parameters in parameter group ``index``, in the order of the optimizer's fp32 clones."""
        return list(self.wrapper.fp16_groups[index])

    def partitions(self) -> list[Partition]:
        """Return a :class:`Partition`, the parameters and their tensors on this rank, for each parameter group.

        The tensors are whole parameters, or fp32 clones of them.
        """
        result = []
        for index, group in enumerate(self.optimizer.param_groups):
            process_group = shard_group(self.engine, group)
            rank, copies = comm.get_rank(process_group), comm.get_world_size(process_group)
            specs = [self.optimizer.specs[param] for param in self.params(index)]
            result.append(whole_partition(index, group["params"], specs, process_group, rank, copies))
        return result

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called during a step, whether the gradients are finite on all ranks.

        The function is a collective only with experts, pipeline stages or tensor parallelism.
        """
        engine, wrapper, is_finite = self.engine, self.wrapper, self.optimizer.has_finite_gradients
        if engine.has_moe_layers or engine.pipeline_parallelism:
            return lambda: agreed(is_finite())
        if tp_rank(engine)[1] > 1:
            return lambda: agreed(is_finite(), group=tp_group(engine))
        if hasattr(wrapper, "_skip_invalid_grad_norm"):
            return lambda: same_on_all_ranks(is_valid(wrapper._global_grad_norm))
        return lambda: same_on_all_ranks(is_finite())

    def prepare(self, group_count: int) -> None:
        """Make the engine scale an fp16 loss; under tensor parallelism or in a pipeline, correct the gradient norm."""
        # The wrapper computes the norm wrongly, because gradients lack the attributes that tell which ranks share a
        # parameter. It also calls a collective for each group, and stages may have different numbers of groups.
        if tp_rank(self.engine)[1] > 1 or self.engine.pipeline_parallelism:
            missing_groups = group_count - len(self.optimizer.param_groups)
            self.wrap_method("step", partial(self._with_all_norms, missing_groups))
        if self.wrapper.loss_scale_config.use_grad_scaling:
            self.engine.torch_autocast_z0_gradscaler = unfused_scaler(self.wrapper, self.patch)

    @contextmanager
    def _with_all_norms(self, missing_groups: int) -> Iterator[None]:
        """Return a context in which the wrapper computes the gradient norm correctly.

        It marks gradients (:func:`mark_gradients`), and adds ``missing_groups`` parameter groups of zeros, so that each
        pipeline stage has as many groups, and calls as many collectives, as the stage with the most groups.
        """
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
        """Copy the optimizer's fp32 weights into the model's parameters. Call this after loading fp32 weights."""
        for index, group in enumerate(self.optimizer.param_groups):
            for param, master in zip(self.params(index), group["params"], strict=True):
                if param is not master:
                    param.copy_(master)

    def patch_state_access(self) -> None:
        """Make ``safe_get_*`` and ``safe_set_*`` find the state, and checkpoints contain the names of parameters."""
        specs, count = self.optimizer.specs, len(self.optimizer.param_groups)
        names_of_groups = [[specs[param].name for param in self.params(i)] for i in range(count)]
        self.optimizer.saved_form.names_of_groups = names_of_groups
        for index, group in enumerate(self.optimizer.param_groups):
            for param, master in zip(self.params(index), group["params"], strict=True):
                whole = _Whole(self.optimizer, master)
                param._hp_mapping = None
                param.get_full_hp_param, param.set_full_hp_param = whole.get, whole.set
                param.get_full_hp_grad = _Whole().get  # returns None: gradients are in param.grad only


class Plain(Stage0):
    """The adapter for an engine without an optimizer wrapper: the optimizer updates the model's parameters directly."""

    MODULE, CLASS = "deepspeed.muon.optimizer", "MuonWithAuxAdam"
    PATCHED = ()

    def params(self, index: int) -> list[Any]:
        """Return the parameters of parameter group ``index``."""
        return self.optimizer.param_groups[index]["params"]

    def prepare(self, group_count: int) -> None:
        """Make checkpoints contain the state of the ``GradScaler`` that fp16 autocast uses.

        In a pipeline, also make the engine clip gradients by their norm over all pipeline stages, not only this one.
        """
        if self.engine.pipeline_parallelism:
            self.patch("clip_fp32_gradients", lambda _: self._clip_by_the_whole_norm(), owner=self.engine)
        is_fp16 = is_fp16_autocast(self.engine)
        self.optimizer.saved_form.scaler = self.engine.torch_autocast_z0_gradscaler if is_fp16 else None

    def _clip_by_the_whole_norm(self) -> None:
        """Clip the gradients by their norm over all pipeline stages. Change nothing if the norm is not finite."""
        from deepspeed.runtime.utils import get_weight_norm

        params = [param for param in self.engine.module.parameters() if param.grad is not None]
        mark_gradients(params)
        norm = self.engine._global_grad_norm = get_weight_norm([param.grad for param in params], mpu=self.engine.mpu)
        if norm > self.engine.gradient_clipping():
            torch._foreach_mul_([param.grad for param in params], self.engine.gradient_clipping() / (norm + 1e-6))


class _Whole:
    """Access to the fp32 weights (``master``) and optimizer state of one parameter that every rank holds whole.

    DeepSpeed's ``safe_get_*`` and ``safe_set_*`` call its methods. A pickled or copied instance has no optimizer: its
    ``get`` returns ``None``, and its ``set`` does nothing.
    """

    def __init__(self, optimizer: Any = None, master: Any = None) -> None:
        self._optimizer, self._master = optimizer, master

    def __reduce__(self) -> tuple:
        return _Whole, ()

    def _check(self, key: str) -> None:
        if key not in (keys := self._optimizer.state_keys(self._master)):
            raise ValueError(
                f"this parameter has no optimizer state {key!r}; pass one of the keys that it has: {', '.join(keys)}"
            )

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
