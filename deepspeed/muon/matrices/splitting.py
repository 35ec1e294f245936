# SPDX-License-Identifier: Apache-2.0
"""The matrices in a parameter of the Muon half: itself, the slices of a stack, a flattened convolution, or cuts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.config.types import Cut
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.block import Block, cut, flattened, matrices
from deepspeed.muon.matrices.fused import cut_fused, output_axis, stack_output_axis
from deepspeed.muon.matrices.heads import GATED_CLASSES, cut_by_head, heads_of, is_a, is_projection


def is_convolution(module: nn.Module) -> bool:
    """Whether the module's weight is ``[out, in, *kernel]``."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_stack(module: nn.Module, path: str, shape: Sequence[int]) -> bool:
    """Whether the names of its module say that a weight ``[experts, rows, cols]`` holds one matrix per expert."""
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
        """The name that an attention projection has in its attention module, and that module."""
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute, self.module
        return self.path.rpartition(".")[2], self.parent

    @property
    def weight(self) -> tuple[str, nn.Module]:
        """The name of the weight in its attention or feed-forward module, and that module."""
        return self.projection if self.attribute == "weight" else (self.attribute, self.module)

    def matrix_output_axis(self, shape: Sequence[int]) -> int | None:
        """The axis of each of its matrices along which the outputs lie; ``None`` for a stack that does not tell."""
        if len(shape) != 3 or is_convolution(self.module):
            return output_axis(self.module)
        name, owner = self.weight
        return stack_output_axis(name, shape[-2:], owner)


class Splitting(NamedTuple):
    """The matrices of a parameter; the fields are those of :class:`MatrixSpec`."""

    blocks: tuple[Block, ...] = ()
    split: str = ""
    split_by: str | None = None
    split_pattern: str = ""
    left_whole: bool = False


def split_parameter(
    names: Sequence[str], shape: Sequence[int], use: Use, config: MuonConfig, model: nn.Module
) -> Splitting:
    """The matrices that Muon sees in a parameter of these names; a tied one has several.

    Raises:
        MuonConfigError: sizes that do not add up to the parameter's, or heads that are not known.
    """
    is_flattened = is_convolution(use.module) and len(shape) > 2
    whole = flattened(shape) if is_flattened else matrices(shape)
    size = f"{whole[0].rows} x {whole[0].cols}"
    text = f"flattened to {size}" if is_flattened else f"{len(whole)} of {size}" if len(whole) > 1 else ""
    pattern = first_match(config.muon_split, names)
    if pattern is not None:
        try:
            return _cut(whole, text, config.muon_split[pattern], f"by muon_split {pattern!r}", "muon_split", pattern)
        except ValueError as error:
            raise MuonConfigError(
                f"optimizer.params.muon_split: {pattern!r} finds {names[0]} {list(shape)}, but {error}"
            ) from None
    if config.per_head_muon and len(shape) == 2 and is_projection(use.projection[0]):
        return _cut(whole, text, _by_head(names[0], shape, use, model), "one matrix per head", "per_head_muon")
    if config.muon_fused == "whole" or is_flattened:
        return Splitting(whole, text)
    name, owner = use.weight
    try:
        fused = cut_fused(name, shape[-2:], output_axis(use.module), owner, model)
    except ValueError as error:
        return Splitting(whole, _joined(text, f"left whole: {error}"), left_whole=not text)
    return _cut(whole, text, fused[0], f"{fused[1]} by muon_fused", "muon_fused") if fused else Splitting(whole, text)


def _cut(whole: Sequence[Block], text: str, by: Cut, why: str, option: str, pattern: str = "") -> Splitting:
    """Each of the matrices, cut alike."""
    blocks = tuple(part for matrix in whole for part in cut(matrix, by))
    return Splitting(blocks, _joined(text, str(by), why), option, pattern, left_whole=not (text or by.sizes))


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
