# SPDX-License-Identifier: Apache-2.0
"""Time, traffic and memory of one optimizer step: deepspeed-muon against stock DeepSpeed's Muon and AdamW.

    python benchmarks/step.py [--world 2] [--repeats 3] [--steps 5] [--cases 1 3 2-offload] [--quick] [--records FILE]

Every variant is a launch of its own and the variants alternate (A B C A B C ...), so that a machine that
grows slower or faster meets them all. The batch is small on purpose: what is timed is backward with its
gradient reduction, and the optimizer step. AdamW is launched twice in every round: how far it is from itself is the
noise of the run. Results go to benchmarks/results/ as CSV, Markdown and PNG. With --records, launches are added to a
file and the report covers all that are in it, so that a long run can be made in pieces.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import launcher
import machine
import report
import roofline
from setups import CASES, VARIANTS, Job

USUAL = [name for name, variant in VARIANTS.items() if not variant.plain]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all variants")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a launch")
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps of a launch, for compilation")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=f"of {[*CASES]}")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {[*VARIANTS]}, by default {USUAL}"
    )
    parser.add_argument("--kernels", choices=("in-use", "torch", "both"), default="in-use", help="of ours")
    parser.add_argument("--records", type=Path, help="a file of launches to add to and to report, one JSON a line")
    parser.add_argument("--no-floor", action="store_true", help="do not measure the machine's rates")
    parser.add_argument("--layers", type=int, default=8, help="blocks of three matrices")
    parser.add_argument("--hidden", type=int, default=512, help="width of a block; inside it is 4 times that")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one launch may take")
    parser.add_argument("--output", help="base name of the result files; a default names machine and setting")
    parser.add_argument("--json", action="store_true", help="also print each launch's full record")
    parser.add_argument("--quick", action="store_true", help="2 layers of 256, 1 repeat, 2 steps by default")
    args = parser.parse_args()
    if args.quick:  # other defaults; what is given on the command line still counts
        parser.set_defaults(layers=2, hidden=256, repeats=1, steps=2)
        args = parser.parse_args()
    chosen = {"in-use": ["ours"], "torch": ["ours-torch"], "both": ["ours", "ours-torch"]}[args.kernels]
    args.variants = args.variants or [v for v in VARIANTS if v in chosen or (v in USUAL and v != "ours")]
    return args


def job_of(args: argparse.Namespace, case: str, variant: str) -> Job:
    """The job of one case and variant."""
    return Job(
        case=case,
        variant=variant,
        world=args.world,
        layers=args.layers,
        hidden=args.hidden,
        warmup=args.warmup,
        steps=args.steps,
    )


def output_name(args: argparse.Namespace) -> str:
    """`step-<machine>`, with what deviates from the usual setting."""
    deviations = ["quick"] if args.quick else []
    deviations += [f"{args.world}-ranks"] if args.world != 2 else []
    return args.output or "-".join(["step", *deviations, machine.slug()])


def run_round(args: argparse.Namespace, number: int, records: list[dict], failures: Counter[tuple]) -> None:
    """One launch of every case and variant that has not failed twice; appends to the records.

    One failure is forgiven: gloo's threads sometimes abort a rank at its exit, whatever the optimizer.
    """
    for case in args.cases:
        for variant in args.variants:
            if failures[case, variant] > 1:
                continue
            begin = time.perf_counter()
            try:
                record = launcher.run(job_of(args, case, variant), args.timeout)
            except launcher.LaunchFailed as error:
                failures[case, variant] += 1
                print(error, file=sys.stderr, flush=True)
                continue
            records.append(record)
            if args.records:
                with args.records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            print(
                f"round {number + 1}, {CASES[case].label}, {VARIANTS[variant].label}: "
                f"{record['seconds']:.3f} s, {record['MB']:.1f} MB "
                f"(launch {time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
            if args.json:
                print(json.dumps(record), flush=True)
            if record["compiled while timed"]:
                print("  torch.compile ran while timed: raise --warmup", file=sys.stderr, flush=True)


def earlier(args: argparse.Namespace) -> list[dict]:
    """The launches in --records, which must be of the same size."""
    if not args.records or not args.records.exists():
        return []
    records = [json.loads(line) for line in args.records.read_text().splitlines()]
    size = args.world, args.layers, args.hidden
    if any((record["world"], record["layers"], record["hidden"]) != size for record in records):
        raise SystemExit(f"{args.records} holds launches of another --world, --layers or --hidden; name another file")
    return records


def main() -> int:
    """Run the rounds; write the results after each, so that an interrupted run leaves its complete rounds."""
    args = arguments()
    records = earlier(args)
    rates = None if args.no_floor else roofline.measure(args.world)
    failures: Counter[tuple] = Counter()
    text = ""
    for number in range(args.repeats):
        run_round(args, number, records, failures)
        rates = rates and rates.best(roofline.measure(args.world))
        text = report.write(records, job_of(args, args.cases[0], args.variants[0]), output_name(args), rates)
    print("\n" + text)
    for (case, variant), count in failures.items():
        print(f"FAILED {count} times: {CASES[case].label}, {VARIANTS[variant].label}", file=sys.stderr)
    return 1 if any(count > 1 for count in failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
