# SPDX-License-Identifier: Apache-2.0
"""A launch: a model of linear layers trained with one optimizer under ZeRO; time, traffic and memory of its steps.

Nothing of deepspeed-muon is imported here, because that would activate it in the launches of others.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import ranks
from benchmarks.rates import seconds
from benchmarks.traffic import TrafficCounter


@dataclasses.dataclass(frozen=True)
class Case:
    """A ZeRO configuration."""

    label: str
    stage: int
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer. `again`: the variant that it repeats, to show the noise."""

    label: str
    optimizer: str
    params: Mapping[str, Any]
    is_ours: bool = False
    is_stock_muon: bool = False
    again: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Whether deepspeed-muon is active in the launch."""
        return {} if self.is_ours else {"DS_MUON_AUTOLOAD": "0"}


MUON, ADAMW = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01}, {"lr": 1e-3, "weight_decay": 0.01}
STANDARD = {"ns_method": "standard"}  # runs in bf16; the default, gram, in fp16 or fp32

CASES = {
    "1": Case("stage 1", 1),
    "2": Case("stage 2", 2),
    "3": Case("stage 3", 3),
    "2-offload": Case("stage 2, CPU offload", 2, offload=True),
    "3-offload": Case("stage 3, CPU offload", 3, offload=True),
}
VARIANTS = {
    "stock": Variant("stock Muon", "Muon", MUON, is_stock_muon=True),
    "stock-standard": Variant("stock Muon, standard", "Muon", MUON | STANDARD, is_stock_muon=True),
    "ours": Variant("deepspeed-muon", "Muon", MUON, is_ours=True),
    "ours-torch": Variant("deepspeed-muon, plain PyTorch", "Muon", MUON | {"kernels": "torch"}, is_ours=True),
    "adamw": Variant("AdamW", "AdamW", ADAMW),
    "adamw-again": Variant("AdamW again", "AdamW", ADAMW, again="adamw"),
}
PHASES = ("backward", "step")
OUR_PHASES = ("prepare", "exchange", "newton_schulz", "apply")
#: Matrices of a layer by its width; `qwen` are those of Qwen3-1.7B at 2048, which has 28 layers.
LAYERS: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "flat": lambda h: [(h, h)],
    "block": lambda h: [(h, h), (4 * h, h), (h, 4 * h)],
    "qwen": lambda h: [(h, h), (h // 2, h), (h // 2, h), (h, h), (3 * h, h), (3 * h, h), (h, 3 * h)],
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch. `bucket`: MiB of a bucket of ours, 0 for its own rule. `batch`: rows of [batch, hidden] a rank."""

    case: str
    variant: str
    world: int = 2
    layers: int = 8
    hidden: int = 512
    warmup: int = 4
    steps: int = 5
    batch: int = 8
    bucket: float = 0.0
    model: str = "block"
    device: str = "cpu"

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of the model's weights."""
        return LAYERS[self.model](self.hidden) * self.layers

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(rows * cols for rows, cols in self.matrices)

    def __str__(self) -> str:
        bucket = f", {self.bucket:g} MiB" * bool(self.bucket)
        return f"{CASES[self.case].label}, {self.world} ranks, {VARIANTS[self.variant].label}{bucket}"


class Layer(nn.Module):
    """Linear layers around a residual stream of some width; every matrix gets a gradient.

    What leaves the stream returns by the matrix that takes its size, two of one size as a product; what no matrix
    takes, by its mean.
    """

    def __init__(self, width: int, matrices: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.ModuleList(nn.Linear(cols, rows, bias=False) for rows, cols in matrices)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to the same."""
        wide = x[:, :1]
        for linear in self.linear:
            y = linear(x if linear.in_features == self.width else torch.relu(wide))
            if linear.out_features == self.width:
                x = x + y
            elif wide.shape == y.shape:
                wide = wide * y
            else:
                x, wide = x + wide.mean(-1, keepdim=True), y
        return x


# ---- in a rank ------------------------------------------------------------------------------------------


def rss_mb() -> float:
    """Resident memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_mb() -> float:
    """The kernel's mark of peak memory, in MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def link_mb() -> float:
    """Megabytes that the network interface of gloo has sent so far; 0 for a loopback device."""
    file = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics/tx_bytes"
    return int(file.read_text()) / 1e6 if file.exists() and "/lo/" not in str(file) else 0.0


def compiled_graphs() -> int:
    """Graphs that torch.compile has built so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def ds_config(job: Job) -> dict[str, Any]:
    """The ds_config.json of a job."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    case, variant = CASES[job.case], VARIANTS[job.variant]
    zero, params = {"stage": case.stage}, dict(variant.params)
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if variant.is_stock_muon and case.stage == 3:
        zero["reduce_scatter"] = False  # stock's Muon raises without it
    if variant.optimizer == "AdamW":
        try:
            CPUAdamBuilder().load() if case.offload else params.update(torch_adam=True)
        except Exception as error:  # compilers fail in many ways
            print(f"DeepSpeedCPUAdam does not build, so torch's AdamW is used: {error}")
            params["torch_adam"] = True
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": variant.optimizer, "params": params},
        "zero_optimization": zero,
    }


def build_engine(job: Job) -> Any:
    """The DeepSpeed engine of a job; raises if its optimizer is not from the distribution the variant names."""
    from deepspeed.comm import comm

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if hasattr(comm.cdb, "shm_vector_kernel_level"):
        comm.cdb.shm_vector_kernel_level = 0  # DeepSpeed's all-reduce goes through torch.distributed, to be counted
    variant = VARIANTS[job.variant]
    if job.bucket:
        from deepspeed.muon import optimizer as module

        module.make_plan = functools.partial(module.make_plan, bucket_bytes=int(job.bucket * 2**20))
    torch.manual_seed(0)
    with torch.device(job.device):
        model = nn.Sequential(*[Layer(job.hidden, LAYERS[job.model](job.hidden)) for _ in range(job.layers)])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(job))
    check_optimizer(engine, variant)
    return engine


def check_optimizer(engine: Any, variant: Variant) -> None:
    """Raises unless the engine's optimizer is from the distribution that the variant names."""
    module = type(engine.basic_optimizer).__module__
    if module.startswith("deepspeed.muon") != variant.is_ours:
        raise RuntimeError(
            f"{variant.label} runs an optimizer of {module}: is deepspeed-muon active, or must it not be?"
        )


class PhaseClock:
    """Seconds inside the optimizer's own `step`, as `optimizer`, and of ours inside its phases, by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str = "cpu") -> None:
        self._spent: dict[str, float] = collections.defaultdict(float)
        self._began = 0.0
        self._synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)
        if hasattr(optimizer, "phase"):
            optimizer.phase = self._phase

    def _begin(self, *_) -> None:
        self._synchronize()
        self._began = time.perf_counter()

    def _end(self, *_) -> None:
        self._synchronize()
        self._spent["optimizer"] += time.perf_counter() - self._began

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._spent[name] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        spent, self._spent = dict(self._spent), collections.defaultdict(float)
        return spent


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """True storage bytes of the optimizer's state by key; a shared storage counts once."""
    storages = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                storages.setdefault(value.untyped_storage().data_ptr(), (name, value.untyped_storage().nbytes()))
    sizes: dict[str, int] = collections.defaultdict(int)
    for name, size in storages.values():
        sizes[name] += size
    return dict(sizes)


def timed_step(engine: Any, batch: Tensor, counter: TrafficCounter, device: str) -> dict[str, float]:
    """One training step: seconds by phase, and megabytes on the link. A barrier before each makes ranks comparable."""
    loss, found = engine(batch).float().square().mean(), {}
    for name, call in zip(PHASES, (lambda: engine.backward(loss), engine.step), strict=True):
        torch.distributed.barrier()
        counter.phase, sent = name, link_mb()
        found[name] = seconds(call, device)
        found[f"link {name}"] = link_mb() - sent
        counter.phase = "other"
    return found


def exchange_alone(optimizer: Any, repeats: int) -> dict[str, float]:
    """Seconds of all collectives of one step of ours with nothing computed; its rounds, and megabytes sent."""
    times = []
    for _ in range(repeats):
        torch.distributed.barrier()
        run = optimizer.exchange.run
        times.append(seconds(lambda: [run(plan, *[lambda buffers: None] * 3) for plan in optimizer.plans]))
    sent = sum(plan.sent_elements for plan in optimizer.plans) * optimizer.exchange.dtype.itemsize
    rounds = sum(len(plan.buckets) for plan in optimizer.plans)
    return {"alone s": statistics.median(times), "exchange MB": sent / 1e6, "exchange rounds": rounds}


def rank(**setting: Any) -> dict[str, Any]:
    """Train as one rank of a job, and say what was measured."""
    job = Job(**setting)
    on_gpu, is_ours = job.device != "cpu", VARIANTS[job.variant].is_ours
    if not on_gpu:
        torch.set_num_threads(1)
    counter = TrafficCounter().install()
    with ranks.joined():
        before = rss_mb()
        engine = build_engine(job)
        optimizer = engine.basic_optimizer
        clock, resident = PhaseClock(optimizer, job.device), []
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())

        def train(steps: int) -> list[dict[str, float]]:
            times = []
            for _ in range(steps):
                batch = torch.randn((job.batch, job.hidden), generator=generator).bfloat16().to(job.device)
                times.append(timed_step(engine, batch, counter, job.device) | clock.take())
                resident.append(rss_mb())
            return times

        warmup = train(job.warmup)
        counter.reset()
        graphs, peaks = compiled_graphs(), [peak_mb()]
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the mark of peak memory starts again
        times = train(job.steps)
        result = {"times": times, "first": (warmup or times)[0], "resident MB": resident, "before MB": before}
        result |= {"peak MB": max(*peaks, peak_mb()), "peak MB, timed steps": peak_mb()}
        result |= {"GPU peak MB": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else 0.0}
        result["MB"] = {phase: counter.megabytes(phase) / job.steps for phase in PHASES}
        result |= {"state bytes": state_bytes(optimizer), "compiled while timed": compiled_graphs() - graphs}
        result["optimizer"] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if is_ours:
            from deepspeed.muon.kernels import reference

            result |= exchange_alone(optimizer, 2 * job.steps + 1)
            result |= {"kernels": optimizer.kernels.name, "workspace MB": optimizer._work.nbytes() / 1e6}
            result["symmetric"] = optimizer.kernels.square is not reference.square
        return result


# ---- launches -------------------------------------------------------------------------------------------


def merge(job: Job, found: Sequence[dict]) -> dict[str, Any]:
    """One record of a launch: medians over the steps, each step that of its slowest rank; our phases as means."""

    def slowest(*names: str) -> float:
        steps = zip(*(of_rank["times"] for of_rank in found), strict=True)
        return statistics.median(max(sum(time[name] for name in names) for time in step) for step in steps)

    def mean(name: str) -> float:
        of_ranks = (statistics.median(time.get(name, 0.0) for time in of_rank["times"]) for of_rank in found)
        return statistics.fmean(of_ranks)

    def largest(name: str) -> float:
        return max(of_rank[name] for of_rank in found)

    record: dict[str, Any] = dataclasses.asdict(job) | {"class": found[0]["optimizer"]}
    for phase in PHASES:
        sent = [of_rank["MB"][phase] for of_rank in found]
        record |= {f"{phase} s": slowest(phase), f"{phase} MB": statistics.fmean(sent)}
        record |= {f"{phase} MB, largest rank": max(sent), f"link {phase} MB": mean(f"link {phase}")}
    record |= {"seconds": slowest("backward", "step"), "optimizer s": slowest("optimizer")}
    record |= {f"{name} s": mean(name) for name in OUR_PHASES}
    record["first step s"] = max(sum(of_rank["first"][phase] for phase in PHASES) for of_rank in found)
    record["MB"] = record["backward MB"] + record["step MB"]
    state = sum(sum(of_rank["state bytes"].values()) for of_rank in found)
    record["state bytes/parameter"] = state / job.parameters
    record["state keys"] = " ".join(sorted({key for of_rank in found for key in of_rank["state bytes"]}))
    record |= {name: largest(name) for name in ("peak MB", "GPU peak MB")}
    for name in ("peak MB", "peak MB, timed steps"):
        record[f"{name}, above start"] = max(of_rank[name] - of_rank["before MB"] for of_rank in found)
    record |= {"compiled while timed": largest("compiled while timed"), "resident MB": found[0]["resident MB"]}
    if "kernels" in found[0]:
        record |= {name: found[0][name] for name in ("kernels", "symmetric", "exchange rounds")}
        record |= {name: largest(name) for name in ("workspace MB", "alone s", "exchange MB")}
    return record


def launch(job: Job, timeout: float = 600, places: Sequence[ranks.Place] = ()) -> dict[str, Any]:
    """Run one job, one thread per rank on a CPU, and return its merged record."""
    settings = {"device": job.device, "environment": VARIANTS[job.variant].environment, "places": places}
    found = ranks.run(rank, dataclasses.asdict(job), job.world, timeout, **settings)
    if max(of_rank["compiled while timed"] for of_rank in found):
        print(f"{job}: torch.compile ran in timed steps; raise --warmup", file=sys.stderr, flush=True)
    return merge(job, found)


def rounds(
    jobs: Sequence[Job],
    repeats: int,
    timeout: float = 600,
    places: Callable[[Job], Sequence[ranks.Place]] = lambda job: (),
    records_file: str = "",
) -> Iterator[list[dict]]:
    """All records so far, after each launch. The jobs alternate (A B C A B C ...), so that all meet the same drift.

    One failure of a job is forgiven: gloo's threads sometimes abort a rank at its exit, whatever the optimizer. After
    the second it is left out, and SystemExit is raised at the end.

    Args:
        records_file: records are added to it, and those in it come first; they must be of models of the same size.
    """
    file, failures = Path(records_file), collections.Counter()
    records = [json.loads(line) for line in file.read_text().splitlines()] if records_file and file.exists() else []
    if {(r["world"], r["layers"], r["hidden"]) for r in records} - {(j.world, j.layers, j.hidden) for j in jobs}:
        raise SystemExit(f"{file} holds launches of another size; name another file")
    for number in range(repeats):
        for job in (job for job in jobs if failures[job] < 2):
            begin = time.perf_counter()
            try:
                record = launch(job, timeout, places(job))
            except ranks.RanksFailed as error:
                failures[job] += 1
                print(f"FAILED: {job}: {error}", file=sys.stderr, flush=True)
                continue
            records.append(record)
            if records_file:
                with file.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
            told = f"{record['seconds']:.3f} s, {record['MB']:.1f} MB"
            print(f"round {number + 1}, {job}: {told} (launch {time.perf_counter() - begin:.0f} s)", flush=True)
            yield records
    if any(count > 1 for count in failures.values()):
        raise SystemExit("left out: " + "; ".join(str(job) for job, count in failures.items() if count > 1))
