# SPDX-License-Identifier: Apache-2.0
"""Models with experts: one that DeepSpeed's MoE spreads over ranks, its twin with all experts, one for AutoEP, and one
with tensor parallelism or in a pipeline.
"""

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from helpers import megatron, tensor_parallel
from helpers.megatron import ColumnParallelLinear, RowParallelLinear, initialize_parts
from helpers.models import cross_entropy, initialize_, squares, text, vectors
from helpers.refusals import Refusal, attempt
from helpers.training import ds_config

EXPERTS, EP = 4, 2
"""Experts of the layer, and over how many ranks it spreads them."""
VOCAB, WIDTH, INNER, TIME = 19, 12, 10, 5
"""Of the Mixtral."""
_LOCAL = re.compile(r"(deepspeed_experts\.)(\d+)")


class Expert(nn.Module):
    """Two linear maps with tanh between them, of a width at which matrices straddle partitions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width - 1)
        self.down = nn.Linear(width - 1, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class AllExperts(nn.Module):
    """Apply to each token the expert with the highest gate probability, times that probability."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(width, EXPERTS, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(Expert(width) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None, None]:
        gates = self.deepspeed_moe.gate.wg(hidden).softmax(-1)
        outputs = torch.stack([expert(hidden) for expert in self.deepspeed_moe.experts.deepspeed_experts], 1)
        chosen = F.one_hot(gates.argmax(-1), EXPERTS) * gates
        return (outputs * chosen[:, :, None]).sum(1), None, None


class WithExperts(nn.Module):
    """A linear map, a layer of experts with a residual connection, and a head.

    `spread`: DeepSpeed's MoE spreads the experts over ranks; otherwise every rank has all of them.
    """

    def __init__(self, spread: bool, width: int = 11) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.layer = spread_experts(width) if spread else AllExperts(width)
        self.lm_head = nn.Linear(width, 5)
        if not spread:
            initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        hidden = hidden + self.layer(hidden)[0]
        return squares(self.lm_head(hidden), targets)

    @staticmethod
    def batch(step: int) -> tuple[Tensor, Tensor]:
        return vectors(step, (7,), (5,))


def spread_experts(width: int) -> nn.Module:
    from deepspeed.moe.layer import MoE

    return MoE(width, Expert(width), EXPERTS, ep_size=EP, k=1, drop_tokens=False, use_rts=False)


def global_name(name: str, rank: int) -> str:
    """Return the twin's name for parameter `name` of `rank`: experts are numbered over all ranks."""
    first = rank % EP * (EXPERTS // EP)
    return _LOCAL.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)


def spread_model(width: int = 11) -> WithExperts:
    """Return the model with this rank's experts and the weights of its twin."""
    net, twin = WithExperts(True, width), WithExperts(False, width).state_dict()
    weights: dict[str, Any] = {name: twin[global_name(name, dist.get_rank())] for name in net.state_dict()}
    net.load_state_dict(weights)
    return net


class Mixtral(MixtralForCausalLM):
    def __init__(self, experts: int = 4, key_heads: int = 1) -> None:
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=key_heads,
            num_local_experts=experts,
            num_experts_per_tok=2,
            max_position_embeddings=TIME,
            attn_implementation="eager",
            experts_implementation="eager",  # the other one knows no float64
            use_cache=False,
        )
        super().__init__(config)
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(super().forward(input_ids=inputs).logits, targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return text(step, VOCAB, TIME)


def autoep(stage: int, ep: int, **config: Any) -> dict[str, Any]:
    from deepspeed.module_inject.auto_ep import AutoEP

    # Stock cannot register what records router logits with transformers from 5.20 on; nothing here reads them.
    AutoEP._retarget_transformers_output_recorders = lambda *_: None
    section = {"enabled": True, "autoep_size": ep, "preset_model": "mixtral", "use_grouped_mm": False}
    return ds_config(stage=stage, expert_parallel=section, **config)


# ---- with tensor parallelism and in pipelines ----------------------------------------------------------------------


class First(nn.Linear):
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

    batch = staticmethod(WithExperts.batch)

    def __deepcopy__(self, memo: Any) -> "Mixed":
        copy = Mixed()
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
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


def build_beside(size: int = 1, stages: int = 0, seed: int = 0, cuts_experts: bool = False, **config: Any) -> Any:
    """Return an engine with `size` model-parallel ranks; of a pipeline if there are `stages`."""
    from deepspeed.pipe import LayerSpec

    if size > 1:
        gather_on_gloo()

    def initialize(net: nn.Module, group: Any) -> None:
        _take_weights(net, group)
        for name, param in net.named_parameters() if cuts_experts else ():
            if "experts" in name and name.endswith("up.weight"):
                param.tensor_model_parallel, param.partition_dim = True, 0

    def specs(group: Any) -> list[Any]:
        return [LayerSpec(kind, group) if kind is Mixture else LayerSpec(kind) for kind in LAYERS]

    whole = partial(Mixed, spread=True)
    return megatron.make_parallel_engine(whole, specs, Mixed.batch, initialize, size, stages, seed, **config)


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return name in the whole model -> master weight, of this rank's layers and experts."""
    return {global_name(name, dist.get_rank() % EP): w for name, w in tensor_parallel.whole_weights(engine).items()}


def cut_experts() -> Refusal | None:
    return attempt(lambda: build_beside(size=2, cuts_experts=True))
