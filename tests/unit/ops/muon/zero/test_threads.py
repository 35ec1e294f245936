# SPDX-License-Identifier: Apache-2.0
"""Threads of a step on the CPU: the ranks of a node share its CPUs, and the script's own setting comes back."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.muon import step
from deepspeed.muon.zero.bind import threads_per_rank
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import Mlp
from helpers.training import ds_config, make_engine, train_through_skips

NODE = list(range(96))
HALVES = [NODE[:48], NODE[48:]]


@pytest.mark.parametrize(
    ("hosts", "cpus", "expected"),
    [
        (["a"] * 8, [NODE] * 8, 12),
        (["a"] * 8 + ["b"] * 4, [NODE] * 12, 12),
        (["a"] * 7, [NODE] * 7, 13),
        (["a"] * 3, [[0]] * 3, 1),
        (["a", "b"], [NODE, NODE], 96),
        (["a"] * 8, [NODE[i * 12 :][:12] for i in range(8)], 12),
        (["a"] * 6, [HALVES[i % 2] for i in range(6)], 16),
        (["a"] * 3, [[0, 1, 2]] * 3, 1),
    ],
    ids=["a node", "uneven nodes", "no divisor", "more ranks than CPUs", "one each", "bound", "by socket", "thirds"],
)
def test_a_rank_takes_its_share_of_the_cpus(hosts: list[str], cpus: list[list[int]], expected: int) -> None:
    assert threads_per_rank(hosts, cpus) == expected


def threads_of_a_run(threads: int, cpus: int) -> tuple[set[int], int, list[str]]:
    """Return the numbers of threads in steps, then the script's, and the log at start."""
    seen: set[int] = set()

    def noting(function: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.add(torch.get_num_threads())
            return function(*args, **kwargs)

        return noted

    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.bind.usable_cpus", lambda: list(range(cpus)))
        patch.setattr("deepspeed.muon.step.orthogonalize", noting(step.orthogonalize))
        with logged(logging.DEBUG) as lines:
            engine = make_engine(Mlp(), ds_config(stage=2, offload=True))
        train_through_skips(engine, 2)
    engine.destroy()
    return seen, torch.get_num_threads(), [line for line in lines if " uses " in line]


@pytest.mark.parametrize(
    ("threads", "cpus", "expected", "text"),
    [
        (4, 2, 1, "a step uses 1 of 4 threads, because ranks share CPUs"),
        (1, 8, 1, "each rank uses 1 of 4 CPUs; set OMP_NUM_THREADS to use more, up to 4"),
        (2, 4, 2, ""),
    ],
    ids=["too many", "few", "enough"],
)
def test_ranks_of_a_node_have_no_more_threads_than_cpus(threads: int, cpus: int, expected: int, text: str) -> None:
    for rank, (seen, after, lines) in enumerate(run(threads_of_a_run, 2, threads=threads, cpus=cpus)):
        assert (seen, after) == ({expected}, threads)
        assert len(lines) == bool(text and rank == 0)
        assert all(text in line for line in lines)
