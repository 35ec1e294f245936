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


def environment(rank: int, world: int, port: int, threads: int, device: str = "cpu") -> dict[str, str]:
    """The rank's place in the job; nothing of the caller's switches deepspeed-muon on or off."""
    given = machine.cpu_environment() if device == "cpu" else dict(os.environ)
    inherited = {name: text for name, text in given.items() if name != "DS_MUON_AUTOLOAD"}
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": 1,
    }
    return inherited | {name: str(value) for name, value in ranks.items()}


def start(
    command: list[str], environments: list[dict[str, str]], folder: Path, places: Sequence[Place] = ()
) -> list[subprocess.Popen]:
    """Start every rank in a process group of its own, output to `rank<i>.log`, result to `rank<i>.json`."""
    processes = []
    for rank, env in enumerate(environments):
        place = places[rank] if places else Place()
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [*place.prefix, sys.executable, *command, str(folder / f"rank{rank}.json")],
                    env=env | place.environment,
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


def end(*_) -> None:
    """What SIGTERM does while ranks run: they are stopped on the way out, which the default action would not do."""
    sys.exit(128 + signal.SIGTERM)


def run_ranks(
    command: list[str],
    world: int,
    timeout: float,
    threads: int = 1,
    extra: dict[str, str] | None = None,
    device: str = "cpu",
    places: Sequence[Place] = (),
) -> list[dict]:
    """Run `python COMMAND RESULT_FILE` as every rank of one job; what each wrote to its file, as JSON.

    Raises:
        LaunchFailed: a rank failed or time ran out.
    """
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        environments = [environment(rank, world, port, threads, device) | (extra or {}) for rank in range(world)]
        processes = start(command, environments, folder, places)
        try:
            problem = wait(processes, timeout)
        finally:
            stop(processes)
        if problem:
            logs = [(folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(world)]
            tails = [f"--- rank {rank} ---\n{text}" for rank, text in enumerate(logs)]
            raise LaunchFailed("\n".join([problem, *tails]))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def run(job: Job, timeout: float) -> dict:
    """Run one job, one thread per rank, and return its merged measurement."""
    return merge(job, results(job, timeout))


def results(job: Job, timeout: float, worker: Path = WORKER, places: Sequence[Place] = ()) -> list[dict]:
    """Run one job, one thread per rank, and return what each rank measured.

    Raises:
        LaunchFailed: a rank failed, or they did not end in time.
    """
    command = [str(worker), json.dumps(dataclasses.asdict(job))]
    try:
        return run_ranks(command, job.world, timeout, extra=VARIANTS[job.variant].environment, places=places)
    except LaunchFailed as error:
        raise LaunchFailed(f"{job.case} {job.variant}: {error}") from error


def merge(job: Job, ranks: list[dict]) -> dict:
    """One record of a launch: seconds of the slowest rank (median over steps), traffic, memory."""
    record: dict = {"case": job.case, "variant": job.variant, "optimizer": ranks[0]["optimizer"]}
    record |= {"world": job.world, "layers": job.layers, "hidden": job.hidden}
    steps = [
        {phase: max(rank["seconds"][step][phase] for rank in ranks) for phase in (*PHASES, "optimizer")}
        for step in range(job.steps)
    ]
    for phase in PHASES:
        sent = [rank["megabytes"][phase] for rank in ranks]
        record[f"{phase} s"] = statistics.median(step[phase] for step in steps)
        record[f"{phase} MB"], record[f"{phase} MB, largest rank"] = statistics.fmean(sent), max(sent)
    record["seconds"] = statistics.median(step["backward"] + step["step"] for step in steps)
    record["optimizer s"] = statistics.median(step["optimizer"] for step in steps)
    record["first step s"] = max(sum(rank["first_seconds"][phase] for phase in PHASES[1:]) for rank in ranks)
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
    record["resident MB"] = ranks[0]["resident_mb"]
    if "kernels" in ranks[0]:
        record |= {"kernels": ranks[0]["kernels"], "symmetric": ranks[0]["symmetric"]}
        record["workspace MB"] = max(rank["workspace_mb"] for rank in ranks)
    return record
