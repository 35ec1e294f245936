# SPDX-License-Identifier: Apache-2.0
"""Which weights hold several projections, and where each projection lies.

A weight's name suggests that it is fused, the name or class of its module gives the order of the parts, and the shape
must equal their sum exactly. A weight that fails any of these stays whole, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.muon.matrices.block import Cut
from deepspeed.muon.matrices.heads import LATENT, possible_heads
from deepspeed.muon.matrices.tp_sharding import whole_shape

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


def cut_fused(
    name: str, shape: Sequence[int], is_transposed: bool, owner: nn.Module | None, model: nn.Module
) -> tuple[Cut, str] | str | None:
    """How a weight is cut into its projections.

    Args:
        name: of the weight in ``owner``, the attention or feed-forward module.
        shape: (rows, cols); of a stack, one matrix's.
        is_transposed: whether the columns of an attention weight are its outputs.

    Returns:
        The cut and a name for its parts; or, as a text, why a weight whose name suggests that it is fused stays
        whole; or ``None`` for any other weight.
    """
    if name in LATENT:
        return _latent(name, shape, owner, model)
    if not _SUGGESTIVE.search(name):
        return None
    if name.endswith("gate_up_proj"):
        return _gate_and_up(name, shape, owner)
    try:
        return _attention(name, shape, 1 if is_transposed else 0, owner, model)
    except ValueError as error:  # groups of columns
        return str(error)


def _attention(
    name: str, shape: Sequence[int], axis: int, owner: nn.Module | None, model: nn.Module
) -> tuple[Cut, str] | str:
    outputs, inputs = shape[axis], shape[1 - axis]
    if devices := next((count for prefix, count in DEVICES.items() if _is_a(owner, prefix)), 0):
        is_whole = outputs == 3 * inputs and inputs % devices == 0
        return (Cut((inputs // devices,) * 3, axis, devices), QKV) if is_whole else _misfit(name, outputs)
    is_grouped = name in GROUPED or _is_a(owner, *GROUPED_CLASSES)
    if not is_grouped and name not in CONTIGUOUS:
        return f"in which order {name} of {type(owner).__name__} holds its parts is not known"
    for heads in possible_heads(model, owner):
        queries, keys, width = heads.queries, heads.keys, heads.width
        if (queries + 2 * keys) * width != outputs or queries % keys:
            continue
        if is_grouped:
            return Cut((queries // keys * width, width, width), axis, keys), QKV
        return Cut((queries * width, keys * width, keys * width), axis), QKV
    if outputs == 3 * inputs and not is_grouped:
        return Cut((inputs,) * 3, axis), QKV
    return _misfit(name, outputs)


def _latent(name: str, shape: Sequence[int], owner: nn.Module | None, model: nn.Module) -> tuple[Cut, str] | str:
    for heads in possible_heads(model, owner):
        if heads.nope and heads.value and heads.queries * (heads.nope + heads.value) == shape[0]:
            return Cut((heads.nope, heads.value), 0, heads.queries), KV
    return _misfit(name, shape[0], KV)


def _gate_and_up(name: str, shape: Sequence[int], owner: nn.Module | None) -> tuple[Cut, str] | str:
    """The shape of the down projection beside it tells which axis holds both."""
    if getattr(owner, "is_concatenated", True) is False or _is_a(owner, *ALTERNATING_CLASSES):
        return f"gate and up of {name} alternate one by one"
    rows, cols = shape
    down = _shape(getattr(owner, name.replace("gate_up", "down"), None))
    if down == (cols, rows // 2) and rows % 2 == 0:
        return Cut((rows // 2,) * 2), GATE_UP
    if down == (cols // 2, rows) and cols % 2 == 0:
        return Cut((cols // 2,) * 2, 1), GATE_UP
    return f"no projection down beside {name} confirms its halves"


def _shape(down: Any) -> tuple[int, ...]:
    """Shape of a module's weight, or of a parameter, before anything cut it; of a stack, one matrix's."""
    weight = getattr(down, "weight", down)
    return whole_shape(weight)[-2:] if isinstance(weight, Tensor) else ()


def _is_a(owner: nn.Module | None, *prefixes: str) -> bool:
    return any(base.__name__.startswith(prefixes) for base in type(owner).__mro__)


def _misfit(name: str, outputs: int, parts: str = QKV) -> str:
    return f"the {outputs} outputs of {name} are not the {parts} of known heads"
