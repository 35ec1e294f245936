# SPDX-License-Identifier: Apache-2.0
"""Runs functions on every rank of a pool of processes joined by torch.distributed (gloo, CPU).

The pools, one for each world size, start at their first use and serve all tests of the session. One server process,
which has imported torch, DeepSpeed and the package, forks their ranks.
"""

import atexit
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import psutil

from helpers import extensions
from helpers.collectives import first_fault
from helpers.paths import TESTS
from helpers.ports import free_port

START_TIMEOUT = 300.0
"""Seconds in which the server must be ready, and the ranks of a new pool must meet."""
COLLECTIVE_TIMEOUT = 90.0
"""Seconds after which a collective that some rank does not join raises in the others."""
GRACE = 5.0
"""Seconds that the other ranks have to report after one rank failed."""
MAX_THREADS = 40
"""Threads of a rank from which on its pool is replaced; those of groups that an engine keeps alive poll for ever."""
MAX_BYTES = 2**31
"""Memory of a rank from which on its pool is replaced; at stage 3 those of DeepSpeed's AdamW are never freed."""
TAIL = 4000
"""Characters of each rank's output shown with a failure."""
STOCKS_OWN = re.compile(r"(?!.*deepspeed/muon/)(.*in _dist_allgather_fn\)){2,}")
"""An order on which NCCL can hang with any optimizer: with AutoEP at stage 3 DeepSpeed gathers the parameters of a
module in the order of a Python set, which is another on each rank."""
Reply = tuple[str, Any]
"""("ok", result), ("error", traceback) or ("ended", what is known of its end)."""


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


def environment(rank: int, world_size: int, port: int, extra: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of one rank; `extra` overrides all others."""
    defaults = {"DS_ACCELERATOR": "cpu"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the host's name, which may not resolve
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1} | ranks
    fixed["TORCHINDUCTOR_COMPILE_THREADS"] = 1  # torch before 2.6 starts its compilers, and a thread, at import
    fixed["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return defaults | dict(os.environ) | {name: str(value) for name, value in fixed.items()} | extra


def start(mode: str, theirs: Connection, env: dict[str, str], *arguments: str, **options: Any) -> subprocess.Popen:
    """Start worker.py in a new interpreter, in mode "rank" or "server", with `theirs` as its end of the connection."""
    command = [sys.executable, "-m", "helpers.worker", mode, str(theirs.fileno()), *arguments]
    options = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()], "start_new_session": True} | options
    return subprocess.Popen(command, env=env, **options)


class Server:
    """The server process, which forks ranks on request."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = start("server", theirs, environment(0, 1, 0, {}))
        theirs.close()
        try:
            if not self._connection.poll(START_TIMEOUT):
                raise TimeoutError("the server of ranks did not start")
            self._connection.recv()
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, theirs: Connection, **rank: Any) -> int:
        return self._ask("fork", rank, theirs)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a rank; None if it is running or the code is unknown."""
        with suppress(OSError, EOFError):
            return self._ask("exit code", pid) if self.is_alive() else None
        return None

    def close(self) -> None:
        """End the process; its ranks follow."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _ask(self, request: str, argument: Any, handle: Connection | None = None) -> Any:
        try:
            self._connection.send((request, argument))
            if handle is not None:
                send_handle(self._connection, handle.fileno(), self._process.pid)
            return self._connection.recv()
        except BaseException:  # a time limit too: the next answer would be taken for another request's
            self.close()
            raise


_servers: list[Server] = []


def server() -> Server:
    """Return the server of this session; start it if needed."""
    if not _servers or not _servers[-1].is_alive():
        _servers.append(Server())
    return _servers[-1]


class Rank:
    """One process, its connection and its log file."""

    def __init__(self, log: Path, env: dict[str, str], timeout: float | None, restart: bool) -> None:
        self.connection, theirs = Pipe()
        self.log, self.mark, self.code = log, 0, None
        self._process, self._server = None, None
        if restart:
            arguments = [] if timeout is None else [str(timeout)]
            with log.open("wb") as output:
                self._process = start("rank", theirs, env, *arguments, stdout=output, stderr=subprocess.STDOUT)
            self.pid = self._process.pid
        else:
            log.touch()
            self._server = server()
            self.pid = self._server.fork(theirs, log=str(log), env=env, collective_timeout=timeout)
        theirs.close()

    def send(self, *messages: bytes) -> None:
        self.mark = self.log.stat().st_size
        for message in messages:
            self.connection.send_bytes(message)

    def receive(self) -> Reply:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return "ended", f"the process ended with code {self.exit_code()}"

    def exit_code(self) -> int | None:
        """Wait a little for the process to end and return its exit code; None if it is still running."""
        if self.code is None and self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.code = self._process.wait(timeout=GRACE)
        elif self.code is None and self._server is not None:
            self.code = self._server.exit_code(self.pid)
        return self.code

    def output(self) -> str:
        """Return the end of what the rank logged since `mark`, and move `mark` to the end of the log."""
        with self.log.open("rb") as log:
            log.seek(self.mark)
            text = log.read()
        self.mark += len(text)
        return text.decode(errors="replace")[-TAIL:]

    def kill(self) -> None:
        """End the process. Do so only once, because the system may reuse its id."""
        self.connection.close()
        if self.code is None:
            for kill in (os.kill, os.killpg):  # a rank that has just been forked leads no group yet
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self.code = self.exit_code() or -signal.SIGKILL


class Pool:
    """`world_size` processes that form one torch.distributed job.

    Args:
        env: added to their environment. Variables that are read when a module is imported need `restart`.
        restart: start each rank in a new interpreter instead of a fork of the server.
        timeout: of their collectives, in seconds; `None`: the job itself calls init_distributed.
    """

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        restart: bool = False,
        timeout: float | None = COLLECTIVE_TIMEOUT,
    ) -> None:
        self.closed = False
        self.ranks: list[Rank] = []
        self.logs = tempfile.TemporaryDirectory(prefix="muon_ranks_")
        self.port = free_port()
        try:
            for rank in range(world_size):
                log = Path(self.logs.name) / f"rank{rank}.log"
                self.ranks.append(Rank(log, environment(rank, world_size, self.port, env or {}), timeout, restart))
            self._results(START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def run(self, fn: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """Return the results of fn(**kwargs) by rank. A failure closes the pool, whose ranks may be out of step."""
        try:
            self.send(fn, [kwargs] * len(self.ranks))
            return self._results(timeout)
        except BaseException:
            self.close()
            extensions.remove_locks()
            raise

    def send(self, fn: Callable[..., Any], kwargs: list[dict[str, Any]]) -> None:
        """Start fn(**kwargs[rank]) on every rank."""
        for rank, own in zip(self.ranks, kwargs, strict=True):
            rank.send(pickle.dumps(sys.path), pickle.dumps((fn, own)))

    def replies(self, timeout: float, grace: float = GRACE) -> dict[int, Reply]:
        """Return rank -> reply, if it comes within `timeout` seconds, or `grace` seconds after the first failure."""
        replies: dict[int, Reply] = {}
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
                    deadline = min(deadline, time.monotonic() + grace)
        return replies

    def is_worn(self) -> bool:
        """Return whether earlier tests left the processes slow, or one process has ended."""
        try:
            processes = [] if self.closed else [psutil.Process(rank.pid) for rank in self.ranks]
            return any(p.num_threads() > MAX_THREADS or p.memory_info().rss > MAX_BYTES for p in processes)
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        self.closed = True
        for rank in self.ranks:
            rank.kill()
        self.logs.cleanup()
        # A session has hundreds of pools: DeepSpeed's 69 MB a rank cannot wait for `extensions.remove_shared_memory`.
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{self.port}_*"):
            buffer.unlink(missing_ok=True)

    def _results(self, timeout: float) -> list[Any]:
        """Return the next result of every rank in order; raise RankError if one is missing or a failure."""
        replies = self.replies(timeout)
        if len(replies) == len(self.ranks) and all(status == "ok" for status, _ in replies.values()):
            results, logs = zip(*(replies[rank][1] for rank in range(len(self.ranks))), strict=True)
            fault = first_fault(logs) if all(log is not None for log in logs) else None
            if fault and not STOCKS_OWN.match(fault):
                raise RankError(f"NCCL could hang, though gloo does not: {fault}")
            return list(results)
        raise RankError(self._report(replies, timeout))

    def _report(self, replies: dict[int, Reply], timeout: float) -> str:
        """Return what every rank did and logged, with the Python stacks of those that are still running."""
        missing = [rank for number, rank in enumerate(self.ranks) if number not in replies]
        outputs = [rank.output() for rank in self.ranks]
        for rank in missing:
            os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.5 if missing else 0.0)
        failed = any(status != "ok" for status, _ in replies.values())
        lines = ["a rank failed" if failed else f"not all ranks answered within {timeout:g} s"]
        for number, rank in enumerate(self.ranks):
            status, reply = replies.get(number, ("was still running", rank.output()))
            lines += [f"---- rank {number}: {status}", "" if status == "ok" else str(reply)]
            lines += [f"---- rank {number}: output", outputs[number]]
        return "\n".join(lines)


_pools: dict[int, Pool] = {}
used: set[int] = set()
"""Sizes of the pools that the test has used."""


def run(
    fn: Callable[..., Any],
    world_size: int,
    timeout: float = 120.0,
    fresh: bool = False,
    restart: bool = False,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(**kwargs)` on `world_size` ranks and return the results by rank.

    `fn` is a function at the top level of a module; arguments and results are pickled, the tensors in
    results arrive detached on the CPU. Raises RankError, and ends the processes, if a rank raises or if not
    all answer within `timeout` seconds. `fresh` runs in a pool of its own, to which `env` adds variables, and
    `restart` in new interpreters.
    """
    if (env or restart) and not fresh:
        raise ValueError("env and restart need fresh=True")
    if fresh:
        pool = Pool(world_size, env, restart)
        try:
            return pool.run(fn, kwargs, timeout)
        finally:
            pool.close()
    if world_size not in used:
        end_worn_pools({world_size})  # a rank may have ended since an earlier test
        used.add(world_size)
    if world_size not in _pools or _pools[world_size].closed:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size].run(fn, kwargs, timeout)


def run_each(job: Callable[..., Any], world_size: int, cases: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Run `job(**case)` one case after another on `world_size` ranks; return the results by rank for each case."""
    results = run(_each, world_size, job=job, cases=list(cases))
    return [list(by_rank) for by_rank in zip(*results, strict=True)]


def _each(job: Callable[..., Any], cases: list[dict[str, Any]]) -> list[Any]:
    return [job(**case) for case in cases]


def end_worn_pools(sizes: set[int]) -> None:
    """Close pools of these sizes that tests left slow. Call it between tests only: runs of one test are compared."""
    for pool in (_pools[size] for size in sizes & _pools.keys()):
        if pool.is_worn():
            pool.close()


@atexit.register
def shutdown() -> None:
    """End the processes of all pools and the server."""
    while _pools:
        _pools.popitem()[1].close()
    while _servers:
        _servers.pop().close()
