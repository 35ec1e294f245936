# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers with random weights, whose heads and fused weights are known."""

from typing import Any

import pytest
import transformers
from packaging.version import Version
from torch import nn

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
#: Gated linear attention, here a delta net of 2 key heads of width 8 and 4 value heads of width 6.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


needs_stacks = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5"), reason="before 5 transformers had modules for each expert"
)


def hybrid(kind: str, *layers: str, **more: Any) -> nn.Module:
    """Return a model that may mix linear and full attention; ``layers``: the kind of each layer."""
    sizes = SIZES | {"num_hidden_layers": len(layers), "layer_types": [f"{layer}_attention" for layer in layers]}
    more = {"head_dim": 8, "pad_token_id": 0, "use_cache": False, "num_experts": 4, "num_experts_per_tok": 2} | more
    return from_config(kind, **sizes, **GQA, **DELTA, **more)


def from_config(kind: str, **settings: Any) -> nn.Module:
    """A tiny model of transformers, with random weights; skips the test where the installed version lacks it."""
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))


MODELS = {
    "llama": lambda: from_config("LlamaConfig", **SIZES, **GQA),
    "qwen3": lambda: from_config("Qwen3Config", **SIZES, **GQA, head_dim=8),
    "gpt2": lambda: from_config("GPT2Config", vocab_size=32, n_embd=32, n_layer=1, n_head=4, n_positions=16),
    "gpt_neox": lambda: from_config("GPTNeoXConfig", **SIZES, num_attention_heads=4),
    "phi3": lambda: from_config("Phi3Config", **SIZES, **GQA, pad_token_id=0),
    "deepseek_v3": lambda: from_config("DeepseekV3Config", **SIZES, **LATENT, first_k_dense_replace=1),
    "mixtral": lambda: from_config("MixtralConfig", **SIZES, **GQA, **EXPERTS),
}
