# SPDX-License-Identifier: Apache-2.0
"""A parameter's matrices: the whole parameter, slices of a stack, a flattened convolution, or what it is cut into."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.config.types import Cut
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.block import Block, cut, matrices
from deepspeed.muon.matrices.fused import cut_fused, output_axis, stack_output_axis
from deepspeed.muon.matrices.heads import GATED_CLASSES, cut_by_head, heads_of, is_a
from deepspeed.muon.matrices.tp_sharding import Sharding, tp_rank


def is_convolution(module: nn.Module) -> bool:
    """Return whether the module's weight is ``[out, in, *kernel]``."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_stack(module: nn.Module, path: str, shape: Sequence[int]) -> bool:
    """Return whether a weight ``[experts, rows, cols]`` holds one matrix per expert, by the names of its module."""
    names = (type(module).__name__, *path.split(".")[-2:])
    return len(shape) == 3 and min(shape[1:]) > 1 and any("expert" in name.lower() for name in names)


def first_match(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the first regular expression that is found in one of the names."""
    return next((pattern for pattern in patterns if any(re.search(pattern, name) for name in names)), None)


class Use(NamedTuple):
    """One module that holds the parameter; a tied parameter has several. ``path`` is without wrappers."""

    name: str
    module: nn.Module
    parent: nn.Module
    path: str
    attribute: str

    @property
    def projection(self) -> tuple[str, nn.Module]:
        """Return the name that an attention projection has in its attention module, and that module."""
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute, self.module
        return self.path.rpartition(".")[2], self.parent

    @property
    def weight(self) -> tuple[str, nn.Module]:
        """Return the name of the weight in its attention or feed-forward module, and that module."""
        return self.projection if self.attribute == "weight" else (self.attribute, self.module)

    def matrix_output_axis(self, shape: Sequence[int]) -> int | None:
        """Return the axis of its matrices along which the outputs lie; ``None`` for a stack that does not tell."""
        if len(shape) != 3 or is_convolution(self.module):
            return output_axis(self.module)
        name, owner = self.weight
        return stack_output_axis(name, shape[-2:], owner)


@dataclass(frozen=True)
class MatrixSpec:
    """One parameter's route, and the matrices that Muon sees in it.

    Args:
        name: of the parameter in the model; of a tied one, the first.
        shape: of the tensor on this rank, before ZeRO partitions it.
        use_muon: whether Muon updates it; else AdamW.
        reason: for people, why.
        blocks: the matrices; empty for AdamW. With ``sharding`` they are blocks of the whole parameter.
        split: for people, how the parameter is split into them; empty for one matrix.
        sharding: how tensor parallelism cut the parameter, if it did.
        is_projection: whether its module's name says that it is an attention projection.
        chosen_by: the user's option that decided the route: ``use_muon``, ``muon_exclude`` or ``muon_include``;
            ``None`` where the rules did.
        overrides_rules: whether the rules would have chosen the other half.
        split_by: the option that cut it: ``muon_split``, ``per_head_muon`` or ``muon_fused``; ``None`` for none.
        split_pattern: which pattern of ``muon_split`` did.
        left_whole: whether ``split`` says why the parameter stays one matrix.
        output_axis: the axis of its matrices along which their outputs lie; ``None`` where that is not known.
    """

    name: str
    shape: tuple[int, ...]
    use_muon: bool
    reason: str
    blocks: tuple[Block, ...] = ()
    split: str = ""
    sharding: Sharding | None = None
    is_projection: bool = False
    chosen_by: str | None = None
    overrides_rules: bool = False
    split_by: str | None = None
    split_pattern: str = ""
    left_whole: bool = False
    output_axis: int | None = 0

    @property
    def numel(self) -> int:
        """Return the number of elements on this rank, before ZeRO partitions it."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the shape before tensor parallelism cut it."""
        return self.sharding.shape if self.sharding else self.shape


def split_parameter(
    spec: MatrixSpec, names: Sequence[str], param: nn.Parameter, use: Use, config: MuonConfig, model: nn.Module
) -> MatrixSpec:
    """Return the spec of a parameter of the Muon half, with its matrices; a tied parameter has several ``names``.

    Raises:
        MuonConfigError: sizes that do not add up to the parameter's, or heads that are not known.
    """
    spec = _split(spec, names, use, config, model)
    if spec.sharding is None or config.tp_mode == "whole":
        return spec
    rank = tp_rank(param, use.module)  # whose shards are matrices of their own
    blocks = tuple(part for block in spec.blocks for part, _ in spec.sharding.parts(block, rank))
    return replace(spec, blocks=blocks, split=_joined(spec.split, "tensor-parallel shards, by tp_mode"), sharding=None)


def _split(spec: MatrixSpec, names: Sequence[str], use: Use, config: MuonConfig, model: nn.Module) -> MatrixSpec:
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
                f"optimizer.params.muon_split: {pattern!r} finds {names[0]} {list(shape)}, but {error}"
            ) from None
    if config.per_head_muon and len(shape) == 2 and spec.is_projection:
        return _cut(spec, _by_head(names[0], shape, use, model), "one matrix per head", "per_head_muon")
    if config.muon_fused == "whole" or is_flattened:
        return spec
    name, owner = use.weight
    try:
        fused = cut_fused(name, shape[-2:], output_axis(use.module), owner, model)
    except ValueError as error:
        return replace(spec, split=_joined(text, f"left whole: {error}"), left_whole=not text)
    return _cut(spec, fused[0], f"{fused[1]} by muon_fused", "muon_fused") if fused else spec


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
            raise ValueError("neither its module nor a config for it gives a number of heads")
        return cut_by_head(leaf, shape[axis], axis, heads, is_a(attention, GATED_CLASSES))
    except ValueError as error:
        raise MuonConfigError(
            f"optimizer.params.per_head_muon: {name} {list(shape)} is an attention projection by its name, but "
            f'{error}; give its sizes in muon_split, or "whole"'
        ) from None
