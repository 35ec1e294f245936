# SPDX-License-Identifier: Apache-2.0
"""A collective as one rank calls it, and what the calls of all its ranks must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Group(NamedTuple):
    """The ranks that call a collective. ``name`` tells apart process groups of the same ranks."""

    ranks: Sequence[int]
    name: str = ""

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) > 1 and list(self.ranks) == list(range(first, last + 1)):
            return f"ranks {first} to {last}"
        return f"ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Collective:
    """A call of one rank.

    Args:
        kind: such as ``all_reduce``.
        group: the ranks that make the call.
        dtype: of the elements, such as ``fp32``.
        numel: elements, equal on all ranks: of the tensor that is reduced or broadcast, or that each rank contributes.
        root: the index in the group of the rank that sends to all, or receives from all.
        sent: elements for each rank of the group, where ranks send unlike numbers.
        received: elements from each rank.
        caller: the line of code that makes the call, if that is known.
    """

    kind: str
    group: Group
    dtype: str = ""
    numel: int = 0
    root: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    caller: str = field(default="", compare=False)

    def __str__(self) -> str:
        numel = sum(self.sent) if self.sent else self.numel
        what = f"{self.kind} of {numel:,} {self.dtype} elements" if self.dtype else self.kind
        root = "" if self.root is None else f" from rank {self.group.ranks[self.root]}"
        return f"{what}{root} among {self.group}" + (f" ({self.caller})" if self.caller else "")


def mismatch(calls: Sequence[Collective]) -> str | None:
    """Return how the calls of one collective differ; ``None`` where they match.

    Args:
        calls: of all ranks of the group, in its order.
    """
    first, ranks = calls[0], calls[0].group.ranks
    for rank, call in zip(ranks, calls, strict=True):
        if _common(call) != _common(first):
            return f"rank {ranks[0]} calls {first}, rank {rank} calls {call}"
        for counts in (call.sent, call.received) if call.sent or call.received else ():
            if len(counts) != len(calls):
                return f"rank {rank} has sizes for {len(counts)} ranks of {len(calls)} in {call}"
    for rank, call, expected in zip(ranks, calls, zip(*(call.received for call in calls), strict=True), strict=False):
        if call.sent != expected:
            other = next(index for index, numel in enumerate(call.sent) if numel != expected[index])
            text = f"{call.sent[other]} elements to rank {ranks[other]}, which receives {expected[other]}"
            return f"rank {rank} sends {text}, in {call}"
    return None


def _common(call: Collective) -> tuple:
    """Return what is equal on all ranks."""
    return call.kind, call.dtype, call.numel, call.root, bool(call.sent)
