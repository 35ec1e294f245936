# SPDX-License-Identifier: Apache-2.0
"""Both methods of Newton-Schulz by shape, and the rule by which `ns_method: auto` chooses between them.

    python benchmarks/choose.py [--device cpu|cuda] [--dtype bf16 fp32] [--seconds 40] [--write]

Times batches of matrices with a smaller dimension of 64 to 4096 and an aspect ratio of 1 to 8, as far as one call stays
short, in turn, with the operations of `MuonWithAuxAdam`. `--write` puts the rule that follows into the package,
deepspeed/muon/choice.json; without it the table judges the rule that is there. Results: benchmarks/results.
"""

import argparse
import csv
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

import machine
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
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Of each shape, matrices in a model; a batch of a step has no more.
COUNT = 8
SCHEDULE = schedule("simple")
#: What a band of its own has to save, as a sum over its shapes of how much slower they are than the better method.
WORTH = 0.03


#: Mean spread beyond which the machine was busy and no rule is written.
BUSY = 0.25


@dataclass(frozen=True)
class Cell:
    """One shape: its median seconds by method, and the widest spread of one method's runs, over its median."""

    size: int
    aspect: float
    seconds: dict[str, float]
    spread: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, round(self.size * self.aspect)

    def loss(self, method: str) -> float:
        """How much slower a method is than the better one, 0 for that."""
        return self.seconds[method] / min(self.seconds.values()) - 1


def kernels_of(device: torch.device) -> Operations:
    """The table that a step on this device has."""
    return selection.choose(selection.missing("auto", [device.type]))


def measure(device: torch.device, dtype: torch.dtype, seconds: float) -> list[Cell]:
    """Every shape whose call is short enough; a longer budget buys more runs of each."""
    grid = [(size, aspect) for size in SIZES for aspect in ASPECTS]
    shapes = [(size, aspect) for size, aspect in grid if size**3 * aspect <= LONGEST[device.type]]
    cells = []
    for size, aspect in shapes:
        wide = size, round(size * aspect)
        times = race(wide, COUNT, SCHEDULE, dtype, device, kernels_of(device), seconds / len(shapes))
        middle = {method: statistics.median(runs) for method, runs in times.items()}
        spread = max((max(runs) - min(runs)) / middle[method] for method, runs in times.items())
        cells.append(Cell(size, aspect, middle, spread))
    return cells


def fit(cells: list[Cell]) -> list[list[float | None]]:
    """The bands that lose least: for each size the least aspect ratio from which `gram` is taken, where it wins at all.

    A further band has to save :data:`WORTH`, else the rule would follow noise. The last one goes on.
    """
    ways: dict[float | None, tuple[float, list[list[float | None]]]] = {None: (0.0, [[1, None]])}
    for size in dict.fromkeys(cell.size for cell in cells):
        mine = [cell for cell in cells if cell.size == size]
        if len(mine) == 1:  # says nothing of where `gram` begins to win
            continue
        further: dict[float | None, tuple[float, list[list[float | None]]]] = {}
        for aspect in (*(cell.aspect for cell in mine), None):
            lost = sum(c.loss("gram" if aspect is not None and c.aspect >= aspect else "standard") for c in mine)
            found = [
                (before + lost + WORTH * (last != aspect), bands + [[size, aspect]] * (last != aspect))
                for last, (before, bands) in ways.items()
            ]
            further[aspect] = min(found, key=lambda way: way[0])
        ways = further
    return min(ways.values(), key=lambda way: way[0])[1]


def table(cells: list[Cell], rule: choice.Rule) -> list[list[str]]:
    """One row per shape."""
    rows = [["shape", "standard ms", "gram ms", "standard / gram", "spread", "rule", "slower than the better"]]
    for cell in cells:
        chosen = rule.method(*cell.shape)
        times = [f"{cell.seconds[method] * 1e3:.3g}" for method in METHODS]
        ratio = f"{cell.seconds['standard'] / cell.seconds['gram']:.2f}"
        shape = " x ".join(map(str, cell.shape))
        rows.append([shape, *times, ratio, f"{cell.spread:.0%}", chosen, f"{cell.loss(chosen):.0%}"])
    return rows


def verdict(cells: list[Cell], rule: choice.Rule) -> str:
    """The rule against the better method of each shape, and against either method for all."""
    losses = {
        "the rule": [cell.loss(rule.method(*cell.shape)) for cell in cells],
        **{f"always {method}": [cell.loss(method) for cell in cells] for method in METHODS},
    }
    parts = [
        f"{name} {statistics.mean(lost):.1%} on average, {max(lost):.0%} at worst" for name, lost in losses.items()
    ]
    return "Slower than the better method of each shape: " + "; ".join(parts) + "."


def basis(device: torch.device) -> str:
    """What was measured, when, on what."""
    facts = machine.describe()
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{facts['cpu']}, threads: {torch.get_num_threads()}"
    )
    return f"{name}, torch {facts['torch']}, kernels {kernels_of(device).name}, {facts['date']}"


def write(cells: list[Cell], kind: str, rule: choice.Rule, path: Path) -> None:
    """CSV, Markdown and PNG."""
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", "rows", "cols", *(f"{method} s" for method in METHODS), "spread", "rule", "basis"])
        for cell in cells:
            times = [f"{cell.seconds[method]:.6g}" for method in METHODS]
            chosen = rule.method(*cell.shape)
            writer.writerow([kind, *cell.shape, *times, f"{cell.spread:.3f}", chosen, rule.basis])
    title = f"# Methods of Newton-Schulz by shape: {kind}\n\n{rule.basis}\n\n"
    text = title + machine.markdown_table(table(cells, rule)) + f"\n\n{verdict(cells, rule)}\n"
    path.with_suffix(".md").write_text(text)
    _draw(cells, kind, path.with_suffix(".png"))


def _draw(cells: list[Cell], kind: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for size in dict.fromkeys(cell.size for cell in cells):
        mine = [cell for cell in cells if cell.size == size]
        if len(mine) == 1:  # says nothing of where `gram` begins to win
            continue
        ratios = [cell.seconds["standard"] / cell.seconds["gram"] for cell in mine]
        axes.plot([cell.aspect for cell in mine], ratios, marker="o", markersize=3, label=str(size))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="aspect ratio", ylabel="standard's time over gram's", title=f"{kind}, {machine.cpu_model()}")
    axes.legend(title="smaller dimension", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def put(kind: str, bands: list[list[float | None]], origin: str, file: Path = choice.FILE) -> None:
    """Replace the rule of one kind; those of the others stay."""
    data = json.loads(file.read_text()) | {kind: {"basis": origin, "bands": bands}}
    choice.parse(data)
    file.write_text("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()) + "\n}\n")


def main() -> None:
    """Measure, print, and with --write replace the rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(LONGEST), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["bf16"])
    parser.add_argument("--seconds", type=float, default=40.0, help="for the shapes of one dtype; each is run thrice")
    parser.add_argument("--write", action="store_true", help="put the rule into the package")
    args = parser.parse_args()
    device = torch.device(args.device)
    for name in args.dtype:
        kind = choice.kind_of(device.type, DTYPES[name].itemsize)
        cells = measure(device, DTYPES[name], args.seconds)
        bands = fit(cells)
        spread = statistics.mean(cell.spread for cell in cells)
        if args.write and spread > BUSY:
            print(f"NOT WRITTEN: the runs of one shape lie {spread:.0%} apart, so the machine is busy; try again")
        elif args.write:
            put(kind, bands, basis(device))
        rule = choice.parse(json.loads(choice.FILE.read_text()))[kind]
        machine.RESULTS.mkdir(exist_ok=True)
        write(cells, kind, rule, machine.RESULTS / f"choose-{kind.replace(' ', '-')}-{machine.slug()}")
        print(f"{kind}, {basis(device)}\n\n{machine.markdown_table(table(cells, rule))}\n\n{verdict(cells, rule)}")
        print(f"The bands that fit: {json.dumps(bands)}; the rule: {json.dumps(rule.bands)}, {rule.basis}\n")


if __name__ == "__main__":
    main()
