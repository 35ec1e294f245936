# SPDX-License-Identifier: Apache-2.0
"""Kernels that one rank launches in a step, beside those of Newton-Schulz: from its plan, and from a trace."""

import contextlib
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch

from benchmarks import report, scaling
from deepspeed.muon.cli.model import build
from deepspeed.muon.config.schema import parse
from deepspeed.muon.exchange.buffers import BucketBuffers
from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.forecast.layout import Layout, StepPart, group_specs, lay_out
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan import bucket
from deepspeed.muon.plan.bucket import Bucket, Scale
from deepspeed.muon.plan.cost import CostModel, cost_model
from deepspeed.muon.plan.plan import BUCKET_BYTES, Plan, global_plan
from deepspeed.muon.plan.program import Send
from deepspeed.muon.seam import replaced
from deepspeed.muon.step.binding import StepContext
from deepspeed.muon.step.partition_step import PartitionStep
from deepspeed.muon.tuning import Candidates

#: A known model, and the ranks that it is planned for.
SIZES = {
    "llama3-1b": (scaling.EXAMPLES / "llama_1b.json", 8),
    "llama3-8b": (scaling.MODELS["llama3-8b"].source, 8),
    "llama3-70b": (scaling.MODELS["llama3-70b"].source, 64),
}
#: Widths are divided by this where steps are traced, and with them buckets and sub-groups by its square.
SMALLER = 16
SUB_GROUP = 10**9
CPU = torch.device("cpu")
#: Whether runs and parts go together.
WAYS = (False, True)
NOTES = """Of the rank that launches most. One by one: a kernel for each span of neighbouring runs, in each elementwise
pass, and a copy for each part that it receives and for each that it sends back. Together: the kernels of a step on a
GPU with Triton, at most. Elsewhere each span has a kernel or more; the copies are the same. Traced: the calls of a step
of such a rank without its collectives, counted by torch.profiler on the CPU, with the same matrices of widths divided
by 16, of which more are neighbours in one span."""


def launches(models: Annotated[tuple[str, ...], SIZES] = tuple(SIZES), stages: tuple[int, ...] = (1, 2, 3)) -> str:
    """Kernels that one rank launches in a step, beside those of Newton-Schulz.

    Args:
        models: which
        stages: of ZeRO
    """
    rows = [row(name, stage) for name in models for stage in stages]
    return report.write("launches", "Kernel launches of a step", rows, report.table(rows), NOTES)


def row(name: str, stage: int) -> dict[str, Any]:
    """The counts of one model at one stage."""
    path, world = SIZES[name]
    parts = muon_parts(path, Layout(stage, world, SUB_GROUP))
    counts = {way: [planned(parts, plans_of(parts, r, BUCKET_BYTES, way), way) for r in range(world)] for way in WAYS}
    together = counts[True]
    busiest = max(range(world), key=lambda rank: sum(together[rank]))
    found = {"model": name, "ranks": world, "stage": stage, "one by one": max(map(sum, counts[False]))}
    found |= {"together": sum(together[busiest])} | together[busiest]._asdict()
    with tempfile.TemporaryDirectory() as folder:
        (small := Path(folder) / "config.json").write_text(json.dumps(smaller(json.loads(Path(path).read_text()))))
        parts = muon_parts(small, Layout(stage, world, SUB_GROUP // SMALLER**2))
        kernels = noted(dataclasses.replace(reference.OPERATIONS, runs=reference.RUNS))
        for way in WAYS:
            plans = plans_of(parts, busiest, BUCKET_BYTES // SMALLER**2, way)
            count, wanted = traced(fake_step(build(str(small)), parts, plans, way, kernels)), planned(parts, plans, way)
            assert count == wanted, f"{count} in the trace, {wanted} planned"
            found[f"traced {'together' if way else 'one by one'}"] = sum(count)
    print(found, flush=True)
    return found


class Launches(NamedTuple):
    """Kernels of one rank's step, by phase."""

    prepare: int
    unpack: int
    pack: int
    apply: int


def launches_of(buckets: Iterable[Bucket], scale: Scale, together: bool) -> Launches:
    """Return the kernels of each phase over all buckets: one for all spans of a call if ``together``, else for each."""
    spans = copies = 0
    for one in buckets:
        for call in one.run_groups(scale):
            spans += 1 if together else max(1, len(one.spans(call, staged=False)))
        copies += len(one.receive_copies)
    return Launches(spans, copies, copies, spans)


HOST_NOTES = """The first of all ranks, with matrices of 128 x 128 in one group, so that nothing but calls takes time:
processor time of a step without collectives, Newton-Schulz and the kernels that update shards. What is left is Python
and its calls of torch. Together: one kernel for all runs of a bucket, as on a GPU with Triton. One by one: a call for
each run, as on a CPU, whose kernels do nothing in this benchmark."""


def _nothing(*_: Any) -> None:
    pass


#: Kernels that leave the shards as they are.
IDLE = dataclasses.replace(
    reference.OPERATIONS,
    advance=_nothing,
    apply_=_nothing,
    runs=dataclasses.replace(reference.RUNS, advance=_nothing, apply_=_nothing),
)


def host(matrices: tuple[int, ...] = (1200, 12000), ranks: int = 1024, stage: int = 3, steps: int = 9) -> str:
    """Milliseconds of a step that the host spends beside kernels and collectives.

    Args:
        matrices: how many the model has
        ranks: that share them
        stage: of ZeRO
        steps: of which the median is taken
    """
    rows = []
    for count in matrices:
        model = torch.nn.ModuleList([torch.nn.Linear(128, 128, bias=False, device="meta") for _ in range(count)])
        groups = group_specs(model, scaling.PLAIN)
        parts = [part for part in lay_out(groups, Layout(stage, ranks, SUB_GROUP)) if part.group.use_muon]
        plans = plans_of(parts, 0, BUCKET_BYTES, together=True)
        row = {"matrices": count, "ranks": ranks, "stage": stage}
        for way in WAYS:
            step = fake_step(model, parts, plans, way, IDLE)
            seconds = []
            for _ in range(steps + 1):
                began = time.thread_time()
                step()
                seconds.append(time.thread_time() - began)
            row[f"{'together' if way else 'one by one'}, ms"] = round(1e3 * statistics.median(seconds[1:]), 2)
        print(row, flush=True)
        rows.append(row)
    return report.write(report.name_of("host"), "Host work of a step", rows, report.table(rows), HOST_NOTES)


def muon_parts(path: Path, layout: Layout) -> list[StepPart]:
    return [part for part in lay_out(group_specs(build(str(path)), parse({"lr": 1e-3})), layout) if part.group.use_muon]


def smaller(config: dict[str, Any]) -> dict[str, Any]:
    """The same matrices with widths divided; vocabulary and positions have no part in it."""
    widths = {key: config[key] // SMALLER for key in ("hidden_size", "intermediate_size")}
    return config | widths | {"vocab_size": 8, "max_position_embeddings": 8}


def cost_of(part: StepPart) -> CostModel:
    """As on an accelerator, in bf16."""
    method = part.group.method(scaling.PLAIN.schedule, "bf16")
    return cost_model(method, scaling.PLAIN.schedule, "bf16", 2, "cuda")


def plans_of(parts: Sequence[StepPart], rank: int, bucket_bytes: int, together: bool) -> list[Plan]:
    """One rank's plans; without ``together`` each part of a matrix is received by a copy of its own."""
    changes = {} if together else {"_merged": lambda copies, merge: list(copies)}
    with mock.patch.multiple(bucket, **changes) if changes else contextlib.nullcontext():
        return [global_plan(p.shards, p.world_size, cost_of(p), bucket_bytes).view(rank) for p in parts]


def planned(parts: Sequence[StepPart], plans: Sequence[Plan], together: bool) -> Launches:
    """The sum over the parts of a step."""

    def count(part: StepPart, of_part: Plan) -> Launches:
        return launches_of(of_part.buckets, lambda rows, cols: part.group.scale(Block(0, rows, cols, cols)), together)

    return Launches(*map(sum, zip(*map(count, parts, plans), strict=True)))


# ---- the trace --------------------------------------------------------------------------------------------------


class Alone(Exchange):
    """An exchange that sends nothing: a rank's step on buffers that hold whatever they held."""

    def _launch(self, buffers: BucketBuffers, operation: Send) -> None:
        pass

    def largest(self, values: torch.Tensor, names: Sequence[str]) -> None:
        """Keep this rank's values."""


def fake_step(
    model: torch.nn.Module,
    parts: Sequence[StepPart],
    plans: Sequence[Plan],
    together: bool,
    kernels: Operations = reference.OPERATIONS,
) -> Callable[[], None]:
    """A step of one rank with random gradients, without communication and Newton-Schulz."""
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, kernels="torch")
    index = next(i for i, group in enumerate(optimizer.param_groups) if group["use_muon"])
    optimizer.context = StepContext(kernels=dataclasses.replace(kernels, runs=kernels.runs if together else None))
    flat = [torch.nn.Parameter(torch.randn(part.numel)) for part in parts]
    for tensor in flat:
        tensor.grad = torch.randn_like(tensor)
    held = zip(flat, parts, plans, strict=True)
    partitions = [Partition(index, (t,), part.shards, None, p.rank, p.of_all.world_size) for t, part, p in held]
    candidates = Candidates.from_config(
        optimizer.config, optimizer.kernels_on(CPU), optimizer.ns_methods, CPU, has_bf16=True
    )
    optimizer.bind(partitions, candidates.choose_untimed(optimizer.shapes), CPU)
    for (key, bound), of_part in zip(optimizer._steps.items(), plans, strict=True):
        facts = {f.name: getattr(bound.exchange, f.name) for f in dataclasses.fields(Exchange)}
        optimizer._steps[key] = dataclasses.replace(bound, plan=of_part, exchange=Alone(**facts))

    def step() -> None:
        for tensor in flat:
            for group in optimizer.param_groups:
                group["params"] = [tensor] if group["use_muon"] else []
            with replaced(PartitionStep, orthogonalize=lambda original, step, buffers, calls: [*calls]):
                optimizer.step()

    return step


def noted(kernels: Operations) -> Operations:
    """The same operations, which leave their name in a trace."""

    def under(name: str, operation: Callable) -> Callable:
        @functools.wraps(operation)
        def call(*args: Any) -> Any:
            with torch.profiler.record_function(name):
                return operation(*args)

        return call

    names = {"advance": "prepare", "advance_rounded": "prepare", "apply_": "apply"}
    single = {field: under(name, getattr(kernels, field)) for field, name in names.items()}
    if kernels.runs is not None:
        runs = {field: under(names[field], getattr(kernels.runs, field)) for field in ("advance", "apply_")}
        single["runs"] = dataclasses.replace(kernels.runs, **runs)
    return dataclasses.replace(kernels, **single)


@contextlib.contextmanager
def noted_copies() -> Iterator[None]:
    """Inside, unpacking and packing leave their names in a trace."""
    originals = {name: getattr(BucketBuffers, name) for name in ("unpack", "pack")}

    def under(name: str) -> Callable[[BucketBuffers], None]:
        def call(buffers: BucketBuffers) -> None:
            with torch.profiler.record_function(name):
                originals[name](buffers)

        return call

    for name in originals:
        setattr(BucketBuffers, name, under(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(BucketBuffers, name, original)


def traced(step: Callable[[], Any]) -> Launches:
    """Counts calls of noted operations, and copies inside of packing and unpacking."""
    with noted_copies(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    counts = dict.fromkeys(Launches._fields, 0)
    for event in profile.events():
        if event.name in ("prepare", "apply"):
            counts[event.name] += 1
        elif event.name == "aten::copy_" and event.cpu_parent and event.cpu_parent.name in ("unpack", "pack"):
            counts[event.cpu_parent.name] += 1
    return Launches(**counts)
