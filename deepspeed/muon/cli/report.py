# SPDX-License-Identifier: Apache-2.0
"""Whether this environment is fit for deepspeed-muon, as facts and as text."""

from __future__ import annotations

import dataclasses
import os
import platform
from importlib import metadata
from typing import Any

from deepspeed.muon.cli.tables import aligned
from deepspeed.muon.kernels import selection
from deepspeed.muon.math.choice import kind_of, shipped
from deepspeed.muon.math.newton_schulz import bf16_is_fast
from deepspeed.muon.version import TESTED_DEEPSPEED, __version__
from deepspeed.muon.zero.hooks import is_tested, seam_states
from deepspeed.muon.zero.read_config import accelerator, backends

#: The entry point that activates the package at ``import torch``.
ENTRY_GROUP, ENTRY_NAME = "torch.backends", "deepspeed_muon"
#: Where set to 0, either leaves DeepSpeed untouched until ``import deepspeed.muon``.
SWITCHES = ("DS_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def environment() -> dict[str, Any]:
    """Versions, seams, activation and devices; ``problems`` lists essential things that are missing."""
    deepspeed = _version("deepspeed")
    oldest, newest = TESTED_DEEPSPEED
    tested = deepspeed is not None and is_tested(deepspeed)
    facts: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "deepspeed", "numpy", "transformers")},
            "deepspeed-muon": __version__,
        },
        "tested_deepspeed": {"oldest": oldest, "newest": newest, "includes_installed": tested},
        "seams": seam_states(),
        "activation": _activation(),
        "accelerator": accelerator(),
        "kernels": _kernels(),
        "bf16_is_fast": bf16_is_fast(accelerator()["kind"]),
        "backends": backends(),
    }
    facts["ns_rule"] = _rule(facts["accelerator"]["kind"], facts["bf16_is_fast"])
    facts["problems"] = _problems(facts)
    facts["ok"] = not facts["problems"]
    return facts


def _rule(device_type: str, in_bf16: bool) -> dict[str, Any]:
    """The shipped rule for this device."""
    kind = kind_of(device_type, 2 if in_bf16 else 4)
    return {"for": kind, **dataclasses.asdict(shipped()[kind])}


def _kernels() -> str:
    """What a step on the CPU would run on; built here if it is not yet, as it would be then."""
    missing = selection.missing("auto", ["cpu"])
    return selection.summary(selection.choose(missing), missing)


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


def _problems(facts: dict[str, Any]) -> list[str]:
    found = [f"seam missing: {name}" for name, state in facts["seams"].items() if state == "missing"]
    if not facts["activation"]["entry_point_registered"]:
        found.append(f"the entry point {ENTRY_NAME} of group {ENTRY_GROUP} is not registered: install deepspeed-muon")
    if not any(facts["backends"].values()):
        found.append("torch has neither gloo nor nccl")
    if facts["accelerator"]["kind"] == "cuda" and not facts["backends"]["nccl"]:
        found.append("torch sees a GPU, but was built without nccl")
    return found


def _rule_text(rule: dict[str, Any]) -> str:
    parts = [f"from {size} on {'never' if aspect is None else f'{aspect:g}'}" for size, aspect in rule["bands"]]
    head = "gram from this aspect ratio on, by the smaller dimension"
    return f"{rule['for']}: {head}: {', '.join(parts)}; {rule['basis']}"


def as_text(facts: dict[str, Any]) -> str:
    """The facts for a terminal."""
    tested, device = facts["tested_deepspeed"], facts["accelerator"]
    rows = [[name, version or "not installed"] for name, version in facts["versions"].items()]
    inside = "tested" if tested["includes_installed"] else "NOT TESTED"
    rows.append(["tested DeepSpeed", f"{tested['oldest']} to {tested['newest']}; this one: {inside}"])
    rows += [[f"seam {name.split('.', 2)[2]}", state] for name, state in facts["seams"].items()]
    activation = facts["activation"]
    rows.append(["entry point", "registered" if activation["entry_point_registered"] else "NOT REGISTERED"])
    rows += [[name, "not set" if value is None else value] for name, value in activation["switches"].items()]
    how = "at import deepspeed" if activation["automatic"] else "only by import deepspeed.muon"
    rows.append(["active", how])
    rows.append(["accelerator", f"{device['count']} x {device['name']}, backend {device['backend']}"])
    rows.append(["backends of torch", ", ".join(name for name, has in facts["backends"].items() if has) or "NONE"])
    rows.append(["kernels", facts["kernels"]])
    rows.append(["bf16 products", "in hardware" if facts["bf16_is_fast"] else "slow; ns_dtype auto takes fp32"])
    rows.append(["Newton-Schulz methods", _rule_text(facts["ns_rule"])])
    verdict = [f"missing: {problem}" for problem in facts["problems"]] or ["nothing essential is missing"]
    return "\n".join([aligned(rows), "", *verdict])
