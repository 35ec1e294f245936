# SPDX-License-Identifier: Apache-2.0
"""One rank of one launch: train a small model, time backward and step, write what was measured as JSON.

Started by step.py as `step_worker.py JOB_AS_JSON RESULT_FILE`, with RANK, WORLD_SIZE and MASTER_* set.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from setups import CASES, PHASES, VARIANTS, Job
from traffic import TrafficCounter, disable_shared_memory_reduce


class Block(nn.Module):
    """Three linear layers, square, tall and wide, with residual connections."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, hidden] to [batch, hidden]."""
        x = x + self.mix(x)
        return x + self.down(torch.relu(self.up(x)))


def rss_mb() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def forget_peak() -> bool:
    """Restart the kernel's peak-memory mark, so that it covers the timed steps only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_mb() -> float:
    """The kernel's peak-memory mark (VmHWM, what ru_maxrss reports), in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def compiled_graphs() -> int:
    """Graphs torch.compile has built so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def cpu_adam_builds() -> bool:
    """Whether DeepSpeedCPUAdam's operator can be built or is built already."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load()
    except Exception as error:  # compilers fail in many ways, and AdamW has a fallback
        print(f"DeepSpeedCPUAdam does not build, using torch's AdamW: {error}")
        return False
    return True


def build_engine(job: Job):
    """The DeepSpeed engine of a job, and the resident memory just before it was made."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo")
    disable_shared_memory_reduce()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(job.hidden) for _ in range(job.layers)])
    config = job.ds_config(
        has_cpu_adam=VARIANTS[job.variant].optimizer == "AdamW" and CASES[job.case].offload and cpu_adam_builds()
    )
    before = rss_mb()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, before


def check_optimizer(engine, variant: str) -> str:
    """The basic optimizer's class; raises unless it comes from the distribution the variant names."""
    kind = type(engine.basic_optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("deepspeed.muon") != VARIANTS[variant].is_ours:
        raise RuntimeError(
            f"variant {variant!r} runs {name}: deepspeed-muon is "
            f"{'not active' if VARIANTS[variant].is_ours else 'active, but must not be'}"
        )
    return name


class OptimizerClock:
    """Seconds inside the basic optimizer's own `step`, since they were last taken; ZeRO may call it several times."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._spent = self._began = 0.0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_) -> None:
        self._began = time.perf_counter()

    def _end(self, *_) -> None:
        self._spent += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds so far; the count starts again."""
        spent, self._spent = self._spent, 0.0
        return spent


def prepare_kernels(optimizer, variant: str) -> dict:
    """What ours computes with, the plain twins where the variant says so; nothing for others.

    The package is imported for ours only, because importing it activates it.
    """
    if not VARIANTS[variant].is_ours:
        return {}
    from deepspeed.muon.kernels import reference

    if VARIANTS[variant].plain:
        optimizer.kernels = reference.OPERATIONS
    kernels = optimizer.kernels
    return {"kernels": kernels.name, "symmetric": kernels.square is not reference.square}


def workspace_mb(optimizer) -> float | None:
    """Scratch memory that ours keeps between steps, the exchange's buffers included, in MB."""
    work = getattr(optimizer, "_work", None)
    return work.nbytes() / 1e6 if work is not None else None


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """True storage bytes of the optimizer's state by key; a shared storage is counted once."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in seen:
                continue
            seen.add(value.untyped_storage().data_ptr())
            sizes[name] = sizes.get(name, 0) + value.untyped_storage().nbytes()
    return sizes


def timed_step(engine, batch: torch.Tensor, counter: TrafficCounter) -> dict[str, float]:
    """One training step; seconds by phase. A barrier before each makes the ranks' times comparable."""
    seconds: dict[str, float] = {}

    def phase(name: str, work: Callable):
        torch.distributed.barrier()
        counter.phase = name
        begin = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - begin
        counter.phase = "other"
        return result

    loss = phase("forward", lambda: engine(batch).float().square().mean())
    phase("backward", lambda: engine.backward(loss))
    phase("step", engine.step)
    return seconds


def measure(job: Job, engine, counter: TrafficCounter) -> dict:
    """Warm up, then time the steps and count their traffic; resident memory is read after each."""
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    clock = OptimizerClock(engine.basic_optimizer)
    resident: list[float] = []

    def train(steps: int) -> list[dict[str, float]]:
        shape, seconds = (job.batch, job.hidden), []
        for _ in range(steps):
            batch = torch.randn(shape, generator=generator).bfloat16()
            seconds.append(timed_step(engine, batch, counter) | {"optimizer": clock.take()})
            resident.append(rss_mb())
        return seconds

    warmup = train(job.warmup)
    counter.reset()
    graphs, peak_in_warmup, has_peak = compiled_graphs(), peak_mb(), forget_peak()
    seconds = train(job.steps)
    peak = peak_mb()
    return {
        "first_seconds": warmup[0] if warmup else seconds[0],
        "seconds": seconds,
        "resident_mb": resident,
        "megabytes": {phase: counter.megabytes(phase) / job.steps for phase in PHASES},
        "collectives": counter.by_collective(),
        "peak_mb": max(peak, peak_in_warmup),
        "peak_in_steps_mb": peak if has_peak else None,
        "compiled_while_timed": compiled_graphs() - graphs,
    }


def main() -> None:
    """Run the job and write the result."""
    job, result_file = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    counter = TrafficCounter().install()
    engine, before = build_engine(job)
    result = {"optimizer": check_optimizer(engine, job.variant)} | prepare_kernels(engine.basic_optimizer, job.variant)
    result |= measure(job, engine, counter)
    result["state_bytes"] = state_bytes(engine.basic_optimizer)
    result["workspace_mb"] = workspace_mb(engine.basic_optimizer)
    result["before_mb"] = before
    result_file.write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
