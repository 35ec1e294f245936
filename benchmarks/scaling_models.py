# SPDX-License-Identifier: Apache-2.0
"""Shapes of known models, as the routes that deepspeed-muon would give their parameters. Nothing is allocated."""

import dataclasses
from collections.abc import Iterator

from deepspeed.muon.forecast.layout import Half
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import MatrixSpec

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers of hidden matrices, which Muon takes, and what AdamW takes: embeddings, heads, gains and biases."""

    label: str
    #: (how many layers, the matrices of one, its parameters for AdamW)
    layers: tuple[tuple[int, Shapes, Shapes], ...]
    rest: Shapes

    def halves(self) -> list[Half]:
        """The parameter groups of the optimizer."""
        found: list[MatrixSpec] = []
        layer = 0
        for count, matrices, others in self.layers:
            for layer in range(layer, layer + count):  # noqa: B020
                found += _specs(f"layers.{layer}.", matrices, True)
                found += _specs(f"layers.{layer}.", others, False)
            layer += 1
        found += _specs("", self.rest, False)
        return [Half(use_muon, tuple(s for s in found if s.use_muon is use_muon)) for use_muon in (True, False)]


def _specs(prefix: str, shapes: Shapes, use_muon: bool) -> Iterator[MatrixSpec]:
    for name, shape in shapes.items():
        blocks = (Block(0, *shape, shape[1]),) if use_muon else ()
        yield MatrixSpec(prefix + name, shape, use_muon, "as routed", blocks)


def _gpt2(label: str, layers: int, hidden: int) -> Model:
    matrices = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }
    vectors = {"gains and biases": (13 * hidden,)}
    return Model(label, ((layers, matrices, vectors),), {"wte": (50257, hidden), "wpe": (1024, hidden)})


def _llama(label: str, layers: int, hidden: int, inner: int, key_value: int = 1024, vocabulary: int = 128256) -> Model:
    matrices = {"q": (hidden, hidden), "k": (key_value, hidden), "v": (key_value, hidden), "o": (hidden, hidden)}
    matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    rest = {"embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    return Model(label, ((layers, matrices, {"gains": (2 * hidden,)}),), rest)


def _mixture(label: str, layers: int, hidden: int, experts: int, expert: int, dense: int, heads: int) -> Model:
    """Attention of DeepSeek-V3 (arXiv 2412.19437), one dense layer, then experts and a shared one per layer."""
    attention = {
        "q_a": (1536, hidden),
        "q_b": (heads * 192, 1536),
        "kv_a": (576, hidden),
        "kv_b": (heads * 256, 512),
        "o": (hidden, heads * 128),
    }
    first = attention | {"gate": (dense, hidden), "up": (dense, hidden), "down": (hidden, dense)}
    sparse = dict(attention)
    for index in (*range(experts), "shared"):
        sparse |= {f"experts.{index}.{name}": (expert, hidden) for name in ("gate", "up")}
        sparse[f"experts.{index}.down"] = (hidden, expert)
    vectors = {"gains": (2 * hidden + 2048,)}
    router = {"router": (experts, hidden)}
    rest = {"embed_tokens": (163840, hidden), "lm_head": (163840, hidden)}
    return Model(label, ((1, first, vectors), (layers - 1, sparse, vectors | router)), rest)


#: By the name on the command line.
MODELS = {
    "gpt2-xl": _gpt2("GPT-2 XL", 48, 1600),
    "llama3-8b": _llama("Llama-3 8B", 32, 4096, 14336),
    "llama3-70b": _llama("Llama-3 70B", 80, 8192, 28672),
    "llama3-405b": _llama("Llama-3 405B", 126, 16384, 53248),
    "moe-1t": _mixture("1T MoE", 61, 7168, 384, 2048, 18432, 64),
}
