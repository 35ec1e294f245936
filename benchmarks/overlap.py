# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange hides behind Newton-Schulz on gloo, as at ZeRO stage 3, by the size of a bucket.

    python benchmarks/overlap.py [--world 2] [--buckets 1 2 4 8] [--repeats 8]

Three kinds of step alternate: everything, without the collectives, and the collectives alone; a step lasts as long as
on the slowest rank. On one machine the ranks' network is its memory and its cores, which are busy. To see a link, run
it as root in a network of its own:

    unshare -n bash -c "ip link set lo up; tc qdisc add dev lo root tbf rate 1gbit burst 512kb latency 100ms;
                        python benchmarks/overlap.py --link '1 Gbit/s'"
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import launcher
import machine

SHAPES = [(512, 512), (2048, 512), (512, 2048)] * 8
WARMUP = 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0], help="sizes in MiB")
    parser.add_argument("--repeats", type=int, default=8, help="timed steps of each kind")
    parser.add_argument("--link", default="memory", help="what joins the ranks, for the table")
    parser.add_argument("--output", help="base name of the result files; a default names machine and link")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def bound(bucket_mib: float, plan_module: Any) -> Any:
    """An optimizer over one flat partition of all matrices, cut as stage 3 cuts them, with a gradient."""
    import torch
    import torch.distributed as dist

    from deepspeed.muon import MuonWithAuxAdam
    from deepspeed.muon import optimizer as module
    from deepspeed.muon.exchange.partition import Partition
    from deepspeed.muon.plan.placement import Placement, Shard

    model = torch.nn.Sequential(*[torch.nn.Linear(cols, rows, bias=False) for rows, cols in SHAPES])
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, ns_dtype="bf16")
    world, shards, base = dist.get_world_size(), [], 0
    for spec in optimizer.specs.values():
        shards.append(Shard(spec, 0, Placement(0, spec.numel // world, base)))
        base += spec.numel // world
    flat = torch.randn(base)
    flat.grad = torch.randn(base)
    optimizer.param_groups[0]["params"] = [flat]
    partition = Partition(0, (flat,), tuple(shards), dist.group.WORLD, dist.get_rank(), world)
    module.make_plan = partial(plan_module.make_plan, bucket_bytes=int(bucket_mib * 2**20))
    optimizer.bind([partition], torch.bfloat16)
    return optimizer


def measure(bucket_mib: float, repeats: int) -> dict[str, Any]:
    """Milliseconds of each kind of step on the slowest rank."""
    import torch
    import torch.distributed as dist

    from deepspeed.muon.exchange.exchange import Exchange
    from deepspeed.muon.plan import plan as plan_module

    optimizer = bound(bucket_mib, plan_module)
    launch_collective, plan = Exchange._launch, optimizer.plans[0]

    def without() -> None:
        Exchange._launch = lambda *args, **kwargs: None
        try:
            optimizer.step()
        finally:
            Exchange._launch = launch_collective

    def nothing(buffers: Any) -> None:
        pass

    kinds = {
        "both": optimizer.step,
        "compute": without,
        "exchange": lambda: optimizer.exchange.run(plan, nothing, nothing, nothing),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(WARMUP + repeats):
        for kind, act in kinds.items():
            dist.barrier()
            began = time.perf_counter()
            act()
            seconds = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if step >= WARMUP:
                times[kind].append(1e3 * float(seconds))
    return {"MiB": bucket_mib, "rounds": len(plan.buckets), "MB sent": plan.sent_elements * 2 / 1e6, "ms": times}


def work(args: argparse.Namespace) -> None:
    """One rank; rank 0 prints what was measured as the last line."""
    import torch

    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results = [measure(bucket, args.repeats) for bucket in args.buckets]
    torch.distributed.barrier()
    if args.rank == 0:
        print(json.dumps(results), flush=True)
    torch.distributed.destroy_process_group()


def start(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ranks and return what rank 0 measured."""
    port, ranks = launcher.free_port(), []
    for rank in range(args.world):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.world, "MASTER_PORT": port}
        env = machine.cpu_environment() | {name: str(number) for name, number in numbers.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=env, stdout=output, text=True))
    try:
        text = ranks[0].communicate(timeout=600)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return json.loads(text.strip().splitlines()[-1])


def row(result: dict[str, Any]) -> list[str]:
    """One line of the table: medians with their range; what hides is taken within each repeat."""
    times = [result["ms"][kind] for kind in ("compute", "exchange", "both")]
    hidden = [100 * (compute + exchange - both) / exchange for compute, exchange, both in zip(*times, strict=True)]
    figures = [f"{statistics.median(ms):.0f} ({min(ms):.0f}..{max(ms):.0f})" for ms in (*times, hidden)]
    return [f"{result['MiB']:g}", str(result["rounds"]), *figures]


def main() -> int:
    """Measure, print the table, write it."""
    args = arguments()
    if args.rank is not None:
        work(args)
        return 0
    results = start(args)
    head = ["bucket MiB", "rounds", "compute ms", "exchange ms", "step ms", "exchange hidden %"]
    table = [head, *map(row, results)]
    link = args.link.lower().replace(" ", "-").replace("/", "")
    stem = machine.RESULTS / (args.output or f"overlap-{link}-{machine.slug()}")
    sent = f"{args.world} ranks joined by {args.link}, one thread each, {results[0]['MB sent']:.1f} MB sent per rank"
    stem.with_suffix(".md").write_text(f"{machine.one_line()}; {sent}\n\n{machine.markdown_table(table)}\n")
    with stem.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows(table)
    print(f"{sent}\n{machine.markdown_table(table)}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.exit(main())
