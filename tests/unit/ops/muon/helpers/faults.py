# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of a training job at chosen events, restart it, and compare it with an undisturbed run.

Events are points in the training loop, a save, the exchange, or a swap to NVMe.
"""

import hashlib
import io
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helpers import nvme
from helpers.distributed import Pool
from helpers.engine_state import snapshot
from helpers.models import MODELS, make_batch
from helpers.training import ds_config, make_engine
from helpers.worker import join

STEPS, EVERY, WORLD = 9, 2, 2
"""Steps of a run, steps between its checkpoints, ranks."""
PARTS = 4
"""Pieces in which a file of torch's is written, with an event between them."""


class Trap:
    """Count events by phase, and kill this process at event `death` = (phase, n)."""

    def __init__(self, death: tuple[str, int] | None) -> None:
        self.death, self.counts = death, Counter()

    def event(self, phase: str) -> None:
        at = (phase, self.counts[phase])
        self.counts[phase] += 1
        if at == self.death:
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

        from deepspeed.muon.exchange.run import BucketBuffers, Exchange

        self.around(Exchange, "_start", "exchange")
        self.around(BucketBuffers, "wait", "exchange")
        self.around(Path, "replace", "save")  # files and latest get their names by it
        for owner in [OptimizerSwapper, *_subclasses(OptimizerSwapper)]:
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


def train(rank: int, folder: Path, case: dict[str, Any], death: tuple[str, int] | None) -> None:
    """Train from `latest` on, save every `EVERY` steps and log every loss."""
    join(TIMEOUT)
    trap = Trap(death)
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


# ---- starts of the job --------------------------------------------------------------------------------------

TIMEOUT = 20.0
"""Seconds of the process group's timeout, within which a rank must end that lost another one."""
BIND_TIMEOUT = "20"
"""Seconds that the ranks wait for one that dies while its engine is built; rank 0's verdict for twice as long."""
LIMIT = TIMEOUT + 40.0
"""Seconds for a start: beside the timeout those for starting and training, on a loaded machine."""
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "SWAP", "buffer_count": 4}, "sub_group_size": 200_000}


#: (config, phases in which ranks are killed).
CELLS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"stage": 2}, ("training", "save", "exchange")),
    ({"stage": 3}, ("training", "save", "exchange")),
    ({"stage": 3, "model": "swapped", "zero": NVME}, ("training", "save", "exchange", "swap")),
]


@dataclass
class Outcome:
    """Result of one start of the job: exit code and output by rank.

    Codes: 0 finished, -9 killed itself, 1 raised, ``None`` still running when the others or the time had ended.
    """

    codes: list[int | None]
    output: list[str]


def attempt(folder: Path, case: dict[str, Any], deaths: dict[int, tuple[str, int]]) -> Outcome:
    """Start the job in `folder` once; `deaths`: rank -> (phase, n), the event at which it dies."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = Pool(WORLD, {"DS_MUON_BIND_TIMEOUT": BIND_TIMEOUT}, timeout=None)
    try:
        jobs = [{"folder": folder, "case": case, "rank": rank, "death": deaths.get(rank)} for rank in range(WORLD)]
        pool.send(nvme.job, [{"task": train, "arguments": arguments} for arguments in jobs])
        replies = pool.replies(LIMIT, grace=LIMIT)
        codes: list[int | None] = [None] * WORLD
        for rank, (status, _) in replies.items():
            codes[rank] = pool.ranks[rank].exit_code() if status == "ended" else int(status == "error")
        said = {rank: str(reply) for rank, (_, reply) in replies.items()}
        return Outcome(codes, [rank.output() + said.get(n, "") for n, rank in enumerate(pool.ranks)])
    finally:
        pool.close()


def read_log(folder: Path, rank: int) -> list[list[str]]:
    """Return the lines of a rank's log, over all attempts: `start n`, `step n loss`, `saved n`, `end digest`."""
    file = folder / f"trace{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Reference:
    """An undisturbed run: by rank {log line: value} and {phase: number of events}; the files of a checkpoint."""

    lines: list[dict[str, str]]
    events: list[dict[str, int]]
    files: set[str]


def reference(folder: Path, case: dict[str, Any]) -> Reference:
    outcome = attempt(folder, case, {})
    assert outcome.codes == [0] * WORLD, outcome.output
    lines = [{" ".join(line[:-1]): line[-1] for line in read_log(folder, rank)} for rank in range(WORLD)]
    assert all(f"step {n}" in one for one in lines for n in range(STEPS))
    events = [json.loads((folder / f"events{rank}").read_text()) for rank in range(WORLD)]
    return Reference(lines, events, latest_files(folder))


def latest_files(folder: Path) -> set[str]:
    """Return the names of the files in the checkpoint that `latest` names; an empty set without `latest`."""
    latest = folder / "saved" / "latest"
    return {file.name for file in (latest.parent / latest.read_text()).glob("*")} if latest.exists() else set()


@dataclass
class Tally:
    """Counts and problems of all attempts in which ranks were killed in one phase."""

    kills: int = 0
    completed: int = 0
    problems: list[str] = field(default_factory=list)


def torment(root: Path, case: dict[str, Any], phase: str, kills: int, seed: int) -> Tally:
    """Restart the job from `latest` until `kills` attempts were killed in `phase`; then let it finish."""
    expected = reference(root / "reference", case)
    rng, tally = random.Random(seed), Tally()
    while tally.kills < kills and not tally.problems:
        # A job that was nearly done reaches no event: the next one starts anew.
        _judge(tally, root / str(tally.completed), case, _choose(rng, phase, expected), expected)
    _judge(tally, root / str(tally.completed), case, {}, expected)
    return tally


def _choose(rng: random.Random, phase: str, expected: Reference) -> dict[int, tuple[str, int]]:
    """Choose one rank or both, and for each an event (phase, n) from the first half of a whole run."""
    victims = rng.choice([[0], [1], [0, 1]])
    return {rank: (phase, rng.randrange(max(1, expected.events[rank][phase] // 2))) for rank in victims}


def _judge(
    tally: Tally, folder: Path, case: dict[str, Any], deaths: dict[int, tuple[str, int]], expected: Reference
) -> None:
    """Start the job and count the outcome; lost checkpoints, other losses than expected and hangs are problems."""
    outcome = attempt(folder, case, deaths)
    is_killed, is_done = -signal.SIGKILL in outcome.codes, outcome.codes == [0] * WORLD
    tally.kills += is_killed
    tally.completed += is_done
    problems = ["a rank hangs"] if None in outcome.codes else []
    if not is_killed and not is_done:
        problems.append(f"failed without a kill: {[text[-1500:] for text in outcome.output]}")
    for rank in range(WORLD):
        saved = 0
        for *words, value in read_log(folder, rank):
            key = " ".join(words)
            if key == "start" and int(value) < saved:
                problems.append(f"rank {rank} starts at step {value} and had saved {saved}")
            elif key == "saved":
                saved = int(value)
            elif key != "start" and expected.lines[rank].get(key) != value:
                problems.append(f"rank {rank} has {key} {value}, expected {expected.lines[rank].get(key)}")
    if latest_files(folder) not in (set(), expected.files):
        problems.append(f"latest names a checkpoint of {sorted(latest_files(folder))}")
    done = {" ".join(words) for *words, _ in read_log(folder, 0)}
    if is_done and (missing := expected.lines[0].keys() - done):
        problems.append(f"finished without {sorted(missing)}")
    tally.problems += [f"{folder.name}, deaths {deaths}, codes {outcome.codes}: {text}" for text in problems]
