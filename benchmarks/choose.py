# SPDX-License-Identifier: Apache-2.0
"""Both methods of Newton-Schulz by shape, and the rule by which `ns_method: auto` chooses between them."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch

from benchmarks import report
from benchmarks.rates import DTYPES
from deepspeed.muon.kernels import selection
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math import choice
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.measure import race
from deepspeed.muon.math.newton_schulz import METHODS

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
ASPECTS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
#: Rows x rows x columns of the largest matrix that is timed: on one core about half a second of either method.
LONGEST = {"cpu": 3.7e9, "cuda": 6e12}
#: Matrices of each shape in a model; a batch has no more.
COUNT = 8
#: What a band of its own has to save, as a sum over its shapes of how much slower they are than the better method.
WORTH = 0.03
#: Mean spread of the runs of a shape beyond which the machine was busy, and no rule is written.
BUSY = 0.25

Bands = list[list[float | None]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape: median seconds by method, and the widest spread of one method's runs over its median."""

    size: int
    aspect: float
    seconds: dict[str, float]
    spread: float

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.size, round(self.size * self.aspect)

    def loss(self, method: str) -> float:
        """How much slower a method is than the better one, 0 for that."""
        return self.seconds[method] / min(self.seconds.values()) - 1


def kernels_of(device: str) -> Operations:
    """The table of operations that a step on this device has."""
    return selection.choose(selection.missing("auto", [device]))


def measure(device: str, dtype: torch.dtype, seconds: float) -> list[Cell]:
    """Every shape whose call is short enough; more seconds buy more runs of each."""
    shapes = [(size, aspect) for size in SIZES for aspect in ASPECTS if size**3 * aspect <= LONGEST[device]]
    where, kernels, cells = torch.device(device), kernels_of(device), []
    for size, aspect in shapes:
        shape = size, round(size * aspect)
        times = race(shape, COUNT, schedule("simple"), dtype, where, kernels, seconds / len(shapes))
        middle = {method: statistics.median(runs) for method, runs in times.items()}
        spread = max((max(runs) - min(runs)) / middle[method] for method, runs in times.items())
        cells.append(Cell(size, aspect, middle, spread))
    return cells


def fit(cells: Sequence[Cell]) -> Bands:
    """The bands that lose least: for each size the least aspect ratio from which `gram` is taken, where it wins at all.

    A further band has to save :data:`WORTH`, else the rule would follow noise. The last one goes on. A size of which
    only one shape was measured says nothing of where `gram` begins to win.
    """
    ways: dict[float | None, tuple[float, Bands]] = {None: (0.0, [[1, None]])}
    for size in dict.fromkeys(cell.size for cell in cells):
        mine = [cell for cell in cells if cell.size == size]
        further: dict[float | None, tuple[float, Bands]] = {}
        for aspect in (*(cell.aspect for cell in mine), None) if len(mine) > 1 else ():
            lost = sum(c.loss("gram" if aspect is not None and c.aspect >= aspect else "standard") for c in mine)
            found = [
                (before + lost + WORTH * (last != aspect), bands + [[size, aspect]] * (last != aspect))
                for last, (before, bands) in ways.items()
            ]
            further[aspect] = min(found, key=lambda way: way[0])
        ways = further or ways
    return min(ways.values(), key=lambda way: way[0])[1]


def verdict(cells: Sequence[Cell], rule: choice.Rule) -> str:
    """The rule against the better method of each shape, and against either method for all."""
    losses = {"the rule": [cell.loss(rule.method(*cell.shape)) for cell in cells]}
    losses |= {f"always {method}": [cell.loss(method) for cell in cells] for method in METHODS}
    parts = (
        f"{name} {statistics.mean(lost):.1%} on average, {max(lost):.0%} at worst" for name, lost in losses.items()
    )
    return f"Slower than the better method of each shape: {'; '.join(parts)}."


def basis(device: str) -> str:
    """What was measured, when, on what."""
    facts = report.describe()
    name = torch.cuda.get_device_name() if device == "cuda" else f"{facts['cpu']}, threads: {torch.get_num_threads()}"
    return f"{name}, torch {facts['torch']}, kernels {kernels_of(device).name}, {facts['date']}"


def put(kind: str, bands: Bands, origin: str) -> None:
    """Replace the rule of one kind; those of the others stay."""
    data = json.loads(choice.FILE.read_text()) | {kind: {"basis": origin, "bands": bands}}
    choice.parse(data)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    Path(choice.FILE).write_text(f"{{\n{lines}\n}}\n")


def choose(
    device: Annotated[str, LONGEST] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[tuple[str, ...], DTYPES] = ("bf16",),
    seconds: float = 40.0,
    write: bool = False,
) -> str:
    """Both methods of Newton-Schulz by shape, and the rule by which `ns_method: auto` chooses between them.

    Times batches of matrices with a smaller dimension of 64 to 4096 and an aspect ratio of 1 to 8, as far as one call
    stays short, in turn, with the operations of a step. Without --write the table judges the shipped rule.

    Args:
        device: where
        dtype: of Newton-Schulz
        seconds: for the shapes of one dtype; each is run thrice
        write: put the rule that follows into the package, deepspeed/muon/math/choice.json
    """
    texts = []
    for name in dtype:
        kind = choice.kind_of(device, DTYPES[name].itemsize)
        cells = measure(device, DTYPES[name], seconds)
        bands, spread = fit(cells), statistics.mean(cell.spread for cell in cells)
        if write and spread > BUSY:
            print(f"NOT WRITTEN: the runs of one shape lie {spread:.0%} apart, so the machine is busy; try again")
        elif write:
            put(kind, bands, basis(device))
        rule, rows = choice.parse(json.loads(choice.FILE.read_text()))[kind], []
        for cell in cells:
            chosen, times = rule.method(*cell.shape), {f"{m} ms": 1e3 * cell.seconds[m] for m in METHODS}
            row = {"shape": "{} x {}".format(*cell.shape), "size": str(cell.size), "aspect": cell.aspect} | times
            row |= {"standard / gram": cell.seconds["standard"] / cell.seconds["gram"], "spread": f"{cell.spread:.0%}"}
            rows.append(row | {"rule": chosen, "slower than the better": f"{cell.loss(chosen):.0%}"})
        fitted = f"The bands that fit: {json.dumps(bands)}; the rule: {json.dumps(rule.bands)}, {rule.basis}"
        chart = report.lines(rows, lambda row: row["size"], "aspect", "standard / gram")
        columns = [column for column in rows[0] if column not in ("size", "aspect")]
        parts = basis(device), report.table(rows, columns), verdict(cells, rule), fitted
        file, title = report.name_of(f"choose-{report.slug(kind)}"), f"Methods of Newton-Schulz by shape: {kind}"
        texts.append(report.write(file, title, rows, *parts, draw=chart))
    return "\n".join(texts)
