# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's hybrid engine writes, and what it has to write."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from helpers import tensor_parallel
from helpers.models import full_weights

NEW = 4
"""Tokens that are written after each prompt."""


def generated(engine: Any) -> Tensor:
    """Return what an engine writes in its phase of generation; a Qwen by a rollout."""
    from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig, build_rollout

    prompts = engine.module.batch(99)[0] % 31 + 1  # none is padding
    engine.eval()
    if engine.module.kind == "qwen":
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
        rollout = build_rollout(SimpleNamespace(engine="hybrid_engine"), engine, tokenizer)
        request = RolloutRequest(prompts, torch.ones_like(prompts))
        text = rollout.generate(request, SamplingConfig(max_new_tokens=NEW, temperature=0.0)).input_ids
    else:
        text = write(engine.module, prompts)
    engine.train()
    return text


def write(net: Any, prompts: Tensor) -> Tensor:
    with torch.no_grad():
        return net.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False)


def expected_text(engine: Any) -> Tensor:
    """Return what a model of its own with the engine's weights writes."""
    weights = full_weights(engine.module)
    net: Any = tensor_parallel.model(engine.module.kind).to(next(iter(weights.values())).dtype)
    net.load_state_dict(weights, strict=False)
    return write(net.eval(), net.batch(99)[0] % 31 + 1)
