# SPDX-License-Identifier: Apache-2.0
"""Compare the runs of ``ds_muon try``: which rate is best, by how much, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

#: The best Muon and the best AdamW run again with other seeds if they differ by less than this share of the loss.
CLOSE = 0.02
#: Number of values -> half of the 95 % interval of their mean, in standard errors (Student's t); 2.2 for more values.
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4, 9: 2.3, 10: 2.3}
#: Times do not compare if the slowest run of an optimizer takes this many times the fastest one's time for a step.
MAX_PACE_RATIO = 1.25
#: A run has diverged if its last loss is more than this many times its first.
DIVERGED = 2.0
COLUMNS = ("variant", "rate", "loss", "to AdamW", "ms/step", "memory", "state")
#: Optimizer -> colormap of its curves.
COLORS = {"AdamW": "Greys", "Muon": "YlOrRd"}


class Variant(NamedTuple):
    """What distinguishes a run of ``ds_muon try`` from the others.

    ``optimizer``: ``"AdamW"`` or ``"Muon"``. ``factor``: the run's learning rate as a multiple of that of the user's
    AdamW. ``seed``: 0, or the number of a repeat with another seed.
    """

    optimizer: str
    factor: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.optimizer} x{self.factor:g}" + (f", seed +{self.seed}" if self.seed else "")

    @property
    def stem(self) -> str:
        """Return the name of the variant's files without a suffix, such as ``muon_x3_seed1``."""
        return f"{self.optimizer.lower()}_x{self.factor:g}" + (f"_seed{self.seed}" if self.seed else "")


@dataclass
class Run:
    """What the run of a variant has recorded so far.

    ``steps``: the record of each step, with ``loss``, ``seconds`` (a clock's time at the end of the step), ``lr`` and
    ``peak`` (bytes of memory). ``state``: ``"waiting"``, ``"running"``, ``"done"``, ``"diverged"`` or ``"failed"``.
    ``note``: why the run has failed. ``config``: the ds_config as DeepSpeed has read it. ``built_by_script``: whether
    the script has built the optimizer; its type and settings are then added to ``config``.
    """

    variant: Variant
    steps: list[dict[str, Any]] = field(default_factory=list)
    state: str = "waiting"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    built_by_script: bool = False

    def losses(self, steps: int | None = None) -> list[float]:
        """Return the running mean of the loss at each of the first ``steps`` steps (``None``: of all steps).

        Each value is the mean over :func:`window` steps up to that step, or over fewer at the start.
        """
        raw = [step["loss"] for step in self.steps[:steps]]
        size = window(len(raw))
        return [fmean(raw[max(0, end - size) : end]) for end in range(1, len(raw) + 1)]

    def loss(self, steps: int) -> float:
        """Return the running mean of the loss after ``steps`` steps, as :meth:`losses`; infinite unless "done"."""
        return self.losses(steps)[-1] if self.state == "done" and steps else math.inf

    @property
    def step_seconds(self) -> float:
        """Return the median time in seconds from the end of a step to the end of the next; NaN if there is no next."""
        ends = [step["seconds"] for step in self.steps]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else math.nan

    def seconds(self) -> list[float]:
        """Return, for each step, the seconds from the start of the run to the end of the step.

        The first step counts as if it had taken the median time, because its start is not recorded.
        """
        return [step["seconds"] - self.steps[0]["seconds"] + self.step_seconds for step in self.steps]


def window(steps: int) -> int:
    """Return over how many of ``steps`` steps the loss is averaged: a tenth, but at least five, or all if fewer."""
    return min(steps, max(5, steps // 10))


def read_run(variant: Variant, path: Path) -> Run:
    """Return the run that the file ``path`` records; one in state ``"waiting"``, without steps, if there is no file.

    An incomplete last line, which a killed run leaves, is ignored.
    """
    run = Run(variant)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for record in (json.loads(line) for line in lines if line.endswith("\n")):
        if "step" in record:
            run.steps.append(record)
        elif "end" in record:
            run.state = record["end"]
        else:
            run.config, run.built_by_script = record["config"], record["built_by_script"]
    if run.state == "done" and run.loss(len(run.steps)) > DIVERGED * run.steps[0]["loss"] > 0:
        run.state = "diverged"
    return run


# ---- comparison ---------------------------------------------------------------------------------------------------


def length(runs: Sequence[Run]) -> int:
    """Return the step at which losses are compared: the last of the shortest run in state ``"done"``; 0 without one."""
    return min((len(run.steps) for run in runs if run.state == "done"), default=0)


def best(runs: Sequence[Run], optimizer: str) -> Run | None:
    """Return the run of ``optimizer`` with the lowest loss; ``None`` if there is none.

    Only runs in state ``"done"`` count, and no repeats with another seed. Losses are compared at the same step.
    """
    found = [run for run in runs if run.variant.optimizer == optimizer and not run.variant.seed and run.state == "done"]
    return min(found, key=lambda run: run.loss(length(runs)), default=None)


def between(runs: Sequence[Run]) -> float | None:
    """Return one more learning rate to try for Muon, as a multiple of AdamW's (``Variant.factor``).

    It is the geometric mean of the best factor tried and the better of the two next to it. Return ``None`` if no run of
    Muon is done, or if the runs with the factors next to the best are not done.
    """
    muon = sorted((run for run in runs if run.variant.optimizer == "Muon"), key=lambda run: run.variant.factor)
    top = best(runs, "Muon")
    if top is None:
        return None
    place = muon.index(top)
    near = [run for run in muon[max(0, place - 1) : place + 2] if run is not top and run.state == "done"]
    if not near:
        return None
    other = min(near, key=lambda run: run.loss(length(runs)))
    return float(f"{math.sqrt(top.variant.factor * other.variant.factor):.2g}")


def pace(runs: Sequence[Run], optimizer: str) -> float:
    """Return the median seconds of a step over all runs of ``optimizer``, which do equal work at all learning rates."""
    return median(run.step_seconds for run in runs if run.variant.optimizer == optimizer and len(run.steps) > 1)


class Difference(NamedTuple):
    """The final loss of the best Muon run minus that of the best AdamW run.

    ``mean``: the mean difference. ``noise``: half the width of its 95 % confidence interval. ``source``: a text that
    says over what both were computed, such as ``"mean of 3 seeds"``.
    """

    mean: float
    noise: float
    source: str


def difference(runs: Sequence[Run]) -> Difference | None:
    """Return the difference in loss between the best Muon run and the best AdamW run, with its uncertainty.

    Both are computed over seeds, if there are repeats and they differ in loss, otherwise over the last steps. Return
    ``None`` if no run of Muon or none of AdamW is done.
    """
    muon, adamw, steps = best(runs, "Muon"), best(runs, "AdamW"), length(runs)
    if muon is None or adamw is None:
        return None
    ours, theirs = (
        {
            run.variant.seed: run.loss(steps)
            for run in runs
            if run.variant[:2] == one.variant[:2] and run.state == "done"
        }
        for one in (muon, adamw)
    )
    by_seed = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
    if len(set(by_seed)) > 1:
        return Difference(fmean(by_seed), _interval(by_seed), f"mean of {len(by_seed)} seeds")
    last = slice(steps - window(steps), steps)
    pairs = [a["loss"] - b["loss"] for a, b in zip(muon.steps[last], adamw.steps[last], strict=True)]
    source = f"scatter of the last {len(pairs)} steps; another seed may move it further"
    if len(by_seed) > 1:
        source += ", but repeats gave the same losses, because the script does not call torch.manual_seed"
    return Difference(fmean(pairs), _interval(pairs), source)


def _interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of ``values``; infinite for fewer than two."""
    if len(values) < 2:
        return math.inf
    return STUDENT.get(len(values), 2.2) * stdev(values) / math.sqrt(len(values))


def is_close(runs: Sequence[Run]) -> bool:
    """Return whether the losses of the best Muon and AdamW runs are so close that other seeds may reverse them."""
    found, adamw = difference(runs), best(runs, "AdamW")
    if found is None or adamw is None:
        return False
    return abs(found.mean) < max(found.noise, CLOSE * abs(adamw.loss(length(runs))))


# ---- words, table and picture ---------------------------------------------------------------------------------------


def verdict(runs: Sequence[Run], base: float | None) -> str:
    """Return a text that compares the final losses of the best Muon run and the best AdamW run, and their times.

    ``base``: AdamW's learning rate in the config; ``None`` if it is not one number.
    """
    muon, adamw, found, steps = best(runs, "Muon"), best(runs, "AdamW"), difference(runs), length(runs)
    if muon is None:
        return "No run of Muon is done, so AdamW stays. The rows say how each ended."
    if adamw is None or found is None:
        return f"{muon.variant} is done, but no run of AdamW to compare it with; try lower --adamw-rates."
    is_clear = abs(found.mean) > found.noise
    first = (
        f"{muon.variant}{f' (rate {muon.variant.factor * base:.3g})' if base else ''} ends at {muon.loss(steps):.4f} "
        f"after {steps} steps, {adamw.variant} at {adamw.loss(steps):.4f}: "
        f"{('lower' if found.mean < 0 else 'higher') if is_clear else 'no clear difference'}, {found.mean:+.4f} +- "
        f"{found.noise:.4f} ({found.source})."
    )
    ours, theirs = (pace(runs, name) for name in ("Muon", "AdamW"))
    times = f"{1e3 * ours:.0f} ms a step, AdamW {1e3 * theirs:.0f}"
    losses = muon.losses(steps)
    reached = next((step for step, loss in enumerate(losses, 1) if loss <= adamw.loss(steps)), None)
    if not is_clear:
        return f"{first} Muon takes {times}; run more steps to decide."
    if found.mean > 0 or reached is None:
        return f"{first} Muon takes {times}; by these runs AdamW stays."
    share = reached * ours / (steps * theirs)
    return f"{first} Muon reaches AdamW's last loss at step {reached}, in {share:.0%} of the time ({times})."


def notes(runs: Sequence[Run]) -> list[str]:
    """Return sentences for the user on the limits of the comparison, such as a best rate that is the highest tried."""
    steps, muon, found = length(runs), best(runs, "Muon"), list[str]()
    if muon is None:
        return found
    for optimizer, flag in (("Muon", "--rates"), ("AdamW", "--adamw-rates")):
        tried = [run for run in runs if run.variant.optimizer == optimizer and not run.variant.seed]
        factors, top = [run.variant.factor for run in tried], best(runs, optimizer)
        if len(tried) == 1:
            found.append(f"{optimizer} had one rate only; {flag} 0.3,1,3 gives it others too")
        elif top and top.variant.factor == (highest := max(factors)):
            found.append(
                f"{optimizer}'s best rate is the highest of these; {flag} {highest:g},{3 * highest:g} tries more"
            )
        times = [1e3 * run.step_seconds for run in tried if len(run.steps) > 1]
        if times and max(times) > MAX_PACE_RATIO * min(times):
            found.append(
                f"{optimizer}'s runs took {min(times):.0f} to {max(times):.0f} ms a step for equal work, so other jobs "
                "ran too; do not compare times"
            )
    rates = [step["lr"] for step in muon.steps[:steps]]
    if rates[-1] == max(rates) > 1.1 * rates[steps // 2]:
        found.append("the schedule still warms up at the last step; take more steps, or a shorter warm-up")
    return found


def rows(runs: Sequence[Run], base: float | None) -> list[tuple[str, ...]]:
    """Return the rows of the table of ``ds_muon try``, titles first. ``base``: as for :func:`verdict`."""
    steps, adamw, lines = length(runs), best(runs, "AdamW"), list[tuple[str, ...]]([COLUMNS])
    for run in runs:
        loss, at = run.loss(steps), f" at step {len(run.steps)}"
        memory = max((step["peak"] for step in run.steps), default=0) / 2**30
        lines.append(
            (
                str(run.variant),
                f"{run.variant.factor * base:.3g}" if base else "",
                f"{loss:.4f}" if run.state == "done" else f"({run.losses()[-1]:.4f})" if run.steps else "",
                f"{loss - adamw.loss(steps):+.4f}" if adamw and run.state == "done" else "",
                f"{1e3 * run.step_seconds:.0f}" if len(run.steps) > 1 else "",
                f"{memory:.2f} GiB" if run.steps else "",
                run.state + (at if run.state in ("running", "diverged") else ""),
            )
        )
    return lines


def draw(runs: Sequence[Run], path: Path) -> bool:
    """Draw the running means of the losses over steps and over seconds into the image file ``path``.

    Return ``False``, and draw nothing, without matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    top = [one for optimizer in COLORS if (one := best(runs, optimizer))]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    shown = [run for run in runs if len(run.steps) > 1 and not run.variant.seed]
    for run in sorted(shown, key=lambda run: run.variant):
        factors = sorted(other.variant.factor for other in shown if other.variant.optimizer == run.variant.optimizer)
        shade = 0.3 + 0.6 * (factors.index(run.variant.factor) + 1) / len(factors)  # the higher the rate, the darker
        color, width = plt.get_cmap(COLORS[run.variant.optimizer])(shade), 2.5 if run in top else 1
        for axes, places in zip(panels, (range(1, len(run.steps) + 1), run.seconds()), strict=True):
            axes.plot(places, run.losses(), color=color, linewidth=width, label=str(run.variant))
    low = min((min(run.losses()) for run in top), default=0.0)
    high = max((run.losses()[0] for run in top), default=0.0)
    if high > low:  # a run that diverges would press the others flat
        panels[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    for axes, name in zip(panels, ("optimizer step", "seconds"), strict=True):
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"training loss, mean of {window(length(runs))} steps")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
