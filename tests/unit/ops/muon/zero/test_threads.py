# SPDX-License-Identifier: Apache-2.0
"""CPU threads: a step uses as many as the script has set, and a warning names the number that fits the machine."""

from typing import Any

import pytest
import torch

from deepspeed.muon import step
from deepspeed.muon.zero.bind import cpus_per_rank
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
def test_the_ranks_of_a_machine_share_its_cpus(hosts: list[str], cpus: list[list[int]], expected: int) -> None:
    assert cpus_per_rank(hosts, cpus) == expected


def threads_of_a_run(threads: int, cpus: int) -> tuple[set[int], int, list[str]]:
    """Return the numbers of threads in steps, then the script's, and the warning at start."""
    seen: set[int] = set()
    orthogonalize = step.orthogonalize

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.add(torch.get_num_threads())
        return orthogonalize(*args, **kwargs)

    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.bind.usable_cpus", lambda: list(range(cpus)))
        patch.setattr("deepspeed.muon.step.orthogonalize", noting)
        with logged() as lines:
            engine = make_engine(Mlp(), ds_config(stage=2, offload=True))
        train_through_skips(engine, 2)
    engine.destroy()
    return seen, torch.get_num_threads(), [line for line in lines if "OMP_NUM_THREADS" in line]


@pytest.mark.parametrize(
    ("threads", "cpus", "text"),
    [
        (4, 2, "threads per rank: 4, CPUs per rank: 1; set OMP_NUM_THREADS to at most 1"),
        (1, 8, "threads per rank: 1, CPUs per rank: 4; set OMP_NUM_THREADS to use more, up to 4"),
        (2, 4, ""),
    ],
    ids=["too many", "few", "as many as CPUs"],
)
def test_a_step_keeps_the_scripts_threads_and_a_warning_names_what_fits(threads: int, cpus: int, text: str) -> None:
    """A step with another number makes forward and backward several times slower: OpenMP's threads then spin."""
    for rank, (seen, after, lines) in enumerate(run(threads_of_a_run, 2, threads=threads, cpus=cpus)):
        assert (seen, after) == ({threads}, threads)
        assert len(lines) == bool(text and rank == 0)
        assert all(text in line for line in lines)
