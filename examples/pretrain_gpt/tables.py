# SPDX-License-Identifier: Apache-2.0
"""The tables of the experiments, in Markdown and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from judge import Difference, paired, steps_to
from runs import Run, Runs, Tuned
from variants import BASELINES, VARIANTS, WATCH

if TYPE_CHECKING:
    from experiments import Judged, Widths

RUN_FIELDS = ("variant", "width", "lr", "weight_decay", "tau", "seed")


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def blank(value: float, form: str) -> str:
    """Return a formatted number, or nothing for NaN."""
    return "" if math.isnan(value) else format(value, form)


def interval(difference: Difference) -> str:
    """Return a difference with its interval."""
    if math.isnan(difference.low):
        return f"{difference.mean:+.4f}"
    return f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"


def tuned_numbers(tuned: Tuned) -> list[str]:
    """Return the best rate and weight decay; a star marks what lies at the edge of what was tried."""
    numbers = {"lr": tuned.run.lr, "weight_decay": tuned.run.weight_decay}
    texts = {key: f"{value:g}{'*' if key in tuned.at_the_edge else ''}" for key, value in numbers.items()}
    if "preset" in tuned.run.definition.params:
        texts["weight_decay"] = "the preset's"
    return list(texts.values())


def largest_logit(runs: Runs, run: Run) -> float:
    """Return the largest attention logit of a run that recorded them, else NaN."""
    return max((value for _, values in runs.logits(run).values() for value in values), default=math.nan)


def rules(judged: Mapping[str, Judged], steps: int) -> str:
    """Return the table of the variants, in the order of their differences to Muon."""
    heads = ["variant", "rate", "decay", "seeds", "final loss", "sigma", "difference to Muon (95 %)", "verdict"]
    rows = []
    for name in sorted(judged, key=lambda name: judged[name].difference.mean):
        one, count = judged[name], len(judged[name].losses)
        numbers = [*tuned_numbers(one.tuned), str(count), f"{fmean(one.losses):.4f}"]
        numbers.append(f"{stdev(one.losses):.4f}" if count > 1 else "")
        against = ["", ""] if name == "Muon" else [interval(one.difference), one.difference.verdict]
        reached = fmean(one.steps)
        rows.append([name, *numbers, *against, "" if math.isnan(reached) else f"{reached:.0f} ({reached / steps:.0%})"])
    return markdown([*heads, "steps to AdamW's final loss"], rows)


def controls(judged: Mapping[str, Judged]) -> str:
    """Return the table of variants against a control that is not plain Muon; nothing if there are none."""
    rows = []
    for name, one in judged.items():
        control = VARIANTS[name].control
        if control != "Muon" and control in judged and len(judged[control].losses) == len(one.losses):
            difference = paired(one.losses, judged[control].losses)
            rows.append([name, control, interval(difference), difference.verdict])
    return markdown(["variant", "control", "difference (95 %)", "verdict"], rows) if rows else ""


def widths(found: Widths) -> str:
    """Return the table of AdamW and Muon by width."""
    rows = []
    for width, tuned in found.tuned.items():
        rates = [tuned_numbers(tuned[name])[0] for name in BASELINES]
        adamw, muon = (found.losses[name][width] for name in BASELINES)
        losses = [f"{adamw:.4f}", f"{muon:.4f}", f"{muon - adamw:+.4f}"]
        rows.append([str(width), *rates, *losses, blank(found.shares[width], ".0%")])
    heads = ["width", "AdamW's rate", "Muon's rate", "AdamW's loss", "Muon's loss", "difference"]
    return markdown([*heads, "Muon's steps to AdamW's final loss"], rows)


def clip(runs: Runs, pairs: Mapping[float, list[Run]]) -> str:
    """Return the table of runs with and without QK-clip."""
    rows = []
    for rate, pair in pairs.items():
        for run in pair:
            tau = "not clipped" if run.tau == WATCH else f"{run.tau:g}"
            loss = runs.final(run)
            final = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
            rows.append([f"{run.lr:g} ({rate:g} x)", tau, f"{largest_logit(runs, run):.1f}", final])
    return markdown(["rate", "tau", "largest logit of the run", "final loss"], rows)


def cost(runs: Runs) -> str:
    """Return how many runs there are, and their CPU time."""
    total = sum(map(runs.cpu_seconds, runs.done()))
    return f"{len(runs.done())} runs of {runs.steps} steps, {total:.0f} CPU seconds in all.\n"


def write_csv(path: Path, runs: Runs, width: int, target: float) -> None:
    """Write one line per run. Steps are counted to the loss `target`, in runs of this width."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*RUN_FIELDS, "steps", "held_out", "steps_to_adamw", "largest_logit", "cpu_seconds"])
        for run in runs.done():
            reached = steps_to(runs.evaluations(run), target) if run.width == width else math.nan
            results = [f"{runs.final(run):.5f}", blank(reached, ".1f"), blank(largest_logit(runs, run), ".2f")]
            own = [getattr(run, name) for name in RUN_FIELDS]
            writer.writerow([*own, runs.steps, *results, runs.cpu_seconds(run)])
