# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor parallelism: layers that hold parts of matrices, with Megatron's marks, and jobs that train them
with a model-parallel unit (mpu) or in a pipeline.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models import GLOBAL_BATCH
from helpers.training import ds_config, make_engine

INPUTS, WIDTH, HEADS, INNER, OUTPUTS, TIME = 7, 12, 4, 10, 5, 4
STAGES = 2
"""Of the pipelines; each has one block."""


class _Copy(torch.autograd.Function):
    """Pass activations to all ranks of a group; sum their gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Sum activations over the ranks of a group; pass gradients through."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        hidden = hidden.contiguous().clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


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
        hidden = hidden if self.group is None else _Copy.apply(hidden, self.group)
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer split by inputs; every rank has the whole bias."""

    def __init__(self, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(outputs, _part(inputs, group)))
        self.bias = nn.Parameter(torch.empty(outputs))
        _mark(self.weight, 1, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        mine = F.linear(hidden, self.weight)
        return (mine if self.group is None else _Sum.apply(mine, self.group)) + self.bias


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
    """A norm and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(outputs.to(dtype := torch.promote_types(outputs.dtype, torch.float32)), targets.to(dtype))


LAYERS: list[tuple[Any, ...]] = [(nn.Linear, INPUTS, WIDTH), (ParallelBlock,), (ParallelBlock,), (Head,)]
"""Kind and sizes. The first and the last are whole on every rank, without marks; the others are given a group."""


def _arguments(layer: tuple[Any, ...], group: Any) -> tuple[Any, ...]:
    return (group,) if layer[0] is ParallelBlock else layer[1:]


class Stack(nn.Sequential):
    """All layers, named by number as in a pipeline; without a tensor-parallel group, all are whole."""

    def __init__(self, group: Any = None, seed: int = 0) -> None:
        super().__init__(*(layer[0](*_arguments(layer, group)) for layer in LAYERS))
        initialize_parts(self, group, seed)

    def __deepcopy__(self, memo: Any) -> "Stack":
        copy = Stack()
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar."""
        return squares(super().forward(inputs.to(self[0].weight.dtype)), targets)

    batch = staticmethod(lambda step: batch(step))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs (GLOBAL_BATCH, TIME, INPUTS) from N(0, 1), targets (GLOBAL_BATCH, TIME, OUTPUTS) from N(0, 16)."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs, targets = (torch.randn(GLOBAL_BATCH, TIME, size, generator=generator) for size in (INPUTS, OUTPUTS))
    return inputs, 4 * targets


def initialize_parts(model: nn.Module, group: Any, seed: int) -> None:
    """Set each parameter to this rank's part of whole values that depend only on its name and `seed`."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_cut, axis = group is not None and hasattr(param, "partition_dim"), getattr(param, "partition_dim", 0)
            ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if is_cut else (1, 0)
            shape = [size * ranks if i == axis else size for i, size in enumerate(param.shape)]
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
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


def whole_weights(engine: Any, group: Any) -> dict[str, Tensor]:
    """Return name -> whole master weight of this rank's layers, joined over the model-parallel ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, param in engine.module.named_parameters():
        is_plain = engine.optimizer is engine.basic_optimizer
        mine = param.detach().clone() if is_plain else safe_get_full_fp32_param(param).detach().clone()
        shards: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shards, mine, group=group)
        if not hasattr(param, "partition_dim"):
            assert all(torch.equal(shards[0], copy) for copy in shards), f"copies of {name} differ"
            found[name] = mine
            continue
        pieces = [shard.chunk(param.partition_stride, dim=param.partition_dim) for shard in shards]
        turns = zip(*pieces, strict=True)
        found[name] = torch.cat([piece for turn in turns for piece in turn], dim=param.partition_dim)
    return found


@contextmanager
def engine_of(
    size: int, stages: int = 0, seed: int = 0, first: str = "model", **config: Any
) -> Iterator[tuple[Any, Mpu]]:
    """Yield (engine with `size` model-parallel ranks, its mpu); with `stages`, of a pipeline with two micro-batches."""
    import deepspeed

    mpu = Mpu(size, first)
    if stages:
        yield from _pipeline(mpu, size, stages, seed, config)
        return
    settings = ds_config(**config) | {"train_micro_batch_size_per_gpu": GLOBAL_BATCH * size // dist.get_world_size()}
    engine = deepspeed.initialize(model=Stack(mpu.groups["model"], seed), config=settings, mpu=mpu)[0]
    yield engine, mpu
    engine.destroy()


def _pipeline(mpu: Mpu, size: int, stages: int, seed: int, config: dict[str, Any]) -> Iterator[tuple[Any, Mpu]]:
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    group, copies = mpu.groups["model"], dist.get_world_size() // (size * stages)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=size, num_dp=copies)
    specs = [LayerSpec(layer[0], *_arguments(layer, group)) for layer in LAYERS]
    net = PipelineModule(specs, topology=topology, loss_fn=squares, partition_method="uniform")
    initialize_parts(net, group, seed)
    settings = ds_config(**{"stage": 1} | config)
    settings |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // (2 * copies), "gradient_accumulation_steps": 2}
    engine = make_engine(net, settings)
    yield engine, mpu
    engine.destroy()


def train_steps(engine: Any, mpu: Mpu, steps: range) -> list[float]:
    """Train on the global batches of `steps`; ranks of one model copy get equal shares. Return the gradient norms."""
    norms, grid = [], getattr(engine, "grid", mpu)
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        share = [part.chunk(grid.get_data_parallel_world_size())[grid.get_data_parallel_rank()] for part in batch(step)]
        if grid is mpu:
            engine.backward(engine(*share))
            engine.step()
        else:
            micro = zip(*(part.chunk(2) for part in share), strict=True)
            engine.train_batch((inputs.to(dtype), targets) for inputs, targets in micro)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return norms


def train(size: int, steps: int, **config: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Train `steps` steps; return (whole weights of this pipeline stage, gradient norm of each step)."""
    with engine_of(size, **config) as (engine, mpu):
        norms = train_steps(engine, mpu, range(steps))
        return whole_weights(engine, mpu.groups["model"]), norms


def go_on(size: int, folder: str, load: bool, **config: Any) -> dict[str, Tensor] | str:
    """Return weights and states after three steps, saved after the first or loaded from there; or the load's error."""
    with engine_of(size, seed=int(load), **config) as (engine, mpu):
        if load:
            try:
                engine.load_checkpoint(folder)
            except ValueError as error:
                return str(error)
        else:
            train_steps(engine, mpu, range(1))
            engine.save_checkpoint(folder)
        train_steps(engine, mpu, range(1, 3))
        return everything(engine)


def everything(engine: Any) -> dict[str, Tensor]:
    """Return copies of this rank's parameters and states, as they are sharded."""
    states = engine.basic_optimizer.state.values()
    kept = {f"{i} {key}": value.clone() for i, state in enumerate(states) for key, value in state.items()}
    params = engine.module.named_parameters()
    return kept | {name: getattr(param, "ds_tensor", param).detach().clone() for name, param in params}


@contextmanager
def spoiled(engine: Any, name: str, rank: int) -> Iterator[None]:
    """Within the context, make the gradients of parameter `name` on `rank` NaN."""
    found = dict(engine.module.named_parameters()) if dist.get_rank() == rank else {}
    hooks = [found[name].register_hook(lambda gradient: gradient * torch.nan)] if found else []
    yield
    for hook in hooks:
        hook.remove()


def around_a_bad_step(engine: Any, take: Callable[[range], Any], name: str, rank: int) -> tuple[list[str], bool]:
    """Take a step with a NaN gradient on `rank`; return (what it changed, whether the next step changed anything)."""
    take(range(1))
    before = everything(engine)
    with spoiled(engine, name, rank):
        take(range(1, 2))
    after = everything(engine)
    take(range(2, 3))
    last = everything(engine)
    is_finite = all(bool(value.isfinite().all()) for value in last.values())
    return differing(before, after), is_finite and len(differing(after, last)) > 1


def step_badly(size: int, name: str, **config: Any) -> tuple[list[str], bool]:
    """Return :func:`around_a_bad_step` with a bad gradient on the last rank."""
    with engine_of(size, **config) as (engine, mpu):
        return around_a_bad_step(engine, partial(train_steps, engine, mpu), name, dist.get_world_size() - 1)


def differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Return the names of values that are not bitwise equal."""
    assert before.keys() == after.keys()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]
