# SPDX-License-Identifier: Apache-2.0
"""Held-out loss against seconds of training on examples/pretrain_gpt: AdamW, stock's Muon, ours.

    python benchmarks/loss_per_second.py [--steps 240] [--only ours] [--out FOLDER]

Two ranks of one thread, ZeRO 2, bf16, the example's own configs and schedule. The clock counts training steps only:
evaluation and start-up are not in it; stock's compilation is, in its first step. Stock's Muon runs twice, with the
example's gradient_clipping (which stock applies to the orthogonalized updates) and without, both with its faster method
and with the rates that give square matrices the updates of ours. Runs that are already complete in --out are not
repeated, so they can be made one at a time by --only.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import launcher
import output
from setups import VARIANTS
from step_worker import check_optimizer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

from losslog import Row, evaluations, first_reaching, is_complete, read_log  # noqa: E402

#: Width of the example's model: an orthogonal square matrix of this size has entries of RMS width ** -0.5.
WIDTH = 192
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Run:
    """One curve: what its config changes of the example's, and the variant whose optimizer must then be running."""

    label: str
    base: str
    variant: str
    optimizer: dict | None = None
    clip: float | None = None
    color: str = "black"


def stock_params() -> dict:
    """Stock's keys for the rates of ours: an update of RMS 0.2 lr for square matrices, and lr for the AdamW half."""
    ours = json.loads((EXAMPLE / "ds_config_muon.json").read_text())["optimizer"]["params"]
    muon_lr = 0.2 * ours["lr"] * WIDTH**0.5
    return {
        "muon_lr": round(muon_lr, 4),
        "adam_lr": ours["lr"],
        "momentum": 0.95,
        "weight_decay": ours["weight_decay"],
        "betas": ours["betas"],
        "eps": ours["eps"],
        "ns_method": "standard",
    }


RUNS = {
    "adamw": Run("AdamW", "ds_config_adamw.json", "adamw", color="tab:gray"),
    "stock-clip": Run("stock Muon, clip 1", "ds_config_muon.json", "stock", stock_params(), color="tab:orange"),
    "stock": Run("stock Muon, no clip", "ds_config_muon.json", "stock", stock_params(), 0.0, "tab:blue"),
    "ours": Run("deepspeed-muon, clip 1", "ds_config_muon.json", "ours", color="tab:red"),
}


def train(name: str, steps: int, out: Path, timeout: float) -> None:
    """One run, unless it is there."""
    run, folder = RUNS[name], out / name
    if not is_complete(folder / "loss.csv", steps):
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((EXAMPLE / run.base).read_text())
        if run.optimizer is not None:
            config["optimizer"]["params"] = run.optimizer
        if run.clip is not None:
            config["gradient_clipping"] = run.clip
        (folder / "ds_config.json").write_text(json.dumps(config))
        command = [__file__, "--worker", run.variant, "--out", str(folder), "--steps", str(steps)]
        command += ["--deepspeed_config", str(folder / "ds_config.json"), "--eval-every", str(max(1, steps // 24))]
        launcher.run_ranks(command, RANKS, timeout, extra=VARIANTS[run.variant].environment)
    last = evaluations(folder / "loss.csv")[-1]
    print(f"{run.label}: {last.held_out:.4f} after {last.seconds:.0f} s", flush=True)


def work(variant: str) -> None:
    """One rank of a run, with the distribution's optimizer that the variant names."""
    import train as example

    trained = example.train

    def checked(engine, *args):
        check_optimizer(engine, variant)
        trained(engine, *args)

    example.train = checked
    example.main()


def loss_at(rows: list[Row], seconds: float) -> float | str:
    """Held-out loss after this many seconds, between the two evaluations around them."""
    for before, after in itertools.pairwise(rows):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.held_out + share * (after.held_out - before.held_out)
    return "-"


def table(runs: dict[str, list[Row]]) -> list[dict]:
    """One row per run, from all of its logged steps; what is relative to AdamW's run only where that is there."""
    held_out = {name: [row for row in rows if not math.isnan(row.held_out)] for name, rows in runs.items()}
    reference = held_out.get("adamw")
    result = []
    for name, rows in held_out.items():
        last, first = rows[-1], runs[name][0]
        row = {"optimizer": RUNS[name].label, "final loss": round(last.held_out, 4), "seconds": round(last.seconds, 1)}
        row["first step s"] = round(first.seconds, 1)
        row["ms per later step"] = round(1e3 * (last.seconds - first.seconds) / (last.step - first.step), 1)
        if reference:
            goal, total = reference[-1].held_out, reference[-1].seconds
            reached = first_reaching(rows, goal)
            row["seconds to AdamW's final loss"] = round(reached.seconds, 1) if reached else "not reached"
            row["of AdamW's seconds"] = f"{reached.seconds / total:.0%}" if reached else "-"
            for part in (0.25, 0.5, 1.0):
                row[f"loss at {part:.0%} of AdamW's seconds"] = loss_at(rows, part * total)
        result.append(row)
    return result


def write(runs: dict[str, list[Row]], steps: int) -> str:
    """The table, the curves and a CSV of every evaluation."""

    def draw(axes) -> None:
        for name, rows in runs.items():
            style = {"label": RUNS[name].label, "color": RUNS[name].color}
            evaluated = [row for row in rows if not math.isnan(row.held_out)]
            axes.plot([row.seconds for row in evaluated], [row.held_out for row in evaluated], **style)
        axes.set(xlabel="seconds of training, without evaluation", ylabel="held-out loss (nats per byte)")
        axes.legend()

    points = [
        {"optimizer": RUNS[name].label, "step": row.step, "seconds": row.seconds, "held_out": row.held_out}
        for name, rows in runs.items()
        for row in rows
        if not math.isnan(row.held_out)
    ]
    rates = stock_params()
    text = (
        f"# Loss per second, {steps} steps of examples/pretrain_gpt, {RANKS} ranks\n\n"
        f"{output.table(table(runs))}\n\nStock's rates: muon_lr {rates['muon_lr']}, adam_lr {rates['adam_lr']}, "
        f"ns_method {rates['ns_method']}; they are those of ours in stock's scale, not a sweep of its own."
    )
    return output.write(output.path_of("loss-per-second"), points, text, draw)


def main() -> None:
    """Run what is missing and report what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="length of every run")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="train only these now")
    parser.add_argument("--out", type=Path, default=Path("build/loss_per_second"), help="folder of the runs")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one run may take")
    args = parser.parse_args()
    out = args.out.resolve()
    for name in args.only:
        train(name, args.steps, out, args.timeout)
    done = [name for name in RUNS if is_complete(out / name / "loss.csv", args.steps)]
    print(write({name: read_log(out / name / "loss.csv") for name in done}, args.steps))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _, _, variant, *sys.argv[1:], result = sys.argv
        work(variant)
        Path(result).write_text("{}")
    else:
        main()
