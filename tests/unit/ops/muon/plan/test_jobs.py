# SPDX-License-Identifier: Apache-2.0
"""Random jobs: no rank hangs, every element travels once each way, every matrix is orthogonalized once."""

import pytest

from helpers.jobs import check_job, random_job


def check(seeds: range, most_ranks: int) -> None:
    for seed in seeds:
        grid, parts = random_job(seed, most_ranks)
        try:
            check_job(grid, parts)
        except AssertionError as error:
            raise AssertionError(f"the job of seed {seed} with at most {most_ranks} ranks, {grid}: {error}") from error


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_jobs_break_no_rule(first: int) -> None:
    check(range(first, first + 100), most_ranks=12)


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("first", range(1000, 21_000, 2000))
def test_many_jobs_break_no_rule(first: int) -> None:
    """On up to 64 ranks."""
    check(range(first, first + 1000), most_ranks=12)
    check(range(first + 1000, first + 2000), most_ranks=64)
