# SPDX-License-Identifier: Apache-2.0
"""Decide how to split attention projections and fused weights, and find the embeddings and head of a pipeline stage.

An attention projection is split into one matrix per head ("Muon Split" of GLM-5's report) only if its outputs are
exactly heads x width. A fused weight is split into the projections that it holds. A pipeline stage names its layers by
number, so its output head is found by its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed.muon.layout import Cut, whole_shape

QUERIES = frozenset({"q_proj", "query", "wq", "q_lin", "q", "q_b_proj"})
KEYS = frozenset({"k_proj", "key", "wk", "k_lin", "k"})
VALUES = frozenset({"v_proj", "value", "wv", "v_lin", "v"})
#: Names of weights with queries, keys and values: whatever their order, the outputs of one head are adjacent.
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv", "in_proj_weight", "in_proj_qkv"})
#: Names of fused weights in linear attention that hold, for each key head, its query, its key, its values and their
#: gates.
FUSED_WITH_GATES = frozenset({"in_proj_qkvz"})
#: Names of the up-projection of keys and values in multi-head latent attention: for each head its key, then its value.
LATENT = frozenset({"kv_b_proj"})
#: Prefixes of attention classes whose query projection holds, for each head, its query and an output gate.
GATED_CLASSES = ("Qwen3Next", "Qwen3_5", "Qwen4Exp")

#: Field of :class:`Heads` -> attribute names of modules and configs; below, those of linear attention.
_NAMES = {
    "query_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_heads", "num_query_groups"),
    "width": ("head_dim", "d_kv", "head_size", "kv_channels"),
    "nope_width": ("qk_nope_head_dim",),
    "rope_width": ("qk_rope_head_dim",),
    "value_width": ("v_head_dim",),
}
_VALUES = ("num_v_heads",)
_NAMES_IN_LINEAR = {
    "query_heads": ("num_k_heads",),
    "key_heads": ("num_k_heads",),
    "width": ("head_k_dim",),
    "value_width": ("head_v_dim",),
    "value_heads": _VALUES,
}
_SIZES = ("hidden_size", "n_embd", "embed_dim", "d_model", "dim")
#: Attributes that only linear attention has: its decay and its convolution.
_LINEAR = ("A_log", "dt_bias", "conv1d", "q_conv1d", "q_conv")


class Heads(NamedTuple):
    """The numbers of heads of an attention module, and their widths (outputs of one head); 0 means unknown.

    ``query_heads``, ``key_heads``: number of query heads and of key-value heads. ``width``: width of a query or
    key head. ``nope_width``, ``rope_width``: in latent attention, the widths of a query's parts without and with rotary
    position. ``value_width``: width of a value head; 0 means ``width``. ``value_heads``: number of value heads in
    linear attention; 0 means ``key_heads``.
    """

    query_heads: int
    key_heads: int
    width: int = 0
    nope_width: int = 0
    rope_width: int = 0
    value_width: int = 0
    value_heads: int = 0

    def __str__(self) -> str:
        latent = (
            f", latent widths {self.nope_width} + {self.rope_width} and {self.value_width}" if self.nope_width else ""
        )
        values = f", {self.value_heads} value heads of width {self.value_width}" if self.value_heads else ""
        return f"{self.query_heads} query and {self.key_heads} key-value heads of width {self.width}{latent}{values}"


def heads_of(attention: nn.Module, model: nn.Module) -> Heads | None:
    """Return the numbers and widths of an attention module's heads; ``None`` if the number of heads is unknown.

    The module's attributes take precedence. Missing numbers come from the module's config or, without one, the model's.
    A config is ignored if its number of query heads differs from the module's. For linear attention every config is
    ignored, because it describes the model's softmax attention.
    """
    config = None if is_linear_attention(attention) else _config_of(attention) or _config_of(model)
    own, stated = _numbers(attention), _numbers(config)
    if own.query_heads and own.query_heads != stated.query_heads:
        config, stated = None, Heads(0, 0)
    queries = own.query_heads or stated.query_heads
    if not queries:
        return None
    groups = first_number(attention, ("num_key_value_groups",))
    # A module that has an attribute for its query heads and none for key heads has as many key heads as query heads.
    keys = own.key_heads or (queries // groups if groups else own.query_heads or stated.key_heads or queries)
    shares = (first_number(module_or_config, _SIZES) // queries for module_or_config in (attention, config))
    width = own.width or stated.width or next(filter(None, shares), 0)
    names = ("nope_width", "rope_width", "value_width", "value_heads")
    return Heads(queries, keys, width, **{name: getattr(own, name) or getattr(stated, name) for name in names})


def is_linear_attention(attention: nn.Module) -> bool:
    """Return whether an attention module's attributes, such as a decay or a convolution, show linear attention."""
    return any(hasattr(attention, name) for name in _LINEAR)


def _config_of(module: nn.Module) -> Any:
    """Return the module's config, or its text config if it is multimodal; ``None`` without one, or with several."""
    config = getattr(module, "config", None)
    get = getattr(config, "get_text_config", None)
    try:
        return get() if callable(get) else config
    except ValueError:  # it has several text parts
        return None


def _numbers(module_or_config: Any) -> Heads:
    """Return the numbers and widths of heads that a module or config states in its attributes."""
    names_of = _NAMES_IN_LINEAR if first_number(module_or_config, _VALUES) else _NAMES
    return Heads(**{field: first_number(module_or_config, names) for field, names in names_of.items()})


def first_number(module_or_config: Any, names: Sequence[str]) -> int:
    """Return the first of the attributes ``names`` that is a positive whole number; 0 if none is."""
    for name in names:
        try:
            value = getattr(module_or_config, name, None)
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
    """Yield the widths of the matrices in each possible split, such as ``(64, 64)``.

    ``per_query``: matrices per query head, 2 with gates. The other arguments are those of :func:`cut_by_head`.
    """
    if leaf in LATENT:
        yield (heads.nope_width, heads.value_width) * heads.query_heads
    elif leaf in QUERIES:
        count = heads.query_heads * per_query
        yield (heads.width or outputs // count,) * count
        if heads.nope_width:
            yield (heads.nope_width + heads.rope_width,) * count
    elif leaf in FUSED_WITH_GATES:
        values = (heads.value_width,) * (2 * heads.value_heads // heads.key_heads)
        yield ((heads.width,) * 2 + values) * heads.key_heads
    elif heads.value_heads and leaf not in KEYS:
        queries_and_keys = (heads.width,) * (2 * heads.key_heads if leaf in FUSED else 0)
        yield queries_and_keys + (heads.value_width,) * heads.value_heads
    else:
        count = heads.query_heads + 2 * heads.key_heads if leaf in FUSED else heads.key_heads
        yield (heads.width or outputs // count,) * count
        if leaf not in FUSED:
            yield (heads.width,)  # one that all queries share
        if leaf in VALUES and heads.value_width:
            yield (heads.value_width,) * heads.key_heads


#: Weights with the queries of all heads first, then all keys, then all values. A name alone does not always tell the
#: order: ``query_key_value`` has one order in GPT-NeoX and another in Falcon, with the same shape.
CONTIGUOUS = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj_weight", "to_qkv", "qkv_linear", "in_proj_qkv"})
#: Weights with, for each key-value head, its queries, its key, its value: names, and classes of the attention module.
GROUPED = frozenset({"linear_qkv"})
GROUPED_CLASSES = ("Bloom", "Falcon", "GPTBigCode", "GPTNeoX", "InternLM2", "MiniMaxLightning", "Persimmon")
#: Classes whose fused weight is laid out for DEVICES tensor-parallel devices: for each, queries, values, keys.
DEVICE_CLASSES, DEVICES = ("CodeGen",), 4
#: Classes of experts whose columns alternate between gate and up.
ALTERNATING_CLASSES = ("GptOss",)
#: Classes of stacked experts, in DeepSpeed's AutoEP and torchtitan, whose matrices are [outputs, inputs].
OUTPUTS_FIRST_CLASSES = ("GroupedExperts",)
#: Weights of linear attention with, for each key head, the step sizes and the decays of its values.
STEPS_AND_DECAYS = frozenset({"in_proj_ba"})
_SUGGESTIVE = re.compile(r"qkv|query_key_value|gate_up_proj$|^c_attn$|^in_proj_weight$", re.IGNORECASE)

QKV, KV, GATE_UP = "queries, keys and values", "keys and values", "gate and up"
GATED_Q, GATED_QKV, STEPS = "queries and gates", "queries, keys, values and gates", "step sizes and decays"


def cut_fused(name: str, shape: Sequence[int], axis: int, owner: nn.Module, model: nn.Module) -> tuple[Cut, str] | None:
    """Return (split, text) for a weight that fuses several projections; ``None`` if its name does not look fused.

    The text names the projections for the log, such as "queries, keys and values".

    Args:
        name: name of the weight, or of its linear module, inside ``owner``.
        shape: (rows, columns) of the weight, or of one matrix of a stack.
        axis: 0 if the weight's outputs are rows, 1 if they are columns; ignored for gate and up.
        owner: the attention or feed-forward module that contains the weight.
        model: the whole model, whose config may have the numbers of heads.

    Raises:
        ValueError: the name suggests a fused weight, but the split is not certain; the text says why.
    """
    if name in LATENT | FUSED_WITH_GATES | STEPS_AND_DECAYS or (name in QUERIES and is_a(owner, GATED_CLASSES)):
        return _by_head(name, shape[axis], axis, heads_of(owner, model) or Heads(0, 0))
    if not _SUGGESTIVE.search(name):
        return None
    if name.endswith("gate_up_proj"):
        return _gate_and_up(name, shape, owner), GATE_UP
    return _attention(name, shape[axis], shape[1 - axis], axis, owner, model)


def _attention(name: str, outputs: int, inputs: int, axis: int, owner: nn.Module, model: nn.Module) -> tuple[Cut, str]:
    if is_a(owner, DEVICE_CLASSES):
        if outputs == 3 * inputs and inputs % DEVICES == 0:
            return Cut((inputs // DEVICES,) * 3, axis, DEVICES), QKV
        raise _misfit(name, outputs)
    is_grouped = name in GROUPED or is_a(owner, GROUPED_CLASSES)
    # A wrong order would train without any error, so nothing is guessed from a name that only looks fused.
    if not is_grouped and name not in CONTIGUOUS:
        raise ValueError(
            f"the order of queries, keys and values in {name} of {type(owner).__name__} is unknown; see muon_split"
        )
    heads = heads_of(owner, model)
    if heads:
        queries, keys = heads.query_heads * heads.width, heads.key_heads * heads.width
        values = heads.value_heads * heads.value_width or keys
        per_key = heads.query_heads // heads.key_heads * heads.width
        if is_grouped and outputs == queries + 2 * keys and heads.query_heads % heads.key_heads == 0:
            return Cut((per_key, heads.width, heads.width), axis, heads.key_heads), QKV
        # In Megatron-core's attention, gates may follow the queries of each key head, one gate per query.
        has_gates = getattr(getattr(owner, "config", None), "attention_output_gate", False) is True
        if is_grouped and outputs == 2 * (queries + keys) and has_gates:
            return Cut((per_key, per_key, heads.width, heads.width), axis, heads.key_heads), GATED_QKV
        if not is_grouped and outputs == queries + keys + values:
            return Cut((queries, keys, values), axis), QKV
    if outputs == 3 * inputs and not is_grouped and not (heads and heads.value_heads):
        return Cut((inputs,) * 3, axis), QKV
    raise _misfit(name, outputs)


def _by_head(name: str, outputs: int, axis: int, heads: Heads) -> tuple[Cut, str]:
    """Return (split, text) as :func:`cut_fused` does, for a weight in which projections alternate from head to head."""
    sizes: tuple[int, ...]
    divides = heads.value_heads > 0 and heads.value_heads % heads.key_heads == 0
    per_key = heads.value_heads // heads.key_heads if divides else 0
    if name in LATENT:
        sizes, groups, projections = (heads.nope_width, heads.value_width), heads.query_heads, KV
    elif name in QUERIES:
        sizes, groups, projections = (heads.width,) * 2, heads.query_heads, GATED_Q
    elif name in STEPS_AND_DECAYS:
        sizes, groups, projections = (per_key,) * 2, heads.key_heads, STEPS
    else:
        values = per_key * heads.value_width
        sizes, groups, projections = (heads.width, heads.width, values, values), heads.key_heads, GATED_QKV
    if all(sizes) and sum(sizes) * groups == outputs:
        return Cut(sizes, axis, groups), projections
    raise _misfit(name, outputs, projections)


def _gate_and_up(name: str, shape: Sequence[int], owner: nn.Module) -> Cut:
    """Return how to split a fused weight into gate and up, along the axis that fits ``owner``'s down projection.

    Raise ValueError if the order of gate and up, or the axis, is unknown.
    """
    if getattr(owner, "is_concatenated", True) is False or is_a(owner, ALTERNATING_CLASSES):
        raise ValueError(f"gate and up are interleaved output by output in {name}, so they cannot be split")
    axis = _gate_up_axis(shape, _shape_of(owner, name.replace("gate_up", "down")))
    if axis is None:
        raise ValueError(
            f"the weight {name} looks like a fused gate and up projection, but no down projection of a fitting shape "
            "lies next to it, so the axis to split is unknown; see muon_split"
        )
    return Cut((shape[axis] // 2,) * 2, axis)


def output_axis(module: nn.Module) -> int:
    """Return the axis of the outputs in a module's weight: 0 (rows), or 1 (columns) in GPT-2's Conv1D."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def stack_output_axis(name: str, shape: Sequence[int], owner: nn.Module) -> int | None:
    """Return the axis of the outputs (0: rows, 1: columns) in each matrix of stacked experts; ``None`` if unknown.

    ``name``: name of the weight in its module ``owner``. ``shape``: (rows, columns) of one matrix.
    """
    if is_a(owner, OUTPUTS_FIRST_CLASSES):
        return 0
    if name.endswith("gate_up_proj"):
        return _gate_up_axis(shape, _shape_of(owner, name.replace("gate_up", "down")))
    if name.endswith("down_proj"):
        return _gate_up_axis(_shape_of(owner, name.replace("down", "gate_up")), shape)
    return None


def _shape_of(owner: nn.Module, name: str) -> Sequence[int]:
    """Return (rows, columns) of the weight ``name`` in ``owner``, or of one matrix of a stack; ``()`` if missing."""
    value = getattr(owner, name, None)
    weight = getattr(value, "weight", value)
    return whole_shape(weight)[-2:] if isinstance(weight, Tensor) else ()


def _gate_up_axis(gate_up: Sequence[int], down: Sequence[int]) -> int | None:
    """Return the axis (0: rows, 1: columns) along which a fused weight splits into gate and up projections.

    Return ``None`` if the down projection's shape does not fit.

    ``gate_up``, ``down``: (rows, columns) of the fused weight and of the down projection; ``()`` if missing.
    """
    if len(gate_up) < 2 or len(down) < 2:
        return None
    rows, cols = gate_up
    if tuple(down) == (cols, rows // 2) and rows % 2 == 0:
        return 0
    return 1 if tuple(down) == (cols // 2, rows) and cols % 2 == 0 else None


def _misfit(name: str, outputs: int, projections: str = QKV) -> ValueError:
    return ValueError(
        f"{name} has {outputs} outputs, but {projections} need another number, according to the attention module and "
        "the config"
    )


def is_pipeline(model: nn.Module) -> bool:
    """Return whether ``model`` is a stage of a DeepSpeed pipeline (``PipelineModule``), which may be the only stage."""
    return callable(getattr(model, "num_pipeline_stages", None))


def stage_of(model: nn.Module) -> int:
    """Return the index of the pipeline stage that the model is; 0 if the model is not part of a pipeline."""
    return model.stage_id if is_pipeline(model) else 0  # type: ignore[return-value]


def stages_of(model: nn.Module) -> int:
    """Return the number of stages of the model's pipeline; 1 if the model is not part of a pipeline."""
    return model.num_pipeline_stages() if is_pipeline(model) else 1  # type: ignore[operator]


def embeddings_and_heads(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {parameter: reason} for a pipeline stage's embeddings and output head, which AdamW updates.

    These are the parameters of tied layers, and the matrix of the pipeline's last layer if that layer has only one.
    Empty if the model is not a pipeline stage.
    """
    if not is_pipeline(model):
        return {}
    tied: Any = model.tied_modules  # layers used in several places
    found = dict.fromkeys(tied.parameters(), "tied layer of a pipeline")
    if stage_of(model) == stages_of(model) - 1:
        layers = [layer for layer in model.forward_funcs if isinstance(layer, nn.Module)]  # type: ignore[union-attr]
        last = next((layer for layer in reversed(layers) if any(True for _ in layer.parameters())), nn.Identity())
        matrices = [param for param in last.parameters() if param.ndim == 2]
        if len(matrices) == 1:
            found.setdefault(matrices[0], "output head, the only matrix of the pipeline's last layer")
    return found


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the tied parameters of which other pipeline stages have copies; all copies need equal updates."""
    ties = model.tied_comms.values() if is_pipeline(model) else ()  # type: ignore[union-attr,operator]
    return {param for tie in ties if len(tie["ranks"]) > 1 for param in tie["module"].parameters()}
