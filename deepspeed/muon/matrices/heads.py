# SPDX-License-Identifier: Apache-2.0
"""Find the numbers and widths of a module's attention heads, and split projections into heads.

The outputs of a projection must be exactly heads x width. One matrix per head is "Muon Split" of GLM-5's report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.config.types import Cut

QUERIES = frozenset({"q_proj", "query", "wq", "q_lin", "q", "q_b_proj"})
KEYS = frozenset({"k_proj", "key", "wk", "k_lin", "k"})
VALUES = frozenset({"v_proj", "value", "wv", "v_lin", "v"})
#: Names of weights with queries, keys and values: whatever their order, the outputs of one head are adjacent.
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv", "in_proj_weight", "in_proj_qkv"})
#: Names of such weights in linear attention: for each key head its query, its key, its values and their gates.
FUSED_WITH_GATES = frozenset({"in_proj_qkvz"})
#: Names of the up-projection of keys and values in multi-head latent attention: per head, first its key, then value.
LATENT = frozenset({"kv_b_proj"})
#: Prefixes of attention classes whose query projection holds, for each head, its query and an output gate.
GATED_CLASSES = ("Qwen3Next", "Qwen3_5", "Qwen4Exp")

#: Field of :class:`Heads` -> attribute names of modules and configs; below, those of linear attention.
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
#: Attributes that only linear attention has: of its decay and of its convolution.
_LINEAR = ("A_log", "dt_bias", "conv1d", "q_conv1d", "q_conv")


class Heads(NamedTuple):
    """The numbers of heads of an attention module, and their widths (outputs of one head); 0 means unknown.

    ``queries``, ``keys``: number of query heads and of key-value heads. ``width``: width of a query or key head.
    ``nope``, ``rope``: in latent attention, the widths of a query's parts without and with rotary position. ``value``:
    width of a value head; 0 means ``width``. ``values``: number of value heads in linear attention; 0 means ``keys``.
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
    """Return the numbers and widths of an attention module's heads; ``None`` if the number of heads is unknown.

    The module's attributes take precedence. Missing numbers come from the module's config or, without one, the model's.
    A config with another number of query heads than the module is ignored. For linear attention every config is
    ignored, because it describes the model's softmax attention.
    """
    config = None if is_linear_attention(attention) else _config_of(attention) or _config_of(model)
    own, stated = _numbers(attention), _numbers(config)
    if own.queries and own.queries != stated.queries:
        config, stated = None, Heads(0, 0)
    queries = own.queries or stated.queries
    if not queries:
        return None
    groups = first_number(attention, ("num_key_value_groups",))
    # A module that has an attribute for its query heads and none for key heads has as many key heads as query heads.
    keys = own.keys or (queries // groups if groups else own.queries or stated.keys or queries)
    shares = (first_number(source, _SIZES) // queries for source in (attention, config))
    width = own.width or stated.width or next(filter(None, shares), 0)
    rest = {name: getattr(own, name) or getattr(stated, name) for name in ("nope", "rope", "value", "values")}
    return Heads(queries, keys, width, **rest)


def is_linear_attention(attention: nn.Module) -> bool:
    """Return whether an attention module's attributes, such as a decay or a convolution, show linear attention."""
    return any(hasattr(attention, name) for name in _LINEAR)


def _config_of(module: nn.Module) -> Any:
    """Return the module's config, or its text config if the model is multimodal; ``None`` if it has none or several."""
    config = getattr(module, "config", None)
    get = getattr(config, "get_text_config", None)
    try:
        return get() if callable(get) else config
    except ValueError:  # it has several text parts
        return None


def _numbers(source: Any) -> Heads:
    names = _NAMES_IN_LINEAR if first_number(source, _VALUES) else _NAMES
    return Heads(**{number: first_number(source, found) for number, found in names.items()})


def first_number(source: Any, names: Sequence[str]) -> int:
    """Return the first of the attributes ``names`` that is a positive whole number in ``source``; 0 if none is."""
    for name in names:
        try:
            value = getattr(source, name, None)
        except RuntimeError:  # transformers raises it for a number that differs between layers
            continue
        if type(value) is int and value > 0:
            return value
    return 0


def is_a(module: nn.Module, prefixes: tuple[str, ...]) -> bool:
    """Return whether the name of the module's class, or of one of its base classes, starts with one of ``prefixes``."""
    return any(base.__name__.startswith(prefixes) for base in type(module).__mro__)


def is_projection(leaf: str) -> bool:
    """Return whether ``leaf``, the last part of a module's name, is a known name of an attention projection."""
    return leaf.lower() in QUERIES | KEYS | VALUES | FUSED | FUSED_WITH_GATES | LATENT


def cut_by_head(leaf: str, outputs: int, axis: int, heads: Heads, gated: bool = False) -> Cut:
    """Return how to split an attention projection into one matrix per head.

    Args:
        leaf: last part of the projection's name, such as "q_proj".
        outputs: the projection's number of outputs.
        axis: 0 if the outputs are rows of the weight, 1 if they are columns.
        heads: the heads of the attention module.
        gated: whether a gate follows each query head (:data:`GATED_CLASSES`); each gate becomes a matrix too.

    Raises:
        ValueError: the outputs cannot be divided into these heads, or in more than one way.
    """
    candidates = _candidates(leaf.lower(), heads, outputs, 2 if gated else 1)
    fitting = {sizes for sizes in candidates if sum(sizes) == outputs}
    if len(fitting) == 1:
        return Cut(fitting.pop(), axis)
    how = (
        "can be split into attention heads in more than one way" if fitting else "cannot be split into attention heads"
    )
    raise ValueError(f"the projection's {outputs} outputs {how}: the model has {heads}")


def _candidates(leaf: str, heads: Heads, outputs: int, per_query: int) -> Iterator[tuple[int, ...]]:
    """Yield the widths of the matrices in each possible split: ``(64, 64)``. ``per_query``: matrices per query head."""
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
