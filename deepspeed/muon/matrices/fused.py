# SPDX-License-Identifier: Apache-2.0
"""Which weights hold several projections, and where each of them lies.

The name or class of a weight's module gives the order of the parts, and the shape must equal their sum exactly; a
weight that fails any of these stays whole, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
