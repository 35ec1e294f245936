# SPDX-License-Identifier: Apache-2.0
"""Reference results of Newton-Schulz: its polynomials applied to singular values in float64, not to matrices."""

import torch
from torch import Tensor

from deepspeed.muon.math.newton_schulz import NAMED, Schedule, schedule

#: Triples that all differ, so that any confusion of steps shows; each keeps singular values within (0, 1.3).
VARIED: Schedule = (
    (3.4445, -4.7750, 2.0315),
    (2.8769, -3.1427, 1.2046),
    (2.3465, -1.7098, 0.4232),
    (1.8750, -1.2500, 0.3750),
    (1.5000, -0.5000, 0.0000),
    (2.0000, -1.5000, 0.5000),
    (1.7000, -0.9000, 0.2000),
)
SCHEDULES = (
    {f"varied[:{n}]": VARIED[:n] for n in range(1, 8)}
    | {f"simple*{n}": schedule("simple", n) for n in range(1, 8)}
    | {name: schedule(name) for name in NAMED}
)
#: (batch, rows, cols).
SHAPES = {
    "wide": (1, 12, 40),
    "tall": (1, 40, 12),
    "square": (1, 24, 24),
    "batch": (3, 10, 33),
    "tall_batch": (4, 21, 8),
    "odd": (2, 17, 31),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image(values: Tensor, triples: Schedule) -> Tensor:
    """Return what all steps make of singular values."""
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


def reference(x: Tensor, triples: Schedule) -> Tensor:
    """Return U diag(p(s)) V' in float64 of a batch U diag(s) V' of norm 1; p composes the polynomials of all steps."""
    u, s, vh = torch.linalg.svd(x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True), full_matrices=False)
    return (u * image(s, triples).unsqueeze(-2)) @ vh
