# SPDX-License-Identifier: Apache-2.0
"""Decide which parameters Muon updates and which AdamW, with a reason for each (routing).

Muon updates hidden matrices: 2-D weights of linear-like modules that are not an embedding, output head, router or
factor of a low-rank adapter. The role of a weight follows from what the model declares, then from the layers around it,
and last from names. A stack of experts is several matrices. The user's tags (``param.use_muon``) and patterns
(``muon_include``, ``muon_exclude``) override these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError, UnsupportedError, listed
from deepspeed.muon.layout import Sharding, local_shape, sharding_of, whole_shape
from deepspeed.muon.model.fused_weights import is_projection, shared_parameters
from deepspeed.muon.model.output_heads import find_output_heads
from deepspeed.muon.model.splitting import (
    Factor,
    MatrixSpec,
    Use,
    embedding_reason,
    first_match,
    is_convolution,
    is_linear_like,
    is_stack,
    lora_factors,
    packed_experts,
    split_parameter,
    without_copy,
    without_wrappers,
)

#: Attribute of a parameter that says whether Muon updates it; set by users, stock DeepSpeed and other projects.
TAG = "use_muon"
#: Attribute with a copy of the tag that :func:`tag_parameters` has set; a different tag was set by the user.
ROUTED_TAG = "_use_muon_routed"

#: The dtypes of matrices that Muon can update. Of a complex matrix Newton-Schulz would read the real part only.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def unwrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    """Return (the module inside DDP, DDP's process group), also for a DDP model in ``torch.compile``.

    Without DDP, return (``model``, ``None``). Raise UnsupportedError if FSDP or DTensors shard the parameters.
    """
    inner: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    is_ddp = isinstance(inner, DistributedDataParallel)
    module = inner.module if is_ddp else model
    if kind := next(filter(None, map(_sharded_by, module.modules())), None):
        raise UnsupportedError(
            f"MuonWithAuxAdam needs whole parameters, but {kind} has split them into shards. Let DeepSpeed shard the "
            'model instead: set "zero_optimization": {"stage": 3} and "optimizer": {"type": "Muon"} in ds_config.json; '
            "or use DistributedDataParallel"
        )
    return module, inner.process_group if is_ddp else None


def _sharded_by(module: nn.Module) -> str | None:
    if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
        return "FullyShardedDataParallel"
    if any(type(param.data).__name__ == "DTensor" for param in module.parameters(recurse=False)):
        return f"fully_shard, or other code that makes DTensors, in {type(module).__name__},"
    return None


class Route(NamedTuple):
    """Whether Muon or AdamW updates one parameter, and why. The fields mean the same as in :class:`MatrixSpec`."""

    use_muon: bool
    reason: str
    chosen_by: str | None = None


def route(model: nn.Module, config: MuonConfig | None = None) -> dict[nn.Parameter, MatrixSpec]:
    """Decide for each trainable parameter whether Muon or AdamW updates it; return {parameter: its MatrixSpec}.

    The user's attribute ``param.use_muon`` overrides the patterns ``muon_include`` and ``muon_exclude`` in ``config``,
    and these override the package's rules. The model is not changed.

    Raises:
        ValueError: the user assigns a parameter to Muon that is not a matrix, or that several pipeline stages share.
        MuonConfigError: a split in ``muon_split`` does not fit its parameter, the heads of a projection are unknown
            (``per_head_muon``), or it is unknown how tensor parallelism split a parameter.
    """
    config = config or MuonConfig()
    used = _uses(model)
    factors = lora_factors(model, {use.name: whole_shape(param) for param, uses in used.items() for use in uses})
    routers = {param for param, uses in used.items() if any(map(_router, uses))}
    heads = find_output_heads(model, used, routers | {p for p, uses in used.items() if uses[0].name in factors})
    specs, shared = {}, shared_parameters(model)
    for param, uses in used.items():
        if not param.requires_grad:
            continue
        names, shape = [use.name for use in uses], whole_shape(param)
        no_matrix, factor = _not_a_matrix(shape, param.dtype), factors.get(names[0])
        head = heads.reasons.get(param)
        by_rules = Route(False, no_matrix) if no_matrix else _route_by_rules(shape, uses, head, factor, config)
        decided = _route_by_user(names, param, no_matrix, config) or by_rules
        # Each stage updates its own copy. AdamW gives all copies equal bits, Newton-Schulz may not.
        if decided.use_muon and param in shared:
            raise ValueError(
                f"{names[0]}: Muon cannot update this parameter ({decided.reason}), because several pipeline stages "
                "have copies of it, and rounding in Muon would make the copies differ; remove the parameter's use_muon "
                "tag or the pattern in muon_include that matches it"
            )
        spec = MatrixSpec(
            names[0],
            local_shape(param),
            **decided._asdict(),
            sharding=_sharding(names[0], param, decided.use_muon),
            is_projection=is_projection(uses[0].projection[0]),
            overrides_rules=decided.use_muon is not by_rules.use_muon,
            output_axis=uses[0].matrix_output_axis(shape),
            is_lora=factor is not None,
            is_unsure=param in heads.uncertain
            and decided == by_rules
            and (decided.use_muon or decided.reason.startswith(head or "output head")),
        )
        specs[param] = split_parameter(spec, names, param, uses[0], config, model, factor) if decided.use_muon else spec
    return specs


#: The most names in a text about output heads.
MAX_LISTED = 3


def head_note(specs: Iterable[MatrixSpec]) -> str:
    """Return a note for the log on the matrices for which only their place tells whether they are output heads.

    Return "" if there are none.
    """
    unsure = [spec for spec in specs if spec.is_unsure]
    heads, others = ([spec.name for spec in unsure if spec.use_muon is use_muon] for use_muon in (False, True))
    texts = [
        *([f"AdamW updates {listed(heads, MAX_LISTED)} (muon_include sends them to Muon)"] if heads else ()),
        *([f"Muon updates {listed(others, MAX_LISTED)} (muon_exclude sends them to AdamW)"] if others else ()),
    ]
    return f"only their place in the model tells whether these are output heads: {'; '.join(texts)}" if texts else ""


def user_tag(param: nn.Parameter) -> bool | None:
    """Return ``param.use_muon``; ``None`` if it is unset or if :func:`tag_parameters` set it."""
    tag = param.__dict__.get(TAG)
    return None if tag is None or tag == param.__dict__.get(ROUTED_TAG) else bool(tag)


def tag_parameters(model: nn.Module, specs: Mapping[nn.Parameter, MatrixSpec]) -> None:
    """Set ``param.use_muon`` of each parameter to whether Muon updates it, except where the user has set it.

    Other code finds Muon's parameters by this attribute. ``specs``: the result of :func:`route`.
    """
    for param in model.parameters():
        if user_tag(param) is None:
            routed = param in specs and specs[param].use_muon
            setattr(param, TAG, routed)
            setattr(param, ROUTED_TAG, routed)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: shape before any sharding} of the trainable parameters, under all names if they are tied."""
    used = _uses(model).items()
    return {use.name: whole_shape(param) for param, uses in used if param.requires_grad for use in uses}


def _sharding(name: str, param: nn.Parameter, use_muon: bool) -> Sharding | None:
    try:
        return sharding_of(param)
    except ValueError as error:
        if not use_muon:
            return None
        raise MuonConfigError(
            f"{name}: cannot tell how tensor parallelism split this parameter: {error}; to let AdamW update the "
            "parameter, list its name in optimizer.params.muon_exclude"
        ) from None


def _uses(model: nn.Module) -> dict[nn.Parameter, list[Use]]:
    """Return {parameter: the places in the model that use it}; a tied parameter has several."""
    modules = dict(model.named_modules(remove_duplicate=False))
    uses: dict[nn.Parameter, list[Use]] = {}
    for path, module in modules.items():
        place = without_copy(path)
        parent = modules[place.rpartition(".")[0]] if place else nn.Module()
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            use = Use(f"{path}.{attribute}".lstrip("."), module, parent, without_wrappers(path), attribute)
            uses.setdefault(param, []).append(use)
    return uses


def _route_by_user(names: Sequence[str], param: nn.Parameter, no_matrix: str, config: MuonConfig) -> Route | None:
    """Return the route that the tag ``use_muon`` or a pattern in ``config`` decides; ``None`` if neither does.

    ``no_matrix``: why Muon cannot update the parameter, or an empty text, from :func:`_not_a_matrix`.
    """
    tag = user_tag(param)
    if tag is not None:
        if tag and no_matrix:
            raise ValueError(
                f"{names[0]}: use_muon = True, but Muon updates only matrices of real numbers, and this is a parameter "
                f"of shape {list(whole_shape(param))} and dtype {param.dtype}; remove use_muon"
            )
        return Route(tag, f"use_muon = {tag} set by the user", TAG)
    for option, use_muon in (("muon_exclude", False), ("muon_include", True)):
        expression = first_match(getattr(config, option), names)
        if expression is not None:
            reason = f"{option} {expression!r}"
            if use_muon and no_matrix:
                return Route(False, f"{no_matrix}, although {reason} matches", option)
            return Route(use_muon, reason, option)
    return None


def _not_a_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return why Muon cannot update a parameter of this shape and dtype; an empty text if Muon can."""
    if len(shape) < 2:
        return "0-D or 1-D"
    if not min(shape):
        return "no elements"
    return "" if dtype in DTYPES else f"numbers of {dtype}"


def _route_by_rules(
    shape: tuple[int, ...], uses: list[Use], head: str | None, factor: Factor | None, config: MuonConfig
) -> Route:
    """Return the route by the package's rules alone, without the user's tags and patterns.

    ``head``: why the parameter is an output head; ``None`` if it is not. ``factor``: which factor of a low-rank adapter
    it is; ``None`` if it is not.
    """
    if factor and len(shape) == 2:
        use_muon = factor.rank > 1 and (config.muon_lora == "both" or (config.muon_lora == "B" and factor.is_b))
        return Route(use_muon, str(factor) + (f", by muon_lora {config.muon_lora}" if use_muon else ""))
    tied = ", tied" if len(uses) > 1 else ""
    if len(shape) != 2:
        found = _route_of_more_dimensions(shape, uses[0], config.muon_conv)
        return Route(False, head + tied) if head and found.use_muon else found
    if min(shape) == 1:
        return Route(False, "a vector in the shape of a matrix")
    for rule in (embedding_reason, _router):
        for use in uses:
            if reason := rule(use):
                return Route(False, reason + tied)
    if head:
        return Route(False, head + tied)
    module = uses[0].module
    kind = type(module).__name__
    if is_linear_like(module, uses[0].attribute):
        return Route(True, f"hidden matrix of {kind}")
    if packed_experts(module, shape):
        why = f"2-D, but {kind} may hold several experts' matrices in it"
        return Route(False, f"{why}; for Muon set muon_include, and their sizes in muon_split")
    return Route(False, f"2-D, but {kind} is not a known linear module; for Muon set param.use_muon = True")


def _route_of_more_dimensions(shape: tuple[int, ...], use: Use, conv: str) -> Route:
    """Return the route of a parameter that is not 2-D. ``conv``: the option ``muon_conv``."""
    kind = type(use.module).__name__
    if is_convolution(use.module) and len(shape) > 2:
        if getattr(use.module, "groups", 1) > 1:
            return Route(False, f"grouped {kind}")
        if conv == "flatten":
            return Route(True, f"{kind}, by muon_conv")
        return Route(False, f'convolution ({kind}); for Muon set "muon_conv": "flatten"')
    if is_stack(use.module, use.path, shape):
        return Route(True, f"stack of {shape[0]} matrices of {kind}")
    return Route(False, "more than two dimensions")


def _router(use: Use) -> str | None:
    """Return why a parameter belongs to the router of a mixture of experts; ``None`` if it does not."""
    parts, kind = use.path.split("."), type(use.module).__name__
    if any("router" in part.lower() for part in parts[-2:]) or "Router" in kind or parts[-2:] == ["gate", "wg"]:
        return "MoE router"
    if parts[-1] not in ("coefficient", "gate"):
        return None
    is_moe = any(child in ("experts", "deepspeed_moe") for child, _ in use.parent.named_children())
    if parts[-1] == "coefficient" and is_moe:
        return "mixture of a residual MoE"
    return "MoE router" if parts[-1] == "gate" and (is_moe or kind.endswith("Gate")) else None
