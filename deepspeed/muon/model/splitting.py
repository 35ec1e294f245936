# SPDX-License-Identifier: Apache-2.0
"""Find the matrices in a parameter: it may be one matrix, a stack, a flattened convolution, or split into several."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeGuard

from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.layout import Block, Cut, MatrixSpec, cut, matrices, tp_rank
from deepspeed.muon.model.fused_weights import (
    GATED_CLASSES,
    cut_by_head,
    cut_fused,
    heads_of,
    is_a,
    output_axis,
    stack_output_axis,
)

#: ``LinearLayer`` and ``LinearAllreduce`` belong to DeepSpeed's tensor parallelism.
_LINEAR_LIKE = re.compile(r"(Linear|Dense|Projection)(Layer|Allreduce)?$|^Conv1D$")
_EMBEDDING_LIKE = re.compile(r"embed|(^|[._])(wte|wpe|pos(ition)?|tok(en)?)([._]|$)", re.IGNORECASE)
#: Parts of a path to remove: PEFT's, after a module that it trains in full; prefixes of PEFT, torch.compile and DDP.
_SAVED_COPY = re.compile(r"\.modules_to_save\.[^.]+$")
_PREFIX = re.compile(r"^((base_model\.model|_orig_mod|module)\.)+")


def without_copy(path: str) -> str:
    """Return ``path``, or for a copy that PEFT trains in full (``modules_to_save``) the path of the copied module."""
    return _SAVED_COPY.sub("", path)


def without_wrappers(path: str) -> str:
    """Return a module's path without the parts that wrappers such as DDP and PEFT add."""
    return _PREFIX.sub("", without_copy(path) + ".").removesuffix(".")


def is_linear_like(module: nn.Module, attribute: str) -> bool:
    """Return whether ``attribute`` is the weight of a linear layer, by the module's class or its attributes."""
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    has_features = hasattr(module, "in_features") and hasattr(module, "out_features")
    return isinstance(module, nn.Linear) or has_features or bool(_LINEAR_LIKE.search(type(module).__name__))


def is_convolution(module: nn.Module) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Return whether the module is a convolution, with a weight ``[out, in, *kernel]``."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_stack(module: nn.Module, path: str, shape: Sequence[int]) -> bool:
    """Return whether a weight is a stack of one matrix per expert: 3-D, with "expert" in the module's class or path."""
    names = (type(module).__name__, *path.split(".")[-2:])
    return len(shape) == 3 and min(shape[1:]) > 1 and any("expert" in name.lower() for name in names)


def packed_experts(module: nn.Module, shape: Sequence[int]) -> int:
    """Guess how many experts a 2-D weight stacks along its rows, as in MegaBlocks; return 0 if it seems to stack none.

    The guess uses the class name of the module and its number of experts; the weight may still be a single matrix.
    """
    counts = (getattr(module, name, 0) for name in ("num_experts", "moe_num_experts", "num_local_experts"))
    count = next((count for count in counts if type(count) is int and count > 1), 0)
    is_experts = "expert" in type(module).__name__.lower()
    return count if is_experts and count and len(shape) == 2 and shape[0] % count == 0 else 0


def first_match(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first regular expression in ``patterns`` that is found in one of ``names``; ``None`` if none is."""
    return next((pattern for pattern in patterns if any(re.search(pattern, name) for name in names)), None)


class Use(NamedTuple):
    """One place in the model that uses a parameter; a tied parameter has several.

    ``name``: the parameter's name in the model. ``module``: the module that holds the parameter, under the name
    ``attribute``. ``path``: the module's name in the model, without the parts that wrappers such as DDP and PEFT add.
    ``parent``: the module that contains ``module``.
    """

    name: str
    module: nn.Module
    parent: nn.Module
    path: str
    attribute: str

    @property
    def projection(self) -> tuple[str, nn.Module]:
        """Return (name, containing module) of the parameter's linear module, such as ("q_proj", attention module).

        ``nn.MultiheadAttention`` has no linear modules for its inputs, so return the parameter's own name and module,
        such as ("in_proj_weight", attention module).
        """
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute, self.module
        return self.path.rpartition(".")[2], self.parent

    @property
    def weight(self) -> tuple[str, nn.Module]:
        """Return (name, containing module), such as ("gate_up_proj", MLP module).

        Both are those of the linear module if the parameter is its ``weight``, otherwise those of the parameter itself.
        """
        return self.projection if self.attribute == "weight" else (self.attribute, self.module)

    def matrix_output_axis(self, shape: Sequence[int]) -> int | None:
        """Return the axis of the outputs in each matrix of the parameter (0: rows, 1: columns); ``None`` if unknown."""
        if len(shape) != 3 or is_convolution(self.module):
            return output_axis(self.module)
        name, owner = self.weight
        return stack_output_axis(name, shape[-2:], owner)


def embedding_reason(use: Use) -> str:
    """Return why a parameter is an embedding: its module's class or, outside of linear layers, its name; "" if not."""
    kind = type(use.module).__name__
    if isinstance(use.module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in kind:
        return f"embedding ({kind})"
    if not is_linear_like(use.module, use.attribute) and _EMBEDDING_LIKE.search(use.attribute):
        return f"embedding by its name {use.attribute}"
    return ""


def split_parameter(
    spec: MatrixSpec,
    names: Sequence[str],
    param: nn.Parameter,
    use: Use,
    config: MuonConfig,
    model: nn.Module,
    factor: Factor | None = None,
) -> MatrixSpec:
    """Split a parameter that Muon updates into matrices; return a copy of ``spec`` with ``blocks`` and ``split`` set.

    ``names``: all names of the parameter; a tied one has several. ``use``: the first place in the model that uses it.
    ``factor``: which factor of a low-rank adapter it is, if so.

    Raises:
        MuonConfigError: the sizes in ``muon_split`` do not add up to the parameter's, or its heads are unknown.
    """
    spec = _split(spec, names, use, config, model, factor)
    if spec.sharding is None or config.tp_mode == "whole":
        return spec
    rank = tp_rank(param, use.module)  # with tp_mode "shard", each rank's shards are separate matrices
    blocks = tuple(part for block in spec.blocks for part, _ in spec.sharding.parts(block, rank))
    return replace(spec, blocks=blocks, split=_joined(spec.split, "tensor-parallel shards, by tp_mode"), sharding=None)


def _split(
    spec: MatrixSpec, names: Sequence[str], use: Use, config: MuonConfig, model: nn.Module, factor: Factor | None
) -> MatrixSpec:
    shape, is_flattened = spec.whole, is_convolution(use.module) and len(spec.whole) > 2
    whole = matrices((shape[0], math.prod(shape[1:])) if is_flattened else shape)
    size = f"{whole[0].rows} x {whole[0].cols}"
    text = f"flattened to {size}" if is_flattened else f"{len(whole)} of {size}" if len(whole) > 1 else ""
    spec = replace(spec, blocks=whole, split=text)
    pattern = first_match(config.muon_split, names)
    if pattern is not None:
        try:
            return _cut(spec, config.muon_split[pattern], f"by muon_split {pattern!r}", "muon_split", pattern)
        except ValueError as error:
            raise MuonConfigError(
                f"optimizer.params.muon_split: {pattern!r} matches {names[0]} of shape {list(shape)}, but {error}; "
                "correct the sizes or the axis, or write a pattern that does not match this parameter"
            ) from None
    if factor is not None:
        return _split_factor(spec, factor)
    if config.per_head_muon and len(shape) == 2 and spec.is_projection:
        return _cut(spec, _by_head(names[0], shape, use, model), "one matrix per head", "per_head_muon")
    if config.muon_fused == "whole" or is_flattened:
        return spec
    if experts := packed_experts(use.module, shape):
        why = f"left whole: it may hold the matrices of {experts} experts; see muon_split"
        return replace(spec, split=why, left_whole=True)
    name, owner = use.weight
    try:
        fused = cut_fused(name, shape[-2:], output_axis(use.module), owner, model)
    except ValueError as error:
        return replace(spec, split=_joined(text, f"left whole: {error}"), left_whole=not text)
    return _cut(spec, fused[0], f"{fused[1]} by muon_fused", "muon_fused") if fused else spec


def _split_factor(spec: MatrixSpec, factor: Factor) -> MatrixSpec:
    """Return ``spec`` with one matrix for each low-rank adapter that shares the factor, as ``factor`` says."""
    why_whole = "tensor parallelism has cut it" if factor.blocks and spec.sharding else factor.why_whole
    if why_whole:
        return replace(spec, split=f"left whole: {why_whole}", left_whole=True)
    if not factor.blocks:
        return spec
    return replace(spec, blocks=factor.blocks, split=f"{len(factor.blocks)} low-rank factors, one for each adapter")


def _cut(spec: MatrixSpec, by: Cut, why: str, option: str, pattern: str = "") -> MatrixSpec:
    return replace(
        spec,
        blocks=tuple(part for matrix in spec.blocks for part in cut(matrix, by)),
        split=_joined(spec.split, str(by), why),
        split_by=option,
        split_pattern=pattern,
        left_whole=not (spec.split or by.sizes),
    )


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _by_head(name: str, shape: Sequence[int], use: Use, model: nn.Module) -> Cut:
    (leaf, attention), axis = use.projection, output_axis(use.module)
    heads = heads_of(attention, model)
    try:
        if heads is None:
            raise ValueError(
                "the number of attention heads is unknown: neither the attention module nor a config states it"
            )
        return cut_by_head(leaf, shape[axis], axis, heads, is_a(attention, GATED_CLASSES))
    except ValueError as error:
        raise MuonConfigError(
            f"optimizer.params.per_head_muon: {name} of shape {list(shape)} has the name of an attention projection, "
            f'but {error}; set its sizes, or "whole", in muon_split'
        ) from None


#: Names of A and B in PEFT, loralib, torchtune, diffusers, kohya's scripts, LLaMA-Adapter, DeepSpeed-Chat and
#: DeepSpeed's OptimizedLinear.
PAIRS = (
    ("A", "B"),
    ("a", "b"),
    ("down", "up"),
    ("l1", "l2"),
    ("right_weight", "left_weight"),
    ("weight_1", "weight_2"),
)
_OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
_B = {b for _, b in PAIRS}
#: The last "lora" in a name decides: kohya's ``lora_unet_down_blocks_0_attn.lora_up.weight`` is a factor B.
_FACTOR = re.compile(
    rf"(?:.*[._]|)lora(?:_[a-z]+(?=[._]))*?[._]?(?P<side>{'|'.join(_OTHER)}|magnitude_vector)(?=[._]|$)"
)


class Factor(NamedTuple):
    """One factor of a low-rank adapter.

    ``is_b``: whether it is B, which starts at zero and is applied second. ``rank``: rank of the adapter. ``blocks``:
    the matrices in the factor if it serves several experts or projections; empty if it is one matrix. ``why_whole``:
    why a factor that seems to serve several is left whole; otherwise empty.
    """

    is_b: bool
    rank: int
    blocks: tuple[Block, ...] = ()
    why_whole: str = ""

    def __str__(self) -> str:
        several = f"{len(self.blocks)} x " if self.blocks else ""
        return f"LoRA factor of {several}rank {self.rank}"


def lora_factors(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, Factor]:
    """Return {name: its :class:`Factor`} of the parameters that are factors of low-rank adapters.

    Args:
        model: the model. The modules that contain the factors may say how many experts or projections these serve.
        shapes: {name: shape before any sharding} of all parameters of the model, frozen ones too.
    """
    modules: dict[str, nn.Module] | None = None
    factors = {}
    for name, shape in shapes.items():
        match = _FACTOR.match(name)
        if match is None:
            continue
        side = match["side"]
        other = shapes.get(name[: match.start("side")] + _OTHER.get(side, "") + name[match.end("side") :], ())
        # Without the other factor only the shape can tell, and a square matrix is not low-rank.
        if len(shape) == 2 and len(other) != 2 and shape[0] == shape[1]:
            continue
        is_b = side in _B
        if len(shape) != 2 or len(other) != 2:
            factors[name] = Factor(is_b, min(shape, default=0))
            continue
        shape_a, shape_b = (other, shape) if is_b else (shape, other)
        modules = modules or dict(model.named_modules(remove_duplicate=False))
        owner = _owner(name[: match.start("side")], modules)
        factors[name] = _factor(is_b, shape_a, shape_b, owner)
    return factors


def _owner(prefix: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module around both LoRA factors. ``prefix``: a factor's name up to the part that says A or B."""
    path = prefix.rpartition(".")[0]
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


def _factor(is_b: bool, shape_a: Sequence[int], shape_b: Sequence[int], owner: nn.Module) -> Factor:
    """Return factor B (``is_b``) or A of a low-rank adapter in module ``owner``, from the shapes of both factors."""
    experts, (outputs, columns) = getattr(owner, "num_experts", 1), shape_b
    if type(experts) is int and experts > 1 and shape_a[0] == columns and columns % experts == 0:
        # PEFT's adapters of stacked experts: expert e has rows [e r, e r + r) of A, and columns e, e + E, ... of B.
        rank = columns // experts
        if is_b:
            blocks = [Block(e, outputs, rank, columns, column_stride=experts) for e in range(experts)]
        else:
            blocks = [Block(e * rank * shape_a[1], rank, shape_a[1], shape_a[1]) for e in range(experts)]
        return Factor(is_b, rank, tuple(blocks))
    count = shape_a[0] // columns
    if count < 2 or shape_a[0] % columns:
        return Factor(is_b, columns if shape_a[0] == columns else min(shape_b if is_b else shape_a))
    # A fused projection whose parts have an adapter each, below each other in A and in B (loralib, LitGPT).
    sizes = list(_part_sizes(owner, outputs, count))
    if not sizes:
        return Factor(
            is_b, columns, why_whole=f"it is unknown how its rows belong to {count} adapters of rank {columns}"
        )
    starts = [sum(sizes[:i]) for i in range(count)]
    width = columns if is_b else shape_a[1]
    rows = zip(starts, sizes, strict=True) if is_b else ((i * columns, columns) for i in range(count))
    return Factor(is_b, columns, tuple(Block(start * width, size, width, width) for start, size in rows))


def _part_sizes(owner: nn.Module, outputs: int, count: int) -> Iterator[int]:
    """Yield how many rows of LoRA factor B belong to each of ``count`` fused projections; nothing if unknown."""
    stated = getattr(owner, "qkv_shapes", None)
    if isinstance(stated, (list, tuple)) and len(stated) == count and sum(stated) == outputs:
        yield from stated
    elif isinstance(getattr(owner, "enable_lora", None), (list, tuple)) and stated is None and outputs % count == 0:
        yield from [outputs // count] * count
