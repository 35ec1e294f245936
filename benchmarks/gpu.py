# SPDX-License-Identifier: Apache-2.0
"""Everything on one GPU, in six calls of less than seven minutes each, the most informative parts first."""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch

from benchmarks import ns, optimizers, ranks, report, training
from benchmarks.rates import Rates, measure, summary
from deepspeed.muon.exchange.bucket import Bucket, GridCopy

Rows = Iterator[dict[str, Any]]
#: Part -> its call, the seconds that it may take, and the arguments of pytest if it is tests.
PARTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "kernel_tests": (1, 300, ("kernels/test_gpu_kernels.py",)),
    "exchange": (2, 120, ()),
    "resume": (2, 240, ()),
    "newton_schulz": (3, 180, ()),
    "alone": (3, 180, ()),
    "engine_tests": (4, 400, ("zero/test_gpu.py", "-n", "4")),
    "share": (5, 390, ()),
    "profile": (6, 240, ()),
}
#: Aligned to 16 elements, as the shapes of real models are.
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


def send_to_itself(optimizer: Any) -> None:
    """Let the only rank send every matrix to itself through the process group."""
    for key, bound in optimizer._partition_steps.items():
        plan = dataclasses.replace(bound.plan)
        vars(plan)["buckets"] = tuple(
            map(sent_to_itself, bound.plan.buckets)
        )  # in place of those that it would compute
        optimizer._partition_steps[key] = dataclasses.replace(
            bound,
            exchange=dataclasses.replace(bound.exchange, group=torch.distributed.group.WORLD),
            plan=plan,
        )
        assert optimizer._partition_steps[key].slots > 1


def exchange(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The collectives of a step on one rank that sends every matrix to itself: equal weights, and what it costs."""
    size = (2, 32) if quick else (4, 2048)
    job, weights = training.Job("1", "ours", 1, *size, model="qwen", device=device), []
    with ranks.joined():
        for way in ("in place", "to itself"):
            engine, times = training.build_engine(job), []
            optimizer = engine.basic_optimizer
            if way == "to itself":
                send_to_itself(optimizer)
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


def resume(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """Stages 1 to 3 with the defaults of users on one rank: trained, saved, loaded by a new engine; equal bits."""
    size = (2, 32) if quick else (4, 1024)
    with ranks.joined():
        for stage in ("1", "2", "3"):
            job, weights = training.Job(stage, "ours", 1, *size, model="qwen", device=device), []
            with tempfile.TemporaryDirectory() as folder:
                for is_resumed in (False, True):
                    engine = training.build_engine(job)
                    generator = torch.Generator().manual_seed(1)
                    batches = [torch.randn(8, job.hidden, generator=generator).bfloat16() for _ in range(5)]
                    if is_resumed:
                        engine.load_checkpoint(folder)
                    for step in range(3 * is_resumed, 5):
                        engine.backward(engine(batches[step].to(device)).float().square().mean())
                        engine.step()
                        if step == 2:
                            engine.save_checkpoint(folder)
                    shards = [t for p in engine.basic_optimizer.all_partitions for t in p.tensors]
                    weights.append([tensor.detach().cpu() for tensor in shards])
                    dtype = engine.basic_optimizer.ns_dtype
                    engine.destroy()
            same = all(map(torch.equal, *weights))
            yield {"stage": stage, "dtype": dtype, "bits after resume": "equal" if same else "differ"}
            assert same


def newton_schulz(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """By method, dtype and table: time, share of the roofline, error."""
    found, more = ns.candidates(device, compiled=device != "cpu")[0], ((4, 2048, 8192), (4, 4096, 4096))
    for shape in QUICK if quick else (*ALIGNED, *more):
        yield from ns.rows_of(shape, found, Rates(**rates), device, 0.1 if quick else 3)


def alone(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The step of each optimizer, on the matrices of Qwen3-1.7B; one after the other, to have the memory for itself."""
    for name in ("ours", "ours-torch", "torch-muon", "stock-muon", "adamw-fused"):
        found = optimizers.rank("qwen", *(1, 32) if quick else (28, 2048), [name], 8, device)
        phases = {f"{phase} ms": 1e3 * spent for phase, spent in found["phases"].items() if phase != "optimizer"}
        yield {"optimizer": name} | summary(found["times"][name]) | phases


def share(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """The optimizer's part of a training step at stage 1, by tokens per step: matrices of GPT-2 and Qwen3-1.7B."""
    sizes = (("block", 12, 768, 16384), ("qwen", 28, 2048, 4096), ("qwen", 28, 2048, 16384))
    for model, layers, hidden, tokens in (("qwen", 1, 32, 8),) if quick else sizes:
        for variant in ("ours", "stock", "adamw"):
            job = training.Job("1", variant, 1, layers, hidden, batch=tokens, model=model, device=device)
            record = training.launch(job, 200)
            total = record["forward s"] + record["seconds"]
            row = {"matrices": f"{layers} x {model}, {hidden}", "tokens": tokens, "optimizer": variant}
            row |= {"optimizer ms": 1e3 * record["optimizer s"]}
            row |= {"step ms": 1e3 * record["step s"], "forward + backward + step ms": 1e3 * total}
            yield row | {"optimizer's share": record["optimizer s"] / total, "peak MB": record["GPU peak MB"]}


def profile(device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """Our step at stage 3 that sends every matrix to itself: launches, waits of the host, time without a kernel."""
    job = training.Job("3", "ours", 1, *(1, 32) if quick else (8, 2048), model="qwen", device=device)
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] * (device != "cpu"))]
    traces: list[torch.profiler.profile] = []

    def start(*_: Any) -> None:
        traces.append(torch.profiler.profile(activities=activities))
        traces[-1].start()

    with ranks.joined():
        engine = training.build_engine(job)
        send_to_itself(engine.basic_optimizer)
        engine.basic_optimizer.register_step_pre_hook(start)
        engine.basic_optimizer.register_step_post_hook(lambda *_: traces[-1].stop())
        x = torch.randn(8, job.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        for _ in range(4):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        assert not engine.skipped_steps
        engine.destroy()
    events = traces[-1].events() or []
    kernels = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    idle, end = 0.0, kernels[0][0] if kernels else 0.0
    for begin, stop in kernels:
        idle, end = idle + max(0.0, begin - end), max(end, stop)
    names = Counter(event.name for event in events)
    # The profiler itself waits for the device, by cudaDeviceSynchronize.
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize")
    yield {
        "launches": sum(count for name, count in names.items() if re.match("cu(da)?Launch", name)),
        "copies": sum(count for name, count in names.items() if name.startswith("cudaMemcpy")),
        "waits of the host": sum(names[name] for name in waits),
        "kernels": len(kernels),
        "from first to last kernel ms": (end - kernels[0][0]) / 1e3 if kernels else 0.0,
        "idle ms": idle / 1e3,
    }


def tests(arguments: Sequence[str], device: str) -> Rows:
    """Run tests; the part fails if one fails, is skipped, or none is found. On a CPU tests are only found."""
    folder = report.ROOT / "tests/unit/ops/muon"
    files = [str(folder / one) if one.endswith(".py") else one for one in arguments]
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "record.xml"
        how = ["--collect-only", "-qq"] if device == "cpu" else ["-rs", f"--junitxml={record}"]
        line = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *how, *files]
        done = subprocess.run(line, capture_output=True, text=True)
        print(done.stdout, done.stderr, sep="\n", flush=True)
        if done.returncode:  # also if no test was found
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-3000:]}")
        if device == "cpu":  # FILE: NUMBER
            yield {"found": sum(int(count) for count in re.findall(r"^\S+\.py: (\d+)$", done.stdout, re.MULTILINE))}
            return
        cases = [case for suite in ElementTree.parse(record).getroot() for case in suite.iter("testcase")]
    skipped = [str(skip.get("message")) for case in cases for skip in case.iter("skipped")]
    yield {"tests": len(cases), "skipped": len(skipped)}
    if skipped:
        raise RuntimeError(f"{len(skipped)} of {len(cases)} tests were skipped: {'; '.join(sorted(set(skipped)))}")


def part(name: str, device: str, quick: bool, rates: dict[str, float]) -> Rows:
    """One part, in a process of its own."""
    arguments = PARTS[name][2]
    yield from tests(arguments, device) if arguments else globals()[name](device, quick, rates)


def gpu(
    call: int = 1,
    parts: Annotated[tuple[str, ...], PARTS] = (),
    device: Annotated[str, ("cuda", "cpu")] = "cuda",
    quick: bool = False,
    output: str = "",
    keep: str = "",
) -> str:
    """Everything on one GPU, in six calls of less than seven minutes, the most informative parts first.

    Each part has a process and a time limit of its own; where it fails its rows so far are kept, and the others go on.
    The exit code is 1 then. Results are written after every part. With --device cpu --quick all of it runs on a CPU,
    but tests are only found.

    Args:
        call: 1 tests of kernels; 2 exchange and resume; 3 Newton-Schulz, optimizers; 4 tests of engines; 5 Muon's share
            of a step; 6 a profile
        parts: these instead of those of the call
        device: where
        quick: tiny sizes, to see that it runs
        output: base name of the result files; by default the GPU's
        keep: a folder that gets a copy of the result files after every part
    """
    name = output or f"gpu-{report.slug(torch.cuda.get_device_name() if device == 'cuda' else 'cpu')}-{call}"
    rates, rows, failed, text = measure(1, 8, device), [], [], ""
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
        verdict = f"FAILED: {', '.join(failed)}" if failed else "Nothing failed."
        text = report.write(name, f"One GPU: {name}", rows, *sections, verdict)
        if keep:
            Path(keep).mkdir(parents=True, exist_ok=True)
            for file in report.RESULTS.glob(f"{name}.*"):
                shutil.copy(file, keep)
    if failed:
        raise SystemExit(text)
    return text
