# SPDX-License-Identifier: Apache-2.0
"""Whether this environment is fit for deepspeed-muon, as facts and as text."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch

from deepspeed.muon.cli.tables import aligned
from deepspeed.muon.kernels import selection
from deepspeed.muon.math.choice import shape_key
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.math.race import fast_enough, probe, race
from deepspeed.muon.version import TESTED_DEEPSPEED, __version__
from deepspeed.muon.zero.hooks import is_tested, seam_states
from deepspeed.muon.zero.read_config import accelerator, backends

#: The entry point that activates the package at ``import torch``.
ENTRY_GROUP, ENTRY_NAME = "torch.backends", "deepspeed_muon"
#: Where set to 0, either leaves DeepSpeed untouched until ``import deepspeed.muon``.
SWITCHES = ("DS_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
#: Rows and columns of the matrices on which products are timed.
SHAPE = (512, 2048)


def environment() -> dict[str, Any]:
    """Versions, seams, activation and devices; ``problems`` lists essential things that are missing."""
    versions = {name: _version(name) for name in ("torch", "deepspeed", "numpy", "transformers")}
    tested = dict(zip(("oldest", "newest"), TESTED_DEEPSPEED, strict=True))
    includes_installed = bool(versions["deepspeed"]) and is_tested(str(versions["deepspeed"]))
    device, lacking = accelerator(), selection.missing("auto", ["cpu"])
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **versions, "deepspeed-muon": __version__},
        "tested_deepspeed": {**tested, "includes_installed": includes_installed},
        "seams": seam_states(),
        "activation": _activation(),
        "accelerator": device,
        # What a step on the CPU would run on; built here if it is not yet, as it would be then.
        "kernels": selection.summary(selection.choose(lacking), lacking),
        "products_tflops": _rates(device["kind"]),
        "backends": backends(),
    }
    problems = list(_problems(facts))
    return facts | {"problems": problems, "ok": not problems}


def _rates(device_type: str) -> dict[str, float]:
    """TFLOP/s of the products of Newton-Schulz by dtype, every one counted in full; hopelessly slow dtypes are missing.

    With a race as at the start of a run, on matrices of :data:`SHAPE`.
    """
    lacking = selection.missing("auto", [device_type])
    tables = selection.product_tables(lacking, device_type)
    device = torch.device(device_type)
    times = race({SHAPE: 4}, fast_enough([probe(DTYPES, tables, device)]), tables, device)
    rows, cols = SHAPE
    operations = {"square": 2 * rows**2 * cols, "multiply": 2 * rows**2 * cols, "product": 2 * rows**3}
    found = {}
    for dtype, kinds in ((dtype, keys[shape_key(*SHAPE)]) for dtype, keys in times.items()):
        if all(kinds.get(kind) for kind in operations):
            found[dtype] = sum(operations.values()) / sum(min(kinds[kind].values()) for kind in operations) / 1e12
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _activation() -> dict[str, Any]:
    points = metadata.entry_points(group=ENTRY_GROUP)
    switches = {name: os.environ.get(name) for name in SWITCHES}
    registered = any(point.name == ENTRY_NAME for point in points)
    # The conditions of the shim and of `import torch`.
    automatic = registered and switches[SWITCHES[0]] != "0" and switches[SWITCHES[1]] in (None, "1")
    return {"entry_point_registered": registered, "automatic": automatic, "switches": switches}


def _problems(facts: dict[str, Any]) -> Iterator[str]:
    yield from (f"seam missing: {name}" for name, state in facts["seams"].items() if state == "missing")
    if not facts["activation"]["entry_point_registered"]:
        yield f"the entry point {ENTRY_NAME} of group {ENTRY_GROUP} is not registered: install deepspeed-muon"
    if not any(facts["backends"].values()):
        yield "torch has neither gloo nor nccl"
    if facts["accelerator"]["kind"] == "cuda" and not facts["backends"]["nccl"]:
        yield "torch sees a GPU, but was built without nccl"


def _seam_rows(states: Mapping[str, str]) -> list[list[str]]:
    """One row per class or module with its attributes; a state is named where it is not that of most of them."""
    (usual, _), *_ = Counter(states.values()).most_common()
    rows = [["replaced in DeepSpeed", f"{len(states)} attributes, {usual} unless another state is named"]]
    owners: dict[str, dict[str, list[str]]] = {}
    for seam, state in states.items():
        owner, _, name = seam.rpartition(".")
        owners.setdefault(owner, {}).setdefault(state, []).append(name)
    for owner, by_state in owners.items():
        texts = [("" if state == usual else f"{state}: ") + ", ".join(names) for state, names in by_state.items()]
        rows.append([f"  {owner.split('.', 2)[2]}", "; ".join(texts)])
    return rows


def as_text(facts: dict[str, Any]) -> str:
    """The facts for a terminal."""
    tested, activation = facts["tested_deepspeed"], facts["activation"]
    device = facts["accelerator"]
    inside = "tested" if tested["includes_installed"] else "NOT TESTED"
    rates = [f"{dtype} {tflops:.3g}" for dtype, tflops in facts["products_tflops"].items()]
    rows = [
        *([name, version or "not installed"] for name, version in facts["versions"].items()),
        ["tested DeepSpeed", f"{tested['oldest']} to {tested['newest']}; this one: {inside}"],
        *_seam_rows(facts["seams"]),
        ["entry point", "registered" if activation["entry_point_registered"] else "NOT REGISTERED"],
        *([name, "not set" if value is None else value] for name, value in activation["switches"].items()),
        ["active", "at import deepspeed" if activation["automatic"] else "only by import deepspeed.muon"],
        ["accelerator", f"{device['count']} x {device['name']}, backend {device['backend']}"],
        ["backends of torch", ", ".join(name for name, has in facts["backends"].items() if has) or "NONE"],
        ["kernels", facts["kernels"]],
        ["products of Newton-Schulz", f"{', '.join(rates)} TFLOP/s, on matrices of {SHAPE[0]} x {SHAPE[1]}"],
    ]
    verdict = [f"missing: {problem}" for problem in facts["problems"]] or ["nothing essential is missing"]
    return "\n".join([aligned(rows), "", *verdict])
