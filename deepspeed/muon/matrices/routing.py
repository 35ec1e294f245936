# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to Muon, which to AdamW, and why.

By module type and shape first, then by name: a hidden matrix is a 2-D weight of a linear-like module that is neither
an embedding, nor an output head, nor a router, nor a factor of a low-rank adapter. A stack of experts is several
matrices. Every decision carries its reason. The user's tags and patterns override the rules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.heads import is_projection
from deepspeed.muon.matrices.pipeline import outer_parameters, shared_parameters
from deepspeed.muon.matrices.splitting import MatrixSpec, Use, first_match, is_convolution, is_stack, split_parameter
from deepspeed.muon.matrices.tp_sharding import Sharding, local_shape, sharding_of, whole_shape

#: The attribute of a parameter by which users, stock DeepSpeed and other projects say whether Muon updates it.
TAG = "use_muon"
#: Beside a tag that :func:`tag_parameters` has set, its value; a tag of another value is the user's.
ROUTED_TAG = "_use_muon_routed"

#: Attribute names of output heads, and those that are heads only at the top level of the model.
HEAD_NAMES = frozenset({"lm_head", "score", "classifier", "embed_out", "output_projection", "qa_outputs"})
TOP_LEVEL_HEAD_NAMES = frozenset({"output", "head"})
#: ``LinearLayer`` and ``LinearAllreduce`` belong to DeepSpeed's tensor parallelism.
_LINEAR_LIKE = re.compile(r"(Linear|Dense|Projection)(Layer|Allreduce)?$|^Conv1D$")
_EMBEDDING_LIKE = re.compile(r"embed|(^|[._])(wte|wpe|pos(ition)?|tok(en)?)([._]|$)", re.IGNORECASE)
#: What PEFT puts between a module that it trains whole and the module's own name, and before the model's own names.
_SAVED_COPY = re.compile(r"\.modules_to_save\.[^.]+$")
_PREFIX = re.compile(r"^((base_model\.model|_orig_mod|module)\.)+")
#: Names of low-rank factors: PEFT, torchtune, diffusers, DeepSpeed-Chat, DeepSpeed's OptimizedLinear.
_LORA = re.compile(
    r"(^|[._])lora_?(embedding_)?(A|B|a|b|up|down|left_weight|right_weight|weight_[12]|magnitude_vector)([._]|$)"
)
#: Of those, the factor that starts at zero and is applied second.
_LORA_B = re.compile(r"(^|[._])lora_?(embedding_)?(B|b|up|left_weight|weight_2)([._]|$)")


#: The dtypes of matrices that Newton-Schulz can read; AdamW gets the others, such as complex numbers.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Route(NamedTuple):
    """A decision for one parameter; the fields are those of :class:`MatrixSpec`."""

    use_muon: bool
    reason: str
    chosen_by: str | None = None


def route(model: nn.Module, config: MuonConfig | None = None) -> dict[nn.Parameter, MatrixSpec]:
    """Decide for every trainable parameter of ``model``, which is left as it is.

    A tag ``param.use_muon`` that the user has set overrides everything else.

    Raises:
        ValueError: ``use_muon = True`` on a parameter that is not a matrix, or Muon for a parameter that several
            stages of a pipeline have copies of.
        MuonConfigError: a split that does not fit, or heads that are not known.
    """
    config = config or MuonConfig()
    outer = _output_embeddings(model) | outer_parameters(model)
    specs, shared = {}, shared_parameters(model)
    for param, uses in _uses(model).items():
        if not param.requires_grad:
            continue
        names, shape = [use.name for use in uses], whole_shape(param)
        no_matrix = _not_a_matrix(shape, param.dtype)
        by_rules = Route(False, no_matrix) if no_matrix else _route_by_rules(shape, uses, outer.get(param), config)
        decided = _route_by_user(names, param, no_matrix, config) or by_rules
        if decided.use_muon and param in shared:
            raise ValueError(
                f"{names[0]}: {decided.reason}, but several stages of the pipeline have copies of it, and rounding in "
                "Muon would let them drift apart; leave it to AdamW"
            )
        spec = MatrixSpec(
            names[0],
            local_shape(param),
            **decided._asdict(),
            sharding=_sharding(names[0], param, decided.use_muon),
            is_projection=is_projection(uses[0].projection[0]),
            overrides_rules=decided.use_muon is not by_rules.use_muon,
            output_axis=uses[0].matrix_output_axis(shape),
        )
        specs[param] = split_parameter(spec, names, param, uses[0], config, model) if decided.use_muon else spec
    return specs


def user_tag(param: nn.Parameter) -> bool | None:
    """Return the user's ``param.use_muon``; ``None`` for no tag, and for one that :func:`tag_parameters` has set."""
    tag = param.__dict__.get(TAG)
    return None if tag is None or tag == param.__dict__.get(ROUTED_TAG) else bool(tag)


def tag_parameters(model: nn.Module, specs: Mapping[nn.Parameter, MatrixSpec]) -> None:
    """Set ``param.use_muon`` as routed on every parameter that the user has not tagged; ``False`` on frozen ones.

    Other code reads the tag to find Muon's parameters. The next :func:`route` does not take it for the user's.
    """
    for param in model.parameters():
        if user_tag(param) is None:
            routed = param in specs and specs[param].use_muon
            setattr(param, TAG, routed)
            setattr(param, ROUTED_TAG, routed)


def shapes_of(specs: Iterable[MatrixSpec]) -> Counter[tuple[int, int]]:
    """Return how many matrices of each shape go to Newton-Schulz; a shape and its transpose count as the wide one."""
    blocks = (block for spec in specs if spec.use_muon for block in spec.blocks)
    return Counter((min(block.rows, block.cols), max(block.rows, block.cols)) for block in blocks)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every trainable parameter, by name; a tied one has several names."""
    used = _uses(model).items()
    return {use.name: whole_shape(param) for param, uses in used if param.requires_grad for use in uses}


def _sharding(name: str, param: nn.Parameter, use_muon: bool) -> Sharding | None:
    try:
        return sharding_of(param)
    except ValueError as error:
        if not use_muon:
            return None
        raise MuonConfigError(
            f"{name}: tensor parallelism cut it, and {error}; name it in optimizer.params.muon_exclude"
        ) from None


def _uses(model: nn.Module) -> dict[nn.Parameter, list[Use]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    uses: dict[nn.Parameter, list[Use]] = {}
    for path, module in modules.items():
        place = _SAVED_COPY.sub("", path)
        parent = modules[place.rpartition(".")[0]] if place else nn.Module()
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            use = Use(f"{path}.{attribute}".lstrip("."), module, parent, _PREFIX.sub("", place), attribute)
            uses.setdefault(param, []).append(use)
    return uses


def _output_embeddings(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of the head that a Hugging Face model declares, with the reason."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    found = head.parameters() if isinstance(head, nn.Module) else ()
    return dict.fromkeys(found, "output head (get_output_embeddings)")


def is_lora(spec: MatrixSpec) -> bool:
    """Return whether the parameter is a factor of a low-rank adapter, by its name and its rank."""
    return _lora(spec.name, spec.shape) is not None


def _lora(name: str, shape: tuple[int, ...]) -> str | None:
    if not _LORA.search(name) or (len(shape) == 2 and shape[0] == shape[1]):
        return None
    return f"LoRA factor of rank {min(shape)}" if len(shape) == 2 else "LoRA"


def _route_by_user(names: Sequence[str], param: nn.Parameter, no_matrix: str, config: MuonConfig) -> Route | None:
    tag = user_tag(param)
    if tag is not None:
        if tag and no_matrix:
            raise ValueError(
                f"{names[0]}: use_muon = True, but its shape {list(whole_shape(param))} of {param.dtype} is not that "
                "of a matrix of real numbers"
            )
        return Route(tag, f"use_muon = {tag} set by the user", TAG)
    for option, use_muon in (("muon_exclude", False), ("muon_include", True)):
        expression = first_match(getattr(config, option), names)
        if expression is not None:
            reason = f"{option} {expression!r}"
            if use_muon and no_matrix:
                return Route(False, f"{no_matrix}, in spite of {reason}", option)
            return Route(use_muon, reason, option)
    return None


def _not_a_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return why a parameter cannot be a matrix for Muon; empty if it can."""
    if len(shape) < 2:
        return "0-D or 1-D"
    if not min(shape):
        return "no elements"
    return "" if dtype in DTYPES else f"numbers of {dtype}"


def _route_by_rules(shape: tuple[int, ...], uses: list[Use], outer: str | None, config: MuonConfig) -> Route:
    if len(shape) != 2:
        return _route_of_more_dimensions(shape, uses[0], config.muon_conv)
    if lora := _lora(uses[0].name, shape):
        use_muon = config.muon_lora == "both" or (config.muon_lora == "B" and bool(_LORA_B.search(uses[0].name)))
        return Route(use_muon and min(shape) > 1, lora + (f", by muon_lora {config.muon_lora}" if use_muon else ""))
    if min(shape) == 1:
        return Route(False, "a vector in the shape of a matrix")
    for rule in (_embedding, _head, _router):
        for use in uses:
            if reason := rule(use):
                return Route(False, reason + (", tied" if len(uses) > 1 else ""))
    if outer:
        return Route(False, outer)
    module = uses[0].module
    kind = type(module).__name__
    if _is_linear_like(module, uses[0].attribute):
        return Route(True, f"hidden matrix of {kind}")
    return Route(False, f"2-D, but {kind} is not known to be linear; set use_muon = True to choose Muon")


def _route_of_more_dimensions(shape: tuple[int, ...], use: Use, conv: str) -> Route:
    kind = type(use.module).__name__
    if is_convolution(use.module) and len(shape) > 2:
        if getattr(use.module, "groups", 1) > 1:
            return Route(False, f"grouped {kind}")
        if conv == "flatten":
            return Route(True, f"{kind}, by muon_conv")
        return Route(False, f"convolution ({kind}); muon_conv: flatten is for Muon")
    if is_stack(use.module, use.path, shape):
        return Route(True, f"stack of {shape[0]} matrices of {kind}")
    return Route(False, "more than two dimensions")


def _embedding(use: Use) -> str | None:
    kind = type(use.module).__name__
    if isinstance(use.module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in kind:
        return f"embedding ({kind})"
    if not _is_linear_like(use.module, use.attribute) and _EMBEDDING_LIKE.search(use.attribute):
        return f"embedding by its name {use.attribute}"
    return None


def _head(use: Use) -> str | None:
    parts = use.path.split(".")
    if parts[-1] in HEAD_NAMES or use.path in TOP_LEVEL_HEAD_NAMES:
        return f"output head {parts[-1]}"
    if "classifier" not in parts[:-1]:  # a parent may have thousands of children
        return None
    siblings = [name for name, _ in use.parent.named_children()]
    return f"output head {use.path}" if parts[-1] == siblings[-1] else None


def _router(use: Use) -> str | None:
    parts, kind = use.path.split("."), type(use.module).__name__
    if any("router" in part.lower() for part in parts[-2:]) or "Router" in kind or parts[-2:] == ["gate", "wg"]:
        return "MoE router"
    if parts[-1] not in ("coefficient", "gate"):
        return None
    is_moe = any(child in ("experts", "deepspeed_moe") for child, _ in use.parent.named_children())
    if parts[-1] == "coefficient" and is_moe:
        return "mixture of a residual MoE"
    return "MoE router" if parts[-1] == "gate" and (is_moe or kind.endswith("Gate")) else None


def _is_linear_like(module: nn.Module, attribute: str) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    has_features = hasattr(module, "in_features") and hasattr(module, "out_features")
    return isinstance(module, nn.Linear) or has_features or bool(_LINEAR_LIKE.search(type(module).__name__))
