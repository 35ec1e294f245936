# SPDX-License-Identifier: Apache-2.0
"""Runs a function on every rank of a job: processes of their own, bounded in time, whose output is shown if one fails.

A rank is started as `python -m benchmarks.ranks MODULE:FUNCTION SETTING_AS_JSON RESULT_FILE`.
"""

import contextlib
import dataclasses
import importlib
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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class RanksFailed(RuntimeError):
    """A rank failed, or time ran out. The message has the end of every rank's output; `results` what rank 0 had."""

    def __init__(self, message: str, results: Any) -> None:
        super().__init__(message)
        self.results = results


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one rank runs: what stands before its command, and what its environment has beside the usual."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


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
        places: of each rank.

    Raises:
        RanksFailed: a rank failed or time ran out; all ranks are killed then.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` below runs
    command = [sys.executable, "-m", "benchmarks.ranks", f"{function.__module__}:{function.__qualname__}"]
    port, processes, problem = _free_port(), [], None
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
            _kill(processes)
        found = [json.loads(result.read_text()) if result.exists() else None for result in results]
        if problem:
            tails = [f"--- rank {rank} ---\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs)]
            raise RanksFailed("\n".join([f"{function.__qualname__}: {problem}", *tails]), found[0])
        return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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


def _kill(processes: Sequence[subprocess.Popen]) -> None:
    """Every rank, with the compilers it may have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    if not isinstance(result, Iterator):
        file.write_text(json.dumps(result))
        return
    items: list[Any] = []
    for item in result:
        items.append(item)
        file.with_suffix(".new").write_text(json.dumps(items))
        file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
