# SPDX-License-Identifier: Apache-2.0
"""What the plan gives known models on 8 to 4096 ranks, and how well its predicted step meets a measured one.

    python benchmarks/scaling.py [--models gpt2-xl moe-1t] [--ranks 8 64 512 4096] [--stages 1 3] [--no-measure]

The table is a prediction for the machine that `estimate.Machine` describes; planning seconds are measured here. The
measured points are steps of a small model at 1, 2 and 4 ranks, predicted from rates that are measured apart.
"""

import argparse
import gc
import itertools
import sys
import time

import machine
import scaling_measure
import scaling_report
from deepspeed.muon.forecast.estimate import Machine, estimate
from deepspeed.muon.forecast.layout import Half, Layout, StepCost, lay_out
from deepspeed.muon.math import coefficients
from deepspeed.muon.plan.cost import cost_model
from deepspeed.muon.plan.plan import make_plan
from scaling_models import MODELS

SCHEDULE, ITEMSIZE, DEVICE = coefficients.schedule("simple"), 2, "cuda"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 1024, 4096])
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 3])
    parser.add_argument("--no-measure", action="store_true", help="leave out the measured points")
    parser.add_argument("--repeats", type=int, default=2, help="rounds over the measured points")
    parser.add_argument("--output", help="base name of the result files; a default names the machine")
    return parser.parse_args()


def planning_seconds(halves: list[Half], layout: Layout, rank: int) -> float:
    """Of one rank's plans of all its parts, as `MuonWithAuxAdam.bind` makes them."""
    parts = [part for part in lay_out(halves, layout) if part.half.use_muon]
    gc.collect()
    begin = time.perf_counter()
    for part in parts:
        make_plan(part.shards, rank, part.world_size, cost_model(part.half.ns_method, SCHEDULE, ITEMSIZE, DEVICE))
    return time.perf_counter() - begin


def imbalance(works: list[StepCost]) -> float:
    """The busiest rank's work over the larger of the mean and the heaviest matrix, which no plan can go below.

    Sub-groups of stage 3 are stepped one after the other, so each waits for its own busiest rank; the bound is that of
    all matrices together.
    """
    waited = sum(max(work.flops) for work in works)
    mean = sum(sum(work.flops) for work in works) / works[0].part.world_size
    return waited / max(mean, *(work.heaviest for work in works))


def predict(name: str, stage: int, ranks: int) -> dict:
    """One row of the table."""
    halves, layout = MODELS[name].halves(), Layout(stage, ranks)
    facts, works = estimate(halves, layout, SCHEDULE, ITEMSIZE, DEVICE, Machine(), offload=False)
    per_rank, step = facts["per_rank"], facts["step_ms"]
    return {
        "model": name,
        "stage": stage,
        "ranks": ranks,
        "matrices": facts["totals"]["muon"]["matrices"],
        "parts": per_rank["parts"],
        "rounds": per_rank["rounds"],
        "imbalance": imbalance(works),
        "MB sent, mean": per_rank["sent_bytes"]["mean"] / 1e6,
        "MB sent, max": per_rank["sent_bytes"]["max"] / 1e6,
        "messages, max": sum(work.messages for work in works),
        "runs, max": sum(work.runs for work in works),
        "elementwise ms": step["elementwise"],
        "Newton-Schulz ms": step["newton_schulz"],
        "exchange ms": step["exchange"],
        "step ms": step["total"],
        "planning s, rank 0": planning_seconds(halves, layout, 0),
        "planning s, middle rank": planning_seconds(halves, layout, ranks // 2),
    }


def main() -> int:
    """Predict, measure, write."""
    args = arguments()
    name = args.output or f"scaling-{machine.slug()}"
    rows: list[dict] = []
    for model, stage, ranks in itertools.product(args.models, args.stages, args.ranks):
        rows.append(predict(model, stage, ranks))
        row = rows[-1]
        planning = max(row["planning s, rank 0"], row["planning s, middle rank"])
        print(
            f"{model}, stage {stage}, {ranks} ranks: {row['step ms']:.1f} ms, planned in {planning:.2f} s", flush=True
        )
    points, rates = ([], None) if args.no_measure else scaling_measure.measure(args.stages, args.repeats)
    print("\n" + scaling_report.write(rows, points, rates, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
