# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch of network.py: timed steps with the optimizer's phases, then the exchange alone.

Started as `network_worker.py JOB_AS_JSON RESULT_FILE`; BUCKETS_MIB in the environment lists sizes of a bucket to try.
"""

import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from setups import PHASES, VARIANTS, Job
from step_worker import build_engine, check_optimizer, timed_step
from traffic import TrafficCounter


class LinkCounter(TrafficCounter):
    """Counts besides what this host's network interface has sent in each phase; zero on a loopback device."""

    def __init__(self) -> None:
        name = os.environ["GLOO_SOCKET_IFNAME"]
        self._file = Path("/sys/class/net") / name / "statistics/tx_bytes" if name != "lo" else None
        self._last, self.link_megabytes = 0.0, defaultdict(float)
        super().__init__()

    @property
    def phase(self) -> str:
        """The phase that is measured."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        total = int(self._file.read_text()) / 1e6 if self._file else 0.0
        if self._last:
            self.link_megabytes[self._phase] += total - self._last
        self._phase, self._last = name, total


def plan_anew(optimizer, mebibytes: float) -> None:
    """Let the steps from now on have buckets of this size."""
    from deepspeed.muon import optimizer as module
    from deepspeed.muon.plan import plan

    module.make_plan = functools.partial(plan.make_plan, bucket_bytes=int(mebibytes * 2**20))
    optimizer.bind(optimizer.all_partitions, optimizer.exchange.dtype, optimizer.exchange.device)


class PhaseClock:
    """Seconds by phase of one optimizer, since `take` was called last; one around `step` is `optimizer`."""

    def __init__(self, optimizer) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        if hasattr(optimizer, "phase"):
            optimizer.phase = self.measure
        step = optimizer.step

        @functools.wraps(step)
        def measured(*args, **kwargs):
            with self.measure("optimizer"):
                return step(*args, **kwargs)

        optimizer.step = measured

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase."""
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What was added, and start anew."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


def exchange_alone(optimizer, repeats: int) -> float:
    """Seconds of all the collectives of a step with nothing computed: the median."""
    seconds = []
    for _ in range(repeats):
        torch.distributed.barrier()
        begin = time.perf_counter()
        for plan in optimizer.plans:
            optimizer.exchange.run(plan, *[lambda buffers: None] * 3)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure(job: Job, engine, counter: LinkCounter, sizes: list[float]) -> list[dict]:
    """Warm up, then time the steps; one record per size of a bucket, between which every step changes."""
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    clock, optimizer = PhaseClock(engine.basic_optimizer), engine.basic_optimizer
    records: list[dict] = [{"bucket": size, "steps": []} for size in sizes or [None]]
    for number in range(job.warmup + job.steps):
        if number == job.warmup:
            counter.reset()
        for record in records:
            if record["bucket"]:
                plan_anew(optimizer, record["bucket"])
            batch = torch.randn((job.batch, job.hidden), generator=generator).bfloat16()
            clock.take()
            counter.link_megabytes.clear()
            seconds = timed_step(engine, batch, counter)
            seconds |= {f"phase {name}": value for name, value in clock.take().items()}
            seconds |= {f"link {phase}": counter.link_megabytes[phase] for phase in PHASES}
            if number >= job.warmup:
                record["steps"].append(seconds)
    for record in records:
        record["megabytes"] = {phase: counter.megabytes(phase) / job.steps / len(records) for phase in PHASES}
        if VARIANTS[job.variant].is_ours:
            if record["bucket"]:
                plan_anew(optimizer, record["bucket"])
            record["rounds"] = sum(len(plan.buckets) for plan in optimizer.plans)
            sent = sum(plan.sent_elements for plan in optimizer.plans)
            record["exchange MB"] = sent * optimizer.exchange.dtype.itemsize / 1e6
            record["exchange alone s"] = exchange_alone(optimizer, 2 * job.steps + 1)
    return records


def main() -> None:
    """Run the job and write the result."""
    job, result_file = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    counter = LinkCounter().install()
    sizes = [float(size) for size in os.environ.get("BUCKETS_MIB", "").split()]
    engine, _ = build_engine(job)
    check_optimizer(engine, job.variant)
    result_file.write_text(json.dumps(measure(job, engine, counter, sizes)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
