# SPDX-License-Identifier: Apache-2.0
"""Attention logits: the largest of each head, and the factors by which QK-clip scales them down to a threshold.

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

#: ``sampled`` takes one query out of this many, in each step different ones.
SHARE = 16
#: Maximum number of logits in memory at a time.
CHUNK = 2**24
#: Maximum number of logits in one call of attention for which ``auto`` is ``exact``: 32 heads of one sequence of 5,792
#: tokens. More logits would take more than 64 chunks, each of several kernels.
MAX_EXACT = 2**30
#: A mask of floats hides a key if it adds this or less to the logit. Models that do not use the dtype's least value or
#: minus infinity use -1e9 or -1e4, and bf16 rounds the latter to -9984.
HIDDEN = -9000.0


@dataclass(frozen=True)
class Visible:
    """The keys that each query of an attention call sees. A key must satisfy all of the conditions.

    Args:
        mask: a tensor that can be broadcast to ``[batch, heads, queries, keys]``. It is bool (True: seen), or contains
            numbers that are added to the logits, where :data:`HIDDEN` or less hides a key. ``None``: no condition.
        is_causal: whether a query sees no key after its own position.
        shift: query i has position i + ``shift`` among the keys.
        window: (before, after): how many keys before and after its own position a query sees; negative: all.
        documents: (document number of each query, ``[queries]``; document number of each key, ``[keys]``). A query sees
            only keys of its own document. ``None``: no condition.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    shift: int = 0
    window: tuple[int, int] = (-1, -1)
    documents: tuple[Tensor, Tensor] | None = None

    @property
    def _after(self) -> int:
        """Return how many keys after its own position a query sees; a negative number means all of them."""
        return 0 if self.is_causal else self.window[1]

    @property
    def is_prefix(self) -> bool:
        """Return whether each query sees all keys from the first to some last one, or none: a prefix of the keys."""
        return self.mask is None and self.documents is None and self.window[0] < 0

    def last_keys(self, queries: int, keys: int) -> Tensor:
        """Return the index of the last key that each query sees, int64 ``[queries]``; negative if it sees no key.

        Call it only if :attr:`is_prefix`. ``queries``, ``keys``: the numbers of queries and keys.
        """
        if self._after < 0:
            return torch.full((queries,), keys - 1, dtype=torch.int64, device="cpu")
        return (torch.arange(queries, dtype=torch.int64, device="cpu") + self.shift + self._after).clamp(max=keys - 1)

    def keys_needed(self, last_query: int, keys: int) -> int:
        """Return n, from 1 to ``keys``, such that the queries 0 to ``last_query`` see only keys among the first n."""
        return keys if self._after < 0 else min(keys, max(1, last_query + self.shift + self._after + 1))

    def seen_by(self, queries: Tensor, keys: int) -> Tensor | None:
        """Return which of the first ``keys`` keys the queries see; ``None`` if there is no condition, so they see all.

        ``queries``: indices of the queries, int64, 1-D. The result is a bool mask, True for a key that is seen. It can
        be broadcast to ``[batch, heads, queries, keys]``.
        """
        conditions = []
        distance = torch.arange(keys, dtype=torch.int64, device=queries.device) - queries[:, None] - self.shift
        if self._after >= 0:
            conditions.append(distance <= self._after)
        if self.window[0] >= 0:
            conditions.append(distance >= -self.window[0])
        if self.documents is not None:
            conditions.append(self.documents[0][queries, None] == self.documents[1][:keys])
        if self.mask is not None:
            mask = self.mask[(None,) * (4 - self.mask.ndim)]
            mask = mask[:, :, queries if mask.size(2) > 1 else slice(None), :keys]
            conditions.append(mask if mask.dtype == torch.bool else mask > HIDDEN)
        return functools.reduce(torch.bitwise_and, conditions) if conditions else None


def largest_logits(
    query: Tensor, key: Tensor, scale: float, visible: Visible, mode: str = "exact", step_number: int = 0
) -> Tensor:
    """Return the largest attention logit of each query head, fp32 ``[heads]``; ``-inf`` for a head that sees no key.

    A logit is ``scale`` times the dot product of a query and a key, before biases and soft caps. The dot product is
    computed in the dtype of ``query``, or in fp32 if that is fp16.

    Args:
        query: ``[batch, heads, queries, width]``.
        key: ``[batch, key_heads, keys, width]``; query heads that share a key head are adjacent.
        mode: ``exact``: the largest logit of all queries and keys. ``sampled``: the largest logit of every
            :data:`SHARE`-th query, so the result may be too small. ``bound``: ``scale`` times the largest product of a
            query's norm and a key's norm, so the result may be too large. ``auto``: ``exact`` up to :data:`MAX_EXACT`
            logits, otherwise ``sampled``.
        step_number: number of the training step, which decides which queries ``sampled`` takes.
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
    positions = range(step_number % share, count, share)
    together = max(1, CHUNK // (batch * heads * keys))
    for start in range(0, len(positions), together):
        chosen = positions[start : start + together]
        reach = visible.keys_needed(chosen[-1], keys)
        taken = query[:, :, chosen.start : chosen.stop : chosen.step]
        logits = (_bounds if mode == "bound" else _products)(taken, key[:, :, :reach])
        rows = torch.arange(chosen.start, chosen.stop, chosen.step, dtype=torch.int64, device=query.device)
        seen = visible.seen_by(rows, reach)
        if seen is not None:
            logits = logits.masked_fill(~seen, -math.inf)
        best = torch.maximum(best, logits.amax((0, 2, 3)).float())
    return best * scale


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of all queries and keys, ``[batch, heads, queries, keys]``."""
    grouped = query.unflatten(1, (key.size(1), -1)).flatten(2, 3)
    return (grouped @ key.transpose(-1, -2)).unflatten(2, (-1, query.size(2))).flatten(1, 2)


def _bounds(query: Tensor, key: Tensor) -> Tensor:
    """Return the product of each query's and each key's norm, fp32 ``[batch, heads, queries, keys]``."""
    norms = key.float().norm(dim=-1).repeat_interleave(query.size(1) // key.size(1), dim=1)
    return query.float().norm(dim=-1)[..., None] * norms[:, :, None]


def _bound_of_prefixes(query: Tensor, key: Tensor, visible: Visible) -> Tensor:
    # For each head the largest of _bounds, without computing all pairs.
    longest = key.float().norm(dim=-1).cummax(dim=-1).values.repeat_interleave(query.size(1) // key.size(1), dim=1)
    last = visible.last_keys(query.size(2), key.size(2)).to(query.device)
    bounds = query.float().norm(dim=-1) * longest[..., last.clamp(min=0)]
    return bounds.masked_fill_(last < 0, -math.inf).amax((0, 2))


class Factors(NamedTuple):
    """The factors by which the weights of one attention layer's heads are multiplied; 1 leaves a head as it is.

    Args:
        query: for each query head, the factor of its query weights.
        key: for each key head, the factor of its key weights.
        rotary: for each query head of latent attention, the factor of the rotary part of its query weights. The key for
            this part is common to all heads and not scaled, so this factor alone scales their product.
    """

    query: list[float]
    key: list[float]
    rotary: list[float]


def clip_factors(logits: Sequence[float], key_heads: int, tau: float, alpha: float) -> Factors:
    """Return the factors that scale logits above ``tau`` down to ``tau``, and leave smaller ones as they are.

    To multiply a head's logits by g = tau / logit, its queries are multiplied by g^alpha and its keys by g^(1 - alpha).
    A key head that several query heads share takes the g of the largest of their logits, so that none stays above
    ``tau``.

    Args:
        logits: the largest logit of each query head. A head whose logit is not finite is not clipped.
        key_heads: number of key heads.
        alpha: the queries' share of the scaling: 0 scales only keys, 1 only queries.
    """
    gains = [tau / logit if tau < logit < math.inf else 1.0 for logit in logits]
    per_key = len(gains) // key_heads
    shared = [min(gains[i : i + per_key]) for i in range(0, len(gains), per_key)]
    return Factors([gain**alpha for gain in gains], [gain ** (1 - alpha) for gain in shared], gains)
