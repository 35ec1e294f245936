# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor parallelism: layers that hold parts of matrices, with Megatron's marks, and engines
that train them with a model-parallel unit (mpu) or in a pipeline.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import ColumnParallel, RowParallel
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models import GLOBAL_BATCH, halve, squares, vectors
from helpers.training import ds_config, make_engine

INPUTS, WIDTH, HEADS, INNER, OUTPUTS, TIME = 7, 12, 4, 10, 5, 4


def _part(count: int, group: Any) -> int:
    return count if group is None else count // dist.get_world_size(group)


def _mark(param: nn.Parameter, axis: int, stride: int) -> None:
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, axis, stride


class ColumnParallelLinear(nn.Module):
    """A linear layer split by outputs: a rank has the same share of each of the `stride` parts of the whole."""

    def __init__(self, inputs: int, outputs: int, group: Any, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(_part(outputs, group), inputs))
        self.bias = nn.Parameter(torch.empty(_part(outputs, group))) if bias else None
        for param in self.parameters():
            _mark(param, 0, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(ColumnParallel.apply(self.group, hidden), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer split by inputs; every rank has the whole bias."""

    def __init__(self, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(outputs, _part(inputs, group)))
        self.bias = nn.Parameter(torch.empty(outputs))
        _mark(self.weight, 1, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return RowParallel.apply(self.group, F.linear(hidden, self.weight), False) + self.bias


class ParallelBlock(nn.Module):
    """Causal self-attention and a gated MLP, each after a LayerNorm, on (batch, time, width)."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.attention_norm = nn.LayerNorm(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, ColumnParallelLinear(WIDTH, WIDTH, group, bias=False))
        self.o_proj = RowParallelLinear(WIDTH, WIDTH, group)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.gate_up_proj = ColumnParallelLinear(WIDTH, 2 * INNER, group, stride=2)
        self.down_proj = RowParallelLinear(INNER, WIDTH, group)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        queries, keys, values = (
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down_proj(torch.tanh(gate) * up)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


LAYERS: list[tuple[Any, ...]] = [(nn.Linear, INPUTS, WIDTH), (ParallelBlock,), (ParallelBlock,), (Head,)]
"""Kind and sizes. The first and the last are whole on every rank, without marks; the others are given a group."""


def _arguments(layer: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    return (group,) if layer[0] is ParallelBlock else layer[1:]


class Stack(nn.Sequential):
    """All layers, named by number as in a pipeline; without a tensor-parallel group, all are whole."""

    def __init__(self, group: Any = None) -> None:
        super().__init__(*(layer[0](*_arguments(layer, group)) for layer in LAYERS))
        initialize_parts(self, group)

    def __deepcopy__(self, memo: Any) -> "Stack":
        copy = Stack()
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return squares(super().forward(inputs.to(self[0].weight.dtype)), targets)

    @staticmethod
    def batch(step: int) -> tuple[Tensor, Tensor]:
        return vectors(step, (TIME, INPUTS), (TIME, OUTPUTS))


def initialize_parts(model: nn.Module, group: Any) -> None:
    """Set each parameter to this rank's part of whole values that depend only on its name."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_cut, axis = group is not None and hasattr(param, "partition_dim"), getattr(param, "partition_dim", 0)
            ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_cut else (1, 0)
            shape = [size * ranks if i == axis else size for i, size in enumerate(param.shape)]
            generator = torch.Generator().manual_seed(zlib.crc32(f"0 {name}".encode()))
            scale = 0.1 if param.ndim == 1 else shape[1] ** -0.5
            whole = torch.randn(shape, generator=generator) * scale + float(name.endswith("norm.weight"))
            parts = whole.chunk(getattr(param, "partition_stride", 1), dim=axis)
            param.copy_(torch.cat([part.chunk(ranks, dim=axis)[rank] for part in parts], dim=axis))


class Mpu:
    """The functions of Megatron's mpu that DeepSpeed calls. Neighbouring ranks form the groups of kind `first`."""

    def __init__(self, size: int, first: str = "model") -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        ranks = torch.arange(world).view(-1, size) if first == "model" else torch.arange(world).view(size, -1).T
        self.groups = {}
        for kind, lines in {"model": ranks.tolist(), "data": ranks.T.tolist()}.items():
            made = [dist.new_group(line) for line in lines]
            self.groups[kind] = next(group for group, line in zip(made, lines, strict=True) if rank in line)

    def __getattr__(self, name: str) -> Any:
        """Return get_{,tensor_}model_parallel_{rank,world_size,group}, or the same for data_parallel."""
        action, _, rest = name.removeprefix("get_").removeprefix("tensor_").partition("_parallel_")
        if action not in ("model", "data") or rest not in ("rank", "world_size", "group"):
            raise AttributeError(name)
        group = self.groups[action]
        answers = {"rank": dist.get_rank(group), "world_size": dist.get_world_size(group), "group": group}
        return lambda: answers[rest]


def build(size: int = 2, stages: int = 0, seed: int = 0, first: str = "model", **config: Any) -> Any:
    """Return an engine of `LAYERS` with `size` model-parallel ranks; of a pipeline if there are `stages`."""
    from deepspeed.pipe import LayerSpec

    def specs(group: Any) -> list[Any]:
        return [LayerSpec(layer[0], *_arguments(layer, group)) for layer in LAYERS]

    return make_parallel_engine(Stack, specs, Stack.batch, initialize_parts, size, stages, seed, first, **config)


def make_parallel_engine(
    whole: Callable[[Any], nn.Module],
    specs: Callable[[Any], list[Any]],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    initialize: Callable[[nn.Module, Any], None],
    size: int,
    stages: int,
    seed: int,
    first: str = "model",
    **config: Any,
) -> Any:
    """Return an engine, with its `model_group`, of a `whole` model or, if there are `stages`, of a pipeline.

    `whole` and `specs` get the group of `size` model-parallel ranks, None if that is 1; `initialize` sets the weights.
    """
    mpu = Mpu(size, first)
    group = mpu.groups["model"] if size > 1 else None
    copies = dist.get_world_size() // (size * max(stages, 1))
    settings = ds_config(**{"stage": 1} | config) | {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // copies}
    if stages:
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=size, num_dp=copies)
        net = PipelineModule(specs(group), topology=topology, loss_fn=squares, partition_method="uniform")
        net.batch = batch
        settings |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // (2 * copies), "gradient_accumulation_steps": 2}
    else:
        net = whole(group)
    initialize(net, group)
    given = {} if stages else {"mpu": mpu}
    engine = make_engine(halve(net, seed), settings, model_parameters=list(net.parameters()), **given)
    engine.model_group = mpu.groups["model"]
    return engine
