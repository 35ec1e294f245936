# SPDX-License-Identifier: Apache-2.0
"""Backward + step under ZeRO: ours against stock's Muon and AdamW, in launches that alternate."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from benchmarks import ranks, report, roofline
from benchmarks.rates import Rates, measure
from benchmarks.training import CASES, OUR_PHASES, PHASES, VARIANTS, Job, rounds

Row = dict[str, Any]
#: One setting's medians of the rounds by variant; of ours with another bucket, by `ours, 4 MiB`.
Found = dict[str, Row]
USUAL = tuple(name for name in VARIANTS if name != "ours-torch")
NOTES = """State: the optimizer's state tensors by true storage size, all ranks together, per parameter; fp32 master
weights and other buffers are not in it. Peak: resident memory of the largest rank, compilation included; "above start"
is less what was resident before `deepspeed.initialize`, "timed steps" counts the peak after warm-up only. First step:
backward + step. Scratch: what ours keeps between steps beside its state. Resident: of rank 0.
Prepare, Newton-Schulz, apply and waiting: mean of the ranks. Waiting: for the exchange, or while copying what it
received. Exchange alone: the same collectives in the same order with nothing computed, slowest rank. Hidden: the part
of that which is not waited for. Fastest rank: mostly the one that started its optimizer's step last. It waits for no
other rank at the start; the slowest does, and both end at about the same time."""


def step(
    worlds: tuple[int, ...] = (2,),
    repeats: int = 3,
    steps: int = 5,
    warmup: int = 4,
    cases: Annotated[tuple[str, ...], CASES] = tuple(CASES),
    variants: Annotated[tuple[str, ...], VARIANTS] = USUAL,
    buckets: tuple[float, ...] = (0.0,),
    layers: int = 8,
    hidden: int = 512,
    link: str = "",
    records: str = "",
    output: str = "",
) -> str:
    """Time, traffic and memory of a step: deepspeed-muon against stock DeepSpeed's Muon and AdamW.

    Every variant is a launch of its own, and the variants alternate. The batch is small on purpose: what is timed is
    backward with its gradient reduction, and the optimizer's step. AdamW is launched twice in every round: how far it
    is from itself is the noise of the run. The report is written anew after every launch.

    Args:
        worlds: numbers of ranks
        repeats: rounds over all settings and variants
        steps: timed steps of a launch
        warmup: untimed steps of a launch, for compilation
        cases: ZeRO stages, with CPU offload
        variants: optimizers; ours-torch is ours with the plain PyTorch twin of every kernel
        buckets: MiB of a bucket of ours; 0 is its own choice
        layers: blocks of three matrices
        hidden: width of a block; inside it is 4 times that
        link: run the ranks on two network namespaces joined by a link of this rate, such as 1gbit; needs root
        records: file of launches to add to and to report, so that a long run can be made in pieces
        output: base name of the result files
    """
    sizes = {"layers": layers, "hidden": hidden, "warmup": warmup, "steps": steps}
    jobs = [
        Job(case, variant, world, bucket=bucket, **sizes)
        for case, world, variant in itertools.product(cases, worlds, variants)
        for bucket in (buckets if VARIANTS[variant].is_ours else (0.0,))
    ]
    changed = "-".join(f"{world}-ranks" for world in worlds if worlds != (2,)), "buckets" * (buckets != (0.0,))
    name = output or report.name_of(f"network-{link}" if link else "step", *changed)
    rates, found, text = {world: measure(world) for world in worlds}, [], "nothing was measured"
    with ranks.two_hosts(link) if link else contextlib.nullcontext() as hosts:
        places = (lambda job: ranks.places_on(hosts, job.world)) if hosts else (lambda job: ())
        for found in rounds(jobs, repeats, places, Path(records) if records else None):
            text = write(found, jobs[0], name, rates, link)
    if found:
        text = write(found, jobs[0], name, {world: rates[world].best(measure(world)) for world in worlds}, link)
    return text


def write(records: list[Row], job: Job, name: str, rates: dict[int, Rates], link: str = "") -> str:
    """The files of a run; returns the report."""
    rows = report.summarize(records, "case", "world", "variant", "bucket")
    rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["world"], list(VARIANTS).index(row["variant"])))
    several, settings = len({row["world"] for row in rows}) > 1, {}
    for row in rows:
        setting = CASES[row["case"]][0] + f", {row['world']} ranks" * several
        settings.setdefault(setting, {})[row["variant"] + f", {row['bucket']:g} MiB" * bool(row["bucket"])] = row
    where = f"two network namespaces joined by a link of {link}" if link else "loopback"
    shapes = ", ".join(f"{rows}x{cols}" for rows, cols in job.matrices[:3])
    caption = (
        f"{job.layers} x {{{shapes}}} linear layers ({job.parameters / 1e6:.1f} M parameters), bf16, "
        f"{'' if several else f'{job.world} ranks, '}gloo over {where}, one thread per rank. Seconds: backward + step, "
        f"slowest rank, median of {job.steps} steps and of {max(row['rounds'] for row in rows)} alternating rounds. "
        "MB: sent per rank in both, mean of the ranks, ring cost."
    )
    sections = {
        "Noise: one variant against itself": noise,
        "Ours against stock, and what each adds to AdamW": against,
        "Distance from the floor": lambda found: floors(found, job, rates),
        "The exchange of ours": exchanges,
        "Details": details,
        "First step and memory": memory,
    }
    parts = [table(settings, overview), *map(str, rates.values())]
    parts += [f"## {title}\n\n{text}" for title, rows_of in sections.items() if (text := table(settings, rows_of))]
    bars = [row | {"name": f"{name}, {label(key)}"} for name, found in settings.items() for key, row in found.items()]
    chart = report.bars(bars, lambda row: row["name"], "backward s", "step s", unit="seconds")
    flat = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
    return report.write(name, "Optimizer step", flat, caption, *parts, NOTES, draw=chart)


def table(settings: dict[str, Found], rows_of: Callable[[Found], Iterator[Row]]) -> str:
    """The rows of all settings, each named."""
    return report.table([{"setting": name} | row for name, found in settings.items() for row in rows_of(found)])


def label(key: str) -> str:
    variant, comma, bucket = key.partition(", ")
    return VARIANTS[variant].label + comma + bucket


def stock_muons(found: Found) -> list[str]:
    """The fastest first."""
    return sorted((key for key in found if key.startswith("stock")), key=lambda key: found[key]["seconds"])


def bounds(found: Found, a: str, b: str) -> list[tuple[float, float]]:
    """Seconds of two variants: medians, the fastest of a and slowest of b, the slowest of a and fastest of b."""
    pairs = (("seconds", "seconds"), ("fastest s", "slowest s"), ("slowest s", "fastest s"))
    return [(found[a][x], found[b][y]) for x, y in pairs]


def overview(found: Found) -> Iterator[Row]:
    """Seconds and megabytes of each variant, and ours over stock's best."""
    kept, stock = [key for key in found if not key.endswith("again")], stock_muons(found)
    row = {label(key): f"{found[key]['seconds']:.2f} s, {found[key]['MB']:.1f} MB" for key in kept}
    if stock and "ours" in found:
        row["ours / stock's best"] = f"{found['ours']['seconds'] / found[stock[0]]['seconds']:.2f}"
    yield row


def against(found: Found) -> Iterator[Row]:
    """Ours against each of stock's Muons: seconds, whether they differ by more than the rounds spread, and what each
    adds to AdamW's seconds.
    """
    for other in stock_muons(found) if "ours" in found else ():
        median, low, high = (a / b for a, b in bounds(found, "ours", other))
        verdict = f"{'faster' if high < 1 else 'slower'}, beyond the spread" if high < 1 or low > 1 else "within it"
        row = {"against": label(other), "ratio of medians": median, "our slowest / its fastest": high}
        row["verdict"] = verdict if found[other]["rounds"] > 1 else "one round, spread unknown"
        if "adamw" in found:
            ours, _, most = (a - b for a, b in bounds(found, "ours", "adamw"))
            theirs, least, _ = (a - b for a, b in bounds(found, other, "adamw"))
            row |= {"AdamW s": found["adamw"]["seconds"], "ours adds s": ours, "it adds s": theirs}
            row |= {"ours adds / it adds": ours / theirs, "at most": most / least if least > 0 else "-"}
        yield row


def noise(found: Found) -> Iterator[Row]:
    """A repeated variant over the original: what a ratio of two equals looks like here."""
    for key, again in ((key, VARIANTS[key.partition(",")[0]].again) for key in found):
        if again in found:
            (a, b), (fast, slow), (slower, faster) = bounds(found, key, again)
            row = {"variant": label(again), "ratio of medians": a / b}
            yield row | {"slowest / fastest round of both": max(slow, slower) / min(fast, faster)}


def floors(found: Found, job: Job, rates: dict[int, Rates]) -> Iterator[Row]:
    """Seconds inside our optimizer's own step, the exchange included, over the least possible."""
    for key, row in found.items():
        if "kernels" in row and row["world"] in rates:
            stage, world = CASES[row["case"]][1], row["world"]
            floor, _ = roofline.floor(job.matrices, stage, world, rates[world], symmetric=row["symmetric"])
            least, slowest, fastest = sum(floor), row["optimizer s"], row["optimizer s, fastest rank"]
            times = {"optimizer s": slowest, "fastest rank s": fastest, "floor s": least}
            times["of it Newton-Schulz"] = floor.newton_schulz
            over = {"optimizer / floor": slowest / least, "fastest rank / floor": fastest / least}
            yield {"variant": label(key), "kernels": row["kernels"]} | times | over


def exchanges(found: Found) -> Iterator[Row]:
    """Where a step of ours goes, and how much of the exchange it does not wait for."""
    for key, row in found.items():
        if row.get("exchange MB"):
            names = dict(zip(OUR_PHASES, ("prepare s", "waiting s", "Newton-Schulz s", "apply s"), strict=True))
            sent = {"variant": label(key), "buckets": row["buckets"], "MB sent": row["exchange MB"]}
            phases = {name: row[f"{phase} s"] for phase, name in names.items()} | {"exchange alone s": row["alone s"]}
            yield sent | phases | {"hidden": f"{max(0.0, 1 - row['exchange s'] / row['alone s']):.0%}"}


def details(found: Found) -> Iterator[Row]:
    """Phases, spread, traffic by phase, state and peak memory."""
    for key, row in found.items():
        shown = {"variant": label(key)} | {name: row[name] for name in ("backward s", "step s", "optimizer s")}
        shown["rounds min-max s"] = f"{row['fastest s']:.3f}-{row['slowest s']:.3f}"
        for phase in PHASES:
            shown[f"MB {phase}"] = f"{row[f'{phase} MB']:.1f} (max {row[f'{phase} MB, largest rank']:.1f})"
            if row[f"link {phase} MB"]:
                shown[f"MB {phase}, of a host on the link"] = row[f"link {phase} MB"]
        shown["state bytes/parameter"] = f"{row['state bytes/parameter']:.2f} ({row['state keys']})"
        yield shown | {name: f"{row[name]:.0f}" for name in row if name.startswith("peak MB")}


def memory(found: Found) -> Iterator[Row]:
    """The first step beyond AdamW's, in steady steps of its own; scratch; resident memory and its growth."""
    for key, row in found.items():
        half, shown = row["resident MB"][len(row["resident MB"]) // 2 :], {"variant": label(key)}
        shown |= {name: row[name] for name in ("first step s", "scratch MB") if name in row}
        if "adamw" in found:
            beyond = row["first step s"] - found["adamw"]["first step s"]
            shown["beyond AdamW's, in steady steps"] = beyond / row["seconds"]
        shown["resident MB, second half of all steps"] = f"{min(half):.0f}-{max(half):.0f}"
        slope = statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else 0.0
        yield shown | {"MB per 100 steps in it": 100 * slope}
