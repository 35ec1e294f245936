# SPDX-License-Identifier: Apache-2.0
"""What ``ds_muon try`` concludes from the records of its variants: which rate, by how much, and how sure that is."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

#: Variants repeat if the best Muon and the best AdamW differ by less than this share of the loss.
CLOSE = 0.02
#: Number of values -> factor of the standard error of their mean for an interval of 95 % (Student's t); 2.1 above.
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4, 9: 2.3, 10: 2.3}
COLUMNS = ("variant", "rate", "loss", "to AdamW", "ms/step", "memory", "state")
COLORS = {"AdamW": "tab:gray", "Muon": "tab:red"}


class Variant(NamedTuple):
    """An optimizer, ``"AdamW"`` or ``"Muon"``, a factor of AdamW's rate, and what is added to the script's seed."""

    optimizer: str
    factor: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.optimizer} x{self.factor:g}" + (f", seed +{self.seed}" if self.seed else "")

    @property
    def stem(self) -> str:
        """Return the name of the variant's files, without a suffix."""
        return f"{self.optimizer.lower()}_x{self.factor:g}" + (f"_seed{self.seed}" if self.seed else "")


@dataclass
class Run:
    """What a variant has recorded so far.

    ``state``: ``"waiting"``, ``"running"``, ``"done"``, ``"diverged"`` or ``"failed"``; ``note``: last lines of a
    failed run. ``config``: the ds_config as DeepSpeed has read it.
    """

    variant: Variant
    steps: list[dict[str, Any]] = field(default_factory=list)
    state: str = "waiting"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    built_by_script: bool = False

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step."""
        return [step["loss"] for step in self.steps]

    def loss(self, steps: int) -> float:
        """Return the mean loss of the last tenth of the first ``steps`` steps; infinite if the run has not ended so."""
        losses = self.losses[:steps]
        ended = self.state == "done" and len(losses) == steps
        return fmean(losses[-window(steps) :]) if ended else math.inf

    @property
    def step_seconds(self) -> float:
        """Return the median time from the end of a step to the end of the next."""
        ends = [step["seconds"] for step in self.steps]
        return median(b - a for a, b in zip(ends, ends[1:], strict=False)) if len(ends) > 1 else math.nan

    def seconds(self) -> list[float]:
        """Return the time at the end of each step, as if the first had taken as long as the others."""
        return [step["seconds"] - self.steps[0]["seconds"] + self.step_seconds for step in self.steps]


def window(steps: int) -> int:
    """Return over how many steps a loss is averaged: a tenth, and at least five if there are as many."""
    return min(steps, max(5, steps // 10))


def read_run(variant: Variant, path: Path) -> Run:
    """Return what the file ``path`` has of ``variant``; the last line of a killed run may be incomplete."""
    run = Run(variant)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for record in (json.loads(line) for line in lines if line.endswith("\n")):
        if "step" in record:
            run.steps.append(record)
        elif "end" in record:
            run.state, run.note = record["end"], record.get("note", "")
        else:
            run.config, run.built_by_script = record["config"], record["built_by_script"]
    return run


def length(runs: Sequence[Run]) -> int:
    """Return the number of steps that all finished runs have."""
    return min((len(run.steps) for run in runs if run.state == "done"), default=0)


def best(runs: Sequence[Run], optimizer: str) -> Run | None:
    """Return the run of ``optimizer``, without repeats, with the lowest loss; ``None`` if none has one."""
    steps = length(runs)
    ours = [run for run in runs if run.variant.optimizer == optimizer and not run.variant.seed]
    found = min(ours, key=lambda run: run.loss(steps), default=None)
    return found if found is not None and math.isfinite(found.loss(steps)) else None


def between(runs: Sequence[Run]) -> float | None:
    """Return the factor in the middle between Muon's best and the better one of its neighbours; ``None`` if none is."""
    steps, top = length(runs), best(runs, "Muon")
    of_muon = [run for run in runs if run.variant.optimizer == "Muon" and not run.variant.seed]
    if top is None:
        return None
    factors = sorted(run.variant.factor for run in of_muon)
    place = factors.index(top.variant.factor)
    near = [run for run in of_muon if run.variant.factor in factors[max(0, place - 1) : place + 2] and run is not top]
    near = [run for run in near if math.isfinite(run.loss(steps))]
    if not near:
        return None
    other = min(near, key=lambda run: run.loss(steps))
    return float(f"{math.sqrt(top.variant.factor * other.variant.factor):.2g}")


class Difference(NamedTuple):
    """Muon's loss less AdamW's: mean, half of an interval of 95 % (``noise``), and of what the interval is."""

    mean: float
    noise: float
    source: str

    @property
    def is_clear(self) -> bool:
        """Return whether the difference is larger than its noise."""
        return abs(self.mean) > self.noise


def difference(runs: Sequence[Run]) -> Difference | None:
    """Compare the best Muon with the best AdamW: over seeds if they were repeated, otherwise over their last steps."""
    muon, adamw, steps = best(runs, "Muon"), best(runs, "AdamW"), length(runs)
    if muon is None or adamw is None:
        return None

    def of_seeds(one: Run) -> dict[int, float]:
        same = [run for run in runs if run.variant[:2] == one.variant[:2]]
        return {run.variant.seed: run.loss(steps) for run in same if math.isfinite(run.loss(steps))}

    ours, theirs = of_seeds(muon), of_seeds(adamw)
    by_seed = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    if len(set(by_seed)) > 1:
        return Difference(fmean(by_seed), _interval(by_seed), f"mean of {len(by_seed)} seeds")
    last = slice(steps - window(steps), steps)
    pairs = [a - b for a, b in zip(muon.losses[last], adamw.losses[last], strict=True)]
    source = f"scatter of the last {len(pairs)} steps; another seed may move it further"
    if len(by_seed) > 1:
        source += ", but repeats gave the same losses, because the script sets other seeds than torch's"
    return Difference(fmean(pairs), _interval(pairs), source)


def _interval(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.inf
    return STUDENT.get(len(values), 2.1) * stdev(values) / math.sqrt(len(values))


def is_close(runs: Sequence[Run]) -> bool:
    """Return whether the best Muon and the best AdamW are so close that another seed could exchange them."""
    found, adamw = difference(runs), best(runs, "AdamW")
    if found is None or adamw is None:
        return False
    return abs(found.mean) < max(found.noise, CLOSE * abs(adamw.loss(length(runs))))


def verdict(runs: Sequence[Run], base: float | None) -> str:
    """Return two sentences: how the best Muon ends next to the best AdamW, and when it reaches AdamW's last loss.

    ``base``: AdamW's rate in the config, if it is one number.
    """
    muon, adamw, found, steps = best(runs, "Muon"), best(runs, "AdamW"), difference(runs), length(runs)
    if muon is None or adamw is None or found is None:
        return "No Muon has a loss to compare, so AdamW stays. The rows say what ended the runs."
    rate = f" (rate {muon.variant.factor * base:.3g})" if base else ""
    where = "no clear difference" if not found.is_clear else "lower" if found.mean < 0 else "higher"
    first = (
        f"{muon.variant}{rate} ends at {muon.loss(steps):.4f} after {steps} steps, {adamw.variant} at "
        f"{adamw.loss(steps):.4f}: {where}, {found.mean:+.4f} +- {found.noise:.4f} ({found.source})."
    )
    size, target = window(steps), adamw.loss(steps)
    sums = [0.0, *accumulate(muon.losses[:steps])]
    means = [(sums[end] - sums[end - size]) / size for end in range(size, steps + 1)]
    reached = next((size + index for index, mean in enumerate(means) if mean <= target), None)
    times = f"{1e3 * muon.step_seconds:.0f} ms a step, AdamW {1e3 * adamw.step_seconds:.0f}"
    if reached is None or not found.is_clear or found.mean > 0:
        return f"{first} It takes {times}; on this evidence " + (
            "AdamW stays." if found.is_clear else "the choice is open: take more steps."
        )
    seconds = muon.seconds()[reached - 1] / adamw.seconds()[steps - 1]
    return f"{first} It reaches AdamW's last loss after {reached} of {steps} steps and {seconds:.0%} of the time ({times})."


def notes(runs: Sequence[Run]) -> list[str]:
    """Return sentences on what limits the comparison."""
    steps, muon, found = length(runs), best(runs, "Muon"), list[str]()
    if muon is None:
        return found
    factors = [run.variant.factor for run in runs if run.variant.optimizer == "Muon"]
    if muon.variant.factor == max(factors):
        found.append(f"the best rate is the highest: --rates {max(factors):g},{3 * max(factors):g} tries another")
    rates = [step["lr"] for step in muon.steps[:steps]]
    if steps > 2 and rates[-1] == max(rates) > 1.1 * rates[steps // 2]:
        found.append("the schedule still warms up at the last step: take more steps, or a shorter warm-up")
    return found


def rows(runs: Sequence[Run], base: float | None, total: int) -> list[tuple[str, ...]]:
    """Return the cells of the table. ``total``: steps of a run."""
    steps, adamw = length(runs), best(runs, "AdamW")
    target, lines = adamw.loss(steps) if adamw else math.inf, [COLUMNS]
    for run in runs:
        loss, pace = run.loss(steps), run.step_seconds
        last = run.losses[-1] if run.losses else math.nan
        state = f"step {len(run.steps)} of {total}" if run.state == "running" else run.state
        lines.append(
            (
                str(run.variant),
                f"{run.variant.factor * base:.3g}" if base else "",
                f"{loss:.4f}" if math.isfinite(loss) else f"{last:.3g}" if run.losses else "",
                f"{loss - target:+.4f}" if math.isfinite(loss) and math.isfinite(target) else "",
                f"{1e3 * pace:.0f}" if math.isfinite(pace) else "",
                f"{max(step['peak'] for step in run.steps) / 2**30:.2f} GiB" if run.steps else "",
                f"{state} at step {len(run.steps)}" if run.state == "diverged" else state,
            )
        )
    return lines


def draw(runs: Sequence[Run], folder: Path) -> Path:
    """Write losses.csv, and the picture losses.png if matplotlib is installed; return the file to look at.

    The picture has the loss by step and by second, averaged over a tenth of the steps.
    """
    runs = [run for run in runs if run.steps and not run.variant.seed]
    table = folder / "losses.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "step", "seconds", "loss", "lr"])
        for run in runs:
            for step, seconds in zip(run.steps, run.seconds(), strict=True):
                writer.writerow([str(run.variant), step["step"], f"{seconds:.3f}", step["loss"], step["lr"]])
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return table
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    top = [one for optimizer in COLORS if (one := best(runs, optimizer))]
    for run in runs:
        size, losses = window(len(run.steps)), [loss for loss in run.losses if math.isfinite(loss)]
        means = [fmean(losses[max(0, end - size) : end]) for end in range(1, len(losses) + 1)]
        style: dict[str, Any] = {"color": COLORS[run.variant.optimizer], "label": str(run.variant)}
        style |= {"linewidth": 2} if run in top else {"linewidth": 1, "alpha": 0.35, "label": str(run.variant)}
        for axes, places in zip(panels, (range(1, len(means) + 1), run.seconds()), strict=True):
            axes.plot(list(places)[: len(means)], means, **style)
            axes.annotate(f"x{run.variant.factor:g}", (list(places)[len(means) - 1], means[-1]), fontsize=7)
    starts = [run.losses[0] for run in runs]
    ends = [fmean(run.losses[-window(len(run.steps)) :]) for run in top]
    if ends:
        panels[0].set_ylim(min(ends) - 0.05 * abs(max(starts) - min(ends)), 1.05 * max(starts))
    for axes, name in zip(panels, ("optimizer step", "seconds"), strict=True):
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"training loss, mean of {window(length(runs)) or 1} steps")
    panels[0].legend(frameon=False, fontsize=8)
    path = folder / "losses.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
