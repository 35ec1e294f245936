# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with 10^12 parameters whose experts are separate ``nn.Linear`` modules: 69,000 matrices."""

from torch import nn


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)


class Mixture(nn.Module):
    """A router, routed experts and a shared one."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))
        self.shared_experts = Expert(width, hidden)


class Attention(nn.Module):
    """The projections of latent attention: queries of rank 1536, keys and values of rank 512."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(width, 1536, bias=False)
        self.q_a_layernorm = nn.RMSNorm(1536)
        self.q_b_proj = nn.Linear(1536, heads * 192, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, 576, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(512)
        self.kv_b_proj = nn.Linear(512, heads * 256, bias=False)
        self.o_proj = nn.Linear(heads * 128, width, bias=False)


class Layer(nn.Module):
    """Attention and a mixture, in the first layer a dense MLP."""

    def __init__(self, width: int, is_dense: bool) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads=64)
        self.mlp = Expert(width, 18432) if is_dense else Mixture(width, 2048, experts=384)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


class Model(nn.Module):
    """Embedding, layers, head. It has no ``forward``: a plan needs names and shapes only."""

    def __init__(self, width: int = 7168, layers: int = 61, vocabulary: int = 163840) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, is_dense=index == 0) for index in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)


def model() -> nn.Module:
    """What ``ds_muon plan --model moe_1t.py:model`` calls."""
    return Model()
