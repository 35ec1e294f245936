# SPDX-License-Identifier: Apache-2.0
"""Find the weights that hold several projections, and how to split them.

The order of the parts must be known from the weight's name or its module's class, and the sizes of the parts must add
up to the weight's shape exactly. Otherwise the weight stays whole: a wrong split would train without any error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.heads import FUSED_WITH_GATES, GATED_CLASSES, LATENT, QUERIES, Heads, heads_of, is_a
from deepspeed.muon.matrices.tp_sharding import whole_shape

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
        raise ValueError(f"it is unknown how {name} of {type(owner).__name__} orders queries, keys and values")
    heads = heads_of(owner, model)
    if heads:
        queries, keys = heads.queries * heads.width, heads.keys * heads.width
        values = heads.values * heads.value or keys
        per_key = heads.queries // heads.keys * heads.width
        if is_grouped and outputs == queries + 2 * keys and heads.queries % heads.keys == 0:
            return Cut((per_key, heads.width, heads.width), axis, heads.keys), QKV
        # In Megatron-core's attention, gates may follow the queries of each key head, one gate per query.
        has_gates = getattr(getattr(owner, "config", None), "attention_output_gate", False) is True
        if is_grouped and outputs == 2 * (queries + keys) and has_gates:
            return Cut((per_key, per_key, heads.width, heads.width), axis, heads.keys), GATED_QKV
        if not is_grouped and outputs == queries + keys + values:
            return Cut((queries, keys, values), axis), QKV
    if outputs == 3 * inputs and not is_grouped and not (heads and heads.values):
        return Cut((inputs,) * 3, axis), QKV
    raise _misfit(name, outputs)


def _by_head(name: str, outputs: int, axis: int, heads: Heads) -> tuple[Cut, str]:
    """Return (split, text) as :func:`cut_fused` does, for a weight in which projections alternate from head to head."""
    sizes: tuple[int, ...]
    per_key = heads.values // heads.keys if heads.values and heads.values % heads.keys == 0 else 0
    if name in LATENT:
        sizes, groups, parts = (heads.nope, heads.value), heads.queries, KV
    elif name in QUERIES:
        sizes, groups, parts = (heads.width,) * 2, heads.queries, GATED_Q
    elif name in STEPS_AND_DECAYS:
        sizes, groups, parts = (per_key,) * 2, heads.keys, STEPS
    else:
        values = per_key * heads.value
        sizes, groups, parts = (heads.width, heads.width, values, values), heads.keys, GATED_QKV
    if all(sizes) and sum(sizes) * groups == outputs:
        return Cut(sizes, axis, groups), parts
    raise _misfit(name, outputs, parts)


def _gate_and_up(name: str, shape: Sequence[int], owner: nn.Module) -> Cut:
    """Return how to split a fused weight into gate and up; the shape of ``owner``'s down projection tells the axis."""
    if getattr(owner, "is_concatenated", True) is False or is_a(owner, ALTERNATING_CLASSES):
        raise ValueError(f"gate and up are interleaved output by output in {name}, so they cannot be split")
    axis = _gate_up_axis(shape, _shape_of(owner, name.replace("gate_up", "down")))
    if axis is None:
        raise ValueError(f"there is no down projection next to {name} with a shape that fits a weight of gate and up")
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
    """Return the axis along which a weight joins gate and up; ``None`` if the down projection's shape does not fit."""
    if len(gate_up) < 2 or len(down) < 2:
        return None
    rows, cols = gate_up
    if tuple(down) == (cols, rows // 2) and rows % 2 == 0:
        return 0
    return 1 if tuple(down) == (cols // 2, rows) and cols % 2 == 0 else None


def _misfit(name: str, outputs: int, parts: str = QKV) -> ValueError:
    return ValueError(
        f"{name} has {outputs} outputs, but {parts} need another number, according to the attention module and the "
        "config"
    )
