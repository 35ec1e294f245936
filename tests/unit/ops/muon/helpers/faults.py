# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of a training job at chosen events, restart it, and compare it with an undisturbed run.

`python -m helpers.faults 4`, from the folder of the tests, prints the table of docs/evidence/checkpoints.md for four
kills per cell.
"""

import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import nvme
from helpers.distributed import Pool, shutdown
from helpers.faulty_training import STEPS, WORLD, train

TIMEOUT = 20.0
"""Seconds of the process group's timeout, within which a rank must end that lost another one."""
BIND_TIMEOUT = "20"
"""Seconds that the ranks wait for one that dies while its engine is built; rank 0's verdict for twice as long."""
MARGIN = 40.0
"""Seconds beside it for starting and training, on a loaded machine."""
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "SWAP", "buffer_count": 4}, "sub_group_size": 200_000}


#: (name, config, phases in which ranks are killed).
CELLS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("2", {"stage": 2}, ("training", "save", "exchange")),
    ("3", {"stage": 3}, ("training", "save", "exchange")),
    ("3, optimizer on NVMe", {"stage": 3, "model": "swapped", "zero": NVME}, ("training", "save", "exchange", "swap")),
]


@dataclass
class Outcome:
    """Result of one start of the job: exit code by rank, seconds until all had ended, output by rank.

    Codes: 0 finished, -9 killed itself, 1 raised, ``None`` still running when the others or the time had ended.
    """

    codes: list[int | None]
    seconds: float
    output: list[str]


def attempt(
    folder: Path,
    case: dict[str, Any],
    deaths: dict[int, tuple[str, int]],
    stall: bool = False,
    timeout: float = TIMEOUT,
) -> Outcome:
    """Start the job in `folder` once; `deaths`: rank -> (phase, n), the event at which it dies or (`stall`) stops."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = timeout + MARGIN
    started = time.monotonic()
    pool = Pool(WORLD, {"DS_MUON_BIND_TIMEOUT": BIND_TIMEOUT}, timeout=None)
    try:
        job = {"folder": folder, "case": case, "stall": stall, "timeout": timeout}
        jobs = [job | {"rank": rank, "death": deaths.get(rank)} for rank in range(WORLD)]
        pool.send(nvme.job, [{"task": train, "arguments": arguments} for arguments in jobs])
        awaited = [rank for rank in range(WORLD) if not (stall and rank in deaths)]
        replies = pool.replies(limit, grace=limit, ranks=awaited)
        seconds = time.monotonic() - started
        codes: list[int | None] = [None] * WORLD
        for rank, (status, _) in replies.items():
            codes[rank] = pool.ranks[rank].exit_code() if status == "ended" else int(status == "error")
        said = {rank: str(reply) for rank, (_, reply) in replies.items()}
        return Outcome(codes, seconds, [rank.output() + said.get(n, "") for n, rank in enumerate(pool.ranks)])
    finally:
        pool.close()


def read_log(folder: Path, rank: int) -> list[list[str]]:
    """Return the lines of a rank's log, over all attempts: `start n`, `step n loss`, `saved n`, `end digest`."""
    file = folder / f"trace{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Reference:
    """An undisturbed run; for each rank, log line -> value, and phase -> number of events."""

    lines: list[dict[str, str]]
    events: list[dict[str, int]]


def reference(folder: Path, case: dict[str, Any]) -> Reference:
    outcome = attempt(folder, case, {})
    assert outcome.codes == [0] * WORLD, outcome.output
    lines = [{" ".join(line[:-1]): line[-1] for line in read_log(folder, rank)} for rank in range(WORLD)]
    assert all(f"step {n}" in one for one in lines for n in range(STEPS))
    return Reference(lines, [json.loads((folder / f"events{rank}").read_text()) for rank in range(WORLD)])


@dataclass
class Tally:
    """Counts and problems of all attempts in which ranks were killed in one phase."""

    kills: int = 0
    completed: int = 0
    resumed: list[int] = field(default_factory=list)
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)


def torment(root: Path, case: dict[str, Any], phase: str, kills: int, seed: int) -> Tally:
    """Restart the job from `latest` until `kills` attempts were killed in `phase`; then let it finish."""
    expected = reference(root / "reference", case)
    rng, tally, chain = random.Random(seed), Tally(), 0
    folder = root / f"{phase}{chain}"
    while tally.kills < kills and not tally.problems:
        deaths = _choose(rng, phase, expected)
        outcome = attempt(folder, case, deaths)
        _judge(tally, outcome, deaths, folder, expected)
        if outcome.codes == [0] * WORLD:  # it was nearly done: the chosen event was never reached
            tally.completed += 1
            chain += 1
            folder = root / f"{phase}{chain}"
    outcome = attempt(folder, case, {})
    _judge(tally, outcome, {}, folder, expected)
    tally.completed += outcome.codes == [0] * WORLD
    return tally


def _choose(rng: random.Random, phase: str, expected: Reference) -> dict[int, tuple[str, int]]:
    """Choose one rank or both, and for each an event (phase, n) from the first half of a whole run."""
    victims = rng.choice([[0], [1], [0, 1]])
    return {rank: (phase, rng.randrange(max(1, expected.events[rank][phase] // 2))) for rank in victims}


def _judge(
    tally: Tally, outcome: Outcome, deaths: dict[int, tuple[str, int]], folder: Path, expected: Reference
) -> None:
    """Add an outcome to the tally; lost checkpoints, other losses than expected and hangs are problems."""
    tally.kills += -signal.SIGKILL in outcome.codes
    tally.slowest = max(tally.slowest, outcome.seconds)
    where = f"{folder.name}, deaths {deaths}, codes {outcome.codes}"
    if None in outcome.codes:
        tally.problems.append(f"{where}: a rank hangs")
    if -signal.SIGKILL not in outcome.codes and outcome.codes != [0] * WORLD:
        tally.problems.append(f"{where}: failed without a kill: {[text[-1500:] for text in outcome.output]}")
    for rank in range(WORLD):
        lines, saved = read_log(folder, rank), 0
        for line in lines:
            key, value = " ".join(line[:-1]), line[-1]
            if key in ("step", "saved") or key == "start":
                continue
            if expected.lines[rank].get(key) != value:
                tally.problems.append(f"{where}: rank {rank} has {line}, expected {expected.lines[rank].get(key)}")
        for key, value in ((line[0], line[1]) for line in lines):
            if key == "start" and int(value) < saved:
                tally.problems.append(f"{where}: rank {rank} starts at step {value} and had saved {saved}")
            saved = int(value) if key == "saved" else saved
    starts = [line[1] for line in read_log(folder, 0) if line[0] == "start"]
    if len(starts) > 1:
        tally.resumed.append(int(starts[-1]))
    if outcome.codes == [0] * WORLD:
        done = {" ".join(line[:-1]) for line in read_log(folder, 0)}
        if missing := expected.lines[0].keys() - done:
            tally.problems.append(f"{where}: finished without {sorted(missing)}")


def table(rows: list[tuple[str, str, Tally]]) -> str:
    """Rows (stage, phase, tally) as a Markdown table."""
    lines = ["| stage | killed during | kills | runs finished | resumed at steps | slowest attempt | wrong |"]
    lines.append("|---|---|---|---|---|---|---|")
    for stage, phase, tally in rows:
        steps = ", ".join(f"{step}: {tally.resumed.count(step)}" for step in sorted(set(tally.resumed)))
        counts = f"{tally.kills} | {tally.completed} | {steps} | {tally.slowest:.0f} s | {len(tally.problems)}"
        lines.append(f"| {stage} | {phase} | {counts} |")
    return "\n".join(lines)


def main(kills: int) -> None:
    """Print the table; the seed is fixed."""
    rows = []
    started = time.monotonic()
    for name, case, phases in CELLS:
        for phase in phases:
            with tempfile.TemporaryDirectory() as root:
                rows.append((name, phase, torment(Path(root), case, phase, kills, seed=1)))
                print(rows[-1], flush=True)
    shutdown()
    print(table(rows), f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))
