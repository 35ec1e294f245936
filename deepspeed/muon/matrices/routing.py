# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to Muon, which to AdamW, and why.

By module type and shape first, then by name: a hidden matrix is a 2-D weight of a linear-like module
that is neither an embedding, nor an output head, nor a router, nor a factor of a low-rank adapter; a stack of
experts is several. Every decision carries its reason. The user's tags and patterns win over the rules.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.heads import is_projection
from deepspeed.muon.matrices.options import DEFAULT_OPTIONS, MatrixOptions
from deepspeed.muon.matrices.pipeline import outer_parameters, shared_parameters
from deepspeed.muon.matrices.splitting import Use, blocks_of, is_convolution, is_stack
from deepspeed.muon.matrices.tp_sharding import Sharding, local_shape, sharding_of, whole_shape

#: Attribute names of output heads, and those that are heads only at the top level of the model.
HEAD_NAMES = frozenset({"lm_head", "score", "classifier", "embed_out", "output_projection", "qa_outputs"})
TOP_LEVEL_HEAD_NAMES = frozenset({"output", "head"})
#: ``LinearLayer`` and ``LinearAllreduce`` are those of DeepSpeed's tensor parallelism.
_LINEAR_LIKE = re.compile(r"(Linear|Dense|Projection)(Layer|Allreduce)?$|^Conv1D$")
_EMBEDDING_LIKE = re.compile(r"embed|(^|[._])(wte|wpe|pos(ition)?|tok(en)?)([._]|$)", re.IGNORECASE)
#: What PEFT puts between a module it trains whole and the module's own name, and before the model's own names.
_SAVED_COPY = re.compile(r"\.modules_to_save\.[^.]+$")
_PREFIX = re.compile(r"^((base_model\.model|_orig_mod|module)\.)+")
#: Names of low-rank factors: PEFT, torchtune, diffusers, DeepSpeed-Chat, DeepSpeed's OptimizedLinear.
_LORA = re.compile(
    r"(^|[._])lora_?(embedding_)?(A|B|a|b|up|down|left_weight|right_weight|weight_[12]|magnitude_vector)([._]|$)"
)


#: Of those, the factor that starts at zero and is applied second.
_LORA_B = re.compile(r"(^|[._])lora_?(embedding_)?(B|b|up|left_weight|weight_2)([._]|$)")


@dataclass(frozen=True)
class MatrixSpec:
    """One parameter's route, and the matrices that it is for Muon.

    ``shape`` is that of the tensor that a rank has, before ZeRO cut it. Where tensor parallelism cut it before,
    ``sharding`` says how, and ``blocks`` are those of the whole.
    """

    name: str
    shape: tuple[int, ...]
    use_muon: bool
    reason: str
    blocks: tuple[Block, ...] = ()
    #: In words, how it was split into them; empty for one matrix.
    split: str = ""
    sharding: Sharding | None = None
    #: Whether it is an attention projection by the name of its module.
    is_projection: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape before tensor parallelism cut it."""
        return self.sharding.shape if self.sharding else self.shape


def route(model: nn.Module, options: MatrixOptions = DEFAULT_OPTIONS) -> dict[nn.Parameter, MatrixSpec]:
    """Decide for every trainable parameter of ``model``.

    A tag ``param.use_muon`` set by the user wins over everything and is **removed**, because stock
    DeepSpeed runs its own Muon on tagged parameters.

    Raises:
        ValueError: ``use_muon = True`` on a parameter that is not a matrix; Muon asked for where several stages of a
            pipeline have copies of the parameter.
        MuonConfigError: a split that does not fit, heads that are not known.
    """
    uses = _uses(model)
    outer = _output_embeddings(model) | outer_parameters(model)
    specs, shared = {}, shared_parameters(model)
    for param, names in _names(model).items():
        tag = param.__dict__.pop("use_muon", None)
        if not param.requires_grad:
            continue
        name, shape, used = names[0], whole_shape(param), uses[param]
        asked = _asked(names, tag, options)
        use_muon, reason = (
            _grant(name, shape, *asked) if asked else _decide(name, shape, used, outer.get(param), options)
        )
        if use_muon and param in shared:
            raise ValueError(
                f"{name}: {reason}, but stages of the pipeline have copies, which Muon's rounding would drive apart; "
                "leave it to AdamW"
            )
        blocks, split = blocks_of(names, shape, used[0], options, model) if use_muon else ((), "")
        sharding = _sharding(name, param, use_muon)
        if use_muon and sharding and options.tp_mode == "shard":
            blocks, split = _shards(blocks, split, sharding, used[0].module)
            sharding = None
        projection = is_projection(used[0].leaf)
        specs[param] = MatrixSpec(name, local_shape(param), use_muon, reason, blocks, split, sharding, projection)
    return specs


def _shards(blocks: Sequence[Block], split: str, sharding: Sharding, module: Any) -> tuple[tuple[Block, ...], str]:
    """What this rank of the tensor-parallel group holds of each block, as a matrix of its own."""
    held = tuple(part for block in blocks for part, _ in sharding.parts(block, module.tp_index))
    return held, ", ".join(filter(None, [split, "tensor-parallel shards, by tp_mode"]))


def shapes_of(specs: Iterable[MatrixSpec]) -> Counter[tuple[int, int]]:
    """How many matrices of each shape go to Newton-Schulz; a shape and its transpose are one, the wide one."""
    blocks = (block for spec in specs if spec.use_muon for block in spec.blocks)
    return Counter((min(block.rows, block.cols), max(block.rows, block.cols)) for block in blocks)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The whole shape of every trainable parameter, by name; a tied one has several."""
    named = _names(model).items()
    return {name: whole_shape(param) for param, names in named if param.requires_grad for name in names}


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


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
        parent = modules.get(place.rpartition(".")[0]) if place else None
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(param, []).append(Use(module, parent, _PREFIX.sub("", place), attribute))
    return uses


def _output_embeddings(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters of the head that a Hugging Face model names itself, with that reason."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    found = head.parameters() if isinstance(head, nn.Module) else ()
    return dict.fromkeys(found, "output head (get_output_embeddings)")


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The regular expressions that are found in none of the names."""
    return [pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)]


def is_lora(spec: MatrixSpec) -> bool:
    """Whether the parameter is a factor of a low-rank adapter, by its name and its rank."""
    return _lora(spec.name, spec.shape) is not None


def _lora(name: str, shape: tuple[int, ...]) -> str | None:
    if not _LORA.search(name) or (len(shape) == 2 and shape[0] == shape[1]):
        return None
    return f"LoRA factor of rank {min(shape)}" if len(shape) == 2 else "LoRA"


def _asked(names: Sequence[str], tag: bool | None, options: MatrixOptions) -> tuple[bool, str] | None:
    """What the user asks for this parameter, and by what; ``None``: the rules decide."""
    if tag is not None:
        return bool(tag), f"use_muon = {bool(tag)} set by the user"
    for key, use_muon, expressions in (
        ("muon_exclude", False, options.exclude),
        ("muon_include", True, options.include),
    ):
        for expression in expressions:
            if any(re.search(expression, name) for name in names):
                return use_muon, f"{key} {expression!r}"
    return None


def _grant(name: str, shape: tuple[int, ...], use_muon: bool, reason: str) -> tuple[bool, str]:
    if not use_muon or (len(shape) >= 2 and min(shape) > 0):
        return use_muon, reason
    if reason.startswith("use_muon"):
        raise ValueError(f"{name}: use_muon = True, but its shape {list(shape)} is not that of a matrix")
    return False, f"{_not_a_matrix(shape)}, in spite of {reason}"


def _not_a_matrix(shape: tuple[int, ...]) -> str:
    return "0-D or 1-D" if len(shape) < 2 else "more than two dimensions" if min(shape) else "no elements"


def _of_more_dimensions(shape: tuple[int, ...], use: Use, conv: str) -> tuple[bool, str]:
    kind = type(use.module).__name__
    if is_convolution(use.module) and len(shape) > 2:
        one_group = getattr(use.module, "groups", 1) == 1
        if conv == "flatten" and one_group:
            return True, f"{kind}, by muon_conv"
        return False, f"convolution ({kind}); muon_conv: flatten is for Muon" if one_group else f"grouped {kind}"
    if is_stack(use.module, use.path, shape):
        return True, f"stack of {shape[0]} matrices of {kind}"
    return False, _not_a_matrix(shape)


def _decide(
    name: str, shape: tuple[int, ...], uses: list[Use], outer: str | None, options: MatrixOptions
) -> tuple[bool, str]:
    if len(shape) != 2:
        return _of_more_dimensions(shape, uses[0], options.conv)
    if lora := _lora(name, shape):
        use_muon = options.lora == "both" or (options.lora == "B" and bool(_LORA_B.search(name)))
        return use_muon and min(shape) > 1, lora + (f", by muon_lora {options.lora}" if use_muon else "")
    if min(shape) <= 1:
        return False, "a vector in the shape of a matrix"
    for rule in (_embedding, _head, _router):
        for use in uses:
            if reason := rule(use):
                return False, reason + (", tied" if len(uses) > 1 else "")
    if outer:
        return False, outer
    module = uses[0].module
    kind = type(module).__name__
    if _is_linear_like(module, uses[0].attribute):
        return True, f"hidden matrix of {kind}"
    return False, f"2-D, but {kind} is not known to be linear; set use_muon = True to choose Muon"


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
    if "classifier" not in parts[:-1]:
        return None
    siblings = [name for name, _ in _children(use.parent)]
    return f"output head {use.path}" if siblings and parts[-1] == siblings[-1] else None


def _router(use: Use) -> str | None:
    parts = use.path.split(".") if use.path else []
    if any("router" in part.lower() for part in parts[-2:]) or "Router" in type(use.module).__name__:
        return "MoE router"
    if parts[-2:] == ["gate", "wg"]:
        return "MoE router"
    if not parts or parts[-1] not in ("gate", "coefficient"):
        return None
    is_moe = any(child in ("experts", "deepspeed_moe") for child, _ in _children(use.parent))
    if parts[-1] == "coefficient":
        return "mixture of a residual MoE" if is_moe else None
    return "MoE router" if is_moe or type(use.module).__name__.endswith("Gate") else None


def _children(module: nn.Module | None) -> Iterable[tuple[str, nn.Module]]:
    return module.named_children() if module is not None else ()


def _is_linear_like(module: nn.Module, attribute: str) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    has_features = hasattr(module, "in_features") and hasattr(module, "out_features")
    return isinstance(module, nn.Linear) or has_features or bool(_LINEAR_LIKE.search(type(module).__name__))
