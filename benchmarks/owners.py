# SPDX-License-Identifier: Apache-2.0
"""A step of one large matrix, with one owner and with every rank as an owner."""

import itertools
from typing import Annotated

from benchmarks import report
from benchmarks.training import CASES, Job, rounds

NOTES = """Step: backward and optimizer, the slowest rank. Optimizer: its step alone. Newton-Schulz: mean of the ranks,
with the time for which owners wait for each other. Times over: one owner over this."""


def owners(
    worlds: tuple[int, ...] = (2, 4),
    cases: Annotated[tuple[str, ...], CASES] = ("3",),
    repeats: int = 3,
    steps: int = 3,
    warmup: int = 1,
    hidden: int = 16384,
) -> str:
    """A step of a model of one matrix [hidden / 4, hidden]: one owner against as many as there are ranks.

    One thread per rank, in launches that alternate.

    Args:
        worlds: numbers of ranks
        cases: ZeRO stages, with CPU offload
        repeats: rounds over all settings
        steps: timed steps of a launch
        warmup: untimed steps of a launch
        hidden: columns of the matrix
    """
    settings = [(case, world, owners) for case, world in itertools.product(cases, worlds) for owners in (1, world)]
    shape = {"layers": 1, "hidden": hidden, "model": "lone", "warmup": warmup, "steps": steps}
    *_, records = rounds([Job(case, "ours", world, owners=k, **shape) for case, world, k in settings], repeats)
    found = {
        (row["case"], row["world"], row["owners"]): row for row in report.summarize(records, "case", "world", "owners")
    }
    rows = []
    for case, world, k in settings:
        row, alone = found[case, world, k], found[case, world, 1]
        line = {"case": CASES[case][0], "ranks": world, "owners": k, "step s": row["seconds"]}
        line |= {"fastest s": row["fastest s"], "slowest s": row["slowest s"], "optimizer s": row["optimizer s"]}
        line |= {"Newton-Schulz s": row["newton_schulz s"], "scratch MB": row["scratch MB"]}
        line["times over"] = alone["optimizer s"] / row["optimizer s"]
        rows.append(line)
    title = f"One matrix [{hidden // 4}, {hidden}] with one owner and with several"
    return report.write(report.name_of("owners"), title, rows, report.table(rows), NOTES)
