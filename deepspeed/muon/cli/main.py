# SPDX-License-Identifier: Apache-2.0
"""The command ``ds_muon``: a config, what a run would do, whether it can, what it did, stock's checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from deepspeed.muon import errors
from deepspeed.muon.cli.init import as_written
from deepspeed.muon.cli.init import convert as convert_config
from deepspeed.muon.cli.model import EXPECTED, build
from deepspeed.muon.cli.plot import plot
from deepspeed.muon.cli.report import as_text, environment, of_launch
from deepspeed.muon.cli.tables import aligned, plan_text, rows_of
from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.forecast.estimate import Estimate, estimate, milliseconds, per_rank, stock_clipping, totals
from deepspeed.muon.forecast.layout import halves_of
from deepspeed.muon.forecast.measured import measure
from deepspeed.muon.kernels.selection import choose, missing, product_tables
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.plan.memory import Memory
from deepspeed.muon.tuning import Candidates
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.checkpoint.from_stock import convert
from deepspeed.muon.zero.read_config import Settings, read_settings

USER_ERRORS: tuple[type[Exception], ...] = (errors.ImportStateError, errors.ModelError, errors.MuonConfigError)
USER_ERRORS += (errors.RecordsError, errors.SettingsError, errors.UnsupportedError)
CHOSEN_LATER = "what is auto of ns_dtype and ns_method is chosen by a race at start; here by the count of operations"
ABOUT_REPORT = "versions, what is replaced in DeepSpeed, activation, devices; status 1 if unfit"
LIVE = "under a launcher: also train a small model on all ranks at every stage, and write all of it to a file"
REPORT = "ds_muon_report.md"
LAUNCHED = "deepspeed --module deepspeed.muon.cli report --live, or torchrun ... -m deepspeed.muon.cli report --live"
MEASURED = "also milliseconds, from rates measured here on the device of --device in about 10 s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0; 1 where ``report`` misses something essential; 2 for a mistake of the user.
    """
    args = parser().parse_args(arguments)
    try:
        # Whatever the user's own code prints must not mix with the output.
        with contextlib.redirect_stdout(sys.stderr):
            facts, text = args.run(args)
    except USER_ERRORS as error:
        print(f"ds_muon {args.command}: {error}", file=sys.stderr)
        return 2
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(facts) if args.json else text, flush=True)
    return 0 if facts.get("ok", True) else 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    title = "Muon for DeepSpeed ZeRO: a config for it, a plan of a run, a report on the environment, import, plot"
    top = _Parser("ds_muon", description=title)
    top.add_argument("--version", action="version", version=f"deepspeed-muon {__version__}")
    top.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    commands = top.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="print a ds_config for Muon, from one for AdamW; the reasons go to stderr")
    init.add_argument("--config", required=True, help="ds_config.json with optimizer.type AdamW, or without optimizer")
    init.set_defaults(run=_init)
    plan = commands.add_parser("plan", help="what the optimizer would do with a model on many ranks")
    plan.add_argument("--config", required=True, help="ds_config.json with optimizer.type Muon")
    plan.add_argument("--model", required=True, help=EXPECTED.removeprefix("expected "))
    plan.add_argument("--world-size", required=True, type=_positive, help="number of data-parallel ranks")
    plan.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage instead of the config's")
    plan.add_argument("--all", action="store_true", help="list every parameter, repeated layers too")
    plan.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the owners are balanced for")
    plan.add_argument("--measured", action="store_true", help=MEASURED)
    plan.set_defaults(run=_plan)
    report = commands.add_parser("report", help=ABOUT_REPORT)
    report.add_argument("--live", action="store_true", help=LIVE)
    report.add_argument("--all", action="store_true", help="list every attribute that is replaced in DeepSpeed")
    report.add_argument("--out", type=Path, help=f"with --live, the file of the report (default: {REPORT})")
    report.set_defaults(run=_report)
    take = commands.add_parser("import", help="a universal checkpoint from one of stock DeepSpeed's Muon")
    take.add_argument("--from", required=True, type=Path, dest="source", help="folder of one tag of the checkpoint")
    take.add_argument("--to", required=True, type=Path, dest="target", help="new folder, of a tag too")
    take.set_defaults(run=_import)
    draw = commands.add_parser("plot", help="a picture of what a run has written through DeepSpeed's monitor")
    draw.add_argument("run_folder", type=Path, metavar="RUN", help="output_path/job_name of csv_monitor or tensorboard")
    draw.add_argument("--out", type=Path, help="the PNG file (default: muon.png in RUN)")
    draw.set_defaults(run=_plot)
    for command in (init, plan, report, take, draw):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return top


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and which flag was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse the unknown flags of a command before argparse misses others."""
        known = list(self._option_string_actions)
        otherwise = f"known: {' '.join(known)}"
        for flag in () if self._subparsers else [argument.partition("=")[0] for argument in args]:
            if flag.startswith("--") and not any(name.startswith(flag) for name in known):
                self.error(f"unknown flag {flag}; {did_you_mean(flag, known, otherwise)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """One line and status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def _init(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts = convert_config(args.config)
    if not args.json:
        rows = [(decision["key"], decision["what"], decision["why"]) for decision in facts["decisions"]]
        print(aligned(rows))  # to stderr: stdout is the config alone
    return facts, as_written(facts["config"], args.config)


def _report(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if args.out and not args.live:
        raise errors.SettingsError("--out: goes with --live, which writes a file")
    if not args.live:
        facts = environment()
        return facts, as_text(facts, args.all)
    if "RANK" not in os.environ:
        raise errors.SettingsError(f"--live: start it on all ranks: {LAUNCHED}")
    found = of_launch()
    if found is None:  # rank 0 speaks for all
        raise SystemExit(0)
    text, file = as_text(found, args.all), args.out or Path(REPORT)
    file.write_text(f"```\n{text}\n```\n")
    return found, f"{text}\n\nwritten to {file}, to be pasted into an issue"


def _import(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts = convert(args.source, args.target)
    divided = f", divided by the loss scale {facts['loss_scale']:g}" if facts["loss_scale"] != 1.0 else ""
    return facts, (
        f"{facts['to']}: momentum of {facts['matrices']} matrices{divided}, AdamW's state of {facts['adamw']} tensors, "
        f"from stage {facts['stage']}. Load it with the tag {args.target.name} and "
        '"checkpoint": {"load_universal": true}'
    )


def _plot(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts = plot(args.run_folder, args.out)
    return facts, f"{facts['file']}: {len(facts['panels'])} panels from {facts['records']} records"


def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    gc.disable()  # Millions of small objects, all of which live to the end.
    try:
        facts = plan_facts(args, read_settings(args.config, args.world_size, args.stage))
        return facts, "" if args.json else plan_text(facts)
    finally:
        gc.enable()


def plan_facts(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The object that ``ds_muon plan --json`` prints; its keys are stable.

    Raises:
        ModelError: no such model.
        MuonConfigError: a pattern that matches nothing.
    """
    config, layout, device = settings.config, settings.layout, torch.device(args.device)
    candidates = Candidates.of(config, {}, {config.ns_method}, device, has_bf16=True)
    dtype = candidates.usual_dtype
    model = build(args.model)
    try:
        halves = halves_of(model, config)
    except errors.MuonConfigError:
        raise
    except ValueError as error:
        raise errors.ModelError(f"--model {args.model!r}: {error}") from None
    memory = Memory(
        wire=config.wire,
        dtype=dtype,
        device_type=args.device,
        staged=settings.offload and device.type != "cpu",
        plain=config.kernels == "torch",
    )
    found = estimate(halves, layout, config.schedule, memory, config.bucket_bytes)
    where = "a CPU on gloo" if args.device == "cpu" else "an accelerator on its fabric"
    return {
        "version": __version__,
        "model": args.model,
        "config": args.config,
        "stage": layout.stage,
        "world_size": layout.world_size,
        "scale": config.scale,
        "beyond_muon": [*config.beyond_muon, *([f"QK-clip at {config.qk_clip.tau:g}"] if config.qk_clip else ())],
        "ns_dtype": dtype,
        "wire_dtype": config.wire,
        "device": args.device,
        "offload": settings.offload,
        "parameters": rows_of(halves, found.costs, layout.world_size, config.schedule, dtype, fold=not args.all),
        "totals": {"muon": totals(halves, True), "adamw": totals(halves, False)},
        "per_rank": per_rank(found),
        "measured": _measured(found, settings, candidates) if args.measured else None,
        "planning_seconds": round(found.planning_seconds, 3),
        "stock_tuning": config.stock_tuning,
        "stock_clipping": stock_clipping(halves, settings.gradient_clipping),
        "assumptions": [f"owners are balanced for {where}; one user group of all trainable parameters"],
        "notes": [
            *_of_preset(config),
            *settings.notes,
            *([CHOSEN_LATER] if "auto" in (config.ns_dtype, config.ns_method) else []),
        ],
    }


def _of_preset(config: MuonConfig) -> list[str]:
    return [] if config.preset == "none" else [config.preset_says]


def _measured(found: Estimate, settings: Settings, candidates: Candidates) -> dict[str, Any]:
    """Rates of this process and the milliseconds that follow from them; a device that is not there is refused."""
    device = candidates.device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.SettingsError("--measured: torch sees no GPU here; --device cpu measures this machine's CPU")
    config, shards = settings.config, torch.device("cpu") if settings.offload else device
    lacking = missing(config.kernels, {device.type, shards.type})
    kernels = choose(lacking)
    began = time.perf_counter()
    machine, shapes = measure(
        found.halves,
        dataclasses.replace(candidates, tables=product_tables(lacking, device.type)),
        DTYPES[config.wire],
        shards,
        kernels,
        world_size=found.world_size,
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"this CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "kernels": kernels.name,
        "seconds": round(time.perf_counter() - began, 1),
        "machine": dataclasses.asdict(machine),
        "shapes": [dataclasses.asdict(shape) for shape in shapes],
        "step_ms": milliseconds(found, machine),
    }
