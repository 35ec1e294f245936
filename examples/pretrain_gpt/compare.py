# SPDX-License-Identifier: Apache-2.0
"""Train with AdamW, then with Muon, and plot the held-out loss of both.

Options other than --out go to train.py, for example --steps 120 --stage 3. On a CPU both train in fp32, unless
--precision says otherwise: CPUs without bf16 instructions take ten times as long in bf16.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from launch import CONFIGS, HERE, launch, on_cpu
from losslog import Row, evaluations, first_reaching

COLORS = {"AdamW": "tab:gray", "Muon": "tab:red"}


def plot_panel(axes: Axes, runs: dict[str, list[Row]], unit: str) -> None:
    """Draw the held-out losses against `unit`, marking where Muon reaches AdamW's final loss."""
    for name, rows in runs.items():
        x, y = [getattr(row, unit) for row in rows], [row.held_out for row in rows]
        axes.plot(x, y, label=name, color=COLORS[name], linewidth=2)
    last = runs["AdamW"][-1]
    axes.axhline(last.held_out, color=COLORS["AdamW"], linestyle=":")
    if reached := first_reaching(runs["Muon"], last.held_out):
        point = (getattr(reached, unit), reached.held_out)
        place = f"{unit.removesuffix('s')} {point[0]:.0f} of {getattr(last, unit):.0f}"
        note = f"Muon at AdamW's final loss:\n{place}"
        axes.plot(*point, "o", color=COLORS["Muon"])
        axes.annotate(note, point, (0.4, 0.6), textcoords="axes fraction", arrowprops={"arrowstyle": "->"})
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)


def plot(runs: dict[str, list[Row]], path: Path) -> None:
    """Draw the held-out loss against the step and against the seconds of training."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axes, unit in zip(panels, ("step", "seconds"), strict=True):
        plot_panel(axes, runs, unit)
    panels[0].set_ylabel("held-out loss (nats per byte)")
    panels[0].legend()
    figure.savefig(path, dpi=150)


def table(runs: dict[str, list[Row]]) -> str:
    """Return final losses, and the steps and seconds to AdamW's final loss, as a Markdown table."""
    target = runs["AdamW"][-1].held_out
    lines = ["| optimizer | final held-out loss | seconds | steps to AdamW's | seconds to AdamW's |"]
    lines.append("|---|---|---|---|---|")
    for name, rows in runs.items():
        row = first_reaching(rows, target)
        reached = f"{row.step} | {row.seconds:.0f}" if row else "not reached | not reached"
        lines.append(f"| {name} | {rows[-1].held_out:.3f} | {rows[-1].seconds:.0f} | {reached} |")
    return "\n".join(lines)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the plot and the runs")
    args, training = parser.parse_known_args()
    if on_cpu():
        training = ["--precision", "fp32", *training]
    runs = {}
    for optimizer in CONFIGS:
        print(f"training with {optimizer}", flush=True)
        folder = args.out / "compare" / optimizer
        launch(CONFIGS[optimizer], folder, training)
        runs[optimizer] = evaluations(folder / "loss.csv")
    plot(runs, args.out / "comparison.png")
    print(table(runs))
    print(f"plot: {args.out / 'comparison.png'}")


if __name__ == "__main__":
    main()
