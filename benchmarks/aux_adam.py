# SPDX-License-Identifier: Apache-2.0
"""Which AdamW the auxiliary parameters should use on a CPU: one step on a flat fp32 tensor, timed.

    python benchmarks/aux_adam.py [--numel 20000000] [--rounds 15] [--threads 1 2]

Each thread count runs in a process of its own, because DeepSpeed's JIT-built operator may load another
OpenMP runtime than torch's, which only `OMP_NUM_THREADS` reaches. Within it the implementations alternate.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import machine

HYPERPARAMETERS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}
REFERENCE = "torch default"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=20_000_000, help="elements of the flat fp32 tensor")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each implementation")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of each implementation")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def implementations() -> dict[str, Callable]:
    """The candidates by name, each a function from parameters to an optimizer."""
    import torch

    def deepspeed_cpu_adam(params):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, **HYPERPARAMETERS)

    return {
        REFERENCE: lambda params: torch.optim.AdamW(params, **HYPERPARAMETERS),
        "torch foreach": lambda params: torch.optim.AdamW(params, foreach=True, **HYPERPARAMETERS),
        "torch fused": lambda params: torch.optim.AdamW(params, fused=True, **HYPERPARAMETERS),
        "DeepSpeedCPUAdam": deepspeed_cpu_adam,
    }


def build(numel: int) -> dict:
    """An optimizer and its parameter for every implementation that works here, all from one start."""
    import torch

    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(numel, generator=generator) for _ in range(2))
    built = {}
    for name, make in implementations().items():
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        try:
            built[name] = make([parameter]), parameter
        except Exception as error:  # a JIT build can fail in many ways; the others still count
            print(f"{name}: left out, {type(error).__name__}: {error}", file=sys.stderr)
    return built


def measure(args: argparse.Namespace) -> None:
    """The worker: alternate the implementations, print one JSON line of seconds and of differences."""
    import torch

    torch.set_num_threads(args.threads[0])
    built = build(args.numel)
    seconds = {name: [] for name in built}
    for _ in range(args.warmup + args.rounds):
        for name, (optimizer, _parameter) in built.items():
            begin = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - begin)
    reference = built[REFERENCE][1].detach()
    apart = {
        name: (parameter.detach() - reference).abs().max().item() for name, (_optimizer, parameter) in built.items()
    }
    print(json.dumps({"seconds": {n: s[args.warmup :] for n, s in seconds.items()}, "difference": apart}))


def launch(args: argparse.Namespace, threads: int) -> dict:
    """Run the worker with this many threads and read its last line."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        "--threads",
        str(threads),
        "--numel",
        str(args.numel),
        "--rounds",
        str(args.rounds),
        "--warmup",
        str(args.warmup),
    ]
    env = machine.cpu_environment() | {"OMP_NUM_THREADS": str(threads), "DS_MUON_AUTOLOAD": "0"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows(threads: int, result: dict) -> list[list]:
    """CSV rows of one thread count: median, fastest, slowest in milliseconds, distance from the reference."""
    table = []
    for name, seconds in result["seconds"].items():
        times = [round(1e3 * value, 3) for value in (statistics.median(seconds), min(seconds), max(seconds))]
        table.append([name, threads, *times, f"{result['difference'][name]:.1e}"])
    return table


def write(table: list[list], numel: int) -> None:
    """Write CSV and Markdown, and print the latter."""
    header = ["implementation", "threads", "median ms", "fastest ms", "slowest ms", "max difference"]
    base = machine.RESULTS / f"aux-adam-{machine.slug()}"
    base.parent.mkdir(exist_ok=True)
    with base.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *table])
    head = f"# One AdamW step on {numel / 1e6:g} M fp32 elements\n\n{machine.one_line()}\n\n"
    foot = f"\n\nThe difference is the largest, after all steps, of a parameter from {REFERENCE}'s.\n"
    text = head + machine.markdown_table([header, *([str(cell) for cell in row] for row in table)]) + foot
    base.with_suffix(".md").write_text(text)
    print(text)


def main() -> None:
    """Measure every thread count and report."""
    args = arguments()
    if args.worker:
        measure(args)
        return
    write([row for threads in args.threads for row in rows(threads, launch(args, threads))], args.numel)


if __name__ == "__main__":
    main()
