# SPDX-License-Identifier: Apache-2.0
"""What ``ds_muon try`` concludes from the records of its variants: which rate, by how much, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

#: The best Muon and the best AdamW repeat if they differ by less than this share of the loss.
CLOSE = 0.02
#: Number of values -> factor of the standard error of their mean for an interval of 95 % (Student's t); 2.2 above.
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.4, 8: 2.4, 9: 2.3, 10: 2.3}
#: A run has diverged if it ends at more than so many times its first loss.
DIVERGED = 2.0
COLUMNS = ("variant", "rate", "loss", "to AdamW", "ms/step", "memory", "state")
COLORS = {"AdamW": "tab:gray", "Muon": "tab:red"}


class Variant(NamedTuple):
    """An optimizer, ``"AdamW"`` or ``"Muon"``, a factor of AdamW's rate, and the number of another seed."""

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

    ``steps``: the record of each step, with ``loss``, ``seconds``, ``lr`` and ``peak`` (bytes). ``state``:
    ``"waiting"``, ``"running"``, ``"done"``, ``"diverged"`` or ``"failed"``. ``note``: why it has failed. ``config``:
    the ds_config as DeepSpeed has read it.
    """

    variant: Variant
    steps: list[dict[str, Any]] = field(default_factory=list)
    state: str = "waiting"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    built_by_script: bool = False

    def losses(self, steps: int | None = None) -> list[float]:
        """Return the mean loss of the last tenth of the steps, as it was at each of the first ``steps`` steps."""
        raw = [step["loss"] for step in self.steps[:steps]]
        size = window(len(raw))
        return [fmean(raw[max(0, end - size) : end]) for end in range(1, len(raw) + 1)]

    def loss(self, steps: int) -> float:
        """Return the mean loss of the last tenth of the first ``steps`` steps; infinite if the run has not ended."""
        return self.losses(steps)[-1] if self.state == "done" and steps else math.inf

    @property
    def step_seconds(self) -> float:
        """Return the median time from the end of a step to the end of the next."""
        ends = [step["seconds"] for step in self.steps]
        return median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else math.nan

    def seconds(self) -> list[float]:
        """Return the time at the end of each step, as if the first had taken as long as the others."""
        return [step["seconds"] - self.steps[0]["seconds"] + self.step_seconds for step in self.steps]


def window(steps: int) -> int:
    """Return over how many steps a loss is averaged: a tenth, but at least five if there are as many."""
    return min(steps, max(5, steps // 10))


def read_run(variant: Variant, path: Path) -> Run:
    """Return what the file ``path`` has of ``variant``; the last line of a killed run may be incomplete."""
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
    """Return the number of steps that all finished runs have."""
    return min((len(run.steps) for run in runs if run.state == "done"), default=0)


def best(runs: Sequence[Run], optimizer: str) -> Run | None:
    """Return the ended run of ``optimizer`` with the lowest loss, not counting repeats; ``None`` if there is none."""
    found = [run for run in runs if run.variant.optimizer == optimizer and not run.variant.seed and run.state == "done"]
    return min(found, key=lambda run: run.loss(length(runs)), default=None)


def between(runs: Sequence[Run]) -> float | None:
    """Return the factor in the middle between Muon's best and the better of its neighbours; ``None`` without one."""
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
    """Return the median seconds of a step over the runs of ``optimizer``, because a rate does not change the work."""
    return median(run.step_seconds for run in runs if run.variant.optimizer == optimizer and len(run.steps) > 1)


class Difference(NamedTuple):
    """Muon's loss less AdamW's: the mean, half of its interval of 95 %, and over what the interval was computed."""

    mean: float
    noise: float
    source: str


def difference(runs: Sequence[Run]) -> Difference | None:
    """Compare the best Muon with the best AdamW: over seeds if they were repeated, otherwise over their last steps."""
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
    if len(values) < 2:
        return math.inf
    return STUDENT.get(len(values), 2.2) * stdev(values) / math.sqrt(len(values))


def is_close(runs: Sequence[Run]) -> bool:
    """Return whether the best Muon and the best AdamW are so close that another seed may exchange them."""
    found, adamw = difference(runs), best(runs, "AdamW")
    if found is None or adamw is None:
        return False
    return abs(found.mean) < max(found.noise, CLOSE * abs(adamw.loss(length(runs))))


# ---- words, table and picture ---------------------------------------------------------------------------------------


def verdict(runs: Sequence[Run], base: float | None) -> str:
    """Return two sentences: how the best Muon ends next to the best AdamW, and when it reaches AdamW's last loss.

    ``base``: AdamW's rate in the config, if it is one number.
    """
    muon, adamw, found, steps = best(runs, "Muon"), best(runs, "AdamW"), difference(runs), length(runs)
    if muon is None or adamw is None or found is None:
        return "No run of Muon has a loss to compare, so AdamW stays. The rows say what ended the runs."
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
        return f"{first} It takes {times}; take more steps to decide."
    if found.mean > 0 or reached is None:
        return f"{first} It takes {times}; by these runs AdamW stays."
    share = reached * ours / (steps * theirs)
    return f"{first} It reaches AdamW's last loss at step {reached}, in {share:.0%} of the time ({times})."


def notes(runs: Sequence[Run]) -> list[str]:
    """Return sentences on what limits the comparison."""
    steps, muon, found = length(runs), best(runs, "Muon"), list[str]()
    if muon is None:
        return found
    top = max(run.variant.factor for run in runs if run.variant.optimizer == "Muon")
    if muon.variant.factor == top:
        found.append(f"the best rate is the highest of these; --rates {top:g},{3 * top:g} tries a higher one")
    if sum(run.variant.optimizer == "AdamW" and not run.variant.seed for run in runs) == 1:
        found.append("AdamW had one rate only; --adamw-rates 0.3,1,3 gives it others too")
    rates = [step["lr"] for step in muon.steps[:steps]]
    if rates[-1] == max(rates) > 1.1 * rates[steps // 2]:
        found.append("the schedule still warms up at the last step; take more steps, or a shorter warm-up")
    return found


def rows(runs: Sequence[Run], base: float | None) -> list[tuple[str, ...]]:
    """Return the rows of the table of ``ds_muon try``, titles first. ``base``: AdamW's rate, if it is one number."""
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
    """Draw the losses by step and by second, averaged over a tenth of the steps, into ``path``.

    Return ``False``, and draw nothing, without matplotlib or without steps.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    top = [one for optimizer in COLORS if (one := best(runs, optimizer))]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in (run for run in runs if len(run.steps) > 1 and not run.variant.seed):
        style: dict[str, Any] = {"linewidth": 2} if run in top else {"linewidth": 1, "alpha": 0.4}
        for axes, places in zip(panels, (range(1, len(run.steps) + 1), run.seconds()), strict=True):
            axes.plot(places, run.losses(), color=COLORS[run.variant.optimizer], label=str(run.variant), **style)
            axes.annotate(f"x{run.variant.factor:g}", (places[-1], run.losses()[-1]), fontsize=7, clip_on=True)
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
