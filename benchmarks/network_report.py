# SPDX-License-Identifier: Apache-2.0
"""From the records of network.py to CSV, Markdown and a chart."""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import machine
from setups import VARIANTS

#: Bytes per second of what tc calls 1gbit.
GBIT = 1e9 / 8
OURS = ("prepare", "exchange", "newton_schulz", "apply")
Key = tuple[int, str, float | None]


def merge(world: int, variant: str, ranks: Sequence[dict]) -> dict:
    """One record of a launch: medians over the steps, each step by its slowest rank; phases as means of the ranks."""

    def slowest(*names: str) -> float:
        steps = zip(*(rank["steps"] for rank in ranks), strict=True)
        return statistics.median(max(sum(one[name] for name in names) for one in step) for step in steps)

    def mean(name: str) -> float:
        return statistics.fmean(statistics.median(step.get(name, 0.0) for step in rank["steps"]) for rank in ranks)

    record = {"world": world, "variant": variant, "bucket": ranks[0]["bucket"], "seconds": slowest("backward", "step")}
    record |= {f"{phase} s": slowest(phase) for phase in ("backward", "step")}
    record |= {f"{name} s": mean(f"phase {name}") for name in ("optimizer", *OURS)}
    record |= {f"{p} MB": statistics.fmean(r["megabytes"][p] for r in ranks) for p in ("backward", "step")}
    record |= {f"link {phase} MB": mean(f"link {phase}") for phase in ("backward", "step")}
    if "exchange alone s" in ranks[0]:
        record["alone s"] = max(rank["exchange alone s"] for rank in ranks)
        record["exchange MB"] = statistics.fmean(rank["exchange MB"] for rank in ranks)
        record["rounds"] = ranks[0]["rounds"]
    return record


def summarize(records: list[dict]) -> dict[Key, dict]:
    """Medians over the rounds by setting, with the fastest and the slowest round."""
    launches: dict[Key, list[dict]] = {}
    for record in records:
        launches.setdefault((record["world"], record["variant"], record["bucket"]), []).append(record)
    summary = {}
    for key in sorted(launches, key=lambda key: (key[0], list(VARIANTS).index(key[1]), key[2] or 0)):
        rounds = launches[key]
        row = {
            name: statistics.median(r[name] for r in rounds) for name, v in rounds[0].items() if isinstance(v, float)
        }
        seconds = [record["seconds"] for record in rounds]
        row |= {"min s": min(seconds), "max s": max(seconds), "launches": len(rounds)}
        summary[key] = row | {"rounds": rounds[0].get("rounds", 0)}
    return summary


def label(key: Key) -> str:
    """The variant, with the size of its buckets where it is given."""
    return VARIANTS[key[1]].label + (f", {key[2]:g} MiB" if key[2] else "")


def main_table(summary: dict[Key, dict]) -> str:
    """Seconds, spread, bytes, and how many times as long as ours it took."""
    rows = [
        [
            "ranks",
            "optimizer",
            "backward + step s",
            "launches min-max s",
            "backward s",
            "step s",
            "optimizer.step s",
            "MB per rank",
            "MB per host on the link",
            "over ours",
        ]
    ]
    for key, row in summary.items():
        ours = summary.get((key[0], "ours", None))
        over = "-"
        if ours and VARIANTS[key[1]].is_stock_muon:
            low, high = row["min s"] / ours["max s"], row["max s"] / ours["min s"]
            over = f"{row['seconds'] / ours['seconds']:.2f} ({low:.2f}-{high:.2f})"
        sent = [f"{row['backward MB'] + row['step MB']:.1f}"]
        sent.append(" + ".join(f"{row[f'link {phase} MB']:.1f}" for phase in ("backward", "step")))
        times = [f"{row[name]:.3f}" for name in ("backward s", "step s", "optimizer s")]
        spread = f"{row['min s']:.3f}-{row['max s']:.3f}"
        rows.append([str(key[0]), label(key), f"{row['seconds']:.3f}", spread, *times, *sent, over])
    return machine.markdown_table(rows)


def link_seconds(row: dict, world: int) -> float:
    """Seconds that the bytes of an exchange between the hosts take one way at 1 Gbit/s, the other way at the same time.

    A host sends what its ranks send, but for what stays among them.
    """
    per_host = world // 2
    return row["exchange MB"] * 1e6 * per_host * per_host / (world - 1) / GBIT


def exchange_table(summary: dict[Key, dict], has_link: bool) -> str:
    """Where our step goes, and how much of the exchange it does not wait for."""
    rows = [
        [
            "ranks",
            "buckets",
            "rounds",
            "prepare s",
            "Newton-Schulz s",
            "apply s",
            "waiting s",
            "exchange alone s",
            "at line rate s",
            "hidden",
        ]
    ]
    for key, row in summary.items():
        if "alone s" not in row:
            continue
        hidden = 1 - row["exchange s"] / row["alone s"]
        times = [f"{row[f'{name} s']:.3f}" for name in ("prepare", "newton_schulz", "apply", "exchange", "alone")]
        line = f"{link_seconds(row, key[0]):.3f}" if has_link else "-"
        size = f"{key[2]:g} MiB" if key[2] else "default"
        rows.append([str(key[0]), size, str(row["rounds"]), *times, line, f"{max(0.0, hidden):.0%}"])
    return machine.markdown_table(rows) if len(rows) > 1 else ""


NOTES = """`optimizer.step`, prepare, Newton-Schulz, apply and waiting: mean of the ranks. Waiting: seconds in which a
rank had nothing to do but wait for the exchange or copy what it received. Exchange alone: the same collectives in the
same order with nothing computed, slowest rank. Hidden: the part of that which is not waited for. At line rate: the
bytes between the hosts in one direction over 1 Gbit/s."""


def markdown(summary: dict[Key, dict], args: argparse.Namespace) -> str:
    """The whole report."""
    d, h = args.hidden, 4 * args.hidden
    where = f"two network namespaces joined by a link of {args.rate}" if args.hosts else "the loopback device"
    launches = max(row["launches"] for row in summary.values())
    caption = (
        f"{machine.one_line()}\n\nStage 3, {args.layers} x {{{d}x{d}, {h}x{d}, {d}x{h}}} linear layers, bf16, gloo "
        f"over {where}, one thread per rank, each rank on one core of its host's half (4 ranks share 2 cores). "
        f"Seconds: slowest rank, median of {args.steps} steps, median of {launches} alternating launches. MB per rank: "
        "ring cost; on the link: what a host's interface has sent, backward + step."
    )
    parts = [
        "# Stage 3 over the network",
        caption,
        main_table(summary),
        exchange_table(summary, bool(args.hosts)),
        NOTES,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_chart(summary: dict[Key, dict], path: Path) -> None:
    """Bars of backward and step by setting; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(summary) + 1.5), layout="constrained")
    names = [f"{key[0]} ranks, {label(key)}" for key in summary]
    rows = list(summary.values())
    backward = [row["backward s"] for row in rows]
    axes.barh(names, backward, color="#9aa5b1", label="backward")
    axes.barh(names, [row["step s"] for row in rows], left=backward, color="#3b6ea5", label="step")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(records: list[dict], args: argparse.Namespace, name: str) -> str:
    """Write the three result files; returns the tables as text."""
    if not records:
        return "nothing was measured"
    summary = summarize(records)
    path = machine.RESULTS / name
    path.with_name(f"{name}.md").write_text(markdown(summary, args))
    with path.with_name(f"{name}.csv").open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in summary.values() for name in row))
        writer = csv.DictWriter(
            file, ["ranks", "variant", "bucket MiB", *names, *machine.describe()], lineterminator="\n"
        )
        writer.writeheader()
        for (world, variant, bucket), row in summary.items():
            values = {n: round(v, 6) if isinstance(v, float) else v for n, v in row.items()}
            writer.writerow({"ranks": world, "variant": variant, "bucket MiB": bucket} | values | machine.describe())
    write_chart(summary, path.with_name(f"{name}.png"))
    return "\n\n".join(part for part in (main_table(summary), exchange_table(summary, bool(args.hosts))) if part)
