# SPDX-License-Identifier: Apache-2.0
"""Random jobs: no rank hangs, every element travels once each way, every matrix is orthogonalized once.

A planner with a fault in one line does not pass these checks.
"""

from types import ModuleType

import pytest

from helpers.jobs import check_job, random_job
from helpers.mutants import mutant


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


#: Module of the planner, a line or a part of one, and what it reads instead.
MUTANTS = [
    # where elements are
    ("placement", "(self.origin + stop - 1) // self.span", "(self.origin + stop) // self.span"),
    ("placement", "low = part * self.span - self.origin", "low = part * self.span"),
    ("placement", "min(stop, low + self.span)", "min(stop, low + self.span - 1)"),
    ("placement", "divmod(rank - self.first, self.step)", "divmod(rank, self.step)"),
    ("placement", "return self.base + (self.origin + element) % self.span", "return self.base + element % self.span"),
    ("placement", "return self.base + (self.origin + element)", "return (self.origin + element)"),
    ("placement", "piece._replace(at=at + piece.at)", "piece._replace(at=piece.at)"),
    ("placement", "enumerate(rules)", "enumerate(rules[:2])"),
    ("placement", "return self._named(self.whole or self.block)", "return self._named(self.block)"),
    # runs and what arrives
    ("bucket", "sent[owner] += numel", "sent[owner] += piece.cols"),
    ("bucket", "send_at += numel", "send_at += piece.rows"),
    ("bucket", "matrices + piece.at if in_place else send_at", "matrices if in_place else send_at"),
    ("bucket", "stay = source == rank and not sends_own", "stay = source == rank"),
    ("bucket", "in_place = mine and piece.is_contiguous and not sends_own", "in_place = mine and piece.is_contiguous"),
    ("bucket", "incoming[source].append((matrices, piece))", "incoming[source].append((0, piece))"),
    ("bucket", "GridCopy(at, matrix + piece.at, rows, cols,", "GridCopy(at, matrix + piece.element, rows, cols,"),
    ("bucket", "piece.pitch if rows > 1 else cols))", "piece.stride if rows > 1 else cols))"),
    (
        "bucket",
        'if piece.is_contiguous else (f"{name}@{piece.at}", 0)',
        "if piece.is_contiguous else (name, 0)",
    ),
    ("bucket", "draws=(name, piece.at)", "draws=(name, at)"),
    (
        "bucket",
        "piece.rows, piece.cols, piece.stride)",
        "piece.rows, piece.cols, piece.pitch)",
    ),
    ("bucket", "follows = second.start == first.start + first.rows * pitch and", "follows ="),
    (
        "bucket",
        "(second.at, second.start) == (first.at + first.cols, first.start + first.cols)",
        "second.start == first.start + first.cols",
    ),
    ("bucket", "(at, start) == (first.times * steps[0], first.times * steps[1])", "at == first.times * steps[0]"),
    ("bucket", "copy.rows == 1 and copy.start == first + copy.at and", "copy.rows == 1 and"),
    ("bucket", "matrix_elements=0 if only_results else numel", "matrix_elements=numel"),
    ("bucket", "(owner == rank) is not only_results", "True"),
    ("bucket", "own_results=sum(item.block.numel for item in own) * only_results", "own_results=0"),
    ("bucket", "start += len(alike) * block.numel", "start += block.numel"),
    (
        "bucket",
        "len(item.spread.parts) > 1 or list(item.spread.holders) != [owner]",
        "list(item.spread.holders) != [owner]",
    ),
    (
        "bucket",
        "places.append(end if run.in_place else in_place + run.copy.at)",
        "places.append(end if run.in_place else run.copy.at)",
    ),
    (
        "bucket",
        "return -item.owners, -item.block.numel, item.block.rows, *item.shape",
        "return -item.block.numel, item.block.rows",
    ),
    # buckets and their order
    ("plan", "filled[owner] + item.block.numel > limit:", "filled[owner] > limit:"),
    ("plan", "parts_of(owned, self.limit * self.copies)", "parts_of(owned, 2 * self.limit * self.copies)"),
    ("plan", "next(turns[of_results]) % 2", "next(turns[of_results]) % 1"),
    ("plan", "self.copies > 1 or self.is_tight else 3", "self.copies > 1 or self.is_tight else 4"),
    ("plan", "[index % slots for index", "[index % 2 for index"),
    ("plan", "(first + k, part)", "(first, part)"),
    ("plan", "return max(1, bucket_bytes // copies //", "return max(1, bucket_bytes //"),
    # the program
    ("program", "own = own if plan.buckets[turn].only_results else turn", "own = turn"),
    ("program", "applies_first = slots <= to_apply", "applies_first = False"),
    ("program", "sum(plan.buckets[turn].buffer_sizes)", "plan.buckets[turn].matrix_elements"),
    ("program", "sent, received = received, sent", "pass"),
    ("program", "yield Wait(number, False)", "yield Wait(number, True)"),
    ("program", "0 <= turn - to_compute < count", "0 <= turn - to_compute < count - 1"),
    ("program", "0 <= bucket < count", "0 < bucket < count"),
    ("program", "numels[plan.rank] = bucket.own_results", "pass"),
    ("program", "for root, n in enumerate(numels) if n)", "for root, n in enumerate(bucket.send_counts) if n)"),
    ("program", "if not bucket.travels or", "if not sum(bucket.send_counts) or"),
    # several owners
    ("program", "first = rank // batch.owners * batch.owners", "first = rank"),
    (
        "program",
        "numel in _parts(count * small * small, SUM_ELEMENTS)",
        "numel in _parts(count * small * small, 8 + rank)",
    ),
    ("program", "if batch.owners == 1:\n        return", "if batch.owners == 1 or rank % 2:\n        return"),
    ("owners", "for first in range(0, len(loads.values), count)]", "for first in range(1, len(loads.values), count)]"),
    ("owners", "size = (block.rows, block.cols)[axis] // count", "size = (block.rows, block.cols)[axis] // count - 1"),
    ("owners", "int(item.block.rows <= item.block.cols)", "int(item.block.rows < item.block.cols)"),
    ("owners", "and not (is_cut_by_rows and block.bands > 1)", ""),
]


@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=lambda text: text[:40])
def test_a_faulty_planner_is_found(module: str, old: str, new: str) -> None:
    """By a job that the planner itself passes."""
    with mutant(module, old, new) as jobs:
        seed = next((seed for seed in range(300) if fails(jobs, seed)), None)
    assert seed is not None
    check_job(*random_job(seed))


def fails(jobs: ModuleType, seed: int) -> bool:
    try:
        jobs.check_job(*jobs.random_job(seed))
    except Exception:
        return True
    return False
