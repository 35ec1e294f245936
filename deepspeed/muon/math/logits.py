# SPDX-License-Identifier: Apache-2.0
"""Attention logits: the largest of each head, and the factors by which QK-clip takes them back to a threshold.

Pure functions. QK-clip: Kimi Team, "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), section 2.1, algorithm 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: ``sampled`` takes one query of this many, others in each step.
SHARE = 16
#: Logits in memory at a time.
CHUNK = 2**24
#: Logits of one call of attention that ``auto`` computes all: 32 heads of one sequence of 5,792 tokens. More take more
#: than 64 chunks, each of several kernels.
MAX_EXACT = 2**30
#: What a mask of floats adds to the logit of a hidden key, or less. Models that do not write the dtype's least value or
#: minus infinity write -1e9 or -1e4, and bf16 rounds the latter to -9984.
HIDDEN = -9000.0


@dataclass(frozen=True)
class Visible:
    """The keys that a query sees, by their positions.

    Args:
        mask: broadcast to ``[batch, heads, queries, keys]``; bool, or floats that are added to the logits, where
            :data:`HIDDEN` or less hides a key.
        is_causal: query i sees keys up to i + ``shift``.
        window: how many keys before that, and after it, a query sees besides; negative: all.
        documents: of queries and of keys, ``[queries]`` and ``[keys]``; a query sees its own document.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    shift: int = 0
    window: tuple[int, int] = (-1, -1)
    documents: tuple[Tensor, Tensor] | None = None

    @property
    def _after(self) -> int:
        """Return how many keys after its position a query sees; negative: all."""
        return 0 if self.is_causal else self.window[1]

    @property
    def is_prefix(self) -> bool:
        """Return whether a query sees all keys up to some point."""
        return self.mask is None and self.documents is None and self.window[0] < 0

    def last(self, queries: int, keys: int) -> Tensor:
        """Return the last key that each query sees if it :attr:`is_prefix`; negative: none."""
        if self._after < 0:
            return torch.full((queries,), keys - 1, dtype=torch.int64, device="cpu")
        return (torch.arange(queries, dtype=torch.int64, device="cpu") + self.shift + self._after).clamp(max=keys - 1)

    def reach(self, query: int, keys: int) -> int:
        """Return how many keys, from the first on, the queries up to this one see at most."""
        return keys if self._after < 0 else min(keys, max(1, query + self.shift + self._after + 1))

    def of(self, queries: Tensor, keys: int) -> Tensor | None:
        """Return which of the first ``keys`` keys these queries see, ``None`` for all.

        Broadcast to ``[batch, heads, queries, keys]``.
        """
        found = []
        distance = torch.arange(keys, dtype=torch.int64, device=queries.device) - queries[:, None] - self.shift
        if self._after >= 0:
            found.append(distance <= self._after)
        if self.window[0] >= 0:
            found.append(distance >= -self.window[0])
        if self.documents is not None:
            found.append(self.documents[0][queries, None] == self.documents[1][:keys])
        if self.mask is not None:
            mask = self.mask[(None,) * (4 - self.mask.ndim)]
            mask = mask[:, :, queries if mask.size(2) > 1 else slice(None), :keys]
            found.append(mask if mask.dtype == torch.bool else mask > HIDDEN)
        return functools.reduce(torch.bitwise_and, found) if found else None


def largest(query: Tensor, key: Tensor, scale: float, visible: Visible, mode: str = "exact", step: int = 0) -> Tensor:
    """Return the largest logit of each head, ``[heads]``, fp32; minus infinity where no query sees a key.

    Logits are ``scale`` times the product of query and key, computed in their dtype, of fp16 in fp32, before biases and
    soft caps. ``sampled`` gives at most this number, ``bound`` at least.

    Args:
        query: ``[batch, heads, queries, width]``.
        key: ``[batch, key_heads, keys, width]``; the heads of a group of queries are adjacent.
        mode: ``exact``: over all pairs; ``sampled``: over a share of the queries; ``bound``: the product of norms,
            which the logits do not exceed; ``auto``: ``exact`` up to :data:`MAX_EXACT` logits, ``sampled`` for more.
        step: its number decides which of the queries ``sampled`` takes.
    """
    batch, heads, count, _ = query.shape
    keys = key.size(2)
    if mode == "auto":
        mode = "exact" if batch * heads * count * keys <= MAX_EXACT else "sampled"
    best = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    if query.dtype == torch.float16:
        query, key = query.float(), key.float()  # a logit may exceed fp16's range before it is scaled
    if mode == "bound" and visible.is_prefix:
        return _bound_of_prefixes(query, key, visible) * scale
    share = min(SHARE, count) if mode == "sampled" else 1
    positions = range(step % share, count, share)
    together = max(1, CHUNK // (batch * heads * keys))
    for start in range(0, len(positions), together):
        chosen = positions[start : start + together]
        reach = visible.reach(chosen[-1], keys)
        taken = query[:, :, chosen.start : chosen.stop : chosen.step]
        logits = (_bounds if mode == "bound" else _products)(taken, key[:, :, :reach])
        rows = torch.arange(chosen.start, chosen.stop, chosen.step, dtype=torch.int64, device=query.device)
        seen = visible.of(rows, reach)
        if seen is not None:
            logits = logits.masked_fill(~seen, -math.inf)
        best = torch.maximum(best, logits.amax((0, 2, 3)).float())
    return best * scale


def _products(query: Tensor, key: Tensor) -> Tensor:
    """``[batch, heads, queries, keys]``."""
    grouped = query.unflatten(1, (key.size(1), -1)).flatten(2, 3)
    return (grouped @ key.transpose(-1, -2)).unflatten(2, (-1, query.size(2))).flatten(1, 2)


def _bounds(query: Tensor, key: Tensor) -> Tensor:
    """Of the same shape, the products of norms."""
    norms = key.float().norm(dim=-1).repeat_interleave(query.size(1) // key.size(1), dim=1)
    return query.float().norm(dim=-1)[..., None] * norms[:, :, None]


def _bound_of_prefixes(query: Tensor, key: Tensor, visible: Visible) -> Tensor:
    # By head the largest product of norms, without a table of all pairs.
    longest = key.float().norm(dim=-1).cummax(dim=-1).values.repeat_interleave(query.size(1) // key.size(1), dim=1)
    last = visible.last(query.size(2), key.size(2)).to(query.device)
    bounds = query.float().norm(dim=-1) * longest[..., last.clamp(min=0)]
    return bounds.masked_fill_(last < 0, -math.inf).amax((0, 2))


class Factors(NamedTuple):
    """Factors for the weights of one attention layer.

    ``query`` and ``rotary``: of each query head. ``key``: of each key head. ``rotary`` is for queries whose keys are
    shared by all heads and stay as they are, as the rotary ones of latent attention.
    """

    query: list[float]
    key: list[float]
    rotary: list[float]


def clip_factors(logits: Sequence[float], keys: int, tau: float, alpha: float) -> Factors:
    """Return the factors that take logits above ``tau`` back to it and leave others as they are.

    A head's logits are multiplied by g = tau / logit, its queries by g^alpha. A key that several heads share takes
    g^(1 - alpha) of the largest logit among them, so that none of them stays above ``tau``.

    Args:
        logits: the largest of each query head; one that is not finite clips nothing.
        keys: number of key heads.
    """
    gains = [tau / logit if tau < logit < math.inf else 1.0 for logit in logits]
    per_key = len(gains) // keys
    shared = [min(gains[i : i + per_key]) for i in range(0, len(gains), per_key)]
    return Factors([gain**alpha for gain in gains], [gain ** (1 - alpha) for gain in shared], gains)
