# SPDX-License-Identifier: Apache-2.0
"""MuonWithAuxAdam: parameter groups, state, and the step in three phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from deepspeed.muon.config import MuonConfig, parse
from deepspeed.muon.exchange import Exchange, Transit
from deepspeed.muon.groups import split_groups
from deepspeed.muon.logs import logger
from deepspeed.muon.orthogonalize import Workspace, bf16_is_fast, choose_method, flops, orthogonalize, resolve_dtype
from deepspeed.muon.owners import CostModel, flops_per_byte
from deepspeed.muon.placement import Placement, Shard
from deepspeed.muon.plan import Plan, make_plan
from deepspeed.muon.routing import MatrixSpec, route
from deepspeed.muon.update import SCALES, apply_, direction, momentum_


@dataclass(frozen=True)
class Partition:
    """Where the Muon parameters of one step of one group lie, over the ranks that share them.

    Args:
        tensors: the tensors that ``step`` will find in the group, in order: flat partitions under ZeRO,
            whole parameters otherwise.
        shards: the parameters they hold.
        group: process group of the ranks that share them, ``None`` for whole parameters.
    """

    tensors: tuple[Tensor, ...]
    shards: tuple[Shard, ...]
    group: Any = None
    rank: int = 0
    world_size: int = 1


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
            which keep the group's own settings (lr, weight_decay, momentum, betas, eps).
        model: whose modules decide the routing; see :func:`deepspeed.muon.routing.route`.
        config: every other keyword is a field of :class:`deepspeed.muon.config.MuonConfig`.

    State per tensor: ``momentum_buffer`` (Muon), or ``exp_avg`` and ``exp_avg_sq`` (AdamW), of the tensor's
    own shape and dtype, which under ZeRO is fp32; and ``step``.

    Raises:
        MuonConfigError: a wrong key or value.
        ValueError: a parameter that is not in ``model``.
    """

    def __init__(self, params: Iterable[Any], *, model: nn.Module, **config: Any) -> None:
        self.config: MuonConfig = parse(config)
        self.specs: dict[nn.Parameter, MatrixSpec] = route(model)
        self._bound: dict[int, _Bound] = {}
        self._is_bound = False
        self._work = Workspace()
        #: Called before an update; ``False`` skips it on every rank, for all groups alike.
        self.is_finite: Callable[[], bool] = self._gradients_are_finite
        super().__init__(split_groups(params, self.specs, self.config), defaults={})

    # ---- binding ----------------------------------------------------------------------------------

    def bind(self, partitions: Sequence[Partition], ns_dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Plan the exchange and allocate the state of every tensor. Called once, before the first step.

        Args:
            partitions: of all Muon groups; a group stepped in several calls has one per call.
            ns_dtype: dtype of Newton-Schulz and of what travels.
            device: where Newton-Schulz runs; by default where the tensors are.
        """
        self._bound.clear()
        for partition in partitions:
            where = partition.tensors[0].device if device is None else device
            plan = make_plan(partition.shards, partition.rank, partition.world_size, self._cost(ns_dtype, where))
            exchange = Exchange(partition.group, ns_dtype, where, self._work)
            self._bound[id(partition.tensors[0])] = _Bound(partition, plan, exchange)
            for tensor in partition.tensors:
                self._muon_state(tensor)
        self._is_bound = True

    @property
    def partitions(self) -> list[Partition]:
        """What was bound: where the Muon parameters lie."""
        return [bound.partition for bound in self._bound.values()]

    @property
    def plans(self) -> list[Plan]:
        """The bound plans, one per partition."""
        return [bound.plan for bound in self._bound.values()]

    @property
    def exchange(self) -> Exchange:
        """The exchange of the first partition; all share one dtype, device and workspace."""
        return next(iter(self._bound.values())).exchange

    def _cost(self, ns_dtype: torch.dtype, device: torch.device) -> CostModel:
        steps = len(self.config.schedule)

        def cost(rows: int, cols: int) -> float:
            return flops(rows, cols, steps, choose_method(rows, cols, self.config.ns_method))

        return CostModel(cost, flops_per_byte(device.type), ns_dtype.itemsize)

    def _bind_whole(self) -> None:
        """Bind the parameters themselves: plain PyTorch, every rank holds every matrix."""
        partitions = [whole_partition(g["params"], [self.specs[p] for p in g["params"]]) for g in self._muon_groups()]
        self.bind(partitions, resolve_dtype(self.config.ns_dtype, bf16_is_fast()))
        for group in self.param_groups:
            for tensor in () if group["use_muon"] else group["params"]:
                self.adam_state(tensor)

    def _muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"]]

    def _muon_state(self, tensor: Tensor) -> dict[str, Any]:
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum_buffer"] = torch.zeros_like(tensor, requires_grad=False)
        return state

    def adam_state(self, tensor: Tensor) -> dict[str, Any]:
        """The AdamW state of a tensor, zeros at first."""
        state = self.state[tensor]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            state["exp_avg"] = torch.zeros_like(tensor, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(tensor, requires_grad=False)
        return state

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
        if not self._is_bound and not self._bind_on_first_use():
            return loss
        if not self.is_finite():
            logger.warning("deepspeed-muon: the gradient is not finite; this step is skipped on all ranks")
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
            self._muon_state(tensor)["step"] += 1
        bound.exchange.run(
            bound.plan,
            prepare=lambda transit: self._prepare(group, transit),
            compute=self._orthogonalize,
            apply=lambda transit: self._apply(group, transit),
        )

    def _prepare(self, group: dict[str, Any], transit: Transit) -> None:
        """On the shard: momentum, Nesterov, cast, into the place from which it travels."""
        for run in transit.bucket.runs:
            tensor = group["params"][run.tensor]
            target = (transit.matrices if run.owned else transit.outbox)[run.at : run.at + run.length]
            if tensor.grad is None:
                target.zero_()
                continue
            grad = _slice(tensor.grad.contiguous(), run.start, run.length)
            buffer = _slice(self.state[tensor]["momentum_buffer"], run.start, run.length)
            momentum_(buffer, grad, group["momentum"])
            scratch = self._work.get("shard", (run.length,), grad.dtype, grad.device)
            target.copy_(direction(buffer, grad, group["momentum"], self.config.nesterov, out=scratch))

    def _orthogonalize(self, transit: Transit) -> None:
        """At the owner: equal shapes in one batch."""
        for batch in transit.bucket.batches:
            numel = batch.count * batch.rows * batch.cols
            matrices = transit.matrices[batch.start : batch.start + numel].view(batch.count, batch.rows, batch.cols)
            method = choose_method(batch.rows, batch.cols, self.config.ns_method)
            orthogonalize(matrices, self.config.schedule, method, work=self._work)

    def _apply(self, group: dict[str, Any], transit: Transit) -> None:
        """On the shard: decay and scaled update."""
        scale = SCALES[self.config.scale]
        for run in transit.bucket.runs:
            tensor = group["params"][run.tensor]
            if tensor.grad is None:
                continue
            result = (transit.matrices if run.owned else transit.outbox)[run.at : run.at + run.length]
            update = self._work.get("shard", (run.length,), tensor.dtype, tensor.device).copy_(result)
            target = _slice(tensor, run.start, run.length)
            apply_(target, update, group["lr"], scale(run.rows, run.cols), group["weight_decay"])

    def _adam_step(self, group: dict[str, Any]) -> None:
        """Run torch's fused AdamW over the group, equal to ``torch.optim.AdamW``."""
        tensors = [p for p in group["params"] if p.grad is not None]
        states = [self.adam_state(p) for p in tensors]
        if not tensors:
            return
        beta1, beta2 = group["betas"]
        function = adamw if self.config.adam_w_mode else adam
        function(
            tensors,
            [p.grad for p in tensors],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _slice(tensor: Tensor, start: int, length: int) -> Tensor:
    return tensor.view(-1)[start : start + length]


def whole_partition(tensors: Sequence[Tensor], specs: Sequence[MatrixSpec]) -> Partition:
    """The partition of parameters that this rank holds whole, each in its own tensor."""
    shards = [Shard(spec, i, Placement(0, spec.numel, 0)) for i, spec in enumerate(specs)]
    return Partition(tuple(tensors), tuple(shards))
