# SPDX-License-Identifier: Apache-2.0
"""The matrices in a parameter of the Muon half: itself, the slices of a stack, a flattened convolution, or cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.block import Block, Cut, cut, flattened, matrices
from deepspeed.muon.matrices.fused import cut_fused
from deepspeed.muon.matrices.heads import Heads, config_or_module, cut_by_head, is_projection
from deepspeed.muon.matrices.options import MatrixOptions


def is_convolution(module: nn.Module) -> bool:
    """Whether the module's weight is ``[out, in, *kernel]``."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_stack(module: nn.Module, path: str, shape: Sequence[int]) -> bool:
    """Whether the names of its module say that a weight ``[experts, rows, cols]`` holds one matrix per expert."""
    names = (type(module).__name__, *path.split(".")[-2:])
    return len(shape) == 3 and min(shape[1:]) > 1 and any("expert" in name.lower() for name in names)


@dataclass(frozen=True)
class Use:
    """One module that holds the parameter; a tied parameter has several. ``path`` is without wrappers."""

    module: nn.Module
    parent: nn.Module | None
    path: str
    attribute: str

    @property
    def leaf(self) -> str:
        """The projection's name in its attention module."""
        is_whole = isinstance(self.module, nn.MultiheadAttention)
        return self.attribute if is_whole else self.path.rpartition(".")[2]

    def heads(self, model: nn.Module) -> Heads | None:
        """The heads, from the model's config or from the attention module."""
        is_whole = isinstance(self.module, nn.MultiheadAttention)
        return config_or_module(model, self.module if is_whole else self.parent)

    def fused(self, shape: Sequence[int], model: nn.Module) -> tuple[Cut, str] | str | None:
        """As :func:`cut_fused`, under the name of the module, or of the parameter where it is not a ``weight``."""
        is_weight = self.attribute == "weight"
        name, owner = (self.leaf, self.parent) if is_weight else (self.attribute, self.module)
        return cut_fused(name, shape[-2:], type(self.module).__name__ == "Conv1D", owner, model)


class Splitting(NamedTuple):
    """The matrices of a parameter.

    ``text``: for people, how it is split into them, or why it is left whole; empty for a plain matrix. ``by``: the
    option that cut it, with the ``pattern`` of ``muon_split``; ``None`` for none. ``left_whole``: whether ``text``
    says why it stays one matrix.
    """

    blocks: tuple[Block, ...] = ()
    text: str = ""
    by: str | None = None
    pattern: str = ""
    left_whole: bool = False


def split_parameter(
    names: Sequence[str], shape: Sequence[int], use: Use, options: MatrixOptions, model: nn.Module
) -> Splitting:
    """The matrices that Muon sees in a parameter.

    Args:
        names: of the parameter; a tied one has several.

    Raises:
        MuonConfigError: sizes that do not add up to the parameter's, or heads that are not known.
    """
    is_flattened = is_convolution(use.module) and len(shape) > 2
    whole = flattened(shape) if is_flattened else matrices(shape)
    size = f"{whole[0].rows} x {whole[0].cols}"
    text = f"flattened to {size}" if is_flattened else f"{len(whole)} of {size}" if len(whole) > 1 else ""
    if found := options.cut_for(names):
        pattern, by = found
        try:
            return _cut(whole, text, by, f"by muon_split {pattern!r}", "muon_split", pattern)
        except ValueError as error:
            raise MuonConfigError(
                f"optimizer.params.muon_split: {pattern!r} finds {names[0]} {list(shape)}, but {error}"
            ) from None
    if options.per_head and len(shape) == 2 and is_projection(use.leaf):
        return _cut(whole, text, _heads_of(names[0], shape, use, model), "one matrix per head", "per_head_muon")
    fused = use.fused(shape, model) if options.fused == "split" and not is_flattened else None
    if isinstance(fused, str):
        return Splitting(whole, _joined(text, f"left whole: {fused}"), left_whole=not text)
    if fused is not None:
        by, parts = fused
        return _cut(whole, text, by, f"{parts} by muon_fused", "muon_fused")
    return Splitting(whole, text)


def _cut(whole: Sequence[Block], text: str, by: Cut, why: str, option: str, pattern: str = "") -> Splitting:
    """Each of the matrices, cut alike."""
    blocks = tuple(part for matrix in whole for part in cut(matrix, by))
    return Splitting(blocks, _joined(text, str(by), why), option, pattern, left_whole=not (text or by.sizes))


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _heads_of(name: str, shape: Sequence[int], use: Use, model: nn.Module) -> Cut:
    heads = use.heads(model)
    try:
        if heads is None:
            raise ValueError("neither the model's config nor its module gives a number of heads")
        return cut_by_head(use.leaf, shape, type(use.module).__name__ == "Conv1D", heads)
    except ValueError as error:
        raise MuonConfigError(
            f"optimizer.params.per_head_muon: {name} {list(shape)} is an attention projection by its name, but "
            f'{error}; give its sizes in muon_split, or "whole"'
        ) from None
