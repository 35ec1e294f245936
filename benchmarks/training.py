# SPDX-License-Identifier: Apache-2.0
"""A launch: a model of linear layers trained with one optimizer under ZeRO; time, traffic and memory of its steps.

Nothing of deepspeed-muon is imported before a launch of ours needs it, because that would activate it in others.
"""

import collections
import contextlib
import copy
import dataclasses
import json
import logging
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import ranks
from benchmarks.rates import seconds
from benchmarks.traffic import TrafficCounter


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer. `again`: the variant that it repeats, to show the noise."""

    label: str
    optimizer: str
    params: Mapping[str, Any]
    is_ours: bool = False
    again: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Whether deepspeed-muon is active in the launch."""
        return {} if self.is_ours else {"DS_MUON_AUTOLOAD": "0"}

    def check(self, engine: Any) -> None:
        """Raises unless the engine's optimizer is from the distribution that the variant names."""
        if (module := type(engine.basic_optimizer).__module__).startswith("deepspeed.muon") is not self.is_ours:
            raise RuntimeError(f"{self.label} runs an optimizer of {module}")


MUON, ADAMW = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01}, {"lr": 1e-3, "weight_decay": 0.01}
STOCKS_SCALE, PLAIN = {"adjust_lr_fn": "original"}, {"kernels": "torch"}
STANDARD = {"ns_method": "standard"}  # runs in bf16; the default, gram, in fp16 or fp32
VARIANTS = {
    "stock": Variant("stock Muon", "Muon", MUON),
    "stock-standard": Variant("stock Muon, standard", "Muon", MUON | STANDARD),
    "ours": Variant("deepspeed-muon", "Muon", MUON | STOCKS_SCALE, is_ours=True),
    "ours-torch": Variant("deepspeed-muon, plain PyTorch", "Muon", MUON | STOCKS_SCALE | PLAIN, is_ours=True),
    "adamw": Variant("AdamW", "AdamW", ADAMW),
    "adamw-again": Variant("AdamW again", "AdamW", ADAMW, again="adamw"),
}
#: (label, stage, whether with CPU offload)
CASES = {
    "1": ("stage 1", 1, False),
    "2": ("stage 2", 2, False),
    "3": ("stage 3", 3, False),
    "2-offload": ("stage 2, CPU offload", 2, True),
    "3-offload": ("stage 3, CPU offload", 3, True),
}
PHASES, OUR_PHASES = ("backward", "step"), ("prepare", "exchange", "newton_schulz", "apply")
#: Matrices of a layer by its width; `lone` is one alone, `qwen` are those of Qwen3-1.7B at 2048, which has 28 layers.
LAYERS: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "flat": lambda h: [(h, h)],
    "lone": lambda h: [(h // 4, h)],
    "block": lambda h: [(h, h), (4 * h, h), (h, 4 * h)],
    "qwen": lambda h: [(h, h), (h // 2, h), (h // 2, h), (h, h), (3 * h, h), (3 * h, h), (h, 3 * h)],
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch. `bucket`, MiB of a bucket: of ours, 0 for its own rule. `batch`: rows of [batch, hidden] a rank."""

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
        return LAYERS[self.model](self.hidden) * self.layers

    @property
    def parameters(self) -> int:
        return sum(rows * cols for rows, cols in self.matrices)

    def __str__(self) -> str:
        bucket = f", {self.bucket:g} MiB" * bool(self.bucket)
        return f"{CASES[self.case][0]}, {self.world} ranks, {VARIANTS[self.variant].label}{bucket}"


class Layer(nn.Module):
    """Linear layers around a normalized residual stream, which a matrix of its width, else a mean, returns to."""

    def __init__(self, width: int, matrices: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.ModuleList(nn.Linear(cols, rows, bias=False) for rows, cols in matrices)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to the same."""
        x = nn.functional.rms_norm(x, (self.width,))
        wide = x[:, :1]
        for linear in self.linear:
            y = linear(x if linear.in_features == self.width else torch.relu(wide))
            if linear.out_features == self.width:
                x = x + y
            elif wide.shape == y.shape:
                wide = wide * y
            else:
                x, wide = x + wide.mean(-1, keepdim=True), y
        return x if len(self.linear) > 1 else x + wide.mean(-1, keepdim=True)


def stack(model: str, layers: int, hidden: int, device: str) -> nn.Module:
    """A model, always with the same weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[Layer(hidden, LAYERS[model](hidden)) for _ in range(layers)])


def memory_mb(field: str) -> float:
    """Of this process, in MB: VmRSS, what is resident, or VmHWM, the mark of its peak."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024 / 1e6


def link_mb() -> float:
    """Megabytes that the network interface of gloo has sent so far; 0 for a loopback device."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) / 1e6 if name != "lo" else 0.0


def compiled_graphs() -> int:
    """Graphs that torch.compile has built so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def ds_config(job: Job) -> dict[str, Any]:
    """Its ds_config.json."""
    (_, stage, offload), variant = CASES[job.case], VARIANTS[job.variant]
    zero, params = {"stage": stage}, dict(variant.params)
    if job.bucket:
        params["bucket_bytes"] = int(job.bucket * 2**20)
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    elif variant.optimizer == "AdamW":
        params["torch_adam"] = True  # with offload it is DeepSpeedCPUAdam
    if job.variant.startswith("stock") and stage == 3:
        zero["reduce_scatter"] = False  # stock's Muon raises without it
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": variant.optimizer, "params": params},
        "zero_optimization": zero,
    }


def build_engine(job: Job) -> Any:
    """The DeepSpeed engine of a job."""
    from deepspeed.comm import comm

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if hasattr(comm.cdb, "shm_vector_kernel_level"):
        comm.cdb.shm_vector_kernel_level = 0  # DeepSpeed's all-reduce goes through torch.distributed, to be counted
    model = stack(job.model, job.layers, job.hidden, job.device)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(job))
    VARIANTS[job.variant].check(engine)
    return engine


class PhaseClock:
    """Seconds inside an optimizer's own `step`, as `optimizer`, and of ours inside its phases, by name.

    On a GPU events in the computing stream take them, because waiting for the device would end all overlap.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str = "cpu") -> None:
        self._moments: list[tuple[str, Any, Any]] = []
        self._is_on_gpu = device != "cpu"
        step = contextlib.ExitStack()
        optimizer.register_step_pre_hook(lambda *_: step.enter_context(self.phase("optimizer")))
        if hasattr(optimizer, "observed"):
            optimizer.register_step_pre_hook(lambda *_: step.enter_context(optimizer.observed(self.phase)))
        optimizer.register_step_post_hook(lambda *_: step.close())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside."""
        begin = self._now()
        yield
        self._moments.append((name, begin, self._now()))

    def _now(self) -> Any:
        if not self._is_on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        if self._is_on_gpu:
            torch.cuda.synchronize()
        spent: dict[str, float] = collections.defaultdict(float)
        for name, begin, end in self._moments:
            spent[name] += begin.elapsed_time(end) / 1e3 if self._is_on_gpu else end - begin
        self._moments.clear()
        return dict(spent)


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """True storage bytes of the optimizer's state by key; a shared storage counts once."""
    sizes, seen = collections.defaultdict(int), set()
    for name, value in (item for state in optimizer.state.values() for item in state.items()):
        if isinstance(value, Tensor) and (storage := value.untyped_storage()).data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[name] += storage.nbytes()
    return dict(sizes)


def timed_step(engine: Any, batch: Tensor, counter: TrafficCounter, device: str) -> dict[str, float]:
    """One training step: seconds by phase, and megabytes on the link. A barrier before each makes ranks comparable."""
    loss: list[Tensor] = []
    found = {"forward": seconds(lambda: loss.append(engine(batch).float().square().mean()), device)}
    for name, call in zip(PHASES, (lambda: engine.backward(loss[0]), engine.step), strict=True):
        torch.distributed.barrier()
        counter.phase, sent = name, link_mb()
        found[name] = seconds(call, device)
        found[f"link {name}"] = link_mb() - sent
        counter.phase = ""
    if not torch.isfinite(loss[0]):
        raise RuntimeError("the loss is not finite: steps would be skipped, and their times mean nothing")
    return found


def exchange_alone(optimizer: Any, repeats: int, device: str) -> float:
    """Median seconds of all collectives of one step of ours with nothing computed."""
    times, alone = [], [copy.copy(step) for step in optimizer._partition_steps.values()]
    for step in alone:
        step._is_int8 = False
        step._prepare = step._apply = lambda values, buffers: None
        step._orthogonalize = lambda buffers: None
    nothing = types.SimpleNamespace(open_buckets={}, phase=contextlib.nullcontext)
    for _ in range(repeats):
        torch.distributed.barrier()
        times.append(seconds(lambda: [step.run(nothing) for step in alone], device))
    return statistics.median(times)


def rank(**setting: Any) -> dict[str, Any]:
    """Train as one rank of a job: `times` of the steps, and values of which :func:`merge` takes the maximum or mean
    of all ranks, or those of the first.
    """
    job = Job(**setting)
    torch.set_num_threads(1)
    counter = TrafficCounter()
    with ranks.joined():
        before = memory_mb("VmRSS")
        engine = build_engine(job)
        optimizer = engine.basic_optimizer
        clock, resident = PhaseClock(optimizer, job.device), []
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())

        def train(steps: int) -> list[dict[str, float]]:
            times = []
            for _ in range(steps):
                batch = torch.randn((job.batch, job.hidden), generator=generator).bfloat16().to(job.device)
                times.append(timed_step(engine, batch, counter, job.device) | clock.take())
                resident.append(memory_mb("VmRSS"))
            return times

        warmup, peak, graphs = train(job.warmup), memory_mb("VmHWM"), compiled_graphs()
        counter.megabytes.clear()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the mark of peak memory starts again
        times = train(job.steps)
        if compiled_graphs() > graphs:
            raise RuntimeError("torch.compile ran in timed steps: raise --warmup")
        state, peaks = state_bytes(optimizer), (max(peak, memory_mb("VmHWM")), memory_mb("VmHWM"))
        sent = {f"{phase} MB": counter.megabytes[phase] / job.steps for phase in PHASES}
        largest = {f"{name}, largest rank": value for name, value in sent.items()}
        largest |= {"first step s": sum((warmup or times)[0][phase] for phase in PHASES), "peak MB": peaks[0]}
        largest |= {"peak MB above start": peaks[0] - before, "peak MB above start, timed steps": peaks[1] - before}
        largest["GPU peak MB"] = torch.cuda.max_memory_allocated() / 1e6 if job.device != "cpu" else 0.0
        sent |= {f"link {phase} MB": statistics.median(time[f"link {phase}"] for time in times) for phase in PHASES}
        sent["state bytes/parameter"] = job.world * sum(state.values()) / job.parameters
        first = {"resident MB": resident, "state keys": " ".join(sorted(state))}
        if VARIANTS[job.variant].is_ours:
            from deepspeed.muon.kernels import kernel_set

            symmetric = optimizer.context.kernels.square is not kernel_set.square
            buckets = sum(bucket.travels for plan in optimizer.plans for bucket in plan.buckets)
            first |= {"kernels": optimizer.context.kernels.name, "symmetric": symmetric, "buckets": buckets}
            elements = sum(plan.sent_elements for plan in optimizer.plans)
            largest |= {"exchange MB": elements * optimizer.exchange.dtype.itemsize / 1e6}
            largest |= {"scratch MB": optimizer.workspace.nbytes() / 1e6}
            largest |= {"alone s": exchange_alone(optimizer, 2 * job.steps + 1, job.device)}
            medians = {name: statistics.median(time.get(name, 0.0) for time in times) for name in OUR_PHASES}
            sent |= {f"{name} s": value for name, value in medians.items()}
        return {"times": times, "max": largest, "mean": sent, "first": first}


def merge(job: Job, found: Sequence[dict]) -> dict[str, Any]:
    """One record of a launch; seconds are medians over the steps, each step that of its slowest rank.

    The optimizer's seconds are also those of its fastest rank, as ``optimizer s, fastest rank``.
    """

    def seconds_of(*names: str, of_ranks: Callable[[Iterable[float]], float] = max) -> float:
        steps = zip(*(of_rank["times"] for of_rank in found), strict=True)
        return statistics.median(of_ranks(sum(time[name] for name in names) for time in step) for step in steps)

    record: dict[str, Any] = dataclasses.asdict(job) | found[0]["first"] | {"seconds": seconds_of(*PHASES)}
    record |= {f"{name} s": seconds_of(name) for name in (*PHASES, "forward", "optimizer")}
    record["optimizer s, fastest rank"] = seconds_of("optimizer", of_ranks=min)
    for kind, reduce in {"max": max, "mean": statistics.fmean}.items():
        record |= {name: reduce([of_rank[kind][name] for of_rank in found]) for name in found[0][kind]}
    return record | {"MB": sum(record[f"{phase} MB"] for phase in PHASES)}


def launch(job: Job, timeout: float = 600, places: Sequence[ranks.Place] = ()) -> dict[str, Any]:
    """Run one job, one thread per rank, and return its merged record."""
    settings = {"device": job.device, "environment": VARIANTS[job.variant].environment, "places": places}
    return merge(job, ranks.run(rank, dataclasses.asdict(job), job.world, timeout, **settings))


def rounds(
    jobs: Sequence[Job],
    repeats: int,
    places: Callable[[Job], Sequence[ranks.Place]] = lambda job: (),
    file: Path | None = None,
) -> Iterator[list[dict]]:
    """All records so far, after each launch. The jobs alternate (A B C A B C ...), so that all meet the same drift.

    One failure of a job is forgiven: gloo's threads sometimes abort a rank at its exit, whatever the optimizer. After
    the second it is left out, and SystemExit is raised at the end. Records are added to the file, if there is one, and
    those in it come first; they must be of models of the same size.
    """
    records = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    if {(r["layers"], r["hidden"]) for r in records} - {(job.layers, job.hidden) for job in jobs}:
        raise SystemExit(f"{file} holds launches of another size; name another file")
    failures = collections.Counter()
    for number in range(repeats):
        for job in (job for job in jobs if failures[job] < 2):
            begin = time.perf_counter()
            try:
                records.append(launch(job, places=places(job)))
            except ranks.RanksFailed as error:
                failures[job] += 1
                print(f"FAILED: {job}: {error}", file=sys.stderr, flush=True)
                continue
            if file:
                with file.open("a") as lines:
                    lines.write(json.dumps(records[-1]) + "\n")
            told = f"{records[-1]['seconds']:.3f} s, {records[-1]['MB']:.1f} MB"
            print(f"round {number + 1}, {job}: {told} (launch {time.perf_counter() - begin:.0f} s)", flush=True)
            yield records
    if left_out := [str(job) for job, count in failures.items() if count > 1]:
        raise SystemExit(f"left out: {'; '.join(left_out)}")
