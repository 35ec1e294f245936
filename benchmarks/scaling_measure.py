# SPDX-License-Identifier: Apache-2.0
"""Measured points for scaling.py: the optimizer's step of a small model, and the rates that predict it."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import launcher
import machine
from deepspeed.muon.forecast.estimate import Machine, estimate, pass_bytes
from deepspeed.muon.forecast.layout import Half, Layout
from deepspeed.muon.kernels import selection
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import coefficients
from deepspeed.muon.math.choice import choose_method, kind_of
from deepspeed.muon.math.newton_schulz import orthogonalize
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.plan.cost import cost_model
from setups import Job

WORKER = Path(__file__).resolve().parent / "network_worker.py"
WORLDS = (1, 2, 4)
BATCH = 4


def half_of(job: Job) -> Half:
    """The Muon group of the job's model."""
    d, h = job.hidden, 4 * job.hidden
    shapes = [(d, d), (h, d), (d, h)] * job.layers
    return Half(
        True,
        tuple(MatrixSpec(f"p{i}", shape, True, "", (Block(0, *shape, shape[1]),)) for i, shape in enumerate(shapes)),
    )


def seconds_of(act: Callable[[], object], repeats: int = 7) -> float:
    """The median of some calls after two that are not timed."""
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def rates(job: Job) -> Machine:
    """What one core does alone: Newton-Schulz on the job's shapes, the elementwise passes, and the cost of a run.

    The network's rate and latency are filled in from the exchange alone, by :func:`measure`.
    """
    torch.set_num_threads(1)
    kernels = selection.choose(selection.missing("auto", ["cpu"]))
    work, schedule = Workspace(), coefficients.schedule("simple")
    cost = cost_model("auto", schedule, 2, "cpu")
    flops = seconds = 0.0
    half = half_of(dataclasses.replace(job, layers=1))
    for spec in half.specs:
        x = torch.randn(BATCH, *spec.shape).bfloat16()
        rows, cols = spec.shape
        method = choose_method(rows, cols, "auto", kind_of("cpu", x.element_size()))
        seconds += seconds_of(lambda x=x, method=method: orthogonalize(x, schedule, method, work=work, kernels=kernels))
        flops += BATCH * cost.flops(*spec.shape)
    passes, run = elementwise(2**20, work, kernels), elementwise(64, work, kernels)
    return Machine(
        tflops=flops / seconds / 1e12, memory_gbs=2**20 * pass_bytes(half, 2) / (passes - run) / 1e9, run_us=run * 1e6
    )


def elementwise(numel: int, work: Workspace, kernels: Operations) -> float:
    """Seconds of both passes over one run of so many elements."""
    buffer, grad, param = (torch.randn(numel) for _ in range(3))
    out = torch.empty(numel, dtype=torch.bfloat16)

    def both() -> None:
        kernels.advance(buffer, grad, out, 0.95, True, work)
        kernels.apply_(param, out, 1e-3, 1.0, 0.1, work)

    return seconds_of(both, 21)


def measure(stages: list[int], repeats: int) -> tuple[list[dict], Machine]:
    """Launch every point in turn; returns them with what was predicted, and the rates of one core.

    Two ranks have a core each; four share two cores, so each has half of the rates.
    """
    alone = rates(Job("3", "ours"))
    found: dict[tuple[int, int], list[list[dict]]] = {}
    for _ in range(repeats):
        for world in WORLDS:
            for stage in stages:
                job = Job(str(stage), "ours", world, warmup=2)
                places = [launcher.Place((), {"GLOO_SOCKET_IFNAME": "lo"})] * world
                ranks = [records[0] for records in launcher.results(job, 300, WORKER, places)]
                found.setdefault((world, stage), []).append(ranks)
                print(f"measured: {world} ranks, stage {stage}", flush=True)
    exchange = found.get((2, 3), [[{"exchange alone s": 0.0, "exchange MB": 0.0}]])
    megabytes = exchange[0][0]["exchange MB"]
    seconds = statistics.median(max(rank["exchange alone s"] for rank in ranks) for ranks in exchange)
    network = megabytes / 1e3 / seconds if seconds else Machine().network_gbs
    alone = dataclasses.replace(alone, network_gbs=network, latency_us=0.0, message_us=0.0)
    return [point(world, stage, launches, alone) for (world, stage), launches in found.items()], alone


def point(world: int, stage: int, launches: list[list[dict]], alone: Machine) -> dict:
    """One measured point beside its prediction, in milliseconds; the phases are means of the ranks."""
    share = min(1.0, machine.cores() / world)
    names = ("tflops", "memory_gbs", "network_gbs")
    of_rank = dataclasses.replace(alone, **{name: getattr(alone, name) * share for name in names})
    of_rank = dataclasses.replace(of_rank, run_us=alone.run_us / share)
    predicted = estimate(
        [half_of(Job("3", "ours"))], Layout(stage, world), coefficients.schedule("simple"), 2, "cpu", of_rank, False
    )[0]["step_ms"]

    def median(name: str, over_ranks: Callable) -> float:
        steps = (
            [
                over_ranks(rank["steps"][k].get(f"phase {name}", 0.0) for rank in ranks)
                for k in range(len(ranks[0]["steps"]))
            ]
            for ranks in launches
        )
        return 1e3 * statistics.median(value for launch_steps in steps for value in launch_steps)

    measured = median("optimizer", max)
    return {
        "ranks": world,
        "stage": stage,
        "measured ms": measured,
        "predicted ms": predicted["total"],
        "error": predicted["total"] / measured - 1,
        "Newton-Schulz ms": median("newton_schulz", statistics.fmean),
        "predicted Newton-Schulz ms": predicted["newton_schulz"],
        "elementwise ms": median("prepare", statistics.fmean) + median("apply", statistics.fmean),
        "predicted elementwise ms": predicted["elementwise"],
        "waiting ms": median("exchange", statistics.fmean),
        "predicted exchange ms": predicted["exchange"],
    }
