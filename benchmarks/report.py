# SPDX-License-Identifier: Apache-2.0
"""From the launches' records to CSV, Markdown and a bar chart."""

import statistics
from pathlib import Path

import machine
import margins
import output
import roofline
from machine import markdown_table
from rates import Rates
from setups import CASES, VARIANTS, Job

Summary = dict[tuple[str, str], dict]


def summarize(records: list[dict]) -> Summary:
    """Medians over the rounds by (case, variant), with the fastest and the slowest round."""
    launches: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        launches.setdefault((record["case"], record["variant"]), []).append(record)
    order = [(case, variant) for case in CASES for variant in VARIANTS if (case, variant) in launches]
    return {key: _summary_of(launches[key]) for key in order}


def _summary_of(rounds: list[dict]) -> dict:
    row = {}
    for name, value in rounds[0].items():
        if isinstance(value, (int, float)):
            row[name] = statistics.median(record[name] for record in rounds)
        elif isinstance(value, str):
            row[name] = value
    seconds = [record["seconds"] for record in rounds]
    return row | {"fastest round s": min(seconds), "slowest round s": max(seconds), "rounds": len(rounds)}


def shown(summary: Summary) -> list[str]:
    """Variants that were measured, without those that only repeat another."""
    return [v for v in VARIANTS if not VARIANTS[v].again and any(key[1] == v for key in summary)]


def stock_muons(summary: Summary, case: str) -> list[str]:
    """Stock's Muon variants measured in a case, fastest first."""
    found = [v for v in VARIANTS if VARIANTS[v].is_stock_muon and (case, v) in summary]
    return sorted(found, key=lambda variant: summary[case, variant]["seconds"])


def ratio(summary: Summary, case: str, ours: str, other: str) -> tuple[float, float, float]:
    """Seconds of ours over the other's: medians, our fastest by its slowest, our slowest by its fastest."""
    a, b = summary[case, ours], summary[case, other]
    return (
        a["seconds"] / b["seconds"],
        a["fastest round s"] / b["slowest round s"],
        a["slowest round s"] / b["fastest round s"],
    )


def main_table(summary: Summary) -> str:
    """Rows: cases. Columns: variants, cells `seconds (MB on the wire)`, then ours over stock's best."""
    variants = shown(summary)
    rows = [["seconds (MB on the wire)", *(VARIANTS[v].label for v in variants), "ours / stock's best"]]
    for case in dict.fromkeys(case for case, _ in summary):
        found = [summary.get((case, variant)) for variant in variants]
        cells = [f"{row['seconds']:.2f} ({row['MB']:.1f})" if row else "-" for row in found]
        stock = stock_muons(summary, case)
        has_ratio = stock and (case, "ours") in summary
        cells.append(f"{ratio(summary, case, 'ours', stock[0])[0]:.2f}" if has_ratio else "-")
        rows.append([CASES[case].label, *cells])
    return markdown_table(rows)


def ratio_table(summary: Summary) -> str:
    """Ours against each of stock's Muons, and whether the difference exceeds the spread of the rounds."""
    rows = [["case", "against", "ratio of medians", "our slowest / its fastest", "verdict"]]
    for case in dict.fromkeys(case for case, variant in summary if variant == "ours"):
        for other in stock_muons(summary, case):
            median, low, high = ratio(summary, case, "ours", other)
            verdict = "within the spread"
            if summary[case, other]["rounds"] < 2:
                verdict = "one round, spread unknown"
            elif high < 1 or low > 1:
                verdict = f"{'faster' if high < 1 else 'slower'}, beyond the spread"
            rows.append([CASES[case].label, VARIANTS[other].label, f"{median:.2f}", f"{high:.2f}", verdict])
    return markdown_table(rows) if len(rows) > 1 else ""


def detail_table(summary: Summary) -> str:
    """Phases, spread, traffic by phase (mean and largest rank), state and memory."""
    rows = [
        [
            "case",
            "variant",
            "backward s",
            "step s",
            "rounds min-max s",
            "MB backward",
            "MB step",
            "state bytes/parameter",
            "peak MB",
            "above start",
            "above start, timed steps",
        ]
    ]
    for (case, variant), row in summary.items():
        sent = [
            f"{row[f'{phase} MB']:.1f} (max {row[f'{phase} MB, largest rank']:.1f})" for phase in ("backward", "step")
        ]
        spread = f"{row['fastest round s']:.3f}-{row['slowest round s']:.3f}"
        state = f"{row['state bytes/parameter']:.2f} ({row['state keys']})"
        peaks = ("peak MB", "peak MB above start", "peak MB above start, timed steps")
        memory = [f"{row[name]:.0f}" for name in peaks]
        seconds = [f"{row[f'{phase} s']:.3f}" for phase in ("backward", "step")]
        rows.append([CASES[case].label, VARIANTS[variant].label, *seconds, spread, *sent, state, *memory])
    return markdown_table(rows)


def caption(summary: Summary, job: Job) -> str:
    """What was measured, on what."""
    rounds = max(row["rounds"] for row in summary.values())
    d, h = job.hidden, 4 * job.hidden
    return (
        f"{machine.one_line()}\n\n{job.layers} x {{{d}x{d}, {h}x{d}, {d}x{h}}} linear layers "
        f"({job.parameters / 1e6:.1f} M parameters), bf16, {job.world} ranks, gloo, one thread per rank. "
        f"Seconds: backward + step, slowest rank, median of {job.steps} steps, median of {rounds} "
        "alternating rounds. MB: sent per rank in backward + step, mean of the ranks, ring cost."
    )


NOTES = """State: the optimizer's state tensors by true storage size, all ranks together, per parameter; fp32
master weights and other buffers are not in it. Peak: resident memory of the largest rank, over the whole run,
compilation included; "above start" is less what was resident just before `deepspeed.initialize`, and "timed
steps" counts the peak after warm-up only."""


def markdown(summary: Summary, job: Job, rates: Rates | None) -> str:
    """The whole report."""
    ratios, noise, additions = ratio_table(summary), margins.noise_table(summary), margins.additions_table(summary)
    parts = ["# Optimizer step", caption(summary, job), main_table(summary)]
    parts += ["## Noise: one variant against itself", noise] if noise else []
    parts += ["## Ours against stock", ratios] if ratios else []
    parts += ["## What Muon adds to AdamW's backward + step", additions] if additions else []
    if rates is not None:
        parts += ["## Distance from the floor", roofline.describe(rates), margins.floor_table(summary, job, rates)]
    return "\n\n".join([*parts, "## Details", detail_table(summary), NOTES]) + "\n"


def write_csv(summary: Summary, path: Path) -> None:
    """One row per case and variant, with the machine in every row."""
    output.write_csv(path, [row | machine.describe() for row in summary.values()])


def write_chart(summary: Summary, job: Job, path: Path) -> None:
    """Grouped bars, backward below step, with the spread of the rounds; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(case for case, _ in summary))
    variants = shown(summary)
    width = 0.8 / len(variants)
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for index, variant in enumerate(variants):
        places = [
            (place + (index - (len(variants) - 1) / 2) * width, summary[case, variant])
            for place, case in enumerate(cases)
            if (case, variant) in summary
        ]
        color = f"C{list(VARIANTS).index(variant)}"
        where, found = [place for place, _ in places], [row for _, row in places]
        backward = [row["backward s"] for row in found]
        rest = [row["seconds"] - row["backward s"] for row in found]
        spread = [
            [max(0.0, row["seconds"] - row["fastest round s"]) for row in found],
            [max(0.0, row["slowest round s"] - row["seconds"]) for row in found],
        ]
        axes.bar(where, backward, width, color=color, alpha=0.45)
        axes.bar(
            where, rest, width, bottom=backward, color=color, yerr=spread, capsize=2, label=VARIANTS[variant].label
        )
    axes.set_xticks(range(len(cases)), [CASES[case].label for case in cases])
    axes.set_ylabel("seconds (pale: backward, full: step)")
    size = f"{job.parameters / 1e6:.1f} M parameters, {job.world} ranks"
    axes.set_title(f"Optimizer step, {size}, {machine.cpu_model()}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(records: list[dict], job: Job, name: str, rates: Rates | None = None) -> str:
    """Write all result files; returns the tables for the terminal, the short one last."""
    if not records:
        return "no results"
    machine.RESULTS.mkdir(exist_ok=True)
    summary = summarize(records)
    path = machine.RESULTS / name
    path.with_name(f"{name}.md").write_text(markdown(summary, job, rates))
    write_csv(summary, path.with_name(f"{name}.csv"))
    write_chart(summary, job, path.with_name(f"{name}.png"))
    written = f"written: {', '.join(str(file) for file in sorted(path.parent.glob(f'{name}.*')))}"
    parts = [written, detail_table(summary), margins.noise_table(summary), margins.additions_table(summary)]
    parts += [margins.floor_table(summary, job, rates)] if rates else []
    parts += [ratio_table(summary), main_table(summary)]
    return "\n\n".join(part for part in parts if part)
