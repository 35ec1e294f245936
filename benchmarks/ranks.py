# SPDX-License-Identifier: Apache-2.0
"""Runs a function on every rank of a job: processes of their own, bounded in time, whose output is shown if one fails.

A rank is started as `python -m benchmarks.ranks MODULE:FUNCTION SETTING_AS_JSON RESULT_FILE`.
"""

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import ROOT, cores


class RanksFailed(RuntimeError):
    """A rank failed, or time ran out. The message has the end of every rank's output; `results` what rank 0 had."""

    def __init__(self, message: str, results: Any) -> None:
        super().__init__(message)
        self.results = results


class Place(NamedTuple):
    """Where one rank runs: what stands before its command, and what its environment has beside the usual."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def run(
    function: Callable[..., Any],
    setting: dict[str, Any],
    world: int = 1,
    timeout: float = 600,
    threads: int = 1,
    device: str = "cpu",
    environment: Mapping[str, str] = {},
    places: Sequence[Place] = (),
) -> list[Any]:
    """What `function(**setting)` returned on each rank; of a generator, the list of what it yielded.

    Args:
        function: of a module of this package; its result can be written as JSON.
        environment: of all ranks. deepspeed-muon is active in them unless it says otherwise.

    Raises:
        RanksFailed: a rank failed or time ran out; all ranks are killed then.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` below runs
    command = [sys.executable, "-m", "benchmarks.ranks", f"{function.__module__}:{function.__qualname__}"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as name:
        logs = [Path(name) / f"rank{rank}.log" for rank in range(world)]
        results = [log.with_suffix(".json") for log in logs]
        try:
            for rank, (log, result) in enumerate(zip(logs, results, strict=True)):
                place = places[rank] if places else Place()
                variables = _environment(rank, world, port, threads, device) | environment | place.environment
                with log.open("w") as file:
                    line = [*place.prefix, *command, json.dumps(setting), str(result)]
                    settings = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True, "cwd": ROOT}
                    processes.append(subprocess.Popen(line, env=variables, **settings))
            problem = _wait(processes, timeout)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the compilers that it may have started too
                process.wait()
        found = [json.loads(result.read_text()) if result.exists() else None for result in results]
        if problem:
            tails = [f"--- rank {rank} ---\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs)]
            raise RanksFailed("\n".join([f"{function.__qualname__}: {problem}", *tails]), found[0])
        return found


def _environment(rank: int, world: int, port: int, threads: int, device: str) -> dict[str, str]:
    """The caller's environment, but for what switches deepspeed-muon off, and the rank's place in the job.

    The interpreter's own tools come first in PATH: another ninja would build DeepSpeed's operators again.
    """
    inherited = {name: text for name, text in os.environ.items() if name != "DS_MUON_AUTOLOAD"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    of_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    of_rank |= {"TORCHINDUCTOR_COMPILE_THREADS": 1, "DS_ACCELERATOR": device, "PATH": path}
    if device == "cpu":
        of_rank["CUDA_VISIBLE_DEVICES"] = ""
    return inherited | {name: str(value) for name, value in of_rank.items()}


def _wait(processes: Sequence[subprocess.Popen], timeout: float) -> str | None:
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


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[tuple[str, ...]]]:
    """Prefixes of commands on either of two network namespaces, joined by a link whose rate is as tc writes it.

    In the end both go, with what still runs in them.
    """
    names = [f"dsmuon{os.getpid()}-{host}" for host in "ab"]

    def ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, stdout=subprocess.PIPE, text=True).stdout

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", name, "link", "set", device, "up")
            # A packet that the sender offloads whole has up to 64 KiB, so the token bucket must hold more than one.
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "link0", *limit], check=True)
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in ip("netns", "pids", name).split():
                    subprocess.run(["kill", "-9", pid])
                ip("netns", "delete", name)


def places_on(hosts: list[tuple[str, ...]], world: int) -> list[Place]:
    """Where each rank runs: the first half on the first host, each on one core of its host's share of the machine."""
    per_host, found = world // len(hosts), []
    for rank in range(world):
        prefix = *hosts[rank // per_host], "taskset", "--cpu-list", str(rank * cores() // world)
        environment = {"LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host)}
        found.append(Place(prefix, environment | {"GLOO_SOCKET_IFNAME": "link0", "MASTER_ADDR": "10.213.0.1"}))
    return found


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """In a rank: inside, it is a member of the job's process group, on the accelerator's backend."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    import deepspeed

    backend = get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timedelta(seconds=300))
    yield
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """One rank: call the function; after each item of a generator the file has all items so far."""
    (module, _, function), setting, file = sys.argv[1].partition(":"), json.loads(sys.argv[2]), Path(sys.argv[3])
    result = getattr(importlib.import_module(module), function)(**setting)
    values = itertools.accumulate(([item] for item in result), initial=[]) if isinstance(result, Iterator) else [result]
    for value in values:
        file.with_suffix(".new").write_text(json.dumps(value))
        file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
