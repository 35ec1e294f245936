# SPDX-License-Identifier: Apache-2.0
"""Runs test functions on every rank of a pool of processes joined by torch.distributed (gloo, CPU).

The pools, one for each world size, start at their first use and serve all tests of the session.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from helpers.paths import TESTS

START_TIMEOUT = 300.0
"""Seconds in which the ranks of a new pool must meet."""
COLLECTIVE_TIMEOUT = 90.0
"""Seconds after which a collective that some rank does not join raises in the others."""
GRACE = 5.0
"""Seconds that the other ranks have to report after one rank failed."""
MAX_THREADS = 200
"""Threads of a rank from which on its pool is replaced; those of groups that an engine keeps alive poll for ever."""
TAIL = 4000
"""Characters of each rank's output shown with a failure."""


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank: int, world_size: int, port: int, extra: dict[str, str]) -> dict[str, str]:
    """The environment variables of one rank; `extra` overrides the rest."""
    defaults = {"DS_ACCELERATOR": "cpu"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the host's name, which may not resolve
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1} | ranks
    fixed["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return defaults | dict(os.environ) | {name: str(value) for name, value in fixed.items()} | extra


class Rank:
    """One worker process, its connection and its log file."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        self.connection, theirs = Pipe()
        self.log = log
        self.mark = 0
        command = [sys.executable, "-m", "helpers.worker", str(theirs.fileno()), str(COLLECTIVE_TIMEOUT)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    def send(self, *messages: bytes) -> None:
        self.mark = self.log.stat().st_size
        for message in messages:
            self.connection.send_bytes(message)

    def receive(self) -> tuple[str, Any]:
        """The reply: ("ok", result) or ("error", text)."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return "error", f"the process ended with code {self.process.wait(timeout=GRACE)}"

    def output(self) -> str:
        """The end of what the rank wrote since `mark`, which moves to the end of the log."""
        with self.log.open("rb") as log:
            log.seek(self.mark)
            text = log.read()
        self.mark += len(text)
        return text.decode(errors="replace")[-TAIL:]

    def kill(self) -> None:
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pool:
    """`world_size` processes in one torch.distributed job, with the environment variables `env` added."""

    def __init__(self, world_size: int, env: dict[str, str] | None = None) -> None:
        self.closed = False
        self.ranks: list[Rank] = []
        self.logs = tempfile.TemporaryDirectory(prefix="muon_ranks_")
        port = _free_port()
        try:
            for rank in range(world_size):
                log = Path(self.logs.name) / f"rank{rank}.log"
                self.ranks.append(Rank(log, _environment(rank, world_size, port, env or {})))
            self._results(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """The results of fn(**kwargs) by rank; a failure closes the pool, as its ranks may be out of step."""
        messages = pickle.dumps(sys.path), pickle.dumps((fn, kwargs))
        try:
            for rank in self.ranks:
                rank.send(*messages)
            return self._results(timeout)
        except BaseException:
            self.close()
            raise

    def is_worn(self) -> bool:
        """Whether what earlier tests left in the processes slows the next."""
        return not self.closed and any(psutil.Process(r.process.pid).num_threads() > MAX_THREADS for r in self.ranks)

    def close(self) -> None:
        self.closed = True
        for rank in self.ranks:
            rank.kill()
        self.logs.cleanup()

    def _results(self, timeout: float) -> list[Any]:
        """The next result of every rank in order; raises RankError if any is missing or a failure."""
        replies = self._replies(timeout)
        if len(replies) == len(self.ranks) and all(status == "ok" for status, _ in replies.values()):
            return [replies[rank][1] for rank in range(len(self.ranks))]
        raise RankError(self._report(replies, timeout))

    def _replies(self, timeout: float) -> dict[int, tuple[str, Any]]:
        """The replies by rank that came within `timeout` seconds, or GRACE seconds after the first failure."""
        replies: dict[int, tuple[str, Any]] = {}
        waiting: dict[Connection, int] = {rank.connection: number for number, rank in enumerate(self.ranks)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                number = waiting.pop(connection)
                replies[number] = self.ranks[number].receive()
                if replies[number][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies

    def _report(self, replies: dict[int, tuple[str, Any]], timeout: float) -> str:
        """What every rank did and wrote, with the Python stack of those that are still running."""
        missing = [rank for number, rank in enumerate(self.ranks) if number not in replies]
        outputs = [rank.output() for rank in self.ranks]
        for rank in missing:
            rank.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5 if missing else 0.0)
        failed = any(status != "ok" for status, _ in replies.values())
        lines = ["a rank failed" if failed else f"not all ranks answered within {timeout:g} s"]
        for number, rank in enumerate(self.ranks):
            status, reply = replies.get(number, ("was still running", rank.output()))
            lines += [f"---- rank {number}: {status}", "" if status == "ok" else str(reply)]
            lines += [f"---- rank {number}: output", outputs[number]]
        return "\n".join(lines)


_pools: dict[int, Pool] = {}


def run(
    fn: Callable[..., Any],
    world_size: int,
    timeout: float = 120.0,
    fresh: bool = False,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(**kwargs)` on `world_size` ranks and return the results by rank.

    `fn` is a function at the top level of a module; arguments and results are pickled, the tensors in
    results arrive detached on the CPU. Raises RankError, and ends the processes, if a rank raises or if not
    all answer within `timeout` seconds. `fresh` runs in a pool of its own, to which `env` adds variables.
    """
    if env and not fresh:
        raise ValueError("env needs fresh=True")
    if fresh:
        pool = Pool(world_size, env)
        try:
            return pool.run(fn, kwargs, timeout)
        finally:
            pool.close()
    if world_size not in _pools or _pools[world_size].closed:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size].run(fn, kwargs, timeout)


def end_worn_pools() -> None:
    """Close the pools that what tests left slows down; between tests, as within one the runs are compared."""
    for pool in _pools.values():
        if pool.is_worn():
            pool.close()


@atexit.register
def shutdown() -> None:
    """End the processes of all pools."""
    while _pools:
        _pools.popitem()[1].close()
