# SPDX-License-Identifier: Apache-2.0
"""The attention heads of a module, and where each lies in a projection: its shape must be exactly heads x width.

Source: "Muon Split", GLM-5's report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.config.types import Cut

QUERIES = frozenset({"q_proj", "query", "wq", "q_lin", "q", "q_b_proj"})
KEYS = frozenset({"k_proj", "key", "wk", "k_lin", "k"})
VALUES = frozenset({"v_proj", "value", "wv", "v_lin", "v"})
#: Queries, keys and values in one weight: whatever their order, the outputs of a head are adjacent.
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv", "in_proj_weight", "in_proj_qkv"})
#: The same in linear attention: for each key head its query, its key, its values and their gates.
FUSED_WITH_GATES = frozenset({"in_proj_qkvz"})
#: The up-projection of keys and values of multi-head latent attention: per head, first keys, then values.
LATENT = frozenset({"kv_b_proj"})
#: Attention whose query projection holds, for each head, its query and an output gate.
GATED_CLASSES = ("Qwen3Next", "Qwen3_5", "Qwen4Exp")

#: What modules and configs call the numbers of :class:`Heads`, and what those of linear attention do.
_NAMES = {
    "queries": ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads"),
    "keys": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_heads", "num_query_groups"),
    "width": ("head_dim", "d_kv", "head_size", "kv_channels"),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
}
_VALUES = ("num_v_heads",)
_NAMES_IN_LINEAR = {
    "queries": ("num_k_heads",),
    "keys": ("num_k_heads",),
    "width": ("head_k_dim",),
    "value": ("head_v_dim",),
    "values": _VALUES,
}
_SIZES = ("hidden_size", "n_embd", "embed_dim", "d_model", "dim")
#: Attributes that only linear attention has: its decay and its convolution.
_LINEAR = ("A_log", "dt_bias", "conv1d", "q_conv1d", "q_conv")


class Heads(NamedTuple):
    """Numbers of heads and their widths; 0 is unknown.

    ``width``: of a query and a key. ``nope``, ``rope``: widths of latent attention. ``value``: the width of a value, if
    it has one of its own; ``values``: the number of value heads, if linear attention has another one for them.
    """

    queries: int
    keys: int
    width: int = 0
    nope: int = 0
    rope: int = 0
    value: int = 0
    values: int = 0

    def __str__(self) -> str:
        latent = f", latent widths {self.nope} + {self.rope} and {self.value}" if self.nope else ""
        values = f", {self.values} value heads of width {self.value}" if self.values else ""
        return f"{self.queries} query and {self.keys} key-value heads of width {self.width}{latent}{values}"


def heads_of(attention: nn.Module, model: nn.Module) -> Heads | None:
    """Return the heads of an attention module; ``None`` where their number is not known.

    Layers of one model may differ, so the module's own numbers come first. Its config, or else the model's, fills in
    what they leave open, but only if it states the same number of query heads. Linear attention is described by its own
    numbers only: a config gives those of the other attention in the model.
    """
    config = None if is_linear_attention(attention) else _config_of(attention) or _config_of(model)
    own, stated = _numbers(attention), _numbers(config)
    if own.queries and own.queries != stated.queries:
        config, stated = None, Heads(0, 0)
    queries = own.queries or stated.queries
    if not queries:
        return None
    groups = _first(attention, ("num_key_value_groups",))
    # A module that states its query heads and no key heads has as many of both, whatever the config says.
    keys = own.keys or (queries // groups if groups else own.queries or stated.keys or queries)
    shares = (_first(source, _SIZES) // queries for source in (attention, config))
    width = own.width or stated.width or next(filter(None, shares), 0)
    rest = {name: getattr(own, name) or getattr(stated, name) for name in ("nope", "rope", "value", "values")}
    return Heads(queries, keys, width, **rest)


def is_linear_attention(attention: nn.Module) -> bool:
    """Return whether the module has a state instead of the softmax of logits."""
    return any(hasattr(attention, name) for name in _LINEAR)


def _config_of(module: nn.Module) -> Any:
    """Return the config of a module; the text part of it where a model also has vision or audio."""
    config = getattr(module, "config", None)
    get = getattr(config, "get_text_config", None)
    try:
        return get() if callable(get) else config
    except ValueError:  # it has several text parts
        return None


def _numbers(source: Any) -> Heads:
    """Return the numbers that a module or a config states; zeros for those that it does not."""
    names = _NAMES_IN_LINEAR if _first(source, _VALUES) else _NAMES
    return Heads(**{number: _first(source, found) for number, found in names.items()})


def _first(source: Any, names: Sequence[str]) -> int:
    for name in names:
        try:
            value = getattr(source, name, None)
        except RuntimeError:  # transformers raises it for a number that differs between layers
            continue
        if type(value) is int and value > 0:
            return value
    return 0


def is_a(module: nn.Module, prefixes: tuple[str, ...]) -> bool:
    """Return whether a module's class, or one that it derives from, has a name with one of these prefixes."""
    return any(base.__name__.startswith(prefixes) for base in type(module).__mro__)


def is_projection(leaf: str) -> bool:
    """Return whether a module of this name (without its path) is an attention projection made of whole heads."""
    return leaf.lower() in QUERIES | KEYS | VALUES | FUSED | FUSED_WITH_GATES | LATENT


def cut_by_head(leaf: str, outputs: int, axis: int, heads: Heads, gated: bool = False) -> Cut:
    """Return how a projection with ``outputs`` along ``axis`` is cut into its heads; ``leaf``: the name of its module.

    ``gated``: whether the attention is of :data:`GATED_CLASSES`; the gate of a head is a matrix of its own.

    Raises:
        ValueError: its outputs are not whole heads, or fit several widths.
    """
    candidates = _candidates(leaf.lower(), heads, outputs, 2 if gated else 1)
    fitting = {sizes for sizes in candidates if sum(sizes) == outputs}
    if len(fitting) == 1:
        return Cut(fitting.pop(), axis)
    what = "could be heads of several widths" if fitting else "are not whole heads"
    raise ValueError(f"its {outputs} outputs {what}; the model has {heads}")


def _candidates(leaf: str, heads: Heads, outputs: int, per_query: int) -> Iterator[tuple[int, ...]]:
    if leaf in LATENT:
        yield (heads.nope, heads.value) * heads.queries
    elif leaf in QUERIES:
        count = heads.queries * per_query
        yield (heads.width or outputs // count,) * count
        if heads.nope:
            yield (heads.nope + heads.rope,) * count
    elif leaf in FUSED_WITH_GATES:
        values = (heads.value,) * (2 * heads.values // heads.keys)
        yield ((heads.width,) * 2 + values) * heads.keys
    elif heads.values and leaf not in KEYS:
        queries_and_keys = (heads.width,) * (2 * heads.keys if leaf in FUSED else 0)
        yield queries_and_keys + (heads.value,) * heads.values
    else:
        count = heads.queries + 2 * heads.keys if leaf in FUSED else heads.keys
        yield (heads.width or outputs // count,) * count
        if leaf not in FUSED:
            yield (heads.width,)  # one that all queries share
        if leaf in VALUES and heads.value:
            yield (heads.value,) * heads.keys
