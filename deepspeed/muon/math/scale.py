# SPDX-License-Identifier: Apache-2.0
"""The factor of a matrix's update, which depends on its shape."""

from __future__ import annotations

import math
from collections.abc import Callable

#: Value of ``adjust_lr_fn``, as ``torch.optim.Muon`` names it -> (formula, function of rows, columns and rms_scale) of
#: the factor. ``original``: Keller Jordan (2024). ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM Training"
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
    """Return the factor by which a rows x cols matrix's update is multiplied, in addition to the learning rate.

    ``adjust_lr_fn``: a key of :data:`SCALES`. ``rms_scale``: RMS of the update; only ``match_rms_adamw`` uses it.
    """
    return SCALES[adjust_lr_fn][1](rows, cols, rms_scale)


def update_rms(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """Return the RMS of a rows x cols matrix's update at learning rate 1, for an exactly orthogonal result.

    The arguments are those of :func:`scale_factor`.
    """
    return scale_factor(adjust_lr_fn, rows, cols, rms_scale) / math.sqrt(max(rows, cols))
