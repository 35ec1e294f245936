# SPDX-License-Identifier: Apache-2.0
"""``ds_muon try``: run the user's own command once per optimizer and rate, and say which to take.

``zero/tried_run.py`` acts inside the runs, and ``verdict.py`` compares their records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deepspeed.muon.cli.init import convert, to_muon
from deepspeed.muon.cli.plan import aligned
from deepspeed.muon.cli.verdict import Run, Variant, between, draw, is_close, length, notes, read_run, rows, verdict
from deepspeed.muon.cli.verdict import best as best_of
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.scheduler import read_schedule
from deepspeed.muon.zero.tried_run import VARIABLE

#: What in the command becomes the name of the variant's files.
PLACEHOLDER = "{variant}"
#: Parameters of schedules, of DeepSpeed and torch, that are learning rates.
SCHEDULE_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")
SCHEDULE_RATES += ("max_lr", "base_lr", "eta_min")
#: Seconds between two looks at the record of a run, and that its processes have to end.
POLL, GRACE = 0.5, 15.0
ERROR_LINE = re.compile(r"\b\w*(Error|Exception|Killed)\b.*")


def run_try(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run all variants, and return (facts for ``--json``, text with table, verdict and files)."""
    command = args.launch[args.launch[:1] == ["--"] :]
    if not command:
        raise SettingsError("no command: write your own after --, such as ds_muon try -- deepspeed train.py ...")
    if args.config:
        convert(args.config)  # raises before the first run what the conversion would raise after it
    trial = Trial(args.out, command, args.steps)
    with trial:
        return _all(args, trial)


def _all(args: argparse.Namespace, trial: Trial) -> tuple[dict[str, Any], str]:
    adamw = [Variant("AdamW", factor) for factor in args.adamw_rates]
    muon = [Variant("Muon", factor) for factor in args.rates]
    trial.plan(*adamw, *muon)
    first = trial.run(adamw[0])
    if first.state == "failed":
        raise SettingsError(f"the command fails as it is: {first.note}; all of its output is in {trial.log(adamw[0])}")
    new, _ = to_muon("the ds_config that DeepSpeed has read", first.config)
    if not first.built_by_script:
        kept = ("optimizer", "gradient_clipping")
        trial.changes = {key: new[key] for key in kept if new.get(key) != first.config.get(key)}
    for variant in [*adamw[1:], *muon]:
        trial.run(variant)
    if middle := between(trial.runs):
        trial.run(Variant("Muon", middle))
    tops = [one for name in ("AdamW", "Muon") if (one := best_of(trial.runs, name))]
    if is_close(trial.runs):
        repeats = [run.variant._replace(seed=seed) for seed in range(1, args.repeats + 1) for run in tops]
        trial.plan(*repeats)
        for variant in repeats:
            trial.run(variant)
    trial.show(is_last=True)
    return _conclude(args, trial, first)


def _conclude(args: argparse.Namespace, trial: Trial, adamw: Run) -> tuple[dict[str, Any], str]:
    """Write the picture and the new ds_config; return (facts, text)."""
    base, muon = _number(rate_of(adamw.config)), best_of(trial.runs, "Muon")
    table, words = rows(trial.runs, base, trial.steps), verdict(trial.runs, base)
    remarks, files = notes(trial.runs), [draw(trial.runs, trial.out)]
    if files[0].suffix == ".csv":
        remarks.append("no picture without matplotlib: pip install matplotlib, and start again; nothing runs twice")
    if muon:
        done = convert(args.config) if args.config else None
        config, _ = (done.config, done.decisions) if done else to_muon("ds_config", adamw.config)
        files.append(trial.out / "ds_config_muon.json")
        new = multiplied(config, muon.variant.factor)
        files[-1].write_text(json.dumps(new, indent=2) + "\n")
        if done and done.accelerate:
            files.append(trial.out / "accelerate_muon.yaml")
            files[-1].write_text(done.accelerate.replace("ds_config.json", str(trial.out / "ds_config_muon.json")))
        rate = f"by {muon.variant.factor:g}" + (f", to {muon.variant.factor * base:.3g}" if base else "")
        if "auto" in (rate_of(new), new["optimizer"]["params"].get("lr")):
            remarks.append(f'multiply the learning rate of the script {rate}: it fills in "auto"')
        elif adamw.built_by_script:
            remarks.append(
                "the script builds its optimizer: leave that to the ds_config, as docs/migrating-from-adamw.md says"
            )
    failed = [f"{run.variant}: {run.note}" for run in trial.runs if run.state == "failed"]
    text = "\n".join([aligned(table), "", words, *remarks, *failed, f"wrote {', '.join(map(str, files))}"])
    cells = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    return {"rows": cells, "verdict": words, "notes": remarks, "files": list(map(str, files))}, text


# ---- the rate in a ds_config ------------------------------------------------------------------------------------


def rate_of(config: Mapping[str, Any]) -> Any:
    """Return the learning rate of a ds_config: the schedule's, or the optimizer's."""
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
    for section, keys in (("optimizer", ("lr", "muon_lr", "adam_lr")), ("scheduler", SCHEDULE_RATES)):
        if params := (config.get(section) or {}).get("params"):
            changed = {key: times(params[key]) for key in keys if key in params}
            new[section] = {**config[section], "params": {**params, **changed}}
    return new


# ---- running ----------------------------------------------------------------------------------------------------


class Trial:
    """The folder of a trial, its finished runs, and the table on the terminal. A context: its end ends what runs.

    For each variant the folder has ``NAME.json`` (what the run reads), ``NAME.jsonl`` (what it records) and
    ``NAME.log`` (its output).
    """

    def __init__(self, out: Path, command: Sequence[str], steps: int) -> None:
        self.out, self.steps = out.absolute(), steps
        self._command, self._runs = list(command), dict[Variant, Run]()
        #: What Muon changes in the ds_config; known after the first run.
        self.changes: dict[str, Any] = {}
        self._seconds, self._began, self._lines, self._shown = list[float](), time.monotonic(), 0, ""
        self.out.mkdir(parents=True, exist_ok=True)
        self._take_folder()
        settings, file = {"command": self._command, "steps": steps}, self.out / "try.json"
        if file.exists() and json.loads(file.read_text()) != settings:
            was = shlex.join(json.loads(file.read_text())["command"])
            raise SettingsError(f"{out} has the runs of another trial ({was}): choose another folder with --out")
        file.write_text(json.dumps(settings, indent=2) + "\n")

    @property
    def runs(self) -> list[Run]:
        """Return the runs in the order in which they were planned."""
        return list(self._runs.values())

    def log(self, variant: Variant) -> Path:
        """Return the file with the output of a run."""
        return self.out / f"{variant.stem}.log"

    def plan(self, *variants: Variant) -> None:
        """Add variants to the table, those that have ended in an earlier start with their records."""
        for variant in variants:
            run = read_run(variant, self.out / f"{variant.stem}.jsonl")
            self._runs[variant] = run if run.state in ("done", "diverged") else Run(variant)

    def run(self, variant: Variant) -> Run:
        """Run the command for a variant, unless it has ended before, and return its record."""
        if variant not in self._runs:
            self.plan(variant)
        if self._runs[variant].state != "waiting":
            return self._runs[variant]
        files = {suffix: self.out / f"{variant.stem}.{suffix}" for suffix in ("json", "jsonl")}
        files["jsonl"].unlink(missing_ok=True)
        settings = {"muon": variant.optimizer == "Muon", "factor": variant.factor, "seed": 1000 * variant.seed}
        settings |= {"steps": self.steps, "changes": self.changes, "records": str(files["jsonl"])}
        files["json"].write_text(json.dumps(settings, indent=2, default=str) + "\n")
        command = [word.replace(PLACEHOLDER, variant.stem) for word in self._command]
        self._began = time.monotonic()
        with self.log(variant).open("wb") as log:
            environment = {**os.environ, VARIABLE: str(files["json"])}
            try:
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise SettingsError(f"cannot start {command[0]}: {error.strerror}") from None
            self._note(process.pid)
            self._wait(variant, process, files["jsonl"])
        self._note(None)
        self._seconds.append(time.monotonic() - self._began)
        self._runs[variant] = self._ended(variant, process, files["jsonl"])
        self.show()
        return self._runs[variant]

    def _wait(self, variant: Variant, process: subprocess.Popen, records: Path) -> None:
        """Wait until a run's processes have ended, and show its progress; end them if they do not after its record."""
        ended_at = None
        while process.poll() is None:
            run = read_run(variant, records)
            if run.state != "waiting":
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > GRACE:
                    end_processes(process.pid)
            run.state = "running"
            self._runs[variant] = run
            self.show()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)

    def _ended(self, variant: Variant, process: subprocess.Popen, records: Path) -> Run:
        run = read_run(variant, records)
        if run.state != "waiting":
            return run
        if process.returncode == 0 and run.steps:  # the script makes fewer steps
            with records.open("a") as file:
                file.write(json.dumps({"end": "done"}) + "\n")
            return read_run(variant, records)
        run.state = "failed"
        run.note = (
            last_lines(self.log(variant))
            if process.returncode
            else ("the run ended without a step of a DeepSpeed engine; is deepspeed-muon installed where it runs?")
        )
        return run

    # ---- one trial at a time in a folder ------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """End what a killed trial has left running; raise SettingsError if another trial uses the folder."""
        file = self.out / "running.json"
        if file.exists():
            before = json.loads(file.read_text())
            if _lives(*before["owner"]):
                raise SettingsError(f"another ds_muon try (process {before['owner'][0]}) uses {self.out}")
            if before["run"] and _lives(*before["run"]):
                print(f"ending process {before['run'][0]}, which a killed ds_muon try has left", file=sys.stderr)
                end_processes(before["run"][0])
        self._note(None)

    def _note(self, pid: int | None) -> None:
        born = [_birth(one) if one else None for one in (os.getpid(), pid)]
        (self.out / "running.json").write_text(json.dumps({"owner": born[0], "run": born[1]}))

    def __enter__(self) -> Trial:
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: Any) -> None:
        run = json.loads((self.out / "running.json").read_text())["run"]
        if run and _lives(*run):
            end_processes(run[0])
        (self.out / "running.json").unlink()
        signal.signal(signal.SIGTERM, self._handler)

    # ---- the table while it runs --------------------------------------------------------------------------------

    def show(self, is_last: bool = False) -> None:
        """Redraw the table on a terminal; elsewhere print a line for each run that has ended."""
        ended = [run for run in self.runs if run.state not in ("waiting", "running")]
        if sys.stderr.isatty():
            base = next((_number(rate_of(run.config)) for run in self.runs if run.config), None)
            text = "" if is_last else f"{aligned(rows(self.runs, base, self.steps))}\n{self._left()}\n"
            sys.stderr.write(f"\x1b[{self._lines}A\x1b[J{text}" if self._lines else text)
            self._lines = text.count("\n")
        elif ended and not is_last and str(ended[-1].variant) != self._shown and ended[-1].state != "running":
            run = max(ended, key=lambda one: (one.steps or [{"seconds": 0.0}])[-1]["seconds"])
            self._shown = str(run.variant)
            loss = f", loss {run.loss(len(run.steps)):.4f}" if run.state == "done" else ""
            print(f"{run.variant}: {run.state}{loss}; {self._left()}", file=sys.stderr)
        sys.stderr.flush()

    def _left(self) -> str:
        """Return how long the planned runs may still take, from those that have ended or the steps of this one."""
        waiting = sum(run.state == "waiting" for run in self.runs)
        running = next((run for run in self.runs if run.state == "running"), None)
        spent = time.monotonic() - self._began
        whole = sum(self._seconds) / len(self._seconds) if self._seconds else None
        if whole is None and running is not None and len(running.steps) > 1:
            whole = spent + running.step_seconds * (self.steps - len(running.steps))
        if whole is None:
            return f"{waiting} more runs"
        seconds = whole * waiting + (max(0.0, whole - spent) if running is not None else 0.0)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def last_lines(log: Path) -> str:
    """Return what a log says of its end: its last line that names an error, otherwise its last three lines."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [found[0] for line in lines if (found := ERROR_LINE.search(line)) and "ChildFailedError" not in line]
    return errors[-1] if errors else " | ".join(lines[-3:]) or "no output"


def end_processes(pid: int) -> None:
    """End a process and its descendants: the launcher, which ends those of other nodes, and then what is left."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        _, family = psutil.wait_procs(family, GRACE)


def _birth(pid: int) -> tuple[int, float] | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return pid, psutil.Process(pid).create_time()
    return None


def _lives(pid: int, born: float) -> bool:
    return _birth(pid) == (pid, born) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
