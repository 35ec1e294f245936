# SPDX-License-Identifier: Apache-2.0
"""The elementwise half of Muon: momentum, Nesterov, scale and decoupled decay.

Everything here acts on any slice of a matrix, so it runs where ZeRO keeps the slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: Scale of the orthogonalized update by shape, under ``torch.optim.Muon``'s names: formula and function.
#: ``original``: Keller Jordan (2024). ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM
#: Training" (arXiv 2502.16982), section 2.2: the update's RMS is rms_scale, 0.2 as AdamW's.
#: ``spectral_unclamped``: Bernstein (2025), the spectral condition sqrt(out / in).
SCALES: dict[str, tuple[str, Callable[[int, int, float], float]]] = {
    "original": ("sqrt(max(1, rows / cols))", lambda rows, cols, rms_scale: math.sqrt(max(1.0, rows / cols))),
    "match_rms_adamw": (
        "rms_scale * sqrt(max(rows, cols))",
        lambda rows, cols, rms_scale: rms_scale * math.sqrt(max(rows, cols)),
    ),
    "spectral_unclamped": ("sqrt(rows / cols)", lambda rows, cols, rms_scale: math.sqrt(rows / cols)),
    "none": ("1", lambda rows, cols, rms_scale: 1.0),
}
RMS_SCALE = 0.2


def scale_factor(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """The factor of :data:`SCALES` for a rows x cols matrix."""
    return SCALES[adjust_lr_fn][1](rows, cols, rms_scale)


def update_rms(adjust_lr_fn: str, rows: int, cols: int, rms_scale: float = RMS_SCALE) -> float:
    """RMS of one scaled update per unit of learning rate, for an exactly orthogonal rows x cols matrix."""
    return scale_factor(adjust_lr_fn, rows, cols, rms_scale) / math.sqrt(max(rows, cols))


def momentum_(buffer: Tensor, grad: Tensor, momentum: float) -> None:
    """``buffer <- momentum buffer + (1 - momentum) grad``, in place; an average, not a sum.

    Args:
        buffer: fp32, any shape; the state key ``momentum_buffer``.
        grad: same shape and dtype: averaged, unscaled and clipped.
    """
    buffer.lerp_(grad, 1.0 - momentum)


def direction(buffer: Tensor, grad: Tensor, momentum: float, nesterov: bool, out: Tensor) -> Tensor:
    """What Newton-Schulz orthogonalizes: Nesterov's look-ahead of the new momentum, or the momentum itself.

    Args:
        buffer: the momentum after :func:`momentum_`, same shape and dtype as ``grad`` and ``out``.
        out: receives Nesterov's ``(1 - momentum) grad + momentum buffer``.
    """
    return torch.lerp(grad, buffer, momentum, out=out) if nesterov else buffer


def apply_(param: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float) -> None:
    """``param <- param (1 - lr weight_decay) - lr scale update``, in place.

    Decoupled decay as in AdamW (Loshchilov and Hutter, arXiv 1711.05101), by the unscaled rate.

    Args:
        param: any shape, fp32 under ZeRO.
        update: same shape, any floating dtype: a slice of the orthogonalized matrix.
        scale: :func:`scale_factor` for the shape of the whole matrix.
    """
    if weight_decay:
        param.mul_(1.0 - lr * weight_decay)
    param.add_(update, alpha=-lr * scale)
