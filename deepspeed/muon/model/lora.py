# SPDX-License-Identifier: Apache-2.0
"""Find the factors of low-rank adapters (LoRA), and the matrices in a factor that serves several layers at once.

An adapter adds B A to a frozen weight ``[out, in]``, with A ``[rank, in]`` and B ``[out, rank]``. A factor is known by
its name and by the other factor of its pair, not by its shape alone: A is square if the rank equals ``in``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from deepspeed.muon.layout.block import Block

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
        model: the model. The modules that contain the factors may say how many layers they serve.
        shapes: {name: shape before any sharding} of all parameters of the model, frozen ones too.
    """
    modules: dict[str, nn.Module] | None = None
    found = {}
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
            found[name] = Factor(is_b, min(shape, default=0))
            continue
        a, b = (other, shape) if is_b else (shape, other)
        modules = modules or dict(model.named_modules(remove_duplicate=False))
        owner = _owner(name[: match.start("side")], modules)
        found[name] = _factor(is_b, a, b, owner)
    return found


def _owner(prefix: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that contains both factors; ``prefix``: a factor's name up to "A" or "B"."""
    path = prefix.rpartition(".")[0]
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return modules[path]


def _factor(is_b: bool, a: Sequence[int], b: Sequence[int], owner: nn.Module) -> Factor:
    """Return the factor of ``owner`` whose pair has the shapes ``a`` and ``b``."""
    experts, (outputs, columns) = getattr(owner, "num_experts", 1), b
    if type(experts) is int and experts > 1 and a[0] == columns and columns % experts == 0:
        # PEFT's adapters of stacked experts: expert e has rows [e r, e r + r) of A, and columns e, e + E, ... of B.
        rank = columns // experts
        if is_b:
            blocks = [Block(e, outputs, rank, columns, step=experts) for e in range(experts)]
        else:
            blocks = [Block(e * rank * a[1], rank, a[1], a[1]) for e in range(experts)]
        return Factor(is_b, rank, tuple(blocks))
    count = a[0] // columns
    if count < 2 or a[0] % columns:
        return Factor(is_b, columns if a[0] == columns else min(b if is_b else a))
    # A fused projection whose parts have an adapter each, below each other in A and in B (loralib, LitGPT).
    sizes = list(_part_sizes(owner, outputs, count))
    if not sizes:
        return Factor(
            is_b, columns, why_whole=f"it is unknown how its rows belong to {count} adapters of rank {columns}"
        )
    starts = [sum(sizes[:i]) for i in range(count)]
    width = columns if is_b else a[1]
    rows = zip(starts, sizes, strict=True) if is_b else ((i * columns, columns) for i in range(count))
    return Factor(is_b, columns, tuple(Block(start * width, size, width, width) for start, size in rows))


def _part_sizes(owner: nn.Module, outputs: int, count: int) -> Iterator[int]:
    """Yield the rows of B that belong to each adapted projection of a fused one; nothing if unknown."""
    stated = getattr(owner, "qkv_shapes", None)
    if isinstance(stated, (list, tuple)) and len(stated) == count and sum(stated) == outputs:
        yield from stated
    elif isinstance(getattr(owner, "enable_lora", None), (list, tuple)) and stated is None and outputs % count == 0:
        yield from [outputs // count] * count
