# SPDX-License-Identifier: Apache-2.0
"""Run the user's own command once per optimizer and learning rate, and say which is best: ``ds_muon try``.

Inside a run, ``zero/tried_run.py`` sets optimizer and rate and records the losses. ``verdict.py`` compares the records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deepspeed.muon.cli.init import LAUNCH, convert, to_muon
from deepspeed.muon.cli.verdict import Run, Variant, best, between, draw, is_close, notes, read_run, rows, verdict
from deepspeed.muon.describe import aligned
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.scheduler import SCHEDULES, read_schedule
from deepspeed.muon.zero.tried_run import VARIABLE

#: Text in the user's command that is replaced with the name of the variant's files, such as ``muon_x3``.
PLACEHOLDER = "{variant}"
#: Section of a ds_config -> its parameters that are learning rates. ``eta_min``: of torch's cosine schedules.
RATES = {
    "optimizer": ("lr", "muon_lr", "adam_lr"),
    "scheduler": ("eta_min", *dict.fromkeys(key for keys in SCHEDULES.values() for key in keys.rates)),
}
#: Seconds between two readings of a run's record; seconds that its processes get to end then, or on SIGTERM.
POLL, GRACE = 0.5, 15.0
ERROR_LINE = re.compile(r"\b\w*(Error|Exception|Killed)\b.*")
NO_STEP = (
    "it ended without a step of a DeepSpeed engine: it trains without DeepSpeed, or deepspeed-muon is not installed"
)


def run_try(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run the user's command with AdamW and with Muon, at all rates and with repeats, and compare the runs.

    Return (object for ``--json``, text with the table, the verdict and the names of written files). Raise SettingsError
    if an argument is wrong, or if the first run, which has AdamW, fails.
    """
    command = args.launch[args.launch[:1] == ["--"] :]
    if not command:
        raise SettingsError("write your own command after --, such as: ds_muon try -- deepspeed train.py ...")
    if args.config:
        convert(args.config)  # raises before the first run what it would raise after the last one
    adamw, muon = (
        [Variant(name, one) for one in of] for name, of in (("AdamW", args.adamw_rates), ("Muon", args.rates))
    )
    with Trial(args.out, command, args.steps) as trial:
        trial.plan(*adamw, *muon)
        trial.later = int(len(muon) > 1)
        if kept := sum(run.state != "waiting" for run in trial.runs):
            print(f"{kept} runs have ended in {args.out} before, and are kept", file=sys.stderr)
        first = trial.run(adamw[0])
        if first.state == "failed":
            raise SettingsError(f"the command fails without Muon: {first.note}; its output is in {trial.log(adamw[0])}")
        config, _ = to_muon("the ds_config of the run", first.config)
        if not first.built_by_script:
            changed = (key for key in ("optimizer", "gradient_clipping") if config.get(key) != first.config.get(key))
            trial.changes = {key: config[key] for key in changed}
        for variant in [*adamw[1:], *muon]:
            trial.run(variant)
        trial.later = 0
        if middle := between(trial.runs):
            trial.run(Variant("Muon", middle))
        if is_close(trial.runs):
            pair = [found.variant for name in ("AdamW", "Muon") if (found := best(trial.runs, name))]
            repeats = [variant._replace(seed=seed) for seed in range(1, args.repeats + 1) for variant in pair]
            trial.plan(*repeats)
            for variant in repeats:
                trial.run(variant)
        return _conclude(args, trial, first)


def _conclude(args: argparse.Namespace, trial: Trial, adamw: Run) -> tuple[dict[str, Any], str]:
    """Write the picture of the losses, and a ds_config with Muon at its best rate; return what :func:`run_try` returns.

    ``adamw``: the first run, which has recorded the ds_config.
    """
    base, muon, out = _number(rate_of(adamw.config)), best(trial.runs, "Muon"), trial.out
    words, remarks, files = verdict(trial.runs, base), notes(trial.runs), list[Path]()
    if draw(trial.runs, out / "losses.png"):
        files.append(out / "losses.png")
    else:
        remarks.append("no picture without matplotlib: pip install matplotlib, and start again; nothing runs twice")
    if muon:
        done = convert(args.config, str(out / "ds_config_muon.json")) if args.config else None
        config = multiplied(done.config if done else to_muon("ds_config", adamw.config)[0], muon.variant.factor)
        files.append(out / "ds_config_muon.json")
        files[-1].write_text(json.dumps(config, indent=2) + "\n")
        if done and done.accelerate:
            files.append(out / "accelerate_muon.yaml")
            files[-1].write_text(done.accelerate)
            remarks.append(f"to continue: {LAUNCH.format(files[-1], done.launch_flags)}")
        if "auto" in (rate_of(config), config["optimizer"]["params"].get("lr")):
            remarks.append(f'"auto" takes the rate from the script: multiply its rate by {muon.variant.factor:g}')
        elif adamw.built_by_script:
            remarks.append(
                "the script built AdamW; to use the new file, remove optimizer= from its deepspeed.initialize. For "
                "Trainer and TRL start again with --config and your ds_config or YAML; no run is repeated"
            )
    failed = [f"{run.variant}: {run.note}; {trial.log(run.variant)}" for run in trial.runs if run.state == "failed"]
    table = rows(trial.runs, base)
    shown = [os.path.relpath(file) for file in files]
    text = "\n".join([aligned(table), "", words, *remarks, *failed, f"wrote {', '.join(shown)}"])
    cells = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    return {"runs": cells, "verdict": words, "notes": [*remarks, *failed], "files": shown}, text


# ---- the rate in a ds_config --------------------------------------------------------------------------------------


def rate_of(config: Mapping[str, Any]) -> Any:
    """Return a ds_config's learning rate (a number, list, ``"auto"`` or ``None``): the schedule's, otherwise ``lr``."""
    schedule = read_schedule(config.get("scheduler"))
    return schedule.rate if schedule.rate_key else (config["optimizer"].get("params") or {}).get("lr")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def multiplied(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a ds_config with every learning rate of optimizer and schedule times ``factor``, except ``"auto"``."""

    def times(value: Any) -> Any:
        if isinstance(value, list):
            return [times(one) for one in value]
        return float(f"{value * factor:.6g}") if isinstance(value, (int, float)) else value

    new = dict(config)
    for section, keys in RATES.items():
        if params := (config.get(section) or {}).get("params"):
            changed = {key: times(params[key]) for key in keys if key in params}
            new[section] = {**config[section], "params": {**params, **changed}}
    return new


# ---- running ------------------------------------------------------------------------------------------------------


class Trial:
    """The runs of one ``ds_muon try``, and the folder ``out`` with their files. A context manager.

    Its exit ends the processes of a run that has not finished. ``command``: the user's training command. ``steps``:
    optimizer steps of each run. Raise SettingsError if the folder has runs of another command, or if another process
    uses it.

    For each variant the folder has ``NAME.json`` (what the run reads), ``NAME.jsonl`` (what it records) and
    ``NAME.log`` (its output), where NAME is :attr:`Variant.stem`. ``try.json`` has the command and ``steps``, and
    ``running.json`` the ids of the process of ``ds_muon try`` and of the current run.
    """

    def __init__(self, out: Path, command: Sequence[str], steps: int) -> None:
        self.out, self.steps = out.absolute(), steps
        self._command, self._runs = list(command), dict[Variant, Run]()
        #: How many runs will follow whose rates depend on the losses of those that are planned.
        self.later = 0
        #: Sections of the ds_config that Muon's runs change; known after the first run.
        self.changes: dict[str, Any] = {}
        #: Seconds that each run of this process took; time when the last one began; lines of the table on the terminal.
        self._took, self._began, self._lines = list[float](), time.monotonic(), 0
        self.out.mkdir(parents=True, exist_ok=True)
        self._end_leftovers()
        file, settings = self.out / "try.json", dict[str, Any](command=self._command, steps=steps)
        before = json.loads(file.read_text()) if file.exists() else settings
        if before != settings:
            was = f"{shlex.join(before['command'])}, {before['steps']} steps"
            raise SettingsError(f"{out} has the runs of another command ({was}); choose another folder with --out")
        file.write_text(json.dumps(settings, indent=2) + "\n")

    @property
    def runs(self) -> list[Run]:
        """Return the runs in the order in which they were planned."""
        return list(self._runs.values())

    def log(self, variant: Variant) -> Path:
        """Return the path of the file with the output of a variant's run."""
        return self.out / f"{variant.stem}.log"

    def plan(self, *variants: Variant) -> None:
        """Add variants to the table of runs, in state ``"waiting"``.

        If a variant's run is done or has diverged in an earlier ``ds_muon try`` in this folder, add that run instead;
        it does not run again.
        """
        for variant in variants:
            run = read_run(variant, self.out / f"{variant.stem}.jsonl")
            self._runs[variant] = run if run.state in ("done", "diverged") else Run(variant)

    def run(self, variant: Variant) -> Run:
        """Run the user's command as ``variant``, wait for its end, and return the run.

        If the variant has already run, return that run instead; only a run that failed in an earlier ``ds_muon try`` is
        repeated. Raise SettingsError if the command cannot be started.
        """
        if variant not in self._runs:
            self.plan(variant)
        if self._runs[variant].state != "waiting":
            return self._runs[variant]
        ours, records = (self.out / f"{variant.stem}.{suffix}" for suffix in ("json", "jsonl"))
        records.unlink(missing_ok=True)
        settings: dict[str, Any] = {
            "muon": variant.optimizer == "Muon",
            "factor": variant.factor,
            "seed": 1000 * variant.seed,
        }
        settings |= {"steps": self.steps, "changes": self.changes, "records": str(records)}
        ours.write_text(json.dumps(settings, indent=2) + "\n")
        command = [word.replace(PLACEHOLDER, variant.stem) for word in self._command]
        self._began = time.monotonic()
        options: dict[str, Any] = {"env": {**os.environ, VARIABLE: str(ours)}, "start_new_session": True}
        with self.log(variant).open("wb") as log:
            try:
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)
            except OSError as error:
                raise SettingsError(f"cannot start {command[0]}: {error.strerror}") from None
            self._note(process.pid)
            if not self._show():
                print(f"{variant}: started; its output is in {self.log(variant)}", file=sys.stderr, flush=True)
            self._wait(variant, process, records)
        self._note(None)
        self._took.append(time.monotonic() - self._began)
        run = self._runs[variant] = self._ended(variant, process.returncode, records)
        if not self._show():
            loss = f", loss {run.loss(len(run.steps)):.4f}" if run.state == "done" else ""
            print(f"{variant}: {run.state}{loss}; {self._left()}", file=sys.stderr, flush=True)
        return run

    def _wait(self, variant: Variant, process: subprocess.Popen, records: Path) -> None:
        """Show a run's progress until ``process`` ends.

        If the process still runs :data:`GRACE` seconds after ``records``, the file of the run, says that the run has
        ended, end the process.
        """
        ended_at = None
        while process.poll() is None:
            run = self._runs[variant] = read_run(variant, records)
            if run.state != "waiting":
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > GRACE:
                    end_processes(process.pid)
            run.state = "running"
            self._show()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)

    def _ended(self, variant: Variant, status: int, records: Path) -> Run:
        run = read_run(variant, records)
        if run.state != "waiting":
            return run
        if status == 0 and run.steps:  # the script ends before that number of steps
            with records.open("a") as file:
                file.write(json.dumps({"end": "done"}) + "\n")
            return read_run(variant, records)
        run.state, run.note = "failed", last_lines(self.log(variant)) if status else NO_STEP
        return run

    def _show(self) -> bool:
        """Draw the table of runs again if stderr is a terminal; return whether it is."""
        if not sys.stderr.isatty():
            return False
        base = next((_number(rate_of(run.config)) for run in self.runs if run.config), None)
        lines, width = [*aligned(rows(self.runs, base)).splitlines(), self._left()], shutil.get_terminal_size().columns
        text = "".join(f"{line[:width]}\n" for line in lines)  # a line that wraps would count as two
        sys.stderr.write(f"\x1b[{self._lines}A\x1b[J{text}" if self._lines else text)
        sys.stderr.flush()
        self._lines = text.count("\n")
        return True

    def _left(self) -> str:
        """Return a text on how many runs are still planned, and how long they and the current run will take."""
        waiting = sum(run.state == "waiting" for run in self.runs) + self.later
        running = next((run for run in self.runs if run.state == "running"), None)
        spent = time.monotonic() - self._began if running else 0.0
        if self._took:
            whole = sum(self._took) / len(self._took)
        elif running and len(running.steps) > 1:
            whole = spent + running.step_seconds * (self.steps - len(running.steps))
        else:
            return f"{waiting} more planned"
        seconds = whole * waiting + (max(0.0, whole - spent) if running else 0.0)
        return f"{waiting} more planned, about {seconds / 60:.0f} min {seconds % 60:.0f} s left"

    # ---- processes --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Trial:
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: Any) -> None:
        _, run = json.loads((self.out / "running.json").read_text())
        if run and _lives(*run):
            end_processes(run[0])
        (self.out / "running.json").unlink()
        if self._lines:  # the table will be printed with the result
            sys.stderr.write(f"\x1b[{self._lines}A\x1b[J")
        signal.signal(signal.SIGTERM, self._handler)

    def _end_leftovers(self) -> None:
        """End the run that a killed ``ds_muon try`` has left running in this folder, if any.

        Raise SettingsError if another ``ds_muon try`` is using the folder.
        """
        file = self.out / "running.json"
        owner, run = json.loads(file.read_text()) if file.exists() else (None, None)
        if owner and _lives(*owner):
            raise SettingsError(f"another ds_muon try, process {owner[0]}, uses {self.out}")
        if run and _lives(*run):
            print(f"ending process {run[0]}, which an earlier ds_muon try has left", file=sys.stderr)
            end_processes(run[0])
        self._note(None)

    def _note(self, pid: int | None) -> None:
        """Write ``running.json``: the ids of this process and of the current run, ``pid`` (``None`` without one)."""
        (self.out / "running.json").write_text(json.dumps([_birth(os.getpid()), _birth(pid) if pid else None]))


def last_lines(log: Path) -> str:
    """Return why a run failed: the last error in its log, such as "ValueError: ...", otherwise its last three lines."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [found[0] for line in lines if (found := ERROR_LINE.search(line)) and "ChildFailedError" not in line]
    return errors[-1] if errors else " | ".join(lines[-3:]) or "no output"


def end_processes(pid: int) -> None:
    """End a process and its descendants with SIGTERM; use SIGKILL if they run :data:`GRACE` seconds later."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    # On SIGTERM, launchers end their processes on other nodes too.
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        _, family = psutil.wait_procs(family, GRACE)


def _birth(pid: int) -> tuple[int, float] | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return pid, psutil.Process(pid).create_time()
    return None


def _lives(pid: int, born: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _birth(pid) == (pid, born) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
