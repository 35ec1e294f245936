# SPDX-License-Identifier: Apache-2.0
"""The loss of examples/pretrain_gpt by `momentum_dtype`, with bf16 rounded to nearest as a control.

    python benchmarks/momentum_dtype.py [--steps 60] [--seeds 3] [--out FOLDER]

One process, ZeRO 2, bf16. Runs that are already complete in --out are not repeated.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import machine

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

from losslog import Row, evaluations, final_loss, is_complete  # noqa: E402

#: Kind of run -> (momentum_dtype, whether the worker rounds to nearest), and its colour.
KINDS = {"fp32": ("fp32", False), "bf16": ("bf16", False), "bf16 to nearest": ("bf16", True)}
COLORS = {"fp32": "tab:gray", "bf16": "tab:red", "bf16 to nearest": "tab:blue"}
Runs = dict[str, list[list[Row]]]


def train(kind: str, seed: int, steps: int, out: Path) -> list[Row]:
    """The evaluated rows of one run."""
    dtype, to_nearest = KINDS[kind]
    folder = out / f"{kind.replace(' ', '-')}-seed{seed}"
    if not is_complete(folder / "loss.csv", steps):
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((EXAMPLE / "ds_config_muon.json").read_text())
        config["optimizer"]["params"]["momentum_dtype"] = dtype
        (folder / "ds_config.json").write_text(json.dumps(config))
        command = [sys.executable, __file__, "--worker", "nearest" if to_nearest else "as-is"]
        command += ["--deepspeed_config", str(folder / "ds_config.json"), "--out", str(folder)]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(machine.cores()))}
        environment = machine.cpu_environment() | ranks | threads
        subprocess.run([*command, "--seed", str(seed), "--steps", str(steps)], env=environment, check=True)
    print(f"{kind}, seed {seed}: {final_loss(folder / 'loss.csv', steps):.4f}", flush=True)
    return evaluations(folder / "loss.csv")


def work(rounding: str) -> None:
    """One run, in this process."""
    import train as example
    from deepspeed.muon.kernels import reference, selection

    if rounding == "nearest":  # of the PyTorch operations, which then are those in use
        reference.round_ = lambda target, source, noise, spare: target.copy_(source)
        selection.choose = lambda missing: reference.OPERATIONS
    example.main()


def write(runs: Runs, steps: int, path: Path) -> None:
    """The CSV of all evaluations, the curves, and the final losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["momentum", "seed", "step", "held_out"])
        for kind, curves in runs.items():
            writer.writerows(
                [kind, s, row.step, f"{row.held_out:.5f}"] for s, rows in enumerate(curves) for row in rows
            )
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, curves in runs.items():
        for index, (rows, base) in enumerate(zip(curves, runs["fp32"], strict=True)):
            style = {"color": COLORS[kind], "linewidth": 1, "label": kind if index == 0 else None}
            x, y = [row.step for row in rows], [row.held_out for row in rows]
            panels[0].plot(x, y, **style)
            panels[1].plot(x, [a - b.held_out for a, b in zip(y, base, strict=True)], **style)
    panels[0].set(xlabel="step", ylabel="held-out loss (nats per byte)")
    panels[1].set(xlabel="step", ylabel="minus fp32's, same seed")
    panels[1].set_yscale("symlog", linthresh=1e-2)
    panels[0].legend()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    finals = {kind: [rows[-1].held_out for rows in curves] for kind, curves in runs.items()}
    lines = [["momentum", "final held-out loss, mean", "standard deviation", "of each seed", "minus fp32, mean"]]
    for kind, losses in finals.items():
        away = mean(a - b for a, b in zip(losses, finals["fp32"], strict=True))
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            [kind, f"{mean(losses):.4f}", f"{stdev(losses):.4f}" if len(losses) > 1 else "", each, f"{away:+.4f}"]
        )
    spread = max(max(losses) - min(losses) for losses in finals.values())
    note = f"\nSeeds of one kind lie up to {spread:.4f} apart; each line of the right panel is one seed.\n"
    title = f"# Loss by momentum_dtype, {steps} steps of examples/pretrain_gpt\n\n{machine.one_line()}\n\n"
    path.with_suffix(".md").write_text(title + machine.markdown_table(lines) + "\n" + note)
    print(path.with_suffix(".md").read_text())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="length of every run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--out", type=Path, default=Path("build/momentum_dtype"), help="folder of the runs")
    args = parser.parse_args()
    runs: Runs = {kind: [] for kind in KINDS}
    for seed in range(args.seeds):
        for kind, curves in runs.items():
            curves.append(train(kind, seed, args.steps, args.out.resolve()))
    write(runs, args.steps, machine.RESULTS / f"momentum-dtype-{machine.slug()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        rounding = sys.argv[2]
        del sys.argv[1:3]
        work(rounding)
    else:
        main()
