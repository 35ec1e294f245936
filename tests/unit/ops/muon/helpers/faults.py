# SPDX-License-Identifier: Apache-2.0
"""Kills ranks of a training job at chosen events, starts it again, and compares it with a run that nobody killed.

A server process imports torch and DeepSpeed once and forks the ranks of every attempt. The ranks count events of four
kinds: points of the training loop, of a save, of the exchange, of a swap to NVMe; a rank ends itself, or stands still,
at the event it is told. `python -m helpers.faults 4`, from the
folder of the tests, prints the table of docs/checkpoints.md for four kills per cell.
"""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from helpers.distributed import START_TIMEOUT, _environment, _free_port

STEPS, EVERY, WORLD = 9, 2, 2
"""Steps of a run, steps between its checkpoints, ranks."""
TIMEOUT = 20.0
"""Seconds of the process group's timeout, within which a rank must end that lost another one."""
MARGIN = 40.0
"""Seconds beside it for starting and training, on a loaded machine."""


@dataclass
class Outcome:
    """What became of one attempt: by rank its exit code (-9 killed by itself, 0 finished) and seconds until then.

    ``None``: still running when the others had ended, or at the end of its time.
    """

    codes: list[int | None]
    seconds: float
    output: list[str]


class Server:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.faults_rank", str(theirs.fileno())],
            env=_environment(0, WORLD, 0, {}),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        if not self._connection.poll(START_TIMEOUT):
            self.close()
            raise TimeoutError("the server of ranks did not start")
        self._connection.recv_bytes()

    def attempt(self, folder: Path, case: dict[str, Any], deaths: dict[int, tuple[str, int]], **job: Any) -> Outcome:
        """One start of the job in `folder`, where rank r meets its end at event n of a phase: deaths[r] = phase, n."""
        known = {"folder": str(folder), "case": case, "deaths": deaths, "port": _free_port(), "ranks": [*range(WORLD)]}
        limits = {"timeout": TIMEOUT, "limit": TIMEOUT + MARGIN}
        self._connection.send_bytes(pickle.dumps((sys.path, known | limits | job)))
        if not self._connection.poll(TIMEOUT + 2 * MARGIN):
            self.close()
            raise TimeoutError("the server of ranks does not answer")
        codes, seconds = pickle.loads(self._connection.recv_bytes())
        output = [(folder / f"rank{rank}.log").read_text() for rank in range(WORLD)]
        return Outcome(codes, seconds, output)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def read_log(folder: Path, rank: int) -> list[list[str]]:
    """The lines of a rank's log, over all attempts: `start n`, `step n loss`, `saved n`, `end digest`."""
    file = folder / f"trace{rank}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Reference:
    """A run that nobody killed: its lines by rank, and how many events of each phase a rank counts."""

    lines: list[dict[str, str]]
    events: list[dict[str, int]]


def reference(server: Server, folder: Path, case: dict[str, Any]) -> Reference:
    outcome = server.attempt(folder, case, {})
    assert outcome.codes == [0] * WORLD, outcome.output
    lines = [{" ".join(line[:-1]): line[-1] for line in read_log(folder, rank)} for rank in range(WORLD)]
    assert all(f"step {n}" in one for one in lines for n in range(STEPS))
    return Reference(lines, [json.loads((folder / f"events{rank}").read_text()) for rank in range(WORLD)])


@dataclass
class Tally:
    """What happened in the kills of one phase."""

    kills: int = 0
    completed: int = 0
    resumed: list[int] = field(default_factory=list)
    slowest: float = 0.0
    problems: list[str] = field(default_factory=list)


def torment(server: Server, root: Path, case: dict[str, Any], phase: str, kills: int, seed: int) -> Tally:
    """Kill until `kills` attempts were killed in `phase`, restarting from `latest` each time, then let it finish."""
    expected = reference(server, root / "reference", case)
    rng, tally, chain = random.Random(seed), Tally(), 0
    folder = root / f"{phase}{chain}"
    while tally.kills < kills and not tally.problems:
        deaths = _choose(rng, phase, expected)
        outcome = server.attempt(folder, case, deaths)
        _judge(tally, outcome, deaths, folder, expected)
        if outcome.codes == [0] * WORLD:  # it was nearly done: the chosen event was never reached
            tally.completed += 1
            chain += 1
            folder = root / f"{phase}{chain}"
    outcome = server.attempt(folder, case, {})
    _judge(tally, outcome, {}, folder, expected)
    tally.completed += outcome.codes == [0] * WORLD
    return tally


def _choose(rng: random.Random, phase: str, expected: Reference) -> dict[int, tuple[str, int]]:
    """One rank or all, each at an event of the first half of what a whole run has."""
    victims = rng.choice([[0], [1], [0, 1]])
    return {rank: (phase, rng.randrange(max(1, expected.events[rank][phase] // 2))) for rank in victims}


def _judge(
    tally: Tally, outcome: Outcome, deaths: dict[int, tuple[str, int]], folder: Path, expected: Reference
) -> None:
    """Count the kills; whatever is lost, silently wrong or hangs is a problem."""
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
    import tempfile

    from helpers.nvme import why_not

    server, rows = Server(), []
    started = time.monotonic()
    for name, case, phases in CELLS:
        for phase in () if "zero" in case and why_not() else phases:
            with tempfile.TemporaryDirectory() as root:
                rows.append((name, phase, torment(server, Path(root), case, phase, kills, seed=1)))
                print(rows[-1], flush=True)
    server.close()
    print(table(rows), f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))


NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "SWAP", "buffer_count": 4}, "sub_group_size": 200_000}


#: (name, config, phases in which ranks are killed)
CELLS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("2", {"stage": 2}, ("training", "save", "exchange")),
    ("3", {"stage": 3}, ("training", "save", "exchange")),
    ("3, optimizer on NVMe", {"stage": 3, "model": "swapped", "zero": NVME}, ("training", "save", "exchange", "swap")),
]
