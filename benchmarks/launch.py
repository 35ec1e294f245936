# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of one job as plain processes, bounded in time, and merges what they measured."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import machine
from setups import PHASES, VARIANTS, Job

WORKER = Path(__file__).resolve().parent / "step_worker.py"


class LaunchFailed(RuntimeError):
    """A rank failed or time ran out; the message holds the ranks' last output."""


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one rank runs: what stands before its command, and what its environment says beside the usual."""

    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """One thread per rank, CPU only, deepspeed-muon on or off as the variant says."""
    inherited = {name: text for name, text in machine.cpu_environment().items() if name != "DS_MUON_AUTOLOAD"}
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job.world,
        "LOCAL_WORLD_SIZE": job.world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    fixed = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    of_rank = {name: str(value) for name, value in ranks.items()}
    return inherited | of_rank | fixed | VARIANTS[job.variant].environment


def start(job: Job, folder: Path, worker: Path, places: Sequence[Place]) -> list[subprocess.Popen]:
    """Start every rank in a process group of its own, output to `rank<i>.log`, result to `rank<i>.json`."""
    port = free_port()
    processes = []
    job_text = json.dumps(dataclasses.asdict(job))
    for rank in range(job.world):
        place = places[rank] if places else Place()
        command = [*place.prefix, sys.executable, str(worker), job_text, str(folder / f"rank{rank}.json")]
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment(job, rank, port) | place.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def stop(processes: list[subprocess.Popen]) -> None:
    """Kill every rank with the compilers it may have started, and reap it."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(processes: list[subprocess.Popen], timeout: float) -> str | None:
    """None when all ranks end well; otherwise what went wrong, as soon as it does."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"ranks ended with {codes}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)
    return f"no end within {timeout:g} s"


def run(job: Job, timeout: float) -> dict:
    """Run one job and return its merged measurement."""
    return merge(job, results(job, timeout))


def results(job: Job, timeout: float, worker: Path = WORKER, places: Sequence[Place] = ()) -> list[dict]:
    """Run one job and return what each rank measured.

    Raises:
        LaunchFailed: a rank failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = start(job, folder, worker, places)
        try:
            problem = wait(processes, timeout)
        finally:
            stop(processes)
        if problem:
            tails = [
                f"--- rank {rank} ---\n{(folder / f'rank{rank}.log').read_text()[-3000:]}" for rank in range(job.world)
            ]
            raise LaunchFailed("\n".join([f"{job.case} {job.variant}: {problem}", *tails]))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(job.world)]


def merge(job: Job, ranks: list[dict]) -> dict:
    """One record of a launch: seconds of the slowest rank (median over steps), traffic, memory."""
    record: dict = {"case": job.case, "variant": job.variant, "optimizer": ranks[0]["optimizer"]}
    steps = [
        {phase: max(rank["seconds"][step][phase] for rank in ranks) for phase in PHASES} for step in range(job.steps)
    ]
    for phase in PHASES:
        sent = [rank["megabytes"][phase] for rank in ranks]
        record[f"{phase} s"] = statistics.median(step[phase] for step in steps)
        record[f"{phase} MB"], record[f"{phase} MB, largest rank"] = statistics.fmean(sent), max(sent)
    record["seconds"] = statistics.median(step["backward"] + step["step"] for step in steps)
    record["MB"] = record["backward MB"] + record["step MB"]
    state = sum(sum(rank["state_bytes"].values()) for rank in ranks)
    record["state bytes/parameter"] = state / job.parameters
    record["state keys"] = " ".join(sorted({key for rank in ranks for key in rank["state_bytes"]}))
    record["peak MB"] = max(rank["peak_mb"] for rank in ranks)
    record["peak MB above start"] = max(rank["peak_mb"] - rank["before_mb"] for rank in ranks)
    in_steps = [rank["peak_in_steps_mb"] - rank["before_mb"] for rank in ranks if rank["peak_in_steps_mb"]]
    record["peak MB above start, timed steps"] = max(in_steps) if in_steps else float("nan")
    record["compiled while timed"] = max(rank["compiled_while_timed"] for rank in ranks)
    record["collectives"] = ranks[0]["collectives"]
    return record
