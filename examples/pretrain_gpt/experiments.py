# SPDX-License-Identifier: Apache-2.0
"""Compare update rules, widths, and runs with and without QK-clip, each optimizer at its own best rate.

Runs that are already complete in --out are not repeated. Options that are not listed go to train.py.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from judge import Difference, paired, steps_to
from launch import HERE
from runs import WIDTH, Run, Runs, Tuned, tune
from variants import BASELINES, STEPS, VARIANTS, WATCH

TRAINING = ["--context", "128", "--eval-every", "20", "--eval-batches", "16"]
WIDTHS = (64, 128, 192, 256)
RATES = (1, 4, 16)
STUDIES = ("width", "qk_clip")


@dataclass
class Judged:
    """A variant at its best rate, by fresh seeds, or by that of the search alone. `steps`: to AdamW's final loss."""

    tuned: Tuned
    losses: list[float]
    steps: list[float]
    difference: Difference


@dataclass
class Widths:
    """AdamW and Muon by width. `shares`: of AdamW's steps, what Muon takes to AdamW's final loss."""

    tuned: dict[int, dict[str, Tuned]]
    losses: dict[str, dict[int, float]]
    shares: dict[int, float]


def best_of(runs: Runs, variant: str, width: int, refine: bool = True) -> Tuned:
    """Search for the best rate of a variant with seed 0."""
    definition = VARIANTS[variant]
    if "lr" in definition.tuned:
        lr = definition.start("lr")
    else:
        lr, refine = best_of(runs, definition.base, width).run.lr, False
    return tune(runs, Run(variant, lr, definition.start("weight_decay"), width=width), definition.tuned, refine)


def finalists(runs: Runs, tuned: dict[str, Tuned], count: int, also: Sequence[str] = ()) -> list[str]:
    """Return the baselines, and the best `count` others and those of `also` with their controls."""
    order = sorted(tuned, key=lambda name: runs.final(tuned[name].run))
    chosen = [*[name for name in order if name not in BASELINES][:count], *also]
    controls = [VARIANTS[name].control for name in chosen]
    return [name for name in tuned if name in (*BASELINES, *chosen, *controls)]


def compare_rules(
    runs: Runs, names: list[str], width: int, seeds: int, count: int, also: Sequence[str] = ()
) -> dict[str, Judged]:
    """Tune every variant with seed 0, run the finalists with the seeds from 1 on, and compare all with Muon."""
    tuned = {name: best_of(runs, name, width) for name in BASELINES}
    others = [name for name in names if name not in BASELINES]
    tuned |= zip(others, runs.each(lambda name: best_of(runs, name, width), others), strict=True)
    chosen = finalists(runs, tuned, count, also)
    fresh = {name: [replace(tuned[name].run, seed=seed) for seed in range(1, seeds + 1)] for name in chosen}
    runs.each(runs.final, [run for seed in zip(*fresh.values(), strict=True) for run in seed])
    target = fmean(map(runs.final, fresh["AdamW"]))
    judged = {}
    for name, best in tuned.items():
        own = fresh.get(name, [best.run])
        base = fresh["Muon"] if name in fresh else [tuned["Muon"].run]
        losses = [runs.final(run) for run in own]
        steps = [steps_to(runs.evaluations(run), target) for run in own]
        judged[name] = Judged(best, losses, steps, paired(losses, [runs.final(run) for run in base]))
    return judged


def compare_widths(runs: Runs, widths: list[int]) -> Widths:
    """Tune AdamW and Muon at every width, by factors of 2 and with one seed."""
    keys = [(width, name) for width in widths for name in BASELINES]
    found = dict(zip(keys, runs.each(lambda key: best_of(runs, key[1], key[0], refine=False), keys), strict=True))
    tuned = {width: {name: found[width, name] for name in BASELINES} for width in widths}
    losses = {name: {width: runs.final(found[width, name].run) for width in widths} for name in BASELINES}
    muon = {width: runs.evaluations(found[width, "Muon"].run) for width in widths}
    shares = {width: steps_to(muon[width], losses["AdamW"][width]) / runs.steps for width in widths}
    return Widths(tuned, losses, shares)


def compare_clip(runs: Runs, best: Run, tau: float) -> dict[float, list[Run]]:
    """Run Muon at its best rate and above it, watched and clipped at `tau`; return the runs by multiple of the rate."""
    pairs = {rate: [replace(best, lr=best.lr * rate, tau=limit) for limit in (WATCH, tau)] for rate in RATES}
    runs.each(runs.final, [run for pair in pairs.values() for run in pair])
    return pairs


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the command line's own arguments, and those for train.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results and runs")
    parser.add_argument("--studies", nargs="*", choices=STUDIES, default=STUDIES, help="beside that of the rules")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="beside the baselines")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of every run")
    parser.add_argument("--also", nargs="*", choices=VARIANTS, default=[], help="variants that run all seeds anyway")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model that compares rules")
    parser.add_argument("--seeds", type=int, default=5, help="runs of a finalist, beside those that find its rate")
    parser.add_argument("--finalists", type=int, default=3, help="variants that run all seeds, beside the baselines")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS, help="of the models that compare widths")
    parser.add_argument("--tau", type=float, default=30.0, help="threshold of QK-clip")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    return parser.parse_known_args()


def main() -> None:
    """Do the studies and write experiments.csv, experiments.md and the charts."""
    import charts  # matplotlib takes longer to load than all else that --help needs
    import tables

    args, training = parse_args()
    runs = Runs(args.out, args.steps, args.jobs, TRAINING + training)
    names = [name for name in VARIANTS if name in (*BASELINES, *args.variants)]
    judged = compare_rules(runs, names, args.width, args.seeds, args.finalists, args.also)
    parts = [tables.rules(judged, args.steps), tables.controls(judged)]
    charts.plot_rules(judged, args.out / "experiments.png")
    if "width" in args.studies:
        widths = compare_widths(runs, args.widths)
        parts.append(tables.widths(widths))
        charts.plot_widths(widths.losses, widths.shares, args.out / "width.png")
    if "qk_clip" in args.studies:
        pairs = compare_clip(runs, judged["Muon"].tuned.run, args.tau)
        parts.append(tables.clip(runs, pairs))
        charts.plot_clip(runs, pairs, args.out / "qk_clip.png")
    parts.append(tables.cost(runs))
    tables.write_csv(args.out / "experiments.csv", runs, args.width, fmean(judged["AdamW"].losses))
    text = "\n".join(part for part in parts if part)
    (args.out / "experiments.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
