# SPDX-License-Identifier: Apache-2.0
"""Which matrices a parameter of the Muon half is: itself, slices of a stack, a flattened convolution, or its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Whether a weight ``[experts, rows, cols]`` holds one matrix for each expert, by the names of its module."""
    names = (type(module).__name__, *path.split(".")[-2:])
    return len(shape) == 3 and min(shape[1:]) > 1 and any("expert" in name.lower() for name in names)


@dataclass(frozen=True)
class Use:
    """One module that holds the parameter; a tied parameter has several. ``path``: without wrappers."""

    module: nn.Module
    parent: nn.Module | None
    path: str
    attribute: str

    @property
    def leaf(self) -> str:
        """The name by which attention calls its projection."""
        is_whole = isinstance(self.module, nn.MultiheadAttention)
        return self.attribute if is_whole else self.path.rpartition(".")[2]

    def heads(self, model: nn.Module) -> Heads | None:
        """What is known of the heads, by the model's config or by the module of the attention."""
        is_whole = isinstance(self.module, nn.MultiheadAttention)
        return config_or_module(model, self.module if is_whole else self.parent)

    def fused(self, shape: Sequence[int], model: nn.Module) -> tuple[Cut, str] | str | None:
        """As :func:`cut_fused`; a parameter that is not a module's ``weight`` is called by its own name."""
        is_weight = self.attribute == "weight"
        name, owner = (self.leaf, self.parent) if is_weight else (self.attribute, self.module)
        return cut_fused(name, shape[-2:], type(self.module).__name__ == "Conv1D", owner, model)


def is_fused(split: str) -> bool:
    """Whether these words, of :func:`blocks_of`, say that ``muon_fused`` cut the parameter."""
    return split.endswith(_BY_FUSED)


_BY_FUSED = "by muon_fused"


def blocks_of(
    names: Sequence[str], shape: Sequence[int], use: Use, options: MatrixOptions, model: nn.Module
) -> tuple[tuple[Block, ...], str]:
    """The matrices, and in words how the parameter was split; empty for one matrix.

    Args:
        names: of the parameter; a tied one has several.

    Raises:
        MuonConfigError: sizes that do not make up the parameter, or heads that are not known.
    """
    is_flattened = is_convolution(use.module) and len(shape) > 2
    whole = flattened(shape) if is_flattened else matrices(shape)
    size = f"{whole[0].rows} x {whole[0].cols}"
    how = [f"flattened to {size}"] if is_flattened else [f"{len(whole)} of {size}"] if len(whole) > 1 else []
    if found := options.cut_for(names):
        pattern, by = found
        why, source = f"{by}, by muon_split {pattern!r}", f"muon_split: {pattern!r} finds {names[0]} {list(shape)}, but"
    elif options.per_head and len(shape) == 2 and is_projection(use.leaf):
        by = _by_head(names[0], shape, use, model)
        why, source = f"{by}, one matrix per head", ""
    elif options.fused == "split" and not is_flattened and (layout := use.fused(shape, model)):
        if isinstance(layout, str):
            return whole, ", ".join([*how, f"left whole: {layout}"])
        by, source = layout[0], ""
        why = f"{by}, {layout[1]} {_BY_FUSED}"
    else:
        return whole, ", ".join(how)
    try:
        return tuple(part for matrix in whole for part in cut(matrix, by)), ", ".join([*how, why])
    except ValueError as error:
        raise MuonConfigError(f"optimizer.params.{source} {error}") from None


def _by_head(name: str, shape: Sequence[int], use: Use, model: nn.Module) -> Cut:
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
