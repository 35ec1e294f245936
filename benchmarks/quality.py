# SPDX-License-Identifier: Apache-2.0
"""What each schedule makes of singular values, and what each dtype and method adds to it by rounding."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import exactness as tables
from benchmarks import report
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.math.coefficients import NAMED, schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, orthogonalize
from helpers.oracles import newton_schulz_fp64

ROWS, COLS = 192, 768
#: Singular values below this part of the largest are left out of the measures: bf16 turns exact zeros into them.
NOISE = 0.01
SETTINGS: dict[str, dict[str, Any]] = {name: {"ns_coefficients": name} for name in NAMED} | {
    "simple, 4 steps": {"ns_coefficients": "simple", "ns_steps": 4},
}


def localized() -> Tensor:
    """Singular values from 1 to 1e-3 whose vectors have few entries, so that no rounding is averaged out."""
    torch.manual_seed(0)
    blocks = [torch.linalg.qr(torch.randn(2, 2))[0] * 10 ** (-3 * i / (ROWS / 2)) for i in range(ROWS // 2)]
    return torch.nn.functional.pad(torch.block_diag(*blocks), (0, COLS - ROWS))


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Of each kind of spectrum one matrix, in bf16 as it arrives at its owner."""
    for kind, matrix in tables.matrices():
        if matrix.shape == (ROWS, COLS) or kind.startswith("gradient"):
            yield kind, matrix.bfloat16()
    yield "localized", localized().bfloat16()


def largest_of(result: Tensor) -> float:
    """The largest singular value."""
    return math.sqrt(
        float(torch.linalg.eigvalsh(result @ result.T if result.size(0) < result.size(1) else result.T @ result)[-1])
    )


def measures(matrix: Tensor, result: Tensor) -> dict[str, float]:
    """Of an orthogonalized matrix, in the directions in which the given one has more than noise."""
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = int((values > NOISE * values[0]).sum())
    inside = u[:, :rank].T @ result @ vh[:rank].T
    rms = (torch.linalg.svdvals(result)[:rank] - 1).square().mean().sqrt()
    return {
        "rms of s - 1": float(rms),
        "distance to U V'": float((inside - torch.eye(rank, dtype=inside.dtype)).norm()) / math.sqrt(rank),
        "largest s": largest_of(result),
    }


def rows() -> Iterator[dict[str, Any]]:
    """One row for each spectrum and schedule."""
    kernels = choose(unavailable_kernels("auto", ["cpu"]))
    for kind, matrix in inputs():
        for name, keys in SETTINGS.items():
            triples = schedule(keys["ns_coefficients"], keys.get("ns_steps"))
            exact = newton_schulz_fp64(matrix, triples)
            row: dict[str, Any] = {"input": kind, "schedule": name, **measures(matrix, exact)}
            largest = row["largest s"]
            for method in METHODS:
                for dtype in DTYPES:
                    batch = matrix.float()[None]
                    found = orthogonalize(batch, triples, method, DTYPES[dtype], None, kernels)[0].double()
                    row[f"{method} {dtype}"] = float((found - exact).norm() / exact.norm())
                    largest = max(largest, largest_of(found))
            yield row | {"largest s, rounded": largest}


def quality() -> str:
    """Orthogonality, residual and rounding by schedule, dtype, method and spectrum; writes docs/evidence/quality.md."""
    found = list(rows())
    text = f"""# Quality of the orthogonalization

What `ns_coefficients` makes of a matrix, and what rounding adds. `python -m benchmarks quality` writes this page.
{report.one_line()}.

Matrices of {ROWS} x {COLS}, in bf16 as they arrive at their owner, and gradients of `examples/pretrain_gpt` at its
third step. *Localized* ones have singular vectors with two entries, so that no error is averaged out. Of the r
directions U, V in which the matrix has more than 1 % of its largest singular value:

- **rms of s - 1**: of the r largest singular values s of the result O, exact in fp64: 0 is an orthogonal matrix;
- **distance to U V'**: |U' O V - I| / sqrt(r);
- **largest s**: exact, and the largest of all dtypes and methods. A schedule that leaves its range would show here;
- **standard, gram**: the error of the result in each dtype, relative to the exact one. The steep start of a schedule
  enlarges the rounding of small singular values.

{report.table(found)}
"""
    (report.ROOT / "docs" / "evidence" / "quality.md").write_text(text)
    return text
