# SPDX-License-Identifier: Apache-2.0
"""Which weights hold several projections, and where each of them lies.

The name or class of a weight's module gives the order of the parts, and the shape must equal their sum exactly; a
weight that fails any of these stays whole, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.heads import FUSED_WITH_GATES, GATED_CLASSES, LATENT, QUERIES, Heads, heads_of, is_a
from deepspeed.muon.matrices.tp_sharding import whole_shape

#: Queries, then keys, then values, each of all heads.
CONTIGUOUS = frozenset({"c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj_weight", "to_qkv", "qkv_linear", "in_proj_qkv"})
#: For each key-value head its queries, its key, its value: by the weight's name, and by the class of its attention.
GROUPED = frozenset({"linear_qkv"})
GROUPED_CLASSES = ("Bloom", "Falcon", "GPTBigCode", "GPTNeoX", "InternLM2", "MiniMaxLightning", "Persimmon")
#: Attention whose queries, values and keys are laid out for so many tensor-parallel devices.
DEVICE_CLASSES, DEVICES = ("CodeGen",), 4
#: Experts whose columns alternate between gate and up.
ALTERNATING_CLASSES = ("GptOss",)
#: Stacks of experts, of DeepSpeed's AutoEP and of torchtitan, whose matrices are [outputs, inputs].
OUTPUTS_FIRST_CLASSES = ("GroupedExperts",)
#: Of linear attention: for each key head the step sizes and the decays of its values.
STEPS_AND_DECAYS = frozenset({"in_proj_ba"})
_SUGGESTIVE = re.compile(r"qkv|query_key_value|gate_up_proj$|^c_attn$|^in_proj_weight$", re.IGNORECASE)

QKV, KV, GATE_UP = "queries, keys and values", "keys and values", "gate and up"
GATED_Q, GATED_QKV, STEPS = "queries and gates", "queries, keys, values and gates", "step sizes and decays"


def cut_fused(name: str, shape: Sequence[int], axis: int, owner: nn.Module, model: nn.Module) -> tuple[Cut, str] | None:
    """Return how a weight is cut into its projections, and a name for them; ``None`` where nothing suggests several.

    ``name``: of the weight in ``owner``, the attention or feed-forward module. ``shape``: (rows, cols); of a stack, one
    matrix's. ``axis``: of the outputs of an attention weight.

    Raises:
        ValueError: why a weight whose name suggests that it is fused stays whole.
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
    if not is_grouped and name not in CONTIGUOUS:
        raise ValueError(f"in which order {name} of {type(owner).__name__} holds its parts is not known")
    heads = heads_of(owner, model)
    if heads:
        queries, keys = heads.queries * heads.width, heads.keys * heads.width
        values = heads.values * heads.value or keys
        per_key = heads.queries // heads.keys * heads.width
        if is_grouped and outputs == queries + 2 * keys and heads.queries % heads.keys == 0:
            return Cut((per_key, heads.width, heads.width), axis, heads.keys), QKV
        # Megatron-core's attention may have a gate for each query, beside the queries of a key head.
        has_gates = getattr(getattr(owner, "config", None), "attention_output_gate", False) is True
        if is_grouped and outputs == 2 * (queries + keys) and has_gates:
            return Cut((per_key, per_key, heads.width, heads.width), axis, heads.keys), GATED_QKV
        if not is_grouped and outputs == queries + keys + values:
            return Cut((queries, keys, values), axis), QKV
    if outputs == 3 * inputs and not is_grouped and not (heads and heads.values):
        return Cut((inputs,) * 3, axis), QKV
    raise _misfit(name, outputs)


def _by_head(name: str, outputs: int, axis: int, heads: Heads) -> tuple[Cut, str]:
    """Cut a weight of one kind of attention, whose parts lie beside each other for each head."""
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
    """Return the cut along the axis that holds both, which the shape of the down projection beside them tells."""
    if getattr(owner, "is_concatenated", True) is False or is_a(owner, ALTERNATING_CLASSES):
        raise ValueError(f"gate and up of {name} alternate one by one")
    axis = _axis_of_both(shape, _shape_of(owner, name.replace("gate_up", "down")))
    if axis is None:
        raise ValueError(f"no projection down beside {name} confirms its halves")
    return Cut((shape[axis] // 2,) * 2, axis)


def output_axis(module: nn.Module) -> int:
    """Return the axis of a module's weight along which its outputs lie."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def stack_output_axis(name: str, shape: Sequence[int], owner: nn.Module) -> int | None:
    """Return the axis along which each matrix of a stack of experts has its outputs; ``None`` where it is not known.

    Stacks have no convention; transformers has both. Their class tells, or the shape of gate and up beside that of
    down. ``name``, ``shape``, ``owner``: as in :func:`cut_fused`.
    """
    if is_a(owner, OUTPUTS_FIRST_CLASSES):
        return 0
    if name.endswith("gate_up_proj"):
        return _axis_of_both(shape, _shape_of(owner, name.replace("gate_up", "down")))
    if name.endswith("down_proj"):
        return _axis_of_both(_shape_of(owner, name.replace("down", "gate_up")), shape)
    return None


def _shape_of(owner: nn.Module, name: str) -> Sequence[int]:
    """Return the shape of the last two axes of a weight, or of the weight of a module; empty where there is none."""
    value = getattr(owner, name, None)
    weight = getattr(value, "weight", value)
    return whole_shape(weight)[-2:] if isinstance(weight, Tensor) else ()


def _axis_of_both(gate_up: Sequence[int], down: Sequence[int]) -> int | None:
    """Return the axis along which a weight holds gate and up, which are its outputs, by the shape of down."""
    if len(gate_up) < 2 or len(down) < 2:
        return None
    rows, cols = gate_up
    if tuple(down) == (cols, rows // 2) and rows % 2 == 0:
        return 0
    return 1 if tuple(down) == (cols // 2, rows) and cols % 2 == 0 else None


def _misfit(name: str, outputs: int, parts: str = QKV) -> ValueError:
    return ValueError(f"the {outputs} outputs of {name} are not the {parts} of known heads")
