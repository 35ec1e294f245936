# SPDX-License-Identifier: Apache-2.0
"""What Muon adds to AdamW, how large the noise is, and how far the optimizer is from its floor: tables of step.py."""

import roofline
from machine import markdown_table
from rates import Rates
from setups import CASES, VARIANTS, Job

Summary = dict[tuple[str, str], dict]


def cases(summary: Summary, *variants: str) -> list[str]:
    """Cases in which all of these variants were measured."""
    return [case for case in CASES if all((case, variant) in summary for variant in variants)]


def noise_table(summary: Summary) -> str:
    """Each repeated variant over the original: what a ratio of two equals looks like here."""
    rows = [["case", "variant", "ratio of medians", "slowest / fastest round of both"]]
    for case, variant in summary:
        again = VARIANTS[variant].again
        if not again or (case, again) not in summary:
            continue
        a, b = summary[case, variant], summary[case, again]
        slowest, fastest = (pick(a[k], b[k]) for pick, k in ((max, "slowest round s"), (min, "fastest round s")))
        ratio = a["seconds"] / b["seconds"]
        rows.append([CASES[case].label, VARIANTS[again].label, f"{ratio:.2f}", f"{slowest / fastest:.2f}"])
    return markdown_table(rows) if len(rows) > 1 else ""


def added(summary: Summary, case: str, variant: str) -> tuple[float, float, float]:
    """Seconds that a variant adds to AdamW's: of medians, the least and the most that the rounds allow."""
    a, b = summary[case, variant], summary[case, "adamw"]
    least, most = a["fastest round s"] - b["slowest round s"], a["slowest round s"] - b["fastest round s"]
    return a["seconds"] - b["seconds"], least, most


def additions_table(summary: Summary) -> str:
    """Seconds added to AdamW's backward + step by ours and by each of stock's Muons."""
    rows = [["case", "AdamW s", "ours adds s", "against", "adds s", "ours / its", "at most"]]
    for case in cases(summary, "ours", "adamw"):
        ours, _, most = added(summary, case, "ours")
        for variant in (v for v in VARIANTS if VARIANTS[v].is_stock_muon and (case, v) in summary):
            theirs, least, _ = added(summary, case, variant)
            cells = [f"{summary[case, 'adamw']['seconds']:.3f}", f"{ours:.3f}", VARIANTS[variant].label]
            cells += [f"{theirs:.3f}", f"{ours / theirs:.2f}", f"{most / least:.2f}" if least > 0 else "-"]
            rows.append([CASES[case].label, *cells])
    return markdown_table(rows) if len(rows) > 1 else ""


def floor_table(summary: Summary, job: Job, rates: Rates) -> str:
    """Seconds inside our optimizer's own step, the exchange included, over the least possible."""
    rows = [["case", "variant", "kernels", "optimizer s", "floor s", "of it Newton-Schulz", "optimizer / floor"]]
    for (case, variant), row in summary.items():
        if not VARIANTS[variant].is_ours:
            continue
        sharding = roofline.Sharding(CASES[case].stage, job.world, CASES[case].offload)
        floor = roofline.floor(job.matrices, sharding, rates, symmetric=bool(row["symmetric"]))
        cells = [f"{value:.3f}" for value in (row["optimizer s"], floor.total, floor.newton_schulz)]
        ratio = f"{row['optimizer s'] / floor.total:.2f}"
        rows.append([CASES[case].label, VARIANTS[variant].label, row["kernels"], *cells, ratio])
    return markdown_table(rows)
