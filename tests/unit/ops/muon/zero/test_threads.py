# SPDX-License-Identifier: Apache-2.0
"""Threads of a step on the CPU: the ranks of a node share its CPUs, and the script's own setting comes back."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.muon import step
from deepspeed.muon.zero.bind import threads_per_rank
from deepspeed.muon.zero.engine_step import limited_threads
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import Mlp
from helpers.training import PARAMS, ds_config, make_engine, train_through_skips

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


def test_a_limit_lowers_the_threads_and_restores_them() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for limit, expected in ((2, 2), (6, 4), (None, 4)):
            with limited_threads(limit):
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 4
        with pytest.raises(ZeroDivisionError), limited_threads(1):
            _ = 1 / 0
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def threads_of_a_run(threads: int, cpus: int, stage: int) -> tuple[set[int], int, list[str]]:
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
            engine = make_engine(
                Mlp(), ds_config(stage=stage, offload=True, optimizer={"type": "Muon", "params": PARAMS})
            )
        train_through_skips(engine, 2)
    engine.destroy()
    return seen, torch.get_num_threads(), [line for line in lines if " uses " in line]


TOO_MANY = (4, 2, 1, "a step uses 1 of 4 threads, because ranks share CPUs")
FEW = (1, 8, 1, "each rank uses 1 of 4 CPUs; set OMP_NUM_THREADS to use more, up to 4")
ENOUGH = (2, 4, 2, "")


@pytest.mark.parametrize(
    ("stage", "case"),
    [*((stage, TOO_MANY) for stage in range(4)), (2, FEW), (2, ENOUGH)],
    ids=["too many, 0", "too many, 1", "too many, 2", "too many, 3", "few", "enough"],
)
def test_ranks_of_a_node_have_no_more_threads_than_cpus(stage: int, case: tuple[int, int, int, str]) -> None:
    threads, cpus, expected, text = case
    for rank, (seen, after, lines) in enumerate(run(threads_of_a_run, 2, threads=threads, cpus=cpus, stage=stage)):
        assert (seen, after) == ({expected}, threads)
        assert len(lines) == bool(text and rank == 0)
        assert all(text in line for line in lines)
