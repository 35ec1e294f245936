# SPDX-License-Identifier: Apache-2.0
"""The first step, growth of memory, and scratch memory by size of the model.

    python benchmarks/steady.py [--cases 1 3] [--steps 200] [--parts first growth scratch]

first    the first backward + step of ours beyond AdamW's, in steady steps of ours; medians of alternating launches
growth   resident memory over --steps steps of a small model: its slope over the second half; the allocator takes
         and returns some megabytes at a time, so a slope means growth only if it stays as the steps become more
scratch  what ours keeps between steps beside its state (buffers of the exchange, temporaries) for 1, 2 and 4 times
         as many layers: bounded by the size of a bucket, whatever the model
Launches are those of step.py.
"""

import argparse
import statistics

import launcher
import output
from setups import CASES, VARIANTS, Job

SLOPE = "MB per 100 steps, second half"


def slope(values: list[float]) -> float:
    """Least-squares slope per 100 entries of the second half of a series."""
    half = values[len(values) // 2 :]
    x = range(len(half))
    return 100 * statistics.linear_regression(x, half).slope


def first(case: str, world: int, rounds: int, timeout: float) -> dict:
    """One row: first and steady backward + step of ours and of AdamW."""
    found: dict[str, list[dict]] = {"ours": [], "adamw": []}
    for _ in range(rounds):
        for variant, records in found.items():
            records.append(launcher.run(Job(case, variant, world=world), timeout))
    row: dict = {"case": CASES[case].label}
    for variant, records in found.items():
        row[f"{VARIANTS[variant].label}, first s"] = statistics.median(record["first step s"] for record in records)
        row[f"{VARIANTS[variant].label}, steady s"] = statistics.median(record["seconds"] for record in records)
    ours, adamw = VARIANTS["ours"].label, VARIANTS["adamw"].label
    beyond = row[f"{ours}, first s"] - row[f"{adamw}, first s"]
    return row | {"first beyond AdamW's s": beyond, "in steady steps of ours": beyond / row[f"{ours}, steady s"]}


def growth(case: str, variant: str, world: int, steps: int, timeout: float) -> dict:
    """One row: resident memory of rank 0 after the warm-up and at the end, and its slope."""
    record = launcher.run(Job(case, variant, world=world, layers=2, hidden=256, steps=steps), timeout)
    resident = record["resident MB"]
    row = {"case": CASES[case].label, "optimizer": VARIANTS[variant].label, "steps": len(resident)}
    half = resident[len(resident) // 2 :]
    row |= {"MB after 10 steps": resident[min(10, len(resident) - 1)], "MB at the end": resident[-1]}
    return row | {"least-most MB, second half": f"{min(half):.0f}-{max(half):.0f}", SLOPE: slope(resident)}


def scratch(case: str, layers: int, world: int, timeout: float) -> dict:
    """One row: what the largest rank keeps between steps beside its state."""
    record = launcher.run(Job(case, "ours", world=world, layers=layers, warmup=1, steps=1), timeout)
    model = 4 * Job(case, "ours", layers=layers).parameters / 1e6
    return {
        "case": CASES[case].label,
        "layers": layers,
        "model MB in fp32": model,
        "scratch MB": record["workspace MB"],
    }


def main() -> None:
    """Launch the parts that are asked for, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("first", "growth", "scratch")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1", "3"])
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=3, help="alternating launches of first")
    parser.add_argument("--steps", type=int, default=200, help="of growth")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one launch may take")
    args = parser.parse_args()
    tables: dict[str, list[dict]] = {part: [] for part in args.parts}
    for case in args.cases:
        if "first" in tables:
            tables["first"].append(first(case, args.world, args.rounds, args.timeout))
        if "growth" in tables:
            tables["growth"] += [growth(case, v, args.world, args.steps, args.timeout) for v in ("ours", "adamw")]
        if "scratch" in tables:
            tables["scratch"] += [scratch(case, layers, args.world, args.timeout) for layers in (16, 32, 64)]
    for part, rows in tables.items():
        text = f"# Steady state: {part}\n\n{args.world} ranks, one thread each.\n\n{output.table(rows)}"
        print(output.write(output.path_of(f"steady-{part}"), rows, text))


if __name__ == "__main__":
    main()
