# SPDX-License-Identifier: Apache-2.0
"""AutoEP: the experts of a transformers model, spread over ranks, train as if they were all in one place."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from distributed import run
from models import GLOBAL_BATCH, initialize_, train_engine
from oracles import OracleResult, Part, change_error, train_oracle
from training import ORACLE, ds_config, fp32_weights, make_engine

STEPS, VOCAB, WIDTH, INNER, TIME = 5, 19, 12, 10, 5


class Mixtral(MixtralForCausalLM):
    """A tiny one with two layers."""

    def __init__(self, experts: int = 4, seed: int = 0) -> None:
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=experts,
            num_experts_per_tok=2,
            max_position_embeddings=TIME,
            attn_implementation="eager",
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


def train_spread(stage: int, experts: int, ep: int, **config: Any) -> dict[str, Tensor]:
    """Master weights of this rank, under stock's names, after the steps."""
    engine = make_engine(Mixtral(experts), autoep(stage, ep, **config))
    train_engine(engine, STEPS)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


def autoep(stage: int, ep: int, **config: Any) -> dict[str, Any]:
    """A ds_config with AutoEP."""
    from deepspeed.module_inject.auto_ep import AutoEP

    # Stock cannot register what records router logits with transformers from 5.20 on; nothing here reads them.
    AutoEP._retarget_transformers_output_recorders = lambda *_: None
    section = {"enabled": True, "autoep_size": ep, "preset_model": "mixtral", "use_grouped_mm": False}
    return ds_config(stage=stage, expert_parallel=section, **config)


def reference(experts: int, clip: float) -> OracleResult:
    """The oracle's training with all experts in one place; gate and up projections are two matrices."""
    net = Mixtral(experts)
    parts: dict[str, list[Part]] = {}
    for name, param in net.named_parameters():
        index = torch.arange(param.numel()).view(param.shape)
        if name.endswith("gate_up_proj"):
            parts[name] = [half for expert in index for half in expert.split(INNER)]
        elif name.endswith("down_proj"):
            parts[name] = list(index)
    to_adam = ("embed_tokens", "norm", "mlp.gate.weight", "lm_head")
    routing = {n: "adam" if any(part in n for part in to_adam) else "muon" for n, _ in net.named_parameters()}
    return train_oracle(net, net.batch, STEPS, routing, replace(ORACLE, clip=clip), parts=parts)


def of_rank(weights: dict[str, Tensor], rank: int, ep: int) -> dict[str, Tensor]:
    """The weights of the whole model as AutoEP lays them out on a rank."""
    found = {}
    for name, weight in weights.items():
        if ".experts." in name:
            prefix, leaf = name.rsplit(".", 1)
            mine = weight.chunk(ep)[rank % ep]
            pairs = {"w2": mine} if leaf == "down_proj" else dict(zip(("w1", "w3"), mine.chunk(2, 1), strict=True))
            found |= {f"{prefix}.{key}": value for key, value in pairs.items()}
        else:
            found[name.replace("mlp.gate", "mlp.router.gate")] = weight
    return found


@pytest.mark.parametrize(("world", "experts", "ep"), [(2, 4, 2), (4, 4, 2), (4, 2, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_of_all_experts_in_one_place(stage: int, world: int, experts: int, ep: int) -> None:
    clip = 1.0 if stage else 0.0
    expected = reference(experts, clip)
    for rank, weights in enumerate(run(train_spread, world, stage=stage, experts=experts, ep=ep, clip=clip)):
        initial, last = (of_rank(side, rank, ep) for side in (expected.initial, expected.weights))
        assert weights.keys() == last.keys()
        for name, weight in last.items():
            assert change_error(initial[name], weights[name], weight) <= 1e-3, (rank, name)
