# SPDX-License-Identifier: Apache-2.0
"""Which weights hold several projections or heads, and where each of them lies.

A weight's name suggests what it is; its shape must be exactly heads x width ("Muon Split", GLM-5's report). Of a fused
weight, the name or class of its module gives the order of the parts, and the shape must equal their sum exactly; one
that fails any of these stays whole, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed.muon.matrices.block import Cut
from deepspeed.muon.matrices.tp_sharding import whole_shape

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

#: Queries, then keys, then values, each of all heads.
CONTIGUOUS = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj_weight", "to_qkv", "qkv_linear"})
#: For each key-value head its queries, its key, its value: by the weight's name, and by the class of its attention.
GROUPED = frozenset({"linear_qkv"})
GROUPED_CLASSES = ("Bloom", "Falcon", "GPTBigCode", "GPTNeoX", "InternLM2", "MiniMaxLightning", "Persimmon")
#: Attention whose queries, values and keys are laid out for this many tensor-parallel devices.
DEVICES = {"CodeGen": 4}
#: Experts whose columns alternate between gate and up.
ALTERNATING_CLASSES = ("GptOss",)
_SUGGESTIVE = re.compile(r"qkv|query_key_value|gate_up_proj$|^c_attn$|^in_proj_weight$", re.IGNORECASE)

QKV, KV, GATE_UP = "queries, keys and values", "keys and values", "gate and up"


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


def cut_fused(name: str, shape: Sequence[int], axis: int, owner: nn.Module, model: nn.Module) -> tuple[Cut, str] | None:
    """How a weight is cut into its projections, and a name for its parts; ``None`` where nothing suggests a fused one.

    ``name``: of the weight in ``owner``, the attention or feed-forward module. ``shape``: (rows, cols); of a stack, one
    matrix's. ``axis``: of the outputs of an attention weight.

    Raises:
        ValueError: why a weight whose name suggests that it is fused stays whole.
    """
    if name in LATENT:
        return _latent(name, shape[0], owner, model), KV
    if not _SUGGESTIVE.search(name):
        return None
    if name.endswith("gate_up_proj"):
        return _gate_and_up(name, shape, owner), GATE_UP
    return _attention(name, shape[axis], shape[1 - axis], axis, owner, model), QKV


def _attention(name: str, outputs: int, inputs: int, axis: int, owner: nn.Module, model: nn.Module) -> Cut:
    if devices := next((count for prefix, count in DEVICES.items() if _is_a(owner, prefix)), 0):
        if outputs == 3 * inputs and inputs % devices == 0:
            return Cut((inputs // devices,) * 3, axis, devices)
        raise _misfit(name, outputs)
    is_grouped = name in GROUPED or _is_a(owner, *GROUPED_CLASSES)
    if not is_grouped and name not in CONTIGUOUS:
        raise ValueError(f"in which order {name} of {type(owner).__name__} holds its parts is not known")
    for heads in possible_heads(model, owner):
        queries, keys, width = heads.queries, heads.keys, heads.width
        if (queries + 2 * keys) * width != outputs or queries % keys:
            continue
        if is_grouped:
            return Cut((queries // keys * width, width, width), axis, keys)
        return Cut((queries * width, keys * width, keys * width), axis)
    if outputs == 3 * inputs and not is_grouped:
        return Cut((inputs,) * 3, axis)
    raise _misfit(name, outputs)


def _latent(name: str, outputs: int, owner: nn.Module, model: nn.Module) -> Cut:
    for heads in possible_heads(model, owner):
        if heads.nope and heads.value and heads.queries * (heads.nope + heads.value) == outputs:
            return Cut((heads.nope, heads.value), 0, heads.queries)
    raise _misfit(name, outputs, KV)


def _gate_and_up(name: str, shape: Sequence[int], owner: nn.Module) -> Cut:
    """The shape of the down projection beside it tells which axis holds both."""
    if getattr(owner, "is_concatenated", True) is False or _is_a(owner, *ALTERNATING_CLASSES):
        raise ValueError(f"gate and up of {name} alternate one by one")
    rows, cols = shape
    down = getattr(owner, name.replace("gate_up", "down"), None)
    weight = getattr(down, "weight", down)
    down_shape = whole_shape(weight)[-2:] if isinstance(weight, Tensor) else ()
    if down_shape == (cols, rows // 2) and rows % 2 == 0:
        return Cut((rows // 2,) * 2)
    if down_shape == (cols // 2, rows) and cols % 2 == 0:
        return Cut((cols // 2,) * 2, 1)
    raise ValueError(f"no projection down beside {name} confirms its halves")


def _is_a(owner: nn.Module, *prefixes: str) -> bool:
    return any(base.__name__.startswith(prefixes) for base in type(owner).__mro__)


def _misfit(name: str, outputs: int, parts: str = QKV) -> ValueError:
    return ValueError(f"the {outputs} outputs of {name} are not the {parts} of known heads")
