# SPDX-License-Identifier: Apache-2.0
"""A table as CSV, Markdown and a chart under benchmarks/results/, with machine and date."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine

Rows = Sequence[dict[str, Any]]


def path_of(benchmark: str, *deviations: str) -> Path:
    """A benchmark's files of this machine, without the suffix; deviations from its usual setting are named."""
    return machine.RESULTS / "-".join([benchmark, *deviations, machine.slug()])


def cell(value: Any) -> str:
    """A value in a table: three digits that count, or as it is."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def table(rows: Rows, columns: Sequence[str] | None = None) -> str:
    """A Markdown table of the columns, by default the first row's; a row without one shows a dash."""
    names = list(columns or rows[0])
    return machine.markdown_table([names, *([cell(row.get(name, "-")) for name in names] for row in rows)])


def write(path: Path, rows: Rows, markdown: str, draw: Callable[[Any], None] | None = None) -> str:
    """Write all files of a result; returns the Markdown, for the terminal.

    Args:
        rows: what goes to the CSV, with machine, versions and date in every row where it has none.
        markdown: the report after its first line, which names the machine.
        draw: gets matplotlib's axes; skipped without matplotlib.
    """
    path.parent.mkdir(exist_ok=True)
    title, _, rest = markdown.partition("\n")
    text = f"{title}\n\n{machine.one_line()}\n{rest}\n"
    path.with_name(f"{path.name}.md").write_text(text)
    write_csv(path.with_name(f"{path.name}.csv"), [machine.describe() | row for row in rows])
    if draw is not None:
        _chart(path.with_name(f"{path.name}.png"), draw)
    return text


def write_csv(path: Path, rows: Rows) -> None:
    """One line per row; the columns are those of any row, in order of appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: float(f"{v:.7g}") if isinstance(v, float) else v for name, v in row.items()})


def _chart(path: Path, draw: Callable[[Any], None]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    draw(axes)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
