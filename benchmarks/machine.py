# SPDX-License-Identifier: Apache-2.0
"""What the numbers were measured on: one description and one file-name slug per machine."""

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def cpu_model() -> str:
    """The processor's marketing name, as the kernel reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slug() -> str:
    """A short file-name part for this machine, such as `amd-epyc-2-cores`."""
    name = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", "", cpu_model().lower())
    return re.sub(r"[^a-z0-9]+", "-", f"{name} {cores()} cores").strip("-")


def version(distribution: str) -> str:
    """The installed version of a distribution, or `not installed`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_environment() -> dict[str, str]:
    """This environment for a worker on the CPU, with the interpreter's own tools first in PATH.

    Another ninja than the one that built DeepSpeed's operators would build them again.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PATH": path}


def describe() -> dict[str, str]:
    """Machine, versions and date, for the head of every result file."""
    facts = {"cpu": cpu_model(), "cores": str(cores()), "python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "deepspeed", "deepspeed-muon")}
    return facts | {"date": datetime.date.today().isoformat()}


def one_line() -> str:
    """`describe` as a sentence for a table's caption."""
    facts = describe()
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "deepspeed", "deepspeed-muon"))
    return f"{facts['cpu']}, {facts['cores']} cores, {versions}, {facts['date']}"


def markdown_table(rows: list[list[str]]) -> str:
    """A Markdown table from rows of cells, padded to align; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
