# SPDX-License-Identifier: Apache-2.0
"""Specs, layouts and the elements of a plan's runs, by plain indexing."""

import itertools

from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.plan.cost import CostModel
from deepspeed.muon.plan.plan import Copy, Run

COST = CostModel(lambda rows, cols: 20.0 * min(rows, cols) ** 2 * max(rows, cols), 200.0, 2)


def whole(rows: int, cols: int) -> tuple[Block, ...]:
    return (Block(0, rows, cols, cols),)


def columns(rows: int, cols: int) -> tuple[Block, ...]:
    """Two blocks side by side, which are not contiguous in the parameter."""
    half = cols // 2
    return (Block(0, rows, half, cols), Block(half, rows, cols - half, cols))


def specs(shapes: list[tuple[int, int]], split: bool = False) -> list[MatrixSpec]:
    cut = columns if split else whole
    return [MatrixSpec(f"p{i}", s, True, "test", cut(*s) if s[1] > 1 else whole(*s)) for i, s in enumerate(shapes)]


def places(run: Run) -> list[tuple[int, int]]:
    """(place in the tensor, place in the buffer) of every element of a run."""
    return [(place, run.copy.at + k) for k, place in enumerate(spread(run.copy))]


def spread(copy: Copy) -> list[int]:
    """Places on the grid, in the order of the buffer: of received elements, where they belong."""
    return [copy.start + r * copy.pitch + c for r in range(copy.rows) for c in range(copy.cols)]


def all_to_all(outboxes: tuple, sent: list, received: list) -> list[list]:
    """`torch.distributed.all_to_all_single` on lists; the counts of sender and receiver must agree."""
    inboxes: list[list] = [[] for _ in outboxes]
    for source, (outbox, counts) in enumerate(zip(outboxes, sent, strict=True)):
        starts = list(itertools.accumulate(counts, initial=0))
        for target, count in enumerate(counts):
            assert received[target][source] == count
            inboxes[target] += outbox[starts[target] : starts[target] + count]
    return inboxes
