# SPDX-License-Identifier: Apache-2.0
"""The attention heads of a model, and where each lies in a projection: its shape must be exactly heads x width.

Source: "Muon Split", GLM-5's report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.matrices.block import Cut

QUERIES = frozenset({"q_proj", "query", "wq", "q_lin", "q", "q_b_proj"})
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj", "key", "value", "wk", "wv", "k_lin", "v_lin", "k", "v"})
#: Queries, keys and values in one weight: whatever their order, each head is consecutive.
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv", "in_proj_weight"})
#: The up-projection of keys and values of multi-head latent attention: per head, first keys, then values.
LATENT = frozenset({"kv_b_proj"})

_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_heads", "num_query_groups")
_WIDTHS = ("head_dim", "d_kv", "head_size", "kv_channels")
_SIZES = ("hidden_size", "n_embd", "embed_dim", "d_model", "dim")


class Heads(NamedTuple):
    """Numbers of heads and their widths; ``nope``, ``rope`` and ``value`` are widths of latent attention.

    A ``width`` of 0 means unknown; it then follows from the shape.
    """

    queries: int
    keys: int
    width: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0


def heads_of(source: Any) -> Heads | None:
    """The heads by a model's config or an attention module; ``None`` where it gives no number."""
    get = getattr(source, "get_text_config", None)
    try:
        source = get() if callable(get) else source
    except ValueError:  # a config of several models for text
        return None
    queries = _first(source, _COUNTS)
    if not queries:
        return None
    width = _first(source, _WIDTHS) or _first(source, _SIZES) // queries
    latent = (_first(source, (name,)) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Heads(queries, _first(source, _KV_COUNTS) or queries, width, *latent)


def _first(source: Any, names: Sequence[str]) -> int:
    values = (getattr(source, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def is_projection(leaf: str) -> bool:
    """Whether a module of this name (without its path) is an attention projection made of whole heads."""
    return leaf.lower() in QUERIES | KEYS_AND_VALUES | FUSED | LATENT


def cut_by_head(leaf: str, outputs: int, axis: int, heads: Heads) -> Cut:
    """How a projection with ``outputs`` along ``axis`` is cut into its heads; ``leaf``: the name of its module.

    Raises:
        ValueError: its outputs are not whole heads, or fit several widths.
    """
    fitting = {sizes for sizes in _candidates(leaf.lower(), heads, outputs) if sum(sizes) == outputs}
    if len(fitting) == 1:
        return Cut(fitting.pop(), axis)
    what = "could be heads of several widths" if fitting else "are not whole heads"
    latent = f", latent widths {heads.nope} + {heads.rope} and {heads.value}" if heads.nope else ""
    raise ValueError(
        f"its {outputs} outputs {what}; the model has {heads.queries} query and {heads.keys} key-value heads of width "
        f"{heads.width}{latent}"
    )


def _candidates(leaf: str, heads: Heads, outputs: int) -> Iterator[tuple[int, ...]]:
    if leaf in LATENT:
        yield (heads.nope, heads.value) * heads.queries
        return
    both = heads.queries + 2 * heads.keys
    count = heads.queries if leaf in QUERIES else heads.keys if leaf in KEYS_AND_VALUES else both
    yield (heads.width or outputs // count,) * count
    if leaf in QUERIES and heads.nope:
        yield (heads.nope + heads.rope,) * count


def possible_heads(model: nn.Module, owner: nn.Module) -> Iterator[Heads]:
    """The heads by the attention's own config, by the attention and by the model's config, as far as each is known."""
    sources = (getattr(owner, "config", None), owner, getattr(model, "config", None))
    return (heads for heads in map(heads_of, sources) if heads)
