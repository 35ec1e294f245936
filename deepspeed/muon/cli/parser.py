# SPDX-License-Identifier: Apache-2.0
"""The command line of ``ds_muon``.

``deepspeed_muon.py`` runs this file by its path, so that help does not wait for the import of DeepSpeed. Therefore the
top of this file imports the standard library only.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

EXPECTED = (
    "expected a Hugging Face config.json or its folder, a model type such as llama, a name on the hub, "
    "package.module:function or path/to/file.py:function"
)
OF_INIT = "ds_config.json with optimizer.type AdamW, or without optimizer; or accelerate's YAML"
ABOUT_REPORT = "versions, what is replaced in DeepSpeed, activation, devices; exit status 1 if there is a problem"
LIVE = "under a launcher: also train a small model on all ranks at stages 1 to 3, and write the report to a file"
REPORT = "ds_muon_report.md"
TOKENS = "tokens per rank and step, accumulation included: print Muon's share of such a step too"
TRY = "run your launch command with AdamW, and with Muon at several rates; write a table, a picture, a ds_config"
MEMORY = "memory of a device in GB: says whether the run fits, and what is left for activations"
WHY = "also print what the plan assumes"
ACTIVE = "parameters that one token passes through in a mixture of experts (default: all of the model)"
RATES = "multiples of AdamW's rate to try for Muon (default: 1,3,10,30); one more near the best is added"
REPEATS = "how often the best Muon and the best AdamW run again with another seed, if they are close (default: 2)"
#: Removed command or flag -> what to do instead.
REMOVED = {
    "plot": "TensorBoard, W&B or any viewer of CSV files draws the six values that DeepSpeed's monitor gets",
    "--measured": "the plan counts operations and bytes, and a short run shows the milliseconds",
    "--check": "ds_muon plan builds the optimizer and fails as the run would",
    "--ranks-per-node": "one rank owns each matrix, wherever the others are",
}


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command ``ds_muon``, with all subcommands."""
    title = "Muon for DeepSpeed ZeRO: write a config, plan a run, report on this machine, import checkpoints, try rates"
    version = runpy.run_path(str(Path(__file__).parents[1] / "version.py"))["__version__"]
    top = _Parser("ds_muon", description=title)
    top.add_argument("--version", action="version", version=f"deepspeed-muon {version}")
    top.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    commands = top.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="print a ds_config for Muon, from one for AdamW; the reasons go to stderr")
    init.add_argument("--config", required=True, help=OF_INIT)
    init.add_argument("--out", type=Path, help="new file for the ds_config; from accelerate's YAML also a new YAML")
    plan = commands.add_parser("plan", help="show what the optimizer would do with a model on many ranks")
    plan.add_argument("--config", required=True, help="ds_config.json with optimizer.type Muon")
    plan.add_argument("--model", required=True, help=EXPECTED.removeprefix("expected "))
    plan.add_argument("--world-size", required=True, type=_positive, help="number of data-parallel ranks")
    plan.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage instead of the config's")
    plan.add_argument("--all", action="store_true", help="list every parameter, repeated layers too")
    plan.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device type for which the owners are balanced"
    )
    plan.add_argument("--memory", type=float, metavar="GB", help=MEMORY)
    plan.add_argument("--why", action="store_true", help=WHY)
    plan.add_argument("--tokens", type=_positive, help=TOKENS)
    plan.add_argument("--active-parameters", type=_positive, metavar="N", help=ACTIVE)
    report = commands.add_parser("report", help=ABOUT_REPORT)
    report.add_argument("--live", action="store_true", help=LIVE)
    report.add_argument("--all", action="store_true", help="list every attribute that is replaced in DeepSpeed")
    report.add_argument("--out", type=Path, help=f"with --live, the file of the report (default: {REPORT})")
    take = commands.add_parser("import", help="write a universal checkpoint from one of stock DeepSpeed's Muon")
    take.add_argument("--from", required=True, type=Path, dest="source", help="folder of one tag of the checkpoint")
    take.add_argument(
        "--to", required=True, type=Path, dest="target", help="new folder for one tag of the new checkpoint"
    )
    rehearse = commands.add_parser("try", help=TRY)
    rehearse.add_argument("--config", help=f"{OF_INIT}, to be converted at the end (default: what DeepSpeed has read)")
    at_least_2, at_least_0 = functools.partial(_at_least, 2), functools.partial(_at_least, 0)
    rehearse.add_argument("--steps", type=at_least_2, default=100, help="optimizer steps of each run (default: 100)")
    rehearse.add_argument("--rates", type=_factors, default=[1.0, 3.0, 10.0, 30.0], help=RATES)
    rehearse.add_argument("--adamw-rates", type=_factors, default=[1.0], help="multiples to try for AdamW (default: 1)")
    rehearse.add_argument("--repeats", type=at_least_0, default=2, help=REPEATS)
    rehearse.add_argument("--out", type=Path, default="ds_muon_try", help="folder of records and results")
    rehearse.add_argument("launch", nargs="...", metavar="-- COMMAND", help="your command, such as deepspeed train.py")
    for command in (init, plan, report, take, rehearse):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return top


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with a suggestion if a flag is misspelled."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but show help without any argument, and report unknown flags before missing ones."""
        if self._subparsers and not (sys.argv[1:] if args is None else args):
            args = ["--help"]
        known = list(self._option_string_actions)  # an unknown flag may be the missing one, misspelled
        own = [] if self._subparsers else itertools.takewhile(lambda argument: argument != "--", args)
        for flag in [argument.partition("=")[0] for argument in own]:  # after -- is the user's command
            if flag.startswith("--") and not any(name.startswith(flag) for name in known):
                self.error(_about_unknown(flag, known))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        removed = (f"{name} is removed; {text}" for name, text in REMOVED.items() if f"choice: {name!r}" in message)
        self.exit(2, f"{self.prog}: {next(removed, message)}\n")


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least {least}")
    return int(text)


_positive = functools.partial(_at_least, 1)


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if not factors or min(factors) <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers above 0 with commas, such as 1,3,10")
    return factors


def _about_unknown(flag: str, known: list[str]) -> str:
    from deepspeed.muon.config.messages import did_you_mean

    if flag in REMOVED:
        return f"{flag} is removed; {REMOVED[flag]}"
    return f"unknown flag {flag}; {did_you_mean(flag, known, 'known: ' + ' '.join(known))}"
