# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers with tensor parallelism and in pipelines: models and engines."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import megatron
from helpers.experts import EP, AllExperts, Mixtral, WithExperts, autoep, global_name, spread_experts, spread_model
from helpers.megatron import (
    ColumnParallelLinear,
    Mpu,
    RowParallelLinear,
    initialize_parts,
    squares,
)
from helpers.models import GLOBAL_BATCH, halve
from helpers.refusals import Refusal, attempt
from helpers.training import ds_config, make_engine

WIDTH, INNER = 12, 10


class First(nn.Linear):
    """Map inputs to the width of the experts."""

    def __init__(self) -> None:
        super().__init__(7, WIDTH)


class Mixture(nn.Module):
    """A feed-forward part that tensor parallelism splits, then experts, which `spread` puts on different ranks."""

    def __init__(self, group: Any, spread: bool = True) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, INNER, group)
        self.down = RowParallelLinear(INNER, WIDTH, group)
        self.layer = spread_experts(WIDTH) if spread else AllExperts(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return hidden + self.layer(hidden)[0]


class Last(nn.Module):
    """The head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


LAYERS = (First, Mixture, Mixture, Last)


class Mixed(nn.Sequential):
    """All layers, named by number as in a pipeline. Without `spread`, every rank has all experts."""

    def __init__(self, group: Any = None, spread: bool = False) -> None:
        super().__init__(*(kind(group, spread) if kind is Mixture else kind() for kind in LAYERS))
        if not spread:
            initialize_parts(self, None)

    batch = WithExperts.batch

    def __deepcopy__(self, memo: Any) -> "Mixed":
        copy = Mixed()
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar."""
        return squares(super().forward(inputs.to(self[0].weight.dtype)), targets)


def gather_on_gloo() -> None:
    """Replace DeepSpeed's gather of tokens, whose flat buffer for several axes NCCL accepts and gloo does not."""
    import deepspeed.comm as comm
    from deepspeed.moe import mappings
    from deepspeed.utils import bwc, groups

    def gather(tokens: Tensor, dim: int = 0) -> Tensor:
        group = bwc.bwc_tensor_model_parallel_group(groups.mpu)
        parts = [torch.empty_like(tokens) for _ in range(comm.get_world_size(group))]
        comm.all_gather(parts, tokens.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    mappings._gather_tokens = gather


def _take_weights(net: nn.Module, group: Any) -> None:
    """Set this rank's parts and experts to the values of the whole model."""
    whole, rank = Mixed().state_dict(), dist.get_rank()
    with torch.no_grad():
        for name, param in net.named_parameters():
            mine = whole[global_name(name, rank)]
            if hasattr(param, "partition_dim") and group is not None:
                mine = mine.chunk(dist.get_world_size(group), dim=param.partition_dim)[dist.get_rank(group)]
            param.copy_(mine)


def build(size: int = 1, stages: int = 0, seed: int = 0, cuts_experts: bool = False, **config: Any) -> Any:
    """Return an engine with `size` model-parallel ranks, its `model_group`; of a pipeline if there are `stages`."""
    mpu = Mpu(size)
    group = mpu.groups["model"] if size > 1 else None
    copies = dist.get_world_size() // (size * max(stages, 1))
    settings = ds_config(**{"stage": 1} | config) | {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // copies}
    if size > 1:
        gather_on_gloo()
    if stages:
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        specs = [LayerSpec(kind, group) if kind is Mixture else LayerSpec(kind) for kind in LAYERS]
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=size, num_dp=copies)
        net = PipelineModule(specs, topology=topology, loss_fn=squares, partition_method="uniform")
        settings |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // (2 * copies), "gradient_accumulation_steps": 2}
    else:
        net = Mixed(group, spread=True)
    _take_weights(net, group)
    for name, param in net.named_parameters():
        if cuts_experts and "experts" in name and name.endswith("up.weight"):
            param.tensor_model_parallel, param.partition_dim = True, 0
    given = {"mpu": mpu} if size > 1 and not stages else {}
    engine = make_engine(halve(net, seed), settings, model_parameters=list(net.parameters()), **given)
    engine.model_group = mpu.groups["model"]
    return engine


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return name in the whole model -> master weight, of this rank's layers and experts."""
    return {global_name(name, dist.get_rank() % EP): w for name, w in megatron.whole_weights(engine).items()}


def cut_experts() -> Refusal | None:
    """Return the refusal of an engine whose marks say that tensor parallelism split experts."""
    return attempt(lambda: build(size=2, cuts_experts=True))


def beside_autoep(kind: str) -> Refusal | None:
    """Return the refusal, if any, of AutoEP with Megatron's "mpu", Ulysses ("sequence") or in a "pipeline"."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import deepspeed

    net, config, given = Mixtral(), autoep(1, 2), {}
    if kind == "pipeline":
        net = PipelineModule([LayerSpec(Mixtral)], num_stages=1, loss_fn=squares)
    else:
        parallel_state_sp.initialize_sequence_parallel(2)
        given = {"mpu": Mpu(2) if kind == "mpu" else parallel_state_sp}
        config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * 2 // dist.get_world_size()
        config |= {"sequence_parallel_size": 2} if kind == "sequence" else {}
    params = list(net.parameters())
    return attempt(lambda: deepspeed.initialize(model=net, config=config, model_parameters=params, **given)[0])


def stock_on_sequences() -> dict[str, Tensor]:
    """Take a step of stock's AdamW with sequence parallelism; return this rank's weights under the twin's names."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import deepspeed

    gather_on_gloo()
    parallel_state_sp.initialize_sequence_parallel(2)
    net, rank, world = spread_model(), dist.get_rank(), dist.get_world_size()
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = ds_config(stage=1, clip=0.0, optimizer=adamw) | {"sequence_parallel_size": 2}
    config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * 2 // world
    groups = split({"params": list(net.parameters()), "name": "all"})
    engine = deepspeed.initialize(model=net, config=config, mpu=parallel_state_sp, model_parameters=groups)[0]
    engine.backward(engine(*(part.chunk(world)[rank] for part in net.batch(0))))
    engine.step()
    found = {global_name(name, rank): param.detach().clone() for name, param in net.named_parameters()}
    engine.destroy()
    return found
