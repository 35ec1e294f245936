# SPDX-License-Identifier: Apache-2.0
"""Stage 3 on two hosts with a slow link: deepspeed-muon against stock's Muon, and how much of the exchange hides.

    sudo benchmarks/network.sh [--worlds 2 4] [--repeats 3] [--steps 5] [--buckets 1 2 4 8 16]

network.sh makes the hosts and calls this. Without --hosts all ranks talk over the loopback device of this machine.
Launches alternate over all settings. Results go to benchmarks/results/ as CSV, Markdown and PNG.
"""

import argparse
import itertools
import sys
from pathlib import Path

import launcher
import machine
import network_report
from setups import VARIANTS, Job

WORKER = Path(__file__).resolve().parent / "network_worker.py"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hosts", nargs=2, default=[], metavar="NAMESPACE", help="network namespaces; half of the ranks in each"
    )
    parser.add_argument("--master", default="127.0.0.1", help="address of the first host")
    parser.add_argument("--interface", default="lo", help="network interface of gloo on each host")
    parser.add_argument("--rate", default="", help="of the link, for the caption: as tc writes it")
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], metavar="RANKS", help="numbers of ranks")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["stock", "stock-standard", "ours"],
        metavar="VARIANT",
        help=f"of {[*VARIANTS]}",
    )
    parser.add_argument(
        "--buckets",
        nargs="+",
        type=float,
        default=[],
        metavar="MIB",
        help="sizes of a bucket instead of the default, of ours",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all settings")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a launch")
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps of a launch, for compilation")
    parser.add_argument("--layers", type=int, default=8, help="blocks of three matrices")
    parser.add_argument("--hidden", type=int, default=512, help="width of a block; inside it is 4 times that")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one launch may take")
    parser.add_argument("--output", help="base name of the result files; a default names link and machine")
    return parser.parse_args()


def places(args: argparse.Namespace, world: int, variant: str) -> list[launcher.Place]:
    """Where each rank runs: the first half on the first host. A host has its share of the machine's cores."""
    per_host = world // 2 if args.hosts else world
    cores = machine.cores()
    found = []
    for rank in range(world):
        core = rank * cores // world
        prefix = ("taskset", "--cpu-list", str(core))
        if args.hosts:
            prefix = ("ip", "netns", "exec", args.hosts[rank // per_host], *prefix)
        environment = {
            "MASTER_ADDR": args.master,
            "GLOO_SOCKET_IFNAME": args.interface,
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
        }
        if VARIANTS[variant].is_ours:
            environment["BUCKETS_MIB"] = " ".join(map(str, args.buckets))
        found.append(launcher.Place(prefix, environment))
    return found


def main() -> int:
    """Run the rounds; write the results after each, so that an interrupted run leaves its complete rounds."""
    args = arguments()
    name = args.output or "-".join(
        ["network", args.rate or "loopback", *(["buckets"] if args.buckets else []), machine.slug()]
    )
    records: list[dict] = []
    failures = 0
    for number in range(args.repeats):
        for world, variant in itertools.product(args.worlds, args.variants):
            job = Job("3", variant, world, args.layers, args.hidden, warmup=args.warmup, steps=args.steps)
            try:
                ranks = launcher.results(job, args.timeout, WORKER, places(args, world, variant))
            except launcher.LaunchFailed as error:
                failures += 1
                print(error, file=sys.stderr, flush=True)
                continue
            for of_ranks in zip(*ranks, strict=True):
                record = network_report.merge(world, variant, of_ranks)
                records.append(record)
                size = f", {record['bucket']:g} MiB" if record["bucket"] else ""
                title = f"round {number + 1}, {world} ranks, {VARIANTS[variant].label}{size}"
                print(f"{title}: {record['seconds']:.3f} s", flush=True)
        text = network_report.write(records, args, name)
    print("\n" + text)
    return 1 if failures > args.repeats else 0


if __name__ == "__main__":
    sys.exit(main())
