# SPDX-License-Identifier: Apache-2.0
"""The pool of processes itself: failures and hangs; the judge of their collectives."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from helpers.collectives import Call, first_fault
from helpers.distributed import RankError, run


def pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("output before the error")
        raise ValueError(f"bad value on rank {rank}")


def sleep_forever_on(rank: int) -> int:
    print(f"output of process {os.getpid()}")
    while dist.get_rank() == rank:
        time.sleep(0.1)
    return os.getpid()


@pytest.mark.full
def test_exception_reaches_the_parent() -> None:
    before = run(pid, 2)
    with pytest.raises(RankError) as caught:
        run(fail_on, 2, rank=1)
    for text in ("ValueError: bad value on rank 1", "output before the error", "in fail_on"):
        assert text in str(caught.value)
    assert not set(before) & set(run(pid, 2))


@pytest.mark.full
def test_rank_that_sleeps_forever_is_killed_and_the_next_run_works() -> None:
    pids = run(pid, 2)
    with pytest.raises(RankError) as caught:
        run(sleep_forever_on, 2, timeout=2, rank=1)
    for text in ("within 2 s", f"output of process {pids[1]}", "rank 1: was still running", "in sleep_forever_on"):
        assert text in str(caught.value)
    for old in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
    assert not set(pids) & set(run(pid, 2))


# ---- the order of collectives -------------------------------------------------------------------------------


def two_groups_in_another_order() -> None:
    """Gloo takes these calls in any order; each occupies the device on NCCL until the other rank has made it."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if dist.get_rank() else reversed(groups):
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    dist.barrier()


def test_an_order_that_nccl_could_hang_on_fails_on_gloo() -> None:
    with pytest.raises(RankError, match=r"gloo does not: rank 0 waits in all_reduce of 2 float32 .* in two_groups_in"):
        run(two_groups_in_another_order, 2, fresh=True)


def calls_of(*orders: str) -> list[list[Call]]:
    """By rank the groups in which it calls, such as "01 12"."""
    return [[Call("all_reduce", tuple(map(int, ranks)), sizes=(8,)) for ranks in order.split()] for order in orders]


def sent(*of_ranks: tuple[tuple[int, int], tuple[int, int]]) -> list[list[Call]]:
    """One all-to-all; by rank (what it sends, what it receives)."""
    return [[Call("all_to_all", (0, 1), sent=one, received=other)] for one, other in of_ranks]


@pytest.mark.parametrize(
    ("logs", "text"),
    [
        (calls_of("01 02", "01 12", "12 02"), "None"),
        (calls_of("01 012 01", "012 01", "012"), "rank 0 waits in all_reduce"),
        (calls_of("01 02", "12 01", "02 12"), "rank 2 waits in all_reduce"),  # though no two ranks share two groups
        (calls_of("01", "01", "01"), "rank 2 calls"),
        (calls_of("01 01", "01"), "rank 1 waits in no further call"),
        ([[Call("all_reduce", (0, 1), sizes=(size,))] for size in (2, 3)], "rank 1 calls all_reduce of 3"),
        (sent(((0, 2), (0, 3)), ((3, 1), (2, 1))), "None"),
        (sent(((0, 2), (0, 3)), ((2, 1), (2, 1))), "rank 1 calls all_to_all of 3"),
    ],
    ids=["in order", "two groups", "a circle", "a foreign rank", "a rank stops", "sizes", "counts", "unlike counts"],
)
def test_calls_that_do_not_meet_are_found(logs: list[list[Call]], text: str) -> None:
    assert text in str(first_fault(logs))
