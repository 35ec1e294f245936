# SPDX-License-Identifier: Apache-2.0
"""Limit the threads of an engine's step, so that the ranks of a node do not use more threads than it has CPUs.

Unless ``OMP_NUM_THREADS`` is set, torch starts as many threads in every rank as the node has cores.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may use: all of the node, or those that it is bound to."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def threads_per_rank(hosts: Sequence[str], cpus: Sequence[Sequence[int]]) -> int:
    """Return how many threads each rank may use so that no CPU has more than one; at least 1, equal for all ranks.

    Args:
        hosts: the host name of each rank.
        cpus: the result of :func:`usable_cpus` on each rank. Ranks with the same host name share the CPUs that they
            have in common.
    """
    ranks = Counter((host, cpu) for host, usable in zip(hosts, cpus, strict=True) for cpu in usable)
    shares = (sum(1 / ranks[host, cpu] for cpu in usable) for host, usable in zip(hosts, cpus, strict=True))
    return max(1, int(min(shares) + 1e-9))  # sums of thirds may be a little less than a whole number


@contextmanager
def limited_threads(limit: int | None) -> Iterator[None]:
    """Let torch use at most ``limit`` threads in the ``with`` block, or as many as the script has set if ``None``."""
    before = torch.get_num_threads()
    if limit is None or before <= limit:
        yield
        return
    torch.set_num_threads(limit)
    try:
        yield
    finally:
        torch.set_num_threads(before)
