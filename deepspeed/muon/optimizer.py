# SPDX-License-Identifier: Apache-2.0
"""MuonWithAuxAdam: parameter groups, state, and the step in three phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.exchange.exchange import BucketBuffers, Exchange, gather, scatter
from deepspeed.muon.exchange.host_staging import Staging
from deepspeed.muon.exchange.partition import Partition, whole_partition
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.selection import choose, missing
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.log import logger
from deepspeed.muon.lr_groups import GivenGroups
from deepspeed.muon.math import adamw, momentum
from deepspeed.muon.math.choice import choose_method, kind_of, pins
from deepspeed.muon.math.newton_schulz import bf16_is_fast, orthogonalize, resolve_dtype
from deepspeed.muon.math.scale import scale_factor
from deepspeed.muon.matrices.pipeline import stage_of
from deepspeed.muon.matrices.routing import MatrixSpec, route, shapes_of
from deepspeed.muon.param_groups import check_options, split_groups
from deepspeed.muon.plan.cost import cost_model
from deepspeed.muon.plan.owners import is_worth_sharing
from deepspeed.muon.plan.plan import Plan, make_plan
from deepspeed.muon.step_stats import StepStats


@dataclass(frozen=True)
class _Bound:
    partition: Partition
    plan: Plan
    exchange: Exchange


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, in one optimizer.

    Under DeepSpeed, ``"type": "Muon"`` in ds_config.json builds it. By hand, for plain PyTorch or
    ``deepspeed.initialize(optimizer=...)``::

        optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, weight_decay=0.1)

    Args:
        params: parameters, or groups of them. Each group is split into a Muon and an AdamW half, both of
            which keep the group's own settings (:data:`deepspeed.muon.config.fields.GROUP_KEYS`).
        model: whose modules decide the routing; see :func:`deepspeed.muon.matrices.routing.route`.
        config: every other keyword is a field of :class:`deepspeed.muon.config.schema.MuonConfig`.

    State per tensor: ``momentum_buffer`` (Muon), or ``exp_avg`` and ``exp_avg_sq`` (AdamW), of the tensor's
    own shape and dtype, which under ZeRO is fp32 (momentum: bf16 where ``momentum_dtype`` says so); and ``step``.

    Raises:
        MuonConfigError: a wrong key or value.
        ValueError: a parameter that is not in ``model``.
    """

    def __init__(self, params: Iterable[Any], *, model: nn.Module, **config: Any) -> None:
        self.config: MuonConfig = parse(config)
        self.specs: dict[nn.Parameter, MatrixSpec] = route(model, self.config.matrix_options)
        #: The stage of a pipeline that ``model`` is, and the options that a stage has to follow and this one does not.
        self.stage, self.idle = stage_of(model), check_options(model, self.specs.values(), self.config)
        #: How many matrices of each shape go to Newton-Schulz.
        self.shapes = shapes_of(self.specs.values())
        self._bound: dict[int, _Bound] = {}
        self._adam_partitions: list[Partition] = []
        self._binding: tuple[Sequence[Partition], torch.dtype, torch.device | None] | None = None
        self._work = Workspace()
        #: Who computes the operations of a step; equal on all ranks.
        self.kernels: Operations = reference.OPERATIONS
        #: Called before an update; ``False`` skips it on every rank, for all groups alike.
        self.is_finite: Callable[[], bool] = self._gradients_are_finite
        #: Called where an update is skipped.
        self.report_skip: Callable[[], None] = lambda: logger.warning(
            "deepspeed-muon: the gradient is not finite; this step is skipped on all ranks"
        )
        #: Entered around each phase of a step, by name: prepare, exchange, newton_schulz, apply, adamw.
        self.phase: Callable[[str], AbstractContextManager] = lambda name: nullcontext()
        #: Where the size of updates is recorded, if anywhere.
        self.step_stats: StepStats | None = None
        split = split_groups(params, self.specs, self.config)
        self._origins, self._given_lrs = split.origins, split.given_lrs
        #: Whether the config or a parameter group gives a learning rate; else stock's defaults act.
        self.sets_a_rate = split.sets_a_rate
        super().__init__(split.halves, defaults={})
        self.defaults["lr"] = split.reference_lr
        self.register_load_state_dict_pre_hook(momentum.hold)
        self.register_load_state_dict_post_hook(momentum.settle)
        self.register_load_state_dict_post_hook(MuonWithAuxAdam.bind_again)  # type: ignore[arg-type]

    @cached_property
    def given(self) -> GivenGroups:
        """The parameter groups as they were given, before the split: what a learning-rate scheduler should see."""
        return GivenGroups(self, self._origins, self._given_lrs, self.config.betas)

    # ---- binding ----------------------------------------------------------------------------------

    def bind(self, partitions: Sequence[Partition], ns_dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Plan the exchange and allocate the state of every tensor that has none. Called before the first step.

        Args:
            partitions: of all groups; a group stepped in several calls has one per call.
            ns_dtype: dtype of Newton-Schulz and of what travels.
            device: where Newton-Schulz runs; by default where the tensors are.
        """
        self._bound.clear()
        self._adam_partitions = [p for p in partitions if not self.param_groups[p.index]["use_muon"]]
        for partition in self._adam_partitions:
            for tensor in partition.tensors:
                self.create_state(tensor, use_muon=False)
        shards = partitions[0].tensors[0].device
        where = shards if device is None else device
        staging = Staging(where) if where.type != shards.type else None
        for partition in partitions:
            group = self.param_groups[partition.index]
            if not group["use_muon"]:
                continue
            kind = kind_of(where.type, ns_dtype.itemsize)
            group["ns_methods"] = pins(self.shapes, kind) | group.get("ns_methods", {})
            settings = group["ns_method"], self.config.schedule, ns_dtype.itemsize, where.type
            cost = cost_model(*settings, group["ns_methods"])
            if partition.is_replicated and not is_worth_sharing(partition.blocks, partition.world_size, cost):
                partition = partition.alone()
            plan = make_plan(partition.planned, partition.rank, partition.world_size, cost)
            exchange = Exchange(partition.group, ns_dtype, where, self._work, group["name"], staging)
            self._bound[id(partition.tensors[0])] = _Bound(partition, plan, exchange)
            for tensor in partition.tensors:
                self.create_state(tensor, use_muon=True)
        self._binding = (partitions, ns_dtype, device)

    def bind_again(self) -> None:
        """After a load, whose settings act: each matrix gets the owner and the batch that it had in the saved run."""
        if self._binding is not None:
            self.bind(*self._binding)

    @property
    def partitions(self) -> list[Partition]:
        """Where the Muon parameters lie, as bound."""
        return [bound.partition for bound in self._bound.values()]

    @property
    def all_partitions(self) -> list[Partition]:
        """Where all parameters lie, as bound."""
        return [*self.partitions, *self._adam_partitions]

    @property
    def plans(self) -> list[Plan]:
        """The bound plans, one per partition."""
        return [bound.plan for bound in self._bound.values()]

    @property
    def exchange(self) -> Exchange:
        """The exchange of the first partition; all share one dtype, device and workspace."""
        return next(iter(self._bound.values())).exchange

    def release_workspace(self) -> None:
        """Give back the memory of temporaries; the next step takes it again."""
        self._work.clear()

    def _bind_whole(self) -> None:
        """Bind the parameters themselves: plain PyTorch, every rank holds every matrix."""
        if self.config.ns_tuning == "measured":  # ranks that nobody compares could find different methods
            logger.warning("deepspeed-muon: ns_tuning: measured acts under DeepSpeed only; the shipped rule is taken")
        partitions = [
            whole_partition(index, group["params"], [self.specs[param] for param in group["params"]])
            for index, group in enumerate(self.param_groups)
        ]
        self.kernels = choose(missing(self.config.kernels, {p.device.type for p in self.specs}))
        self.bind(partitions, resolve_dtype(self.config.ns_dtype, bf16_is_fast()))

    def create_state(self, tensor: Tensor, use_muon: bool) -> dict[str, Any]:
        """The state of a tensor, zeros of its size where it has none yet. It is updated in place ever after."""
        state = self.state[tensor]
        if use_muon:
            return momentum.state_of(state, tensor, self.config.momentum_dtype)
        return adamw.state_of(state, tensor)

    # ---- the step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tensors of the groups that are present.

        ZeRO calls this once per group or sub-group, in the same order on all ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._binding is None and not self._bind_on_first_use():
            return loss
        if not self.is_finite():
            self.report_skip()
            return loss
        for group in self.param_groups:
            if group["params"]:
                (self._muon_step if group["use_muon"] else self._adam_step)(group)
        return loss

    def _bind_on_first_use(self) -> bool:
        tensors = [p for group in self.param_groups for p in group["params"]]
        if all(p in self.specs for p in tensors):
            self._bind_whole()
            return True
        if all(p.grad is None or not p.grad.any() for p in tensors):
            return False  # DeepSpeed's fp16 wrapper makes one step with zero gradients before it is complete.
        raise RuntimeError(
            "MuonWithAuxAdam got flattened parameters of a wrapper that it does not know; under DeepSpeed pass it to "
            'deepspeed.initialize, or set "type": "Muon" in ds_config.json'
        )

    def _gradients_are_finite(self) -> bool:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return True
        norms = torch._foreach_norm(grads)
        return bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all())

    def _muon_step(self, group: dict[str, Any]) -> None:
        bound = self._bound.get(id(group["params"][0]))
        if bound is None:
            raise RuntimeError(
                f"group {group['name']!r} holds tensors that were not there when the optimizer was bound"
            )
        for tensor in group["params"]:
            self.create_state(tensor, use_muon=True)["step"] += 1
        bound.exchange.run(
            bound.plan,
            prepare=lambda buffers: self._prepare(group, buffers),
            compute=lambda buffers: self._orthogonalize(group, buffers),
            apply=lambda buffers: self._apply(group, buffers),
            phase=self.phase,
        )

    def _prepare(self, group: dict[str, Any], buffers: BucketBuffers) -> None:
        """On the shard: momentum, Nesterov, cast, into the place from which it travels."""
        for run, target in zip(buffers.bucket.runs, buffers.shard_slices, strict=True):
            tensor = group["params"][run.tensor]
            if tensor.grad is None:
                target.zero_()
                continue
            state = self.state[tensor]
            grad = gather(tensor.grad.contiguous(), run, self._work, "gradient")
            buffer = gather(state["momentum_buffer"], run, self._work, "momentum")
            decay, nesterov = group["momentum"], group["nesterov"]
            if self.config.momentum_dtype == "bf16":
                name, first = run.draws
                key = key_of(name, int(state["step"]))
                self.kernels.advance_rounded(buffer, grad, target, decay, nesterov, key, first, self._work)
            else:
                self.kernels.advance(buffer, grad, target, decay, nesterov, self._work)
            scatter(buffer, state["momentum_buffer"], run)

    def _orthogonalize(self, group: dict[str, Any], buffers: BucketBuffers) -> None:
        """At the owner: equal shapes in one batch."""
        for batch in buffers.bucket.batches:
            numel = batch.count * batch.rows * batch.cols
            matrices = buffers.matrices[batch.start : batch.start + numel].view(batch.count, batch.rows, batch.cols)
            kind = kind_of(matrices.device.type, matrices.element_size())
            method = choose_method(batch.rows, batch.cols, group["ns_method"], kind, group["ns_methods"])
            orthogonalize(matrices, self.config.schedule, method, work=self._work, kernels=self.kernels)

    def _apply(self, group: dict[str, Any], buffers: BucketBuffers) -> None:
        """On the shard: decay and scaled update."""
        for run, result in zip(buffers.bucket.runs, buffers.shard_slices, strict=True):
            tensor = group["params"][run.tensor]
            if tensor.grad is None:
                continue
            target = gather(tensor, run, self._work, "parameter")
            scale = scale_factor(group["adjust_lr_fn"], run.rows, run.cols, self.config.rms_scale)
            self.kernels.apply_(target, result, group["lr"], scale, group["weight_decay"], self._work)
            scatter(target, tensor, run)
            if self.step_stats is not None:
                norm = torch.linalg.vector_norm(result, dtype=torch.float32)
                self.step_stats.add("muon", norm.square() * scale**2, run.length)

    def _adam_step(self, group: dict[str, Any]) -> None:
        tensors = [p for p in group["params"] if p.grad is not None]
        with self.phase("adamw"):
            states = [self.create_state(p, use_muon=False) for p in tensors]
            adamw.step(tensors, states, group, self.config.adam_w_mode)
        if self.step_stats is not None:
            stepped = {id(p): state for p, state in zip(tensors, states, strict=True)}
            for partition in self._adam_partitions:
                for tensor, start, length in partition.held():
                    if id(tensor) in stepped:
                        squares = adamw.update_squares(stepped[id(tensor)], group, start, length)
                        self.step_stats.add("adamw", squares, length)
