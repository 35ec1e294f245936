# SPDX-License-Identifier: Apache-2.0
"""The runs of the experiments: trained once, then read from their folders; and the search for their best rates."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from launch import launch
from losslog import Row, evaluations, final_loss, is_complete
from variants import VARIANTS, Variant, monitored, watched

HEAD_SIZE = 32
WIDTH = 128
MAX_EXTENSIONS = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One training run. `tau`: Muon with QK-clip at this threshold, its logits recorded."""

    variant: str
    lr: float
    weight_decay: float = 0.0
    seed: int = 0
    width: int = WIDTH
    tau: float | None = None

    @property
    def name(self) -> str:
        """Folder of the run."""
        tau = "" if self.tau is None else f"-tau{self.tau:g}"
        numbers = f"lr{self.lr:g}-decay{self.weight_decay:g}{tau}-seed{self.seed}"
        return f"width{self.width}/{re.sub('[ ,]+', '-', self.variant)}-{numbers}"

    @property
    def definition(self) -> Variant:
        """What this run trains with, apart from its own numbers."""
        return VARIANTS[self.variant] if self.tau is None else watched(self.tau)


@dataclass
class Runs:
    """Runs of one length on one rank, kept under `out`, `jobs` of them at a time. `training`: options of train.py."""

    out: Path
    steps: int
    jobs: int = 1
    training: list[str] = field(default_factory=list)

    def folder(self, run: Run) -> Path:
        """Return where the run is kept."""
        return self.out / "runs" / run.name

    def final(self, run: Run) -> float:
        """Return the run's final held-out loss, or infinity if it diverged; train it first where needed."""
        folder = self.folder(run)
        if not ((folder / "run.json").exists() and is_complete(folder / "loss.csv", self.steps)):
            print(f"training {run.name}", flush=True)
            self._train(run, folder)
        return final_loss(folder / "loss.csv", self.steps)

    def each(self, work: Callable[..., T], items: Iterable) -> list[T]:
        """Do `work` for each of the items, `jobs` at a time; `work` itself trains one run after another."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(work, items))

    def evaluations(self, run: Run) -> list[Row]:
        """Return the rows with a held-out loss."""
        return evaluations(self.folder(run) / "loss.csv")

    def done(self) -> list[Run]:
        """Return every run that was ever completed here, in the order of their names."""
        found = [json.loads(path.read_text())["run"] for path in (self.out / "runs").glob("*/*/run.json")]
        return sorted((Run(**values) for values in found), key=lambda run: run.name)

    def cpu_seconds(self, run: Run) -> float:
        """Return the CPU time of the run, its start included."""
        return json.loads((self.folder(run) / "run.json").read_text())["cpu_seconds"]

    def logits(self, run: Run) -> dict[str, tuple[list[int], list[float]]]:
        """Return the steps and the largest logits in them, by layer; nothing where they were not recorded."""
        result = {}
        for path in sorted((self.folder(run) / "monitor").glob("*max_logit*.csv")):
            with path.open(newline="") as file:
                values = [float(value) for _, value in list(csv.reader(file))[1:]]
            result[path.stem.split("max_logit_")[1]] = list(range(1, len(values) + 1)), values
        return result

    def _train(self, run: Run, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # records would be appended to those of an interrupted run
        folder.mkdir(parents=True)
        config = monitored(run.definition.config(lr=run.lr, weight_decay=run.weight_decay), folder)
        (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
        options = {"steps": self.steps, "seed": run.seed, "width": run.width, "heads": run.width // HEAD_SIZE}
        arguments = [word for key, value in options.items() for word in (f"--{key}", str(value))] + self.training
        log = folder / "log"
        seconds = launch(folder / "ds_config.json", folder, arguments, ranks=1, jobs=self.jobs, log=log)
        (folder / "run.json").write_text(json.dumps({"run": asdict(run), "cpu_seconds": round(seconds, 1)}))


@dataclass(frozen=True)
class Tuned:
    """The best run of a search, and the numbers of which the best lies at the edge of what was tried."""

    run: Run
    at_the_edge: tuple[str, ...] = ()


def tune(runs: Runs, start: Run, keys: tuple[str, ...] = ("lr",), refine: bool = True) -> Tuned:
    """Search for the best value of each key, one after another, until a round changes none; two rounds at most.

    `refine`: at last, try one rate between the best and the better of its neighbours.
    """
    best = start
    for _ in range(2):
        before, edge = best, ()
        for key in keys:
            best, inside = search(runs, best, key)
            edge += () if inside else (key,)
        if best == before or len(keys) == 1:
            break
    return Tuned(refined(runs, best) if refine and "lr" not in edge else best, edge)


def search(runs: Runs, start: Run, key: str) -> tuple[Run, bool]:
    """Return the best run on a grid by factors of 2 from `start` on, widened until the best is inside, and if it is."""
    first = getattr(start, key)
    losses = {value: runs.final(replace(start, **{key: value})) for value in (first, first * 2)}
    for _ in range(MAX_EXTENSIONS):
        best = min(losses, key=losses.get)
        if min(losses) < best < max(losses):
            break
        value = best / 2 if best == min(losses) else best * 2
        losses[value] = runs.final(replace(start, **{key: value}))
    best = min(losses, key=losses.get)
    return replace(start, **{key: best}), min(losses) < best < max(losses)


def refined(runs: Runs, best: Run) -> Run:
    """Return the better of `best` and a run at a rate between it and the better neighbour of its grid."""
    neighbour = min((replace(best, lr=best.lr * factor) for factor in (0.5, 2.0)), key=runs.final)
    between = replace(best, lr=float(f"{(best.lr * neighbour.lr) ** 0.5:.3g}"))
    return min(best, between, key=runs.final)
