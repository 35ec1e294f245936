# SPDX-License-Identifier: Apache-2.0
"""Find the weights of each head's queries and keys, for QK-clip, which scales single heads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn

from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.layout import Block, Cut, cut, local_shape, matrices, sharding_of, tp_rank, whole_shape
from deepspeed.muon.model.fused_weights import (
    DEVICE_CLASSES,
    FUSED,
    KEYS,
    LATENT,
    QKV,
    QUERIES,
    Heads,
    cut_fused,
    heads_of,
    is_a,
    is_linear_attention,
    output_axis,
)

#: ``rotary``: in latent attention, the part of a query that is multiplied by a key that all heads share.
Role = Literal["query", "key", "rotary"]
#: Names of norms of queries or keys, which undo any scaling of their weights.
_NORM = re.compile(
    r"^(q|k|qk|query|key)_?(layer_?norm|rms_?norm|norm|ln)$|^(layer_?norm|norm|ln)_?(q|k|qk|query|key)$", re.I
)


class HeadWeights(NamedTuple):
    """The weights or biases of a parameter that compute one head's queries or keys.

    ``role``: "query", "key" or, for the rotary part of a query in latent attention, "rotary". ``head``: index of the
    query head, or of the key head, over all tensor-parallel ranks. ``block``: where the weights are in the parameter as
    this tensor-parallel rank has it, before ZeRO partitions it.
    """

    role: Role
    head: int
    block: Block


class _Outputs(NamedTuple):
    """``size`` adjacent outputs of a projection, such as the queries of one head.

    ``role``: "query", "key" or, for the rotary part of a query in latent attention, "rotary"; ``None`` for values.
    ``head``: index of the query head, or of the key head.
    """

    size: int
    role: Role | None = None
    head: int = 0


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention module's heads, and where the weights of their queries and keys are.

    Args:
        name: name of the module.
        query_heads, key_heads: numbers of query heads and key heads on all tensor-parallel ranks together.
        local_heads: indices of the query heads whose weights this tensor-parallel rank has.
        weights: {parameter: where each head's weights are in it}; only heads whose weights this rank has.
    """

    name: str
    query_heads: int
    key_heads: int
    local_heads: tuple[int, ...]
    weights: Mapping[nn.Parameter, tuple[HeadWeights, ...]]


def attention_layers(model: nn.Module, trained: Collection[nn.Parameter] | None = None) -> dict[nn.Module, Attention]:
    """Return {module: its heads} for each softmax attention module of ``model`` whose queries and keys are trained.

    ``trained``: the parameters that an optimizer updates; ``None``: those with ``requires_grad``.

    Raises:
        MuonConfigError: QK-clip cannot act on one of these modules: its heads are unknown, scaling its weights would
            not scale its logits, some of its queries or keys are frozen, or it shares weights with another module.
    """
    trained = {param for param in model.parameters() if param.requires_grad} if trained is None else set(trained)
    attentions: dict[nn.Module, Attention] = {}
    problems: dict[str, str] = {}
    for name, module in model.named_modules():
        projections = _projections(module)
        if not any(param in trained for p in projections.values() for param in p.parameters()):
            continue
        try:
            attentions[module] = _attention(name, module, projections, model, trained)
        except ValueError as error:
            problems.setdefault(str(error), name)
    for name, module in model.named_modules():
        if _is_unknown_attention(module, trained) and not any(map(_projections, module.modules())):
            problems.setdefault("the names of its projections do not tell which are queries and keys", name)
    if problems:
        texts = "; ".join(f"{name}: {problem}" for problem, name in problems.items())
        raise MuonConfigError(
            f"optimizer.params.qk_clip: remove this key, because QK-clip cannot act on these attention layers: {texts}"
        )
    shared = [param for layer in attentions.values() for param in layer.weights]
    if len(set(shared)) < len(shared):
        raise MuonConfigError(
            "optimizer.params.qk_clip: remove this key, because QK-clip cannot act on attention layers that share "
            "weights"
        )
    return attentions


def _is_unknown_attention(module: nn.Module, trained: Set[nn.Parameter]) -> bool:
    """Return whether a module's class is named like softmax attention, and it or a child of it has trained matrices.

    If no queries and keys are found in such a module, QK-clip raises an error instead of skipping it silently.
    """
    is_attention = isinstance(module, nn.MultiheadAttention) or type(module).__name__.endswith("Attention")
    own = [*module.parameters(recurse=False), *(p for child in module.children() for p in child.parameters(False))]
    return is_attention and not is_linear_attention(module) and any(p in trained and p.ndim == 2 for p in own)


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    """Return {name: child} for the children of a softmax attention module that compute queries or keys.

    Return an empty dict for other modules, and if the names of the children are unknown.
    """
    if isinstance(module, nn.MultiheadAttention) or is_linear_attention(module):
        return {}

    def named(names: Set[str]) -> dict[str, nn.Module]:
        children = module.named_children()
        return {name: child for name, child in children if name.lower() in names and hasattr(child, "weight")}

    queries, keys = named(QUERIES), named(KEYS | LATENT)
    return queries | keys if queries and keys else named(FUSED | {"linear_qkv"})


def _attention(
    name: str, module: nn.Module, projections: Mapping[str, nn.Module], model: nn.Module, trained: Set[nn.Parameter]
) -> Attention:
    """Return the heads of attention module ``module``. Raise ValueError with the reason if QK-clip cannot act on it.

    ``name``: name of the module. ``projections``: {name: child} for the children that compute its queries and keys.
    """
    for child, _ in module.named_children():
        if _NORM.search(child):
            raise ValueError(
                f"{child} normalizes queries or keys, so scaling the weights of queries and keys has no effect"
            )
    heads = heads_of(module, model)
    if heads is None:
        raise ValueError(
            "neither an attribute of the attention module nor the model's config tells the number of heads"
        )
    latent = any(leaf.lower() in LATENT for leaf in projections)
    weights: dict[nn.Parameter, tuple[HeadWeights, ...]] = {}
    keys = heads.query_heads
    for leaf, projection in projections.items():
        for attribute, param in projection.named_parameters():
            if attribute not in ("weight", "bias"):
                raise ValueError(
                    f"{leaf}.{attribute} changes the outputs of {leaf}, as an adapter does, so scaling {leaf}.weight "
                    "does not scale the logits"
                )
            if param not in trained:
                raise ValueError(
                    f"{leaf}.{attribute} is frozen, but other queries or keys of the layer are trained; train or "
                    "freeze all of them"
                )
        parts = _parts(leaf, projection, module, model, heads, latent)
        keys = max((part.head + 1 for part in parts if part.role == "key"), default=keys)
        for attribute, param in projection.named_parameters():
            axis = output_axis(projection) if attribute == "weight" else 0
            weights[param] = tuple(_local_weights(param, parts, axis, projection))
    if heads.query_heads % keys:
        raise ValueError(
            f"the number of query heads, {heads.query_heads}, is not a multiple of the number of key heads, {keys}"
        )
    local = sorted({w.head for of_param in weights.values() for w in of_param if w.role == "query"})
    return Attention(name, heads.query_heads, keys, tuple(local), weights)


def _parts(
    leaf: str, projection: Any, module: nn.Module, model: nn.Module, heads: Heads, latent: bool
) -> Sequence[_Outputs]:
    """Return which outputs of a projection belong to which head of attention module ``module``.

    The result lists all outputs in order. If each of 2 heads has 64 queries, those of ``q_proj`` are
    ``[_Outputs(64, "query", 0), _Outputs(64, "query", 1)]``.

    ``leaf``: name of the projection, such as ``q_proj``. ``heads``: number and widths of the module's heads.
    ``latent``: whether the module computes latent attention. Raise ValueError if the outputs do not fit the heads.
    """
    shape, axis = whole_shape(projection.weight), output_axis(projection)
    kind, outputs, parts = leaf.lower(), shape[axis], list[_Outputs]()
    if kind in LATENT:
        for h in range(heads.query_heads):
            parts += [_Outputs(heads.nope_width, "key", h), _Outputs(heads.value_width)]
    elif kind in QUERIES and latent:
        for h in range(heads.query_heads):
            parts += [_Outputs(heads.nope_width, "query", h), _Outputs(heads.rope_width, "rotary", h)]
    elif kind in QUERIES:
        width = heads.width or outputs // heads.query_heads
        parts = [_Outputs(width, "query", h) for h in range(heads.query_heads)]
    elif kind in KEYS:
        width = heads.width or outputs // heads.key_heads
        parts = [_Outputs(width, "key", h) for h in range(1 if outputs == width else heads.key_heads)]
    else:
        parts = list(_fused(leaf, shape, axis, module, model, heads))
    if sum(part.size for part in parts) != outputs:
        raise ValueError(
            f"the {outputs} outputs of {leaf} cannot be divided into attention heads; the model has {heads}"
        )
    return parts


def _fused(
    leaf: str, shape: Sequence[int], axis: int, module: nn.Module, model: nn.Module, heads: Heads
) -> Iterator[_Outputs]:
    """Do the same as :func:`_parts` for a projection ``leaf`` that computes queries, keys and values.

    ``shape``, ``axis``: shape of its weight before tensor parallelism, and the axis of its outputs. Raise ValueError if
    the order of the outputs is unknown.
    """
    known = None if is_a(module, DEVICE_CLASSES) else cut_fused(leaf, shape, axis, module, model)
    if known is None or known[1] != QKV:
        raise ValueError(
            f"the fused projection {leaf} of {type(module).__name__} has queries, keys and values in an unknown order"
        )
    sizes, groups = known[0].sizes, known[0].groups
    per_group, width = heads.query_heads // groups, sizes[0] * groups // heads.query_heads
    for group in range(groups):
        yield from (_Outputs(width, "query", group * per_group + i) for i in range(per_group))
        yield from (_Outputs(width, "key", group + i) for i in range(sizes[1] // width))
        yield _Outputs(sizes[2])


def _local_weights(param: nn.Parameter, parts: Sequence[_Outputs], axis: int, projection: Any) -> Iterator[HeadWeights]:
    """Yield where each head's weights are in ``param``, the weight or bias of ``projection``, on this rank.

    ``parts``: the projection's outputs over all tensor-parallel ranks. ``axis``: the axis of ``param`` along which its
    outputs lie. Raise ValueError if it is unknown which part of ``param`` this rank has.
    """
    whole, sharding = whole_shape(param), sharding_of(param)
    if sharding is None and whole != local_shape(param):
        raise ValueError(
            "QK-clip does not know how tensor parallelism has split the weights of this layer among the ranks"
        )
    shape = (*whole, 1)[:2]  # a bias counts as a matrix of one column
    blocks = cut(matrices(shape)[0], Cut(tuple(part.size for part in parts), axis))
    for part, block in zip(parts, blocks, strict=True):
        if part.role is None:
            continue
        if sharding is None:
            yield HeadWeights(part.role, part.head, block)
            continue
        for shard, _ in replace(sharding, shape=shape).parts(block, tp_rank(param, projection)):
            yield HeadWeights(part.role, part.head, shard)
