# SPDX-License-Identifier: Apache-2.0
"""A table of what the optimizer does with each parameter, for ``optimizer.describe()`` and ``ds_muon plan``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from deepspeed.muon.layout import MatrixSpec
from deepspeed.muon.step import PartitionStep

#: A layer's number in a parameter's name.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: More owners than this are counted instead of listed.
FEW_OWNERS = 4
TITLES = ("parameter", "shape", "rule", "matrices", "lr x scale", "Newton-Schulz", "cost", "owner", "reason")


@dataclass(frozen=True)
class Row:
    """A table row: parameters of one shape that are updated alike and whose names differ only in layer numbers.

    Args:
        name: such as ``layers.{0..31}.mlp.up.weight``.
        count: number of parameters in the row.
        shape: shape of each parameter, such as ``(4096, 1024)``.
        updated_by: ``"Muon"`` or ``"AdamW"``.
        reason: why Muon or AdamW updates them, and how they are split into matrices, if they are.
        matrices: how many matrices one parameter holds; 0 for AdamW.
        lr: the group's current learning rate; ``None`` if it is not known yet.
        scales: the distinct factors that multiply the matrices' updates in addition to ``lr``.
        methods, dtype: of Newton-Schulz, such as ``("gram",)`` and ``fp16``.
        cost: share (0 to 1) of the model's Newton-Schulz operations.
        owners: the ranks that orthogonalize these matrices.
        is_on_each: whether every rank orthogonalizes all of these matrices itself, so that the ranks share no work.

    ``scales``, ``methods``, ``dtype`` and ``owners`` are empty for AdamW, and until the optimizer has planned which
    rank orthogonalizes which matrix.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    updated_by: str
    reason: str
    matrices: int = 0
    lr: float | None = None
    scales: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    dtype: str = ""
    cost: float = 0.0
    owners: tuple[int, ...] = ()
    is_on_each: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the row as texts, one for each of :data:`TITLES`."""
        lr = "lr" if self.lr is None else f"{self.lr:g}"
        return (
            self.name + (f" x{self.count:,}" if self.count > 1 else ""),
            " x ".join(map(str, self.shape)) or "scalar",
            self.updated_by,
            str(self.matrices) if self.matrices else "-",
            f"{lr} x {', '.join(f'{scale:.4g}' for scale in self.scales)}" if self.scales else lr,
            f"{', '.join(self.methods)} in {self.dtype}" if self.methods else "-",
            f"{self.cost:.1%}" if self.methods else "-",
            self._who(),
            self.reason,
        )

    def _who(self) -> str:
        """Return the text in the column "owner": the ranks that orthogonalize the row's matrices."""
        if self.is_on_each:
            return "each rank"
        if len(self.owners) > FEW_OWNERS:
            return f"{len(self.owners):,} ranks"
        return ", ".join(map(str, self.owners)) or "-"


@dataclass(frozen=True)
class Description:
    """The table that :meth:`MuonWithAuxAdam.describe` returns. ``str()`` turns it into text."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return aligned([TITLES, *(row.cells() for row in self.rows)])


@dataclass(frozen=True, kw_only=True)
class Group:
    """What :func:`describe` needs to know about one parameter group of the optimizer.

    ``specs``: the group's parameters. ``scale``, ``method``, ``flops``: functions of a matrix's (rows, columns). They
    return the factor that multiplies its update, its Newton-Schulz method, and the floating-point operations of
    Newton-Schulz. ``owners``: {name of a parameter: the ranks that orthogonalize its matrices}. These four are ``None``
    for AdamW, and until the optimizer has planned its steps. The other fields mean the same as in :class:`Row`.
    """

    use_muon: bool
    specs: Sequence[MatrixSpec]
    lr: float | None = None
    scale: Callable[[int, int], float] | None = None
    method: Callable[[int, int], str] | None = None
    flops: Callable[[int, int], float] | None = None
    dtype: str = ""
    owners: Mapping[str, Collection[int]] | None = None
    is_on_each: bool = False


def groups_of(
    param_groups: Sequence[Mapping[str, Any]], specs: Sequence[Sequence[MatrixSpec]], steps: Sequence[PartitionStep]
) -> Iterator[Group]:
    """Yield a :class:`Group` for each parameter group of an optimizer.

    Args:
        param_groups: the optimizer's parameter groups, with their current learning rates.
        specs: for each group, the :class:`MatrixSpec` of each of its parameters.
        steps: the planned step of each Muon group, or at ZeRO stage 3 of each of its sub-groups; empty before the
            optimizer has planned them.
    """
    for index, (group, of_group) in enumerate(zip(param_groups, specs, strict=True)):
        mine = [step for step in steps if step.partition.index == index]
        owners = {name: ranks for step in mine for name, ranks in step.plan.owners_of_parameters.items()}
        planned: dict[str, Any] = {}
        if mine:
            how = mine[0].newton_schulz
            planned = {"scale": mine[0].scale, "method": how.method, "flops": how.flops, "dtype": how.dtype}
            shared = max(step.plan.world_size for step in mine)
            planned |= {"owners": owners, "is_on_each": shared < mine[0].partition.world_size}
        yield Group(use_muon=group["use_muon"], specs=of_group, lr=group["lr"], **planned)


def describe(groups: Iterable[Group], fold: bool = True) -> Description:
    """Return the table for ``groups``. ``fold``: whether parameters that differ only in layer numbers share a row."""
    rows = [row for group in groups for row in _rows_of(group, fold)]
    total = sum(row.cost for row in rows)
    return Description(tuple(replace(row, cost=row.cost / total if total else 0.0) for row in rows))


def _rows_of(group: Group, fold: bool) -> Iterator[Row]:
    """Yield the rows of a group, with ``cost`` in floating-point operations instead of as a share."""
    alike: dict[tuple, list[MatrixSpec]] = {}
    for spec in group.specs:
        pattern = _NUMBER.sub("{}", spec.name) if fold else spec.name
        shapes = tuple((block.rows, block.cols) for block in spec.blocks)
        alike.setdefault((pattern, spec.shape, spec.reason, spec.split, shapes), []).append(spec)
    owners = group.owners or {}
    for (pattern, shape, reason, split, shapes), specs in alike.items():
        yield Row(
            name=_folded(pattern, [spec.name for spec in specs]),
            count=len(specs),
            shape=shape,
            updated_by="Muon" if group.use_muon else "AdamW",
            reason=f"{reason}; {split}" if split else reason,
            matrices=len(shapes),
            lr=group.lr,
            scales=tuple(dict.fromkeys(group.scale(*each) for each in shapes)) if group.scale else (),
            methods=tuple(dict.fromkeys(group.method(*each) for each in shapes)) if group.method else (),
            dtype=group.dtype,
            cost=len(specs) * sum(group.flops(*each) for each in shapes) if group.flops else 0.0,
            owners=tuple(sorted({owner for spec in specs for owner in owners.get(spec.name, ())})),
            is_on_each=group.is_on_each,
        )


def _folded(pattern: str, names: Sequence[str]) -> str:
    """Fill the layer numbers of ``names`` into each ``{}`` of ``pattern``: ``layers.{}.mlp`` -> ``layers.{0..31}.mlp``.

    ``names``: names of parameters that match the pattern. If there is only one, it is returned unchanged.
    """
    if len(names) == 1:
        return names[0]
    places = [_ranges(sorted(set(map(int, place)))) for place in zip(*map(_NUMBER.findall, names), strict=True)]
    filled = iter([place if place.isdecimal() else "{" + place + "}" for place in places])
    return re.sub(r"\{\}", lambda _: next(filled), pattern)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a text: ``0..3,7`` for 0, 1, 2, 3 and 7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text, one line per row, with columns padded to the width of their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
