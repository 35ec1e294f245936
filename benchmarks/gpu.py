# SPDX-License-Identifier: Apache-2.0
"""Everything on one GPU, in two calls of less than ten minutes each, the most informative parts first."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import torch

from benchmarks import ns, optimizers, ranks, report, training
from benchmarks.rates import Rates, measure, summary
from deepspeed.muon.plan.bucket import Bucket, GridCopy

Rows = Iterator[dict[str, Any]]
#: Part -> its call, the seconds that it may take, and the tests that it is, if it is no function of this module.
PARTS = {
    "exchange": (1, 100, ()),
    "newton_schulz": (1, 120, ()),
    "kernel_tests": (1, 150, ("kernels/test_gpu_kernels.py",)),
    "alone": (2, 120, ()),
    "share": (2, 240, ()),
    "engine_tests": (2, 200, ("zero/test_gpu.py",)),
}
#: Aligned to 16 elements, as the shapes of real models are: Triton compiles other code for those that are not.
ALIGNED, QUICK = ((3, 512, 1024), (2, 1024, 512), (2, 2048, 8192), (1, 4096, 4096)), ((2, 48, 160), (2, 64, 64))


def sent_to_itself(bucket: Bucket) -> Bucket:
    """A bucket of one rank, which owns and holds every matrix, with each run sent from the rank to itself."""
    columns, runs, received, at = iter(bucket.received), [], [], 0
    for run in bucket.runs:
        count = run.copy.numel
        to = GridCopy(at, run.copy.at, 1, count, count) if run.in_place else next(columns)
        received.append(to._replace(at=at))
        runs.append(run._replace(in_place=False, copy=run.copy._replace(at=at)))
        at += count
    changes = {"runs": tuple(runs), "received": tuple(received), "send_counts": (at,), "receive_counts": (at,)}
    return dataclasses.replace(bucket, **changes, travels=True)


def exchange(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The collectives of a step on one rank that sends every matrix to itself: equal weights, and what it costs."""
    size = (2, 32) if quick else (4, 2048)
    job, weights = training.Job("1", "ours", 1, *size, model="qwen", device=device), []
    with ranks.joined():
        for way in ("in place", "to itself"):
            engine, times = training.build_engine(job), []
            optimizer = engine.basic_optimizer
            for key, bound in optimizer._steps.items() if way == "to itself" else ():
                bound.exchange.group = torch.distributed.group.WORLD
                plan = dataclasses.replace(bound.plan, buckets=tuple(map(sent_to_itself, bound.plan.buckets)))
                optimizer._steps[key] = dataclasses.replace(bound, plan=plan)
                assert plan.of_all.slots(plan.travels(staged=False)) > 1
            clock = training.PhaseClock(optimizer, device)
            x = torch.randn(8, job.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
            for _ in range(8):
                engine.backward(engine(x).float().square().mean())
                engine.step()
                times.append(clock.take()["optimizer"])
            weights.append([parameter.detach().cpu() for parameter in engine.module.parameters()])
            engine.destroy()
            same = all(map(torch.equal, weights[0], weights[-1]))
            yield {"way": way, "kernels": optimizer.context.kernels.name, "equal weights": same} | summary(times[3:])
            assert same


def newton_schulz(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """By method, dtype and table: time, share of the roofline, error."""
    found, more = ns.candidates(device, compiled=device != "cpu")[0], ((4, 2048, 8192), (4, 4096, 4096))
    for shape in QUICK if quick else (*ALIGNED, *more):
        yield from ns.rows_of(shape, found, Rates(**rates), device, 0.1 if quick else 3)


def alone(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The step of each optimizer, on the matrices of Qwen3-1.7B; one after the other, to have the memory for itself."""
    for name in ("ours", "torch-muon", "stock-muon", "adamw-fused"):
        found = optimizers.rank("qwen", *(1, 32) if quick else (28, 2048), [name], 8, device)
        phases = {f"{phase} ms": 1e3 * spent for phase, spent in found["phases"].items() if phase != "optimizer"}
        yield {"optimizer": name} | summary(found["times"][name]) | phases


def share(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The optimizer's part of a training step of Qwen3-1.7B's matrices at stage 1, by tokens per step."""
    for tokens in (8,) if quick else (4096, 16384):
        for variant in ("ours", "stock", "adamw"):
            size = {"layers": 1, "hidden": 32} if quick else {"layers": 28, "hidden": 2048}
            job = training.Job("1", variant, 1, **size, batch=tokens, model="qwen", device=device)
            record = training.launch(job, 200)
            total = record["forward s"] + record["seconds"]
            row = {"tokens": tokens, "optimizer": variant, "optimizer ms": 1e3 * record["optimizer s"]}
            row |= {"step ms": 1e3 * record["step s"], "forward + backward + step ms": 1e3 * total}
            yield row | {"optimizer's share": record["optimizer s"] / total, "peak MB": record["GPU peak MB"]}


def part(name: str, device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """One part, in a process of its own."""
    files = PARTS[name][2]
    if not files:
        yield from globals()[name](device, quick, rates)
    elif device == "cuda":
        paths = [str(report.ROOT / "tests/unit/ops/muon" / file) for file in files]
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths], check=True)
        yield {"passed": " ".join(files)}


def gpu(
    call: int = 1,
    parts: Annotated[tuple[str, ...], PARTS] = (),
    device: Annotated[str, ("cuda", "cpu")] = "cuda",
    quick: bool = False,
    output: str = "",
) -> str:
    """Everything on one GPU, in two calls of less than ten minutes, the most informative parts first.

    Each part has a process and a time limit of its own; where it fails its rows so far are kept, and the others go on.
    The exit code is 1 then. With --device cpu --quick all of it but the tests runs on a CPU.

    Args:
        call: 1 products, exchange, Newton-Schulz, tests of kernels; 2 optimizers, training, tests of engines
        parts: these instead of those of the call
        device: where
        quick: tiny sizes, to see that it runs
        output: base name of the result files; by default the GPU's
    """
    name = output or f"gpu-{report.slug(torch.cuda.get_device_name() if device == 'cuda' else 'cpu')}-{call}"
    rates, rows, failed = measure(1, 8, device), [], []
    sections = [str(rates)]
    for of in parts or [of for of, (number, *_) in PARTS.items() if number == call]:
        setting = {"name": of, "device": device, "quick": quick, "rates": dataclasses.asdict(rates)}
        try:
            (found,) = ranks.run(part, setting, 1, PARTS[of][1] * (1 if device == "cuda" else 5), 8, device)
        except ranks.RanksFailed as error:
            print(f"FAILED: {error}", file=sys.stderr, flush=True)
            failed.append(of)
            found = error.results or []
        rows += [{"part": of} | row for row in found]
        sections.append(f"## {of}\n\n{report.table(found)}")
        print(sections[-1], flush=True)
    sections.append(f"FAILED: {', '.join(failed)}" if failed else "Nothing failed.")
    text = report.write(name, f"One GPU: {name}", rows, *sections)
    if failed:
        raise SystemExit(text)
    return text
