# SPDX-License-Identifier: Apache-2.0
"""Models with experts: one that DeepSpeed's MoE spreads over ranks, its twin with all experts, and one for AutoEP."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from helpers.models import GLOBAL_BATCH, initialize_
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

    def __init__(self, spread: bool, width: int = 11, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.layer = spread_experts(width) if spread else AllExperts(width)
        self.lm_head = nn.Linear(width, 5)
        if not spread:
            initialize_(self, seed)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, a scalar; `inputs` (batch, 7), `targets` (batch, 5)."""
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        hidden = hidden + self.layer(hidden)[0]
        outputs = self.lm_head(hidden)
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        return F.mse_loss(outputs.to(dtype), targets.to(dtype))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs (GLOBAL_BATCH, 7) from N(0, 1), targets (GLOBAL_BATCH, 5) from N(0, 16), float32."""
        generator = torch.Generator().manual_seed(1000 + step)
        inputs, targets = (torch.randn(GLOBAL_BATCH, size, generator=generator) for size in (7, 5))
        return inputs, 4 * targets


def spread_experts(width: int) -> nn.Module:
    """DeepSpeed's layer of experts."""
    from deepspeed.moe.layer import MoE

    return MoE(width, Expert(width), EXPERTS, ep_size=EP, k=1, drop_tokens=False, use_rts=False)


def global_name(name: str, rank: int) -> str:
    """Return the twin's name for parameter `name` of `rank`: experts are numbered over all ranks."""
    first = rank % EP * (EXPERTS // EP)
    return _LOCAL.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)


def spread_model(width: int = 11, seed: int = 0) -> WithExperts:
    """Return the model with this rank's experts and the weights of its twin."""
    import torch.distributed as dist

    net, twin = WithExperts(True, width), WithExperts(False, width, seed).state_dict()
    weights: dict[str, Any] = {name: twin[global_name(name, dist.get_rank())] for name in net.state_dict()}
    net.load_state_dict(weights)
    return net


class Mixtral(MixtralForCausalLM):
    """A tiny Mixtral with two layers."""

    def __init__(self, experts: int = 4, seed: int = 0, key_heads: int = 1) -> None:
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
        initialize_(self, seed)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, summed over time, mean over the batch, a scalar; arguments (batch, time), int64."""
        logits = super().forward(input_ids=inputs).logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / len(inputs)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (GLOBAL_BATCH, time), int64; the targets are the inputs one token later."""
        generator = torch.Generator().manual_seed(1000 + step)
        text = torch.randint(VOCAB, (GLOBAL_BATCH, TIME + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def autoep(stage: int, ep: int, **config: Any) -> dict[str, Any]:
    """A ds_config with AutoEP."""
    from deepspeed.module_inject.auto_ep import AutoEP

    # Stock cannot register what records router logits with transformers from 5.20 on; nothing here reads them.
    AutoEP._retarget_transformers_output_recorders = lambda *_: None
    section = {"enabled": True, "autoep_size": ep, "preset_model": "mixtral", "use_grouped_mm": False}
    return ds_config(stage=stage, expert_parallel=section, **config)
