# SPDX-License-Identifier: Apache-2.0
"""Tune the learning rate of each optimizer, then compare both at their best rate with several seeds.

Runs that are already complete in --out are not repeated. Other options go to train.py.
"""

import argparse
import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from launch import CONFIGS, HERE, launch
from losslog import Row, evaluations, final_loss, first_reaching, is_complete

MAX_EXTENSIONS = 5


@dataclass(frozen=True)
class Run:
    """One training run of the sweep."""

    optimizer: str
    lr: float
    seed: int


@dataclass
class Sweep:
    """Runs of one length, kept under `out`."""

    out: Path
    steps: int
    training: list[str] = field(default_factory=list)
    done: list[Run] = field(default_factory=list)

    def log(self, run: Run) -> Path:
        """Return the path of the run's CSV."""
        return self.out / "sweep" / f"{run.optimizer}-lr{run.lr:g}-seed{run.seed}" / "loss.csv"

    def final(self, run: Run) -> float:
        """Return the run's final held-out loss, training first where needed."""
        path = self.log(run)
        if not is_complete(path, self.steps):
            print(f"training with {run.optimizer}, lr {run.lr:g}, seed {run.seed}", flush=True)
            options = ["--lr", str(run.lr), "--seed", str(run.seed), "--steps", str(self.steps)]
            launch(run.optimizer, path.parent, self.training + options)
        if run not in self.done:
            self.done.append(run)
        return final_loss(path, self.steps)

    def evaluations(self, run: Run) -> list[Row]:
        """Return the evaluated rows of the run's CSV."""
        return evaluations(self.log(run))


def best_lr(sweep: Sweep, optimizer: str, points: int) -> tuple[float, bool]:
    """Return the best of a grid of rates by factors of 2, widened until the best is inside, and if it is."""
    base = json.loads(CONFIGS[optimizer].read_text())["optimizer"]["params"]["lr"]
    grid = [base * 2.0 ** (index - points // 2) for index in range(points)]
    losses = {lr: sweep.final(Run(optimizer, lr, 0)) for lr in grid}
    for _ in range(MAX_EXTENSIONS):
        best = min(losses, key=losses.get)
        if min(losses) < best < max(losses):
            return best, True
        lr = best / 2 if best == min(losses) else best * 2
        losses[lr] = sweep.final(Run(optimizer, lr, 0))
    best = min(losses, key=losses.get)
    return best, min(losses) < best < max(losses)


def write_csv(sweep: Sweep, target: float) -> None:
    """Write one line per run to sweep.csv."""
    with (sweep.out / "sweep.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["optimizer", "lr", "seed", "steps", "held_out", "step_at_adamw_final"])
        for run in sweep.done:
            reached = first_reaching(sweep.evaluations(run), target)
            values = [sweep.steps, sweep.final(run), reached.step if reached else ""]
            writer.writerow([run.optimizer, f"{run.lr:g}", run.seed, *values])


def summary(sweep: Sweep, best: dict[str, list[Run]], interior: dict[str, bool], target: float) -> str:
    """Return the comparison at the best rates as Markdown."""
    lines = ["| optimizer | best lr | inside the grid | final held-out loss, mean of the seeds | of each seed |"]
    lines.append("|---|---|---|---|---|")
    for name, runs in best.items():
        losses, inside = [sweep.final(run) for run in runs], "yes" if interior[name] else "no"
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        lines.append(f"| {name} | {runs[0].lr:g} | {inside} | {mean(losses):.3f} | {each} |")
    lines += ["", f"Muon on its way to AdamW's mean final held-out loss, {target:.3f}:", ""]
    lines += ["| seed | steps | of AdamW's steps |", "|---|---|---|"]
    for run in best["Muon"]:
        row = first_reaching(sweep.evaluations(run), target)
        reached = f"{row.step} | {row.step / sweep.steps:.0%}" if row else "not reached |"
        lines.append(f"| {run.seed} | {reached} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the sweep and write sweep.csv and summary.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results and runs")
    parser.add_argument("--steps", type=int, default=240, help="length of every run")
    parser.add_argument("--points", type=int, default=5, help="learning rates to start with, per optimizer")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best learning rate, per optimizer")
    args, training = parser.parse_known_args()
    sweep, best, interior = Sweep(args.out, args.steps, training), {}, {}
    for name in CONFIGS:
        lr, interior[name] = best_lr(sweep, name, args.points)
        best[name] = [Run(name, lr, seed) for seed in range(args.seeds)]
        if not all(math.isfinite(sweep.final(run)) for run in best[name]):
            raise SystemExit(f"{name} diverged at its best learning rate, {lr:g}")
    target = mean(map(sweep.final, best["AdamW"]))
    write_csv(sweep, target)
    (args.out / "summary.md").write_text(summary(sweep, best, interior, target))
    print((args.out / "summary.md").read_text())


if __name__ == "__main__":
    main()
