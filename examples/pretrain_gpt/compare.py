# SPDX-License-Identifier: Apache-2.0
"""Train with AdamW, then with Muon, and plot the held-out loss of both by step.

Options other than --out go to train.py, for example --steps 120 --stage 3. On a CPU both train in fp32, unless
--precision says otherwise: CPUs without bf16 instructions take ten times as long in bf16.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from launch import CONFIGS, HERE, launch, on_cpu
from losslog import Row, evaluations, first_reaching

COLORS = {"AdamW": "tab:gray", "Muon": "tab:red"}


def plot(runs: dict[str, list[Row]], path: Path) -> None:
    """Draw the held-out losses against the step, marking where Muon reaches AdamW's final loss."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, rows in runs.items():
        steps, losses = [row.step for row in rows], [row.held_out for row in rows]
        axes.plot(steps, losses, label=name, color=COLORS[name], linewidth=2)
    last = runs["AdamW"][-1]
    axes.axhline(last.held_out, color=COLORS["AdamW"], linestyle=":")
    if reached := first_reaching(runs["Muon"], last.held_out):
        point = (reached.step, reached.held_out)
        note = f"Muon at AdamW's final loss:\nstep {reached.step} of {last.step}"
        axes.plot(*point, "o", color=COLORS["Muon"])
        axes.annotate(note, point, (0.4, 0.6), textcoords="axes fraction", arrowprops={"arrowstyle": "->"})
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def table(runs: dict[str, list[Row]]) -> str:
    """Return final losses, and the steps to AdamW's final loss, as a Markdown table.

    No seconds: two runs, one after the other, do not compare if the machine does other work meanwhile.
    """
    target = runs["AdamW"][-1].held_out
    lines = ["| optimizer | final held-out loss | steps to AdamW's |", "|---|---|---|"]
    for name, rows in runs.items():
        row = first_reaching(rows, target)
        lines.append(f"| {name} | {rows[-1].held_out:.3f} | {row.step if row else 'not reached'} |")
    return "\n".join(lines)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the plot and the runs")
    args, training = parser.parse_known_args()
    if on_cpu():
        training = ["--precision", "fp32", *training]
    runs = {}
    print("the first start compiles DeepSpeed's and Muon's C++ extensions, one to two minutes", flush=True)
    for optimizer in CONFIGS:
        print(f"training with {optimizer}", flush=True)
        folder = args.out / "compare" / optimizer
        launch(CONFIGS[optimizer], folder, training)
        runs[optimizer] = evaluations(folder / "loss.csv")
    plot(runs, args.out / "comparison.png")
    print(table(runs))
    print(f"plot: {args.out / 'comparison.png'}")
    print("Now your model: `ds_muon try --steps 60 -- YOUR COMMAND` compares the two on your own script.")


if __name__ == "__main__":
    main()
