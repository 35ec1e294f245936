# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon, for the oracle: written row by row, for matrices (outputs, inputs)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.oracles import Memory


def unit_rows(matrix: Tensor) -> Tensor:
    """Each row divided by its norm; rows of zeros stay."""
    return torch.stack([row / row.norm() if row.norm() > 0 else row for row in matrix])


def unit_columns(matrix: Tensor) -> Tensor:
    """Each column divided by its norm."""
    return unit_rows(matrix.T).T


def normuon(matrix: Tensor, memory: Memory, beta2: float = 0.95) -> Tensor:
    """NorMuon, algorithm 1: rows by the root of their mean square, averaged over steps; the norm stays."""
    before = memory.get("rows", torch.zeros(len(matrix), dtype=matrix.dtype))
    if not matrix.any():
        return matrix
    memory["rows"] = torch.stack(
        [beta2 * old + (1 - beta2) * (row @ row) / len(row) for old, row in zip(before, matrix, strict=True)]
    )
    scaled = torch.stack([row / (mean.sqrt() + 1e-10) for row, mean in zip(matrix, memory["rows"], strict=True)])
    return scaled * (matrix.norm() / scaled.norm())


def muon_plus(*sides: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Memory], Tensor]:
    """Muon+ with the norm sqrt(min(rows, columns)) of an orthogonal matrix."""

    def normalize(matrix: Tensor, memory: Memory) -> Tensor:
        for side in sides:
            matrix = side(matrix)
            matrix = matrix * (math.sqrt(min(matrix.shape)) / matrix.norm())
        return matrix

    return normalize


_DECAY = {"weight_decay": 1.0, "adam_weight_decay": 1.0}
#: Keys of optimizer.params, and the oracle's settings.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cautious": ({"weight_decay": 1.0, "cautious_weight_decay": True}, {**_DECAY, "cautious": True}),
    "normuon": ({"normuon": True}, {"after": normuon}),
    "normuon, slow": (
        {"normuon": True, "normuon_beta2": 0.5},
        {"after": lambda matrix, memory: normuon(matrix, memory, 0.5)},
    ),
    "muon_eq, rows": ({"muon_eq": "rows"}, {"before": unit_rows}),
    "muon_eq, columns": ({"muon_eq": "columns"}, {"before": unit_columns}),
    "muon_plus, rows": ({"muon_plus": "rows"}, {"after": muon_plus(unit_rows)}),
    "muon_plus, columns, rows": ({"muon_plus": "columns_rows"}, {"after": muon_plus(unit_columns, unit_rows)}),
    "muon_eq and normuon": ({"muon_eq": "rows", "normuon": True}, {"before": unit_rows, "after": normuon}),
}
