# SPDX-License-Identifier: Apache-2.0
"""The scale of an update, by the shape of its matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

#: Scale of the orthogonalized update by shape, under ``torch.optim.Muon``'s names: formula and function.
#: ``original``: Keller Jordan (2024). ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM Training"
#: (arXiv 2502.16982), section 2.2: the update's RMS is rms_scale, by default 0.2, like AdamW's.
#: ``spectral_unclamped``: Bernstein (2025), the spectral condition sqrt(out / in).
SCALES: dict[str, tuple[str, Callable[[int, int, float], float]]] = {
    "original": ("sqrt(max(1, rows / cols))", lambda rows, cols, rms: math.sqrt(max(1.0, rows / cols))),
    "match_rms_adamw": ("rms_scale * sqrt(max(rows, cols))", lambda rows, cols, rms: rms * math.sqrt(max(rows, cols))),
    "spectral_unclamped": ("sqrt(rows / cols)", lambda rows, cols, rms: math.sqrt(rows / cols)),
    "none": ("1", lambda rows, cols, rms: 1.0),
}
RMS_SCALE = 0.2


def scale_factor(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """Return the factor of :data:`SCALES` for a rows x cols matrix."""
    return SCALES[adjust_lr_fn][1](rows, cols, rms_scale)


def update_rms(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """Return the RMS of one scaled update per unit of learning rate, for an exactly orthogonal rows x cols matrix."""
    return scale_factor(adjust_lr_fn, rows, cols, rms_scale) / math.sqrt(max(rows, cols))
