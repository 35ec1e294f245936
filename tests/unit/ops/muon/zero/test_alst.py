# SPDX-License-Identifier: Apache-2.0
"""Ulysses of DeepSpeed's ALST, inside of a model of transformers: ranks hold parts of the time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.distributed import run
from helpers.models import GLOBAL_BATCH, initialize_
from helpers.oracles import route, train_oracle
from helpers.parity import assert_parity
from helpers.training import ORACLE, ds_config, fp32_weights

STEPS, CLIP, VOCAB, TIME = 3, 1.0, 17, 6
pytest.importorskip("transformers")
pytest.importorskip("einops", reason="DeepSpeed's ALST needs it")


class Llama(nn.Module):
    """One layer, four query and two key-value heads; its loss is summed over the time from `first` on."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
        self.net = LlamaForCausalLM(config)
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor, first: int = 0) -> Tensor:
        """Cross-entropy, a scalar; arguments (batch, time), int64."""
        positions = torch.arange(first, first + inputs.shape[1]).expand(len(inputs), -1)
        logits = self.net(input_ids=inputs, position_ids=positions, use_cache=False).logits.flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / len(inputs)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (GLOBAL_BATCH, TIME), one token apart."""
        text = torch.randint(VOCAB, (GLOBAL_BATCH, TIME + 1), generator=torch.Generator().manual_seed(step))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(stage: int) -> dict[str, Tensor]:
    """Master weights on ranks of which each two share a sequence."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import deepspeed

    rank, rows, time = dist.get_rank(), GLOBAL_BATCH * 2 // dist.get_world_size(), TIME // 2
    own: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        net = Llama()
        mpu = UlyssesSPAttentionHF.register_with_transformers(net.net, "sdpa", 2, micro_batch_size=rows)
        config = ds_config(stage=stage, clip=CLIP) | {"train_micro_batch_size_per_gpu": rows}
        engine = deepspeed.initialize(model=net, config=config | {"sequence_parallel_size": 2}, mpu=mpu)[0]
        top, first = rank // 2 * rows, rank % 2 * time
        for step in range(STEPS):
            inputs, targets = (part[top : top + rows, first : first + time] for part in net.batch(step))
            engine.backward(engine(inputs, targets, first))
            engine.step()
        weights = fp32_weights(engine)
        engine.destroy()
        return weights
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


@pytest.mark.parametrize("stage", [2, 3])
def test_training_equals_the_oracle(stage: int) -> None:
    """Gradients are summed over a sequence's ranks at stage 2 and averaged at stage 3; both are clipped to 1."""
    net = Llama()
    routing = route(net, ["net.model.embed_tokens", "net.lm_head"])
    expected = train_oracle(net, net.batch, STEPS, routing, replace(ORACLE, clip=CLIP))
    assert min(expected.norms) > 2 * CLIP
    for weights in run(train, 2, stage=stage):
        assert_parity(weights, expected)
