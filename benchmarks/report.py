# SPDX-License-Identifier: Apache-2.0
"""From rows to CSV, Markdown and a chart under benchmarks/results/, with machine, versions and date."""

import csv
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Rows = Sequence[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def cores() -> int:
    """Cores this process may use; in a container that can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe() -> dict[str, str]:
    """Machine, versions and date: columns of every CSV."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    cpu = (models or [platform.processor() or platform.machine()])[0]
    if (widest := torch.backends.cpu.get_cpu_capability()) != "AVX512":  # one name is given to several generations
        cpu += f" {widest}"
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    facts = gpu | {"cpu": cpu, "cores": str(cores()), "python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "deepspeed", "deepspeed-muon")}
    return facts | {"date": datetime.date.today().isoformat()}


def one_line() -> str:
    """`describe` as a caption."""
    facts = describe()
    machine = [facts[name] for name in ("gpu", "cpu") if name in facts]
    versions = [f"{name} {facts[name]}" for name in ("torch", "deepspeed", "deepspeed-muon")]
    return ", ".join([*machine, f"{facts['cores']} cores", *versions, facts["date"]])


def slug(text: str) -> str:
    """A part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", "", text.lower())).strip("-")


def name_of(benchmark: str, *deviations: str) -> str:
    """The base name of a benchmark's files on this machine, with whatever deviates from its usual setting."""
    return "-".join([benchmark, *filter(None, deviations), slug(describe()["cpu"]), f"{cores()}-cores"])


def cell(value: Any) -> str:
    """A float with three significant digits; anything else as it is."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """A Markdown table, by default of every column in order of appearance; empty without rows."""
    if not rows:
        return ""
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([cell(row.get(name, "-")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def summarize(records: Rows, *keys: str) -> list[dict[str, Any]]:
    """One row for all records with equal keys: medians, the fastest and slowest `seconds`, the number of rounds."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    rows = []
    for rounds in groups.values():
        row = dict(rounds[0])
        numbers = [name for name, value in row.items() if isinstance(value, float)]
        row |= {name: statistics.median(record[name] for record in rounds) for name in numbers}
        seconds = [record["seconds"] for record in rounds]
        rows.append(row | {"fastest s": min(seconds), "slowest s": max(seconds), "rounds": len(rounds)})
    return rows


def write(name: str, title: str, rows: Rows, *parts: str, draw: Callable[[Any], None] | None = None) -> str:
    """Write `name`.csv of the rows, .md of the title and the parts that are not empty, and .png; returns the Markdown.

    `draw` gets matplotlib's axes. There is no chart without it, or without matplotlib.
    """
    RESULTS.mkdir(exist_ok=True)
    text = "\n\n".join([f"# {title}", one_line(), *filter(None, parts)]) + "\n"
    (RESULTS / f"{name}.md").write_text(text)
    write_csv(RESULTS / f"{name}.csv", [describe() | row for row in rows])
    if draw is not None:
        chart(name, draw)
    return text


def chart(name: str, draw: Callable[[Any], None]) -> None:
    """Write `name`.png, unless matplotlib is missing; `draw` gets its axes."""
    if importlib.util.find_spec("matplotlib"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure.subplots())
        figure.savefig(RESULTS / f"{name}.png", dpi=120)


def write_csv(path: Path, rows: Rows) -> None:
    """One line per row; floats with seven digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: float(f"{v:.7g}") if isinstance(v, float) else v for name, v in row.items()})


def bars(rows: Rows, label: Callable[[dict], str], *columns: str, unit: str) -> Callable[[Any], None]:
    """One bar per row, made of the columns one after the other."""

    def draw(axes: Any) -> None:
        names, left = [label(row) for row in rows], [0.0] * len(rows)
        for column in columns:
            values = [row[column] for row in rows]
            axes.barh(names, values, left=left, label=column)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.legend(frameon=False)

    return draw


def lines(rows: Rows, by: Callable[[dict], str], x: str, y: str, **settings: Any) -> Callable[[Any], None]:
    """A line for each value of `by`; `settings` are those of matplotlib's axes, labels by default the columns."""

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(map(by, rows)):
            points = [(row[x], row[y]) for row in rows if by(row) == name and y in row]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set(**{"xlabel": x, "ylabel": y} | settings)
        axes.tick_params("x", labelrotation=45 if isinstance(rows[0][x], str) else 0)
        axes.legend(fontsize=7, frameon=False)

    return draw
