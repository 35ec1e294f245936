# SPDX-License-Identifier: Apache-2.0
"""The server of faults.py and the ranks that it forks."""

import gc
import hashlib
import io
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

PARTS = 4
"""Pieces in which a file of torch's is written, with an event between them."""

BIND_TIMEOUT = 20.0
"""Seconds that the ranks wait for one that dies while its engine is built; rank 0's verdict for twice as long."""
PRELOADED = (
    "deepspeed.muon",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper",
    "helpers.engine_state",
    "helpers.training",
    "helpers.worker",
)
"""What a rank would import at leisure; the first of stock's Muon loads torch's compiler."""


class Trap:
    """Counts events by phase and ends this process, or lets it stand still, at the one it is told."""

    def __init__(self, death: tuple[str, int] | None, stall: bool) -> None:
        self.death, self.stall, self.counts = death, stall, Counter()

    def event(self, phase: str) -> None:
        at = (phase, self.counts[phase])
        self.counts[phase] += 1
        if at == self.death:
            while self.stall:
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, phase: str) -> None:
        """An event before and after every call of a function."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.event(phase)
            result = original(*args, **kwargs)
            self.event(phase)
            return result

        setattr(owner, name, watched)

    def set(self) -> None:
        """Put the events into the product and into torch, in this process."""
        from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

        from deepspeed.muon.exchange.exchange import Exchange
        from deepspeed.muon.exchange.watchdog import PendingCollective

        self.around(Exchange, "_launch", "exchange")
        self.around(PendingCollective, "wait", "exchange")
        self.around(Path, "replace", "save")  # header, manifest and latest are put in place by it
        swappers = [OptimizerSwapper, *_subclasses(OptimizerSwapper)]
        for owner in swappers:
            for name in ("swap_in_optimizer_state", "swap_out_optimizer_state"):
                if name in vars(owner):
                    self.around(owner, name, "swap")
        torch.save = self._in_pieces(torch.save)

    def _in_pieces(self, save: Callable) -> Callable:
        def saving(value: Any, path: str, *args: Any, **kwargs: Any) -> None:
            whole = io.BytesIO()
            save(value, whole, *args, **kwargs)
            size = -(-whole.tell() // PARTS)
            with open(path, "wb") as file:
                for part in range(PARTS):
                    self.event("save")
                    file.write(whole.getvalue()[part * size : (part + 1) * size])
                    file.flush()
            self.event("save")

        return saving


def _subclasses(owner: type) -> list[type]:
    return [sub for one in owner.__subclasses__() for sub in (one, *_subclasses(one))]


def train(job: dict[str, Any], rank: int) -> None:
    """Go on from `latest`, save now and then, and note every loss."""
    from helpers.engine_state import snapshot
    from helpers.faults import EVERY, STEPS, WORLD
    from helpers.models import MODELS, make_batch
    from helpers.training import ds_config, make_engine
    from helpers.worker import _start

    _start(job["timeout"])
    folder = Path(job["folder"])
    trap = Trap(job["deaths"].get(rank), job.get("stall", False))
    trap.set()
    case = _placed(job["case"], folder)
    engine = make_engine(MODELS[case.pop("model", "mlp")](), ds_config(**case))
    if (folder / "saved" / "latest").exists():
        engine.load_checkpoint(str(folder / "saved"))
    first = engine.global_steps
    _note(folder, rank, f"start {first}")
    for step in range(first, STEPS):
        trap.event("training")
        loss = engine(*make_batch(engine.module, step, 0, rank, WORLD))
        trap.event("training")
        engine.backward(loss)
        trap.event("training")
        engine.step()
        _note(folder, rank, f"step {step} {loss.item().hex()}")
        if (step + 1) % EVERY == 0:
            engine.save_checkpoint(str(folder / "saved"))
            _note(folder, rank, f"saved {step + 1}")
    digest = hashlib.sha256()
    for name, value in sorted(snapshot(engine).items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    _note(folder, rank, f"end {digest.hexdigest()}")
    (folder / f"events{rank}").write_text(json.dumps(trap.counts))


def _placed(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case, with the folder of the swap files below the job's."""
    text = json.dumps(case).replace("SWAP", str(folder / "swap"))
    return json.loads(text)


def _note(folder: Path, rank: int, line: str) -> None:
    with (folder / f"trace{rank}").open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def _fork(job: dict[str, Any], rank: int) -> int:
    """Start a rank; its process id."""
    from helpers.distributed import _environment

    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(Path(job["folder"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        limit = {"DS_MUON_BIND_TIMEOUT": str(BIND_TIMEOUT)}
        os.environ.update(_environment(rank, len(job["ranks"]), job["port"], limit))
        train(job, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(job: dict[str, Any]) -> tuple[list[int | None], float]:
    """Fork the ranks; their exit codes, and seconds from the first end to the last that came in time."""
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    started = ended = time.monotonic()
    running = {_fork(job, rank): rank for rank in job["ranks"]}
    codes: list[int | None] = [None] * len(running)
    waits = set(job["ranks"]) - set(job["deaths"]) if job.get("stall") else set(job["ranks"])
    while waits & set(running.values()) and time.monotonic() - started < job["limit"]:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
                ended = time.monotonic()
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes, ended - started


def serve(fd: int) -> None:
    """Answer "ready", then every job with what :func:`launch` gives, until the parent goes away."""
    for name in PRELOADED:
        import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # stage 3 collects garbage while it is set up, which would copy every page that a rank inherits
    parent = Connection(fd)
    parent.send_bytes(b"ready")
    while True:
        try:
            path, job = pickle.loads(parent.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        parent.send_bytes(pickle.dumps(launch(job)))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
