# SPDX-License-Identifier: Apache-2.0
"""A training job whose ranks count events; a rank can be told to kill itself, or to stop, at one of them.

Events are points in the training loop, a save, the exchange, the look for gradients, or a swap to NVMe.
"""

import hashlib
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from helpers.engine_state import snapshot
from helpers.models import MODELS, make_batch
from helpers.training import ds_config, make_engine
from helpers.worker import join

STEPS, EVERY, WORLD = 9, 2, 2
"""Steps of a run, steps between its checkpoints, ranks."""
PARTS = 4
"""Pieces in which a file of torch's is written, with an event between them."""


class Trap:
    """Count events by phase; at event `death` = (phase, n) kill this process or, with `stall`, sleep forever."""

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
        """Count an event of `phase` before and after every call of `owner.name`."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.event(phase)
            result = original(*args, **kwargs)
            self.event(phase)
            return result

        setattr(owner, name, watched)

    def set(self) -> None:
        """Insert the events into deepspeed-muon, DeepSpeed and torch, in this process."""
        from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

        from deepspeed.muon.exchange.exchange import Exchange
        from deepspeed.muon.exchange.watchdog import PendingCollective

        self.around(Exchange, "largest", "look")
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
        def saving(value: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            whole = io.BytesIO()
            save(value, whole, *args, **kwargs)
            size = -(-whole.tell() // PARTS)
            with nullcontext(target) if hasattr(target, "write") else open(target, "wb") as file:
                for part in range(PARTS):
                    self.event("save")
                    file.write(whole.getvalue()[part * size : (part + 1) * size])
                    file.flush()
            self.event("save")

        return saving


def _subclasses(owner: type) -> list[type]:
    return [sub for one in owner.__subclasses__() for sub in (one, *_subclasses(one))]


def train(
    rank: int, folder: Path, case: dict[str, Any], death: tuple[str, int] | None, stall: bool, timeout: float
) -> None:
    """Train from `latest` on, save every `EVERY` steps and log every loss; `timeout`: of collectives, in seconds."""
    join(timeout)
    trap = Trap(death, stall)
    trap.set()
    case = json.loads(json.dumps(case).replace("SWAP", str(folder / "swap")))
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


def _note(folder: Path, rank: int, line: str) -> None:
    with (folder / f"trace{rank}").open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
