# SPDX-License-Identifier: Apache-2.0
"""The command ``ds_muon`` and its subcommands: init, plan, report, import and try."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.muon import errors
from deepspeed.muon.cli.build_model import build
from deepspeed.muon.cli.forecast import (
    device_bytes,
    estimate,
    group_specs,
    nccl_bytes,
    needed_bytes,
    per_rank,
    share_of_step,
    step_operations,
    stock_clipping,
    totals,
)
from deepspeed.muon.cli.init import LAUNCH, NEXT
from deepspeed.muon.cli.init import convert as convert_config
from deepspeed.muon.cli.parser import REPORT, parser
from deepspeed.muon.cli.plan_text import as_json, plan_text, rows_of
from deepspeed.muon.cli.report import as_text, check_launch, environment
from deepspeed.muon.cli.try_ import run_try
from deepspeed.muon.describe import Row, aligned
from deepspeed.muon.exchange.memory import Memory
from deepspeed.muon.exchange.plan import without_collector
from deepspeed.muon.model.routing import head_note
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.checkpoint.import_states import import_stocks_muon
from deepspeed.muon.zero.read_config import find_ds_config, parse_file, read_settings

USER_ERRORS: tuple[type[Exception], ...] = (errors.ImportStateError, errors.ModelError, errors.MuonConfigError)
USER_ERRORS += (errors.SettingsError, errors.UnsupportedError)
SHARE = (
    "Muon's share of a step: forward and backward take 6 operations per parameter and token (4 if frozen), without "
    "recomputation, at as many operations per second as Newton-Schulz; the C++ kernels compute one triangle of "
    "symmetric products; the planner assumes how long Muon's communication takes; ZeRO's communication and elementwise "
    "passes are left out"
)
MEMORY = (
    "memory: counted as DeepSpeed's estimate_zero2_model_states_mem_needs does, with this config's dtypes and buffers; "
    "activations, the loss and fragmentation are left out; stage 3 gathers up to stage3_max_live_parameters; NCCL's "
    "memory is that of all-to-alls (NVIDIA/nccl#1685)"
)
BF16_ON_CPU = "ns_dtype: a run on a CPU that multiplies bf16 faster than fp32 uses bf16; this plan assumes fp32"
#: Tokens per rank and step for which ``ds_muon plan`` always prints Muon's share of a step.
TOKENS = (1024, 4096, 16384, 65536)
LAUNCHED = "deepspeed --module deepspeed.muon.cli report --live, or torchrun ... -m deepspeed.muon.cli report --live"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``ds_muon`` with ``arguments`` (``None``: those of the process), and return its exit status.

    The status is 0 if all is well, 1 if ``report`` lists a problem, 2 for a wrong argument or file, 130 if interrupted.
    """
    args = parser().parse_args(arguments)
    try:
        # What the user's model code prints must not mix with the output, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            facts, text = RUN[args.command](args)
    except USER_ERRORS as error:
        print(f"ds_muon {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; run the same command again to continue" if args.command == "try" else ""
        print(f"ds_muon {args.command}: stopped{again}", file=sys.stderr)
        return 130
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(facts) if args.json else text, flush=True)
    return 0 if facts.get("ok", True) else 1


def _init(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    name = str(args.out or "ds_config.json")
    done = convert_config(args.config, name)
    text, launch = json.dumps(done.config, indent=2), ""
    if args.out:
        files = {args.out: f"{text}\n"}
        if done.accelerate:
            files[args.out.with_name(f"{args.out.stem}_accelerate.yaml")] = done.accelerate
            launch = f"start: {LAUNCH.format(list(files)[-1], done.launch_flags)}"
        _write(files)
        text = f"wrote {', and '.join(map(str, files))}"
    elif done.accelerate:
        head = f"\naccelerate's configuration, if this one is saved as {name} (--out FILE writes both):"
        launch = f"{head}\n\n{done.accelerate}"
    if not args.json:  # to stderr, because stdout is the config
        print(aligned(done.decisions))
        print(*filter(None, [launch, NEXT.format(name)]), sep="\n")
    decisions = [decision._asdict() for decision in done.decisions]
    return {"config": done.config, "decisions": decisions, "accelerate": done.accelerate}, text


def _write(texts: dict[Path, str]) -> None:
    """Write new files. ``texts``: {file: its text}.

    Raise SettingsError if a file cannot be written. If any of the files exists already, raise it before writing.
    """
    for file in texts:
        if file.exists():
            raise errors.SettingsError(f"cannot write {file}: File exists; choose another path with --out")
    for file, text in texts.items():
        try:
            file.write_bytes(text.encode())
        except OSError as error:
            raise errors.SettingsError(
                f"cannot write {file}: {error.strerror}; choose another path with --out"
            ) from None


def _report(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if args.out and not args.live:
        raise errors.SettingsError("--out works only with --live; otherwise redirect the output: ds_muon report > FILE")
    if not args.live:
        facts = environment()
        return facts, as_text(facts, args.all)
    if "RANK" not in os.environ:
        raise errors.SettingsError(f"--live needs a launcher, which starts the command on all ranks: {LAUNCHED}")
    found = check_launch()
    if found is None:  # only rank 0 prints and writes
        raise SystemExit(0)
    text, file = as_text(found, args.all), args.out or Path(REPORT)
    file.write_text(f"```\n{text}\n```\n")
    return found, f"{text}\n\nwritten to {file}, to be pasted into an issue"


def _import(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts = import_stocks_muon(args.source, args.target)
    divided = f", divided by the loss scale {facts['loss_scale']:g}" if facts["loss_scale"] != 1.0 else ""
    return facts, (
        f"wrote {facts['to']}: momentum of {facts['matrices']} matrices{divided}, AdamW's state of {facts['adamw']} "
        f"tensors, saved at stage {facts['stage']}. Load it with the tag {args.target.name} and "
        '"checkpoint": {"load_universal": true}'
    )


@without_collector()
def _plan(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts, rows = _plan_facts(args)
    return facts, "" if args.json else plan_text(facts, rows, shows_why=args.why)


def _plan_facts(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Return (object that ``ds_muon plan --json`` prints, rows of the table of parameters that it prints otherwise).

    Later versions must keep the object's keys, because users' scripts read them.
    """
    section = find_ds_config(args.config, parse_file(args.config))
    settings = read_settings(args.config, section, args.world_size, args.stage)
    config, device = settings.config, torch.device(args.device)
    layout = settings.layout
    default = "fp32" if args.device == "cpu" else "fp16"
    dtype = default if config.ns_dtype == "auto" else config.ns_dtype
    model = build(args.model)
    try:
        groups = group_specs(model, config, dtype, args.device)
    except errors.MuonConfigError:
        raise
    except ValueError as error:
        raise errors.ModelError(f"--model {args.model!r}: {error}") from None
    per_token = _operations_per_token(model, args.active_parameters)
    memory = Memory(
        wire=config.wire,
        dtype=dtype,
        device_type=args.device,
        staged=settings.offload and device.type != "cpu",
        plain=config.kernels == "torch",
    )
    found = estimate(groups, layout, config, memory)
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    rows = rows_of(groups, found.costs, layout.world_size, config.schedule, dtype, fold=not args.all)
    where = "CPUs on gloo" if args.device == "cpu" else "accelerators with a fast interconnect"
    facts = {
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
        "parameters": list(map(as_json, rows)),
        "totals": {"muon": totals(groups, True), "adamw": totals(groups, False)},
        "per_rank": per_rank(found) | {"nccl_bytes": nccl_bytes(found, args.device)},
        "memory": _memory(device_bytes(found, settings, frozen, args.device), args.memory),
        "share": _share(step_operations(found, config.schedule, memory), per_token, args.tokens),
        "planning_seconds": round(found.planning_seconds, 3),
        "stock_tuning": config.stock_tuning,
        "stock_clipping": stock_clipping(groups, settings.gradient_clipping),
        "assumptions": [f"owners are balanced for {where}; all trainable parameters are in one group", SHARE, MEMORY],
        "notes": [
            *([] if config.preset == "none" else [config.preset_summary]),
            *settings.notes,
            *filter(None, [head_note(spec for group in groups for spec in group.specs)]),
            *([BF16_ON_CPU] if args.device == "cpu" and config.ns_dtype == "auto" else []),
        ],
    }
    return facts, rows


def _operations_per_token(model: torch.nn.Module, active: int | None) -> float:
    """Return the operations of forward and backward for one token: 6 per trained parameter, 4 per frozen one.

    ``active``: the number of parameters that a token passes through; ``None``: all. Raise SettingsError if ``model``
    has fewer.
    """
    sizes = [(param.numel(), 6 if param.requires_grad else 4) for param in model.parameters()]
    total = sum(numel for numel, _ in sizes)
    if active and active > total:
        raise errors.SettingsError(f"--active-parameters: got {active:,}, but the model has only {total:,} parameters")
    return sum(numel * each for numel, each in sizes) * (active or total) / total


def _memory(rows: dict[str, dict[str, float]], gigabytes: float | None) -> dict[str, Any]:
    """Return the object ``memory`` of ``ds_muon plan --json``: bytes on the device of the rank that needs most.

    ``rows``: result of :func:`device_bytes`. ``gigabytes``: the flag ``--memory``, the memory of a device in units of
    10^9 bytes; ``None`` if unknown.
    """
    limit = None if gigabytes is None else gigabytes * 1e9
    (needed, backward), (adamw, _) = needed_bytes(rows["muon"]), needed_bytes(rows["adamw"])
    return {
        "rows": rows,
        "needed_bytes": {"muon": needed, "adamw": adamw},
        "limit_bytes": limit,
        "fits": None if limit is None else needed <= limit,
        "left_for_activations_bytes": None if limit is None else max(0.0, limit - backward),
    }


def _share(muon: dict[str, float], per_token: float, tokens: int | None) -> dict[str, Any]:
    """Return the object ``share`` of ``ds_muon plan --json``: Muon's share of a step, by tokens per rank and step.

    ``muon``: result of :func:`step_operations`. ``per_token``: operations of forward and backward for one token.
    ``tokens``: the flag ``--tokens``.
    """
    rows = [
        {"tokens": count, "counted": share_of_step(sum(muon.values()), per_token, count)}
        for count in sorted({*TOKENS, *([tokens] if tokens else ())})
    ]
    gflop = {f"{name}_gflop": value / 1e9 for name, value in muon.items()}
    return {**gflop, "gflop_per_token": per_token / 1e9, "by_tokens": rows}


#: Subcommand -> function that returns (object to print as JSON, text to print without ``--json``).
RUN = {"init": _init, "plan": _plan, "report": _report, "import": _import, "try": run_try}
