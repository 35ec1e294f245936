# SPDX-License-Identifier: Apache-2.0
"""Update rules beyond plain Muon, for the oracle: written row by row, for matrices (outputs, inputs)."""

import math
from typing import Any

import torch
from torch import Tensor

from helpers.oracles import Memory


def unit_rows(matrix: Tensor) -> Tensor:
    """Return the matrix with each row divided by its norm; rows of zeros stay."""
    return torch.stack([row / row.norm() if row.norm() > 0 else row for row in matrix])


def unit_columns(matrix: Tensor) -> Tensor:
    """Return the matrix with each column divided by its norm."""
    return unit_rows(matrix.T).T


def normuon(matrix: Tensor, memory: Memory, beta2: float = 0.95) -> Tensor:
    """NorMuon, algorithm 1: divide rows by the root of their mean square, averaged over steps; keep the norm."""
    before = memory.get("rows", torch.zeros(len(matrix), dtype=matrix.dtype))
    if not matrix.any():
        return matrix
    memory["rows"] = torch.stack(
        [beta2 * old + (1 - beta2) * (row @ row) / len(row) for old, row in zip(before, matrix, strict=True)]
    )
    scaled = torch.stack([row / (mean.sqrt() + 1e-10) for row, mean in zip(matrix, memory["rows"], strict=True)])
    return scaled * (matrix.norm() / scaled.norm())


def muon_plus(matrix: Tensor, memory: Memory) -> Tensor:
    """Muon+ of nanochat: scale the matrix to the norm sqrt(min(rows, columns)) of an orthogonal one."""
    return matrix * (math.sqrt(min(matrix.shape)) / matrix.norm()) if matrix.any() else matrix


def muon_plus_and_normuon(matrix: Tensor, memory: Memory) -> Tensor:
    return normuon(muon_plus(matrix, memory), memory)


def warm_up(step: int) -> dict[str, float]:
    """Return the momentum of a step: from 0.5 to the tests' 0.9 in three steps."""
    return {"momentum": {0: 0.5, 1: 0.5 + 0.4 / 3, 2: 0.5 + 0.8 / 3}.get(step, 0.9)}


def decay_to_zero(step: int) -> dict[str, float]:
    """Return the weight decay of a step: from 1 to 0 in three steps."""
    return {"weight_decay": {0: 1.0, 1: 2 / 3, 2: 1 / 3}.get(step, 0.0)}


_DECAY = {"weight_decay": 1.0, "adam_weight_decay": 1.0}
#: (keys of optimizer.params, the same as settings of the oracle).
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cautious": ({"weight_decay": 1.0, "cautious_weight_decay": True}, {**_DECAY, "cautious": True}),
    "normuon": ({"normuon": True}, {"after": normuon}),
    "normuon, slow": (
        {"normuon": True, "normuon_beta2": 0.5},
        {"after": lambda matrix, memory: normuon(matrix, memory, 0.5)},
    ),
    "muon_eq, rows": ({"muon_eq": "rows"}, {"before": unit_rows}),
    "muon_eq, columns": ({"muon_eq": "columns"}, {"before": unit_columns}),
    "muon_plus": ({"muon_plus": True}, {"after": muon_plus}),
    "momentum": ({"momentum_start": 0.5, "momentum_warmup_steps": 3}, {"varying": warm_up}),
    "decay": ({"weight_decay": 1.0, "muon_weight_decay_steps": 3}, {**_DECAY, "varying": decay_to_zero}),
    "muon_eq and normuon": ({"muon_eq": "rows", "normuon": True}, {"before": unit_rows, "after": normuon}),
    "all of nanochat's": (
        {"muon_eq": "rows", "muon_plus": True, "normuon": True},
        {"before": unit_rows, "after": muon_plus_and_normuon},
    ),
}
#: The settings that :class:`deepspeed.muon.math.rules.Rules` implements.
OF_MATRICES = [rule for rule, (_, settings) in RULES.items() if settings.keys() & {"before", "after"}]
