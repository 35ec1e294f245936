# SPDX-License-Identifier: Apache-2.0
"""What the optimizer does with each shape, as a table: ``print(optimizer.describe())``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.muon.model.splitting import MatrixSpec
from deepspeed.muon.step import PartitionStep


@dataclass(frozen=True)
class Row:
    """All matrices of one shape in a Muon group, or all parameters of one shape in an AdamW group.

    Args:
        updated_by: ``"Muon"`` or ``"AdamW"``.
        shape: of the matrix or parameter, such as ``(4096, 1024)``.
        count: how many there are.
        first: name of the first one.
        lr: the group's learning rate at this step.
        scale: factor of Muon's update next to ``lr``, by the shape; ``None`` for AdamW.
        method: how Muon orthogonalizes, such as ``gram in fp16``; empty for AdamW and before the first step.
        owners: the ranks that orthogonalize these matrices; empty for AdamW and before the first step.
    """

    updated_by: str
    shape: tuple[int, ...]
    count: int
    first: str
    lr: float
    scale: float | None = None
    method: str = ""
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Description:
    """The rows of the table; as a text, the table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [("", "shape", "count", "lr x scale", "Newton-Schulz", "owners", "first")]
        for row in self.rows:
            size = f"{row.lr:g}" if row.scale is None else f"{row.lr:g} x {row.scale:.4g}"
            shape = " x ".join(map(str, row.shape)) or "scalar"
            lines.append((row.updated_by, shape, str(row.count), size, row.method, _ranges(row.owners), row.first))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def describe(
    groups: Sequence[Mapping[str, Any]], specs: Sequence[Sequence[MatrixSpec]], steps: Sequence[PartitionStep]
) -> Description:
    """Return the table for the optimizer's parameter groups.

    Args:
        groups: the parameter groups, with their current learning rates.
        specs: for each group, its parameters.
        steps: the planned steps of the Muon groups; empty before they are planned.
    """
    rows = [*_muon_rows(groups, steps)] if steps else []
    for group, of_group in zip(groups, specs, strict=True):
        if not (group["use_muon"] and steps):
            rows += _rows_of(group, of_group)
    return Description(tuple(rows))


def _muon_rows(groups: Sequence[Mapping[str, Any]], steps: Sequence[PartitionStep]) -> Iterator[Row]:
    """Yield the rows of planned Muon groups. At ZeRO stage 3 a group has a step for each of its sub-groups."""
    names: dict[tuple, list[str]] = {}
    owners: dict[tuple, set[int]] = {}
    for step in steps:
        plan = step.plan.of_all
        for item, owner in zip(plan.items, plan.owners, strict=True):
            rows, cols = item.shape
            how = f"{step.newton_schulz.method(rows, cols)} in {step.newton_schulz.dtype}"
            key = step.partition.index, item.shape, step.scale(rows, cols), how
            names.setdefault(key, []).append(item.name)
            owners.setdefault(key, set()).add(owner)
    for key, of_key in names.items():
        index, shape, scale, how = key
        lr = groups[index]["lr"]
        yield Row("Muon", shape, len(of_key), of_key[0], lr, scale, how, tuple(sorted(owners[key])))


def _rows_of(group: Mapping[str, Any], specs: Sequence[MatrixSpec]) -> Iterator[Row]:
    names: dict[tuple[int, ...], list[str]] = {}
    for spec in specs:
        shapes: list[tuple[int, ...]] = [(block.rows, block.cols) for block in spec.blocks]
        for shape in shapes or [spec.whole]:
            names.setdefault(shape, []).append(spec.name)
    for shape, of_shape in names.items():
        yield Row("Muon" if group["use_muon"] else "AdamW", shape, len(of_shape), of_shape[0], group["lr"])


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as a text, such as ``0-3, 6``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
