# SPDX-License-Identifier: Apache-2.0
"""Report whether this environment, or all ranks of a launch, can run deepspeed-muon: ``ds_muon report``."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch

from deepspeed.muon.describe import aligned
from deepspeed.muon.kernels import selection
from deepspeed.muon.version import TESTED_DEEPSPEED, __version__
from deepspeed.muon.zero.live_trial import run_trial
from deepspeed.muon.zero.patches import is_tested, seam_states
from deepspeed.muon.zero.read_config import accelerator, backends

#: The entry point that activates the package at ``import torch``.
ENTRY_GROUP, ENTRY_NAME = "torch.backends", "deepspeed_muon"
#: Environment variables. If one is 0, DeepSpeed stays untouched until ``import deepspeed.muon``.
SWITCHES = ("DS_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
#: Packages whose versions are shown and must be equal on all ranks.
PACKAGES = ("torch", "deepspeed", "numpy", "triton", "transformers")
#: Column titles of the table of ``--live``.
TRIAL = ("ZeRO", "trains", "error", "step ms")


def environment() -> dict[str, Any]:
    """Return what ``ds_muon report`` shows about this machine and its software.

    The keys are those of ``ds_muon report --json``: facts, ``problems`` (a list of sentences), and ``ok`` (whether that
    list is empty).
    """
    versions = _versions()
    tested = dict(zip(("oldest", "newest"), TESTED_DEEPSPEED, strict=True))
    includes_installed = bool(versions["deepspeed"]) and is_tested(str(versions["deepspeed"]))
    device = accelerator()
    unavailable = selection.unavailable_kernels("auto", sorted({"cpu", device["kind"]}))
    facts: dict[str, Any] = {
        "versions": versions,
        "tested_deepspeed": {**tested, "includes_installed": includes_installed},
        "seams": seam_states(),
        "activation": _activation(),
        "accelerator": device,
        "tools": _tools(),
        # A step on the CPU would build the kernels too, so the report does, if they are not built yet.
        "kernels": selection.summary(selection.choose(unavailable), unavailable),
        "ns_dtype": selection.fast_dtype(device["kind"], unavailable),
        "backends": backends(),
    }
    problems = list(_problems(facts))
    return facts | {"problems": problems, "ok": not problems}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"deepspeed-muon": __version__}


def _tools() -> dict[str, str | None]:
    """Return {name: version} of the C++ compiler, ninja, libaio (its file name), CUDA and NCCL; ``None`` if missing."""
    compiler = os.environ.get("CXX", "c++").split()  # it may come with a wrapper or flags
    cuda, nccl = torch.version.cuda, torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "C++ compiler": _first_line(*compiler, "--version"),
        "ninja": _first_line("ninja", "--version"),
        "libaio": ctypes.util.find_library("aio"),
        "CUDA of torch": cuda,
        "NCCL of torch": ".".join(map(str, nccl)) if nccl else None,
    }


def _first_line(*command: str) -> str | None:
    path = shutil.which(command[0])
    if path is None:
        return None
    found = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False)
    return found.stdout.partition("\n")[0] or None


def check_launch() -> dict[str, Any] | None:
    """Compare the software of all ranks, and train a small model on them (:func:`run_trial`). A collective.

    Return on rank 0 the result of :func:`environment`, with findings about all ranks under the key ``launch`` and in
    ``problems``. Return ``None`` on other ranks.
    """
    device = accelerator()
    own = {**_versions(), "host": platform.node(), "device": device["name"], "backend": device["backend"]}
    found = run_trial(own)
    if found is None:
        return None
    ranks, trial, facts = found["ranks"], found["trial"], environment()
    odd = [name for name in ranks[0] if name != "host" and len({one[name] for one in ranks}) > 1]
    differing = {name: [one[name] for one in ranks] for name in odd}
    problems = [
        *facts["problems"],
        *(f"ranks differ in {name}; make it the same on all ranks" for name in odd if name != "device"),
    ]
    problems += [f"stage {case['stage']}: {case['problem']}" for case in trial if case["problem"]]
    launch = {
        "ranks": len(ranks),
        "hosts": len({one["host"] for one in ranks}),
        "differing": differing,
        "trial": trial,
    }
    return facts | {"launch": launch, "problems": problems, "ok": not problems}


def _activation() -> dict[str, Any]:
    points = metadata.entry_points(group=ENTRY_GROUP)
    switches = {name: os.environ.get(name) for name in SWITCHES}
    registered = any(point.name == ENTRY_NAME for point in points)
    # deepspeed_muon.py reads the first variable, `import torch` the second.
    automatic = registered and switches[SWITCHES[0]] != "0" and switches[SWITCHES[1]] in (None, "1")
    return {"entry_point_registered": registered, "automatic": automatic, "switches": switches}


def _problems(facts: dict[str, Any]) -> Iterator[str]:
    tested = "install DeepSpeed {oldest} to {newest}, which are tested".format_map(facts["tested_deepspeed"])
    yield from (
        f"DeepSpeed lacks {name}, which deepspeed-muon replaces; {tested}"
        for name, state in facts["seams"].items()
        if state == "missing"
    )
    if not facts["activation"]["entry_point_registered"]:
        yield f"the entry point {ENTRY_NAME} of group {ENTRY_GROUP} is not registered: install deepspeed-muon"
    if not any(facts["backends"].values()):
        yield "torch has neither gloo nor nccl, so ranks cannot communicate; install another build of torch"
    if facts["accelerator"]["kind"] == "cuda" and not facts["backends"]["nccl"]:
        yield "torch sees a GPU, but was built without nccl; install a build of torch for CUDA"


def _replaced_rows(states: Mapping[str, str], every: bool) -> list[list[str]]:
    """Return rows (title, text) about the attributes of DeepSpeed that deepspeed-muon replaces.

    ``states``: {attribute: "in use", "missing", ...}, from :func:`deepspeed.muon.zero.patches.seam_states`. ``every``:
    whether to list all attributes instead of counting them.
    """
    (usual, _), *_ = counts = Counter(states.values()).most_common()
    if not every:
        text = ", ".join(f"{count} {state}" for state, count in counts)
        return [["replaced in DeepSpeed", f"{len(states)} attributes: {text}; --all lists them"]]
    rows = [["replaced in DeepSpeed", f"{len(states)} attributes, {usual} unless another state is named"]]
    owners: dict[str, dict[str, list[str]]] = {}
    for seam, state in states.items():
        owner, _, name = seam.rpartition(".")
        owners.setdefault(owner, {}).setdefault(state, []).append(name)
    for owner, by_state in owners.items():
        texts = [("" if state == usual else f"{state}: ") + ", ".join(names) for state, names in by_state.items()]
        rows.append([f"  {owner.split('.', 2)[2]}", "; ".join(texts)])
    return rows


def as_text(facts: dict[str, Any], every: bool = False) -> str:
    """Return a report as text for a terminal, problems first.

    ``facts``: result of :func:`environment` or :func:`check_launch`. ``every``: whether to list each replaced
    attribute of DeepSpeed.
    """
    tested, activation = facts["tested_deepspeed"], facts["activation"]
    device = facts["accelerator"]
    inside = "tested" if tested["includes_installed"] else "NOT TESTED"
    rows = [
        *([name, version or "not installed"] for name, version in facts["versions"].items()),
        *([name, version or "not found"] for name, version in facts["tools"].items()),
        ["tested DeepSpeed", f"{tested['oldest']} to {tested['newest']}; this one: {inside}"],
        *_replaced_rows(facts["seams"], every),
        ["entry point", "registered" if activation["entry_point_registered"] else "NOT REGISTERED"],
        *([name, "not set" if value is None else value] for name, value in activation["switches"].items()),
        ["active", "at import deepspeed" if activation["automatic"] else "only by import deepspeed.muon"],
        ["accelerator", f"{device['count']} x {device['name']}, backend {device['backend']}"],
        ["backends of torch", ", ".join(name for name, has in facts["backends"].items() if has) or "NONE"],
        ["kernels", facts["kernels"]],
        ["dtype of Newton-Schulz", f"{facts['ns_dtype']} on {device['kind']}, unless ns_dtype is set"],
    ]
    verdict = [f"problem: {problem}" for problem in facts["problems"]] or ["nothing essential is missing"]
    return "\n".join([*verdict, "", aligned(rows), *_launch_lines(facts.get("launch"))])


def _launch_lines(launch: dict[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the report about all ranks of a launch; none if ``launch`` is ``None``."""
    if launch is None:
        return
    ranks, hosts = _count(launch["ranks"], "rank"), _count(launch["hosts"], "host")
    yield f"\n{ranks} on {hosts}, compared with one process without DeepSpeed:\n"
    rows = [TRIAL]
    for case in launch["trial"]:
        verdict = "fails" if case["problem"] else "as one process"
        rows.append((f"stage {case['stage']}", verdict, f"{case['error']:.1e}", f"{case['step_ms']:.1f}"))
    yield aligned(rows)
    yield "\nerror: the largest relative error of a weight's change; step ms: the optimizer's step on the slowest rank"
    yield from (f"{name} by rank: {values}" for name, values in launch["differing"].items())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
