# SPDX-License-Identifier: Apache-2.0
"""From the rows of scaling.py to CSV, Markdown and a chart."""

import csv
import dataclasses

import machine
from deepspeed.muon.forecast.estimate import Machine, assumptions
from scaling_models import MODELS

FORMATS = {"error": "{:+.0%}", "imbalance": "{:.3f}", "step ms": "{:.1f}"}
HEADS = {"planning s, rank 0": "planning s", "planning s, middle rank": "of a middle rank", "MB sent, mean": "MB mean"}
HEADS |= {"MB sent, max": "MB max", "messages, max": "messages", "runs, max": "runs"}


def table(rows: list[dict]) -> str:
    """All columns of the rows."""
    if not rows:
        return ""
    cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
    return machine.markdown_table([[HEADS.get(name, name) for name in rows[0]], *cells])


def _cell(name: str, value: object) -> str:
    if isinstance(value, float):
        return FORMATS.get(name, "{:.2f}").format(value)
    return MODELS[value].label if name == "model" else str(value)


NOTES = """Imbalance: Newton-Schulz work of the busiest rank over the larger of the mean and the heaviest matrix. MB,
messages: sent per rank and step, there and back; messages and runs are of the busiest rank. Planning: one rank's plans
of all parts, measured on this machine. Parts: sub-groups of stage 3, stepped one after the other. The MoE: {matrices}
matrices, 61 layers of 7168, attention of DeepSeek-V3 with 64 heads, one dense layer of 18432, 60 layers of 384 experts
and a shared one of 2048, gate, up and down a matrix each, all data-parallel."""


def markdown(rows: list[dict], points: list[dict], rates: Machine | None) -> str:
    """The whole report."""
    stated = "\n".join(f"- {text}" for text in assumptions(Machine(), "cuda", "bf16", False))
    matrices = max((row["matrices"] for row in rows if row["model"] == "moe-1t"), default=0)
    parts = ["# Scaling of the plan", machine.one_line(), "A prediction, not a measurement, but for the planning time:"]
    parts += [stated, table(rows), NOTES.format(matrices=matrices)]
    if rates:
        text = ", ".join(
            f"{name} {value:.4g}" for name, value in dataclasses.asdict(rates).items() if "host" not in name
        )
        parts += [
            "## Measured points",
            "8 x {512x512, 2048x512, 512x2048}, bf16, gloo on loopback, one thread per rank; ",
        ]
        parts[-1] += (
            "four ranks share two cores, so each is predicted with half of the rates. Measured: `optimizer.step`, "
        )
        parts[-1] += f"slowest rank. Predicted from rates of one core alone and of the bare exchange: {text}."
        parts.append(table(points))
    return "\n\n".join(parts) + "\n"


def write(rows: list[dict], points: list[dict], rates: Machine | None, name: str) -> str:
    """Write the result files; returns the tables as text."""
    path = machine.RESULTS / name
    path.with_name(f"{name}.md").write_text(markdown(rows, points, rates))
    for suffix, lines in (("", rows), ("-measured", points)):
        if lines:
            with path.with_name(f"{name}{suffix}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, [*lines[0], *machine.describe()], lineterminator="\n")
                writer.writeheader()
                for line in lines:
                    values = {key: round(v, 6) if isinstance(v, float) else v for key, v in line.items()}
                    writer.writerow(values | machine.describe())
    write_chart(rows, name)
    return "\n\n".join(text for text in (table(rows), table(points)) if text)


def write_chart(rows: list[dict], name: str) -> None:
    """Predicted step over ranks, a line per model, a panel per stage; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = sorted({row["stage"] for row in rows})
    figure, panels = pyplot.subplots(1, len(stages), figsize=(5 * len(stages), 4), layout="constrained", squeeze=False)
    for panel, stage in zip(panels[0], stages, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            chosen = [row for row in rows if (row["model"], row["stage"]) == (model, stage)]
            steps = [row["step ms"] for row in chosen]
            panel.loglog([row["ranks"] for row in chosen], steps, marker="o", label=MODELS[model].label)
        panel.set_title(f"stage {stage}")
        panel.set_xlabel("ranks")
        panel.set_ylabel("predicted optimizer step, ms")
        panel.legend(frameon=False)
    figure.savefig((machine.RESULTS / name).with_name(f"{name}.png"), dpi=120)
    pyplot.close(figure)
