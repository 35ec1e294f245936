# SPDX-License-Identifier: Apache-2.0
"""Backward + step under ZeRO: ours against stock's Muon and AdamW, in launches that alternate."""

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from typing import Annotated, Any

from benchmarks import network, report, roofline
from benchmarks.rates import Rates, measure
from benchmarks.training import CASES, OUR_PHASES, VARIANTS, Job, rounds

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
of that which is not waited for."""


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
    no_floor: bool = False,
    timeout: float = 600,
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
        no_floor: do not measure the machine's rates
        timeout: seconds that one launch may take
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
    rates, found, text = {} if no_floor else {world: measure(world) for world in worlds}, [], "nothing was measured"
    with network.two_hosts(link) if link else contextlib.nullcontext() as hosts:
        places = (lambda job: network.places(job.world, hosts)) if hosts else (lambda job: ())
        for found in rounds(jobs, repeats, timeout, places, records):
            text = write(found, jobs[0], name, rates, link)
    if found and rates:
        text = write(found, jobs[0], name, {world: rates[world].best(measure(world)) for world in worlds}, link)
    return text


def write(records: list[Row], job: Job, name: str, rates: dict[int, Rates], link: str = "") -> str:
    """The files of a run; returns the report."""
    rows = report.summarize(records, "case", "world", "variant", "bucket")
    rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["world"], list(VARIANTS).index(row["variant"])))
    several, settings = len({row["world"] for row in rows}) > 1, {}
    for row in rows:
        setting = CASES[row["case"]].label + f", {row['world']} ranks" * several
        settings.setdefault(setting, {})[row["variant"] + f", {row['bucket']:g} MiB" * bool(row["bucket"])] = row
    d, h, most = job.hidden, 4 * job.hidden, max(row["rounds"] for row in rows)
    where = f"two network namespaces joined by a link of {link}" if link else "loopback"
    caption = (
        f"{job.layers} x {{{d}x{d}, {h}x{d}, {d}x{h}}} linear layers ({job.parameters / 1e6:.1f} M parameters), bf16, "
        f"{'' if several else f'{job.world} ranks, '}gloo over {where}, one thread per rank. Seconds: backward + step, "
        f"slowest rank, median of {job.steps} steps, median of {most} alternating rounds. MB: sent per rank in both, "
        "mean of the ranks, ring cost."
    )
    sections = {
        "Noise: one variant against itself": noise,
        "Ours against stock": ratios,
        "What Muon adds to AdamW's backward + step": additions,
        "Distance from the floor": lambda found: floors(found, job, rates),
        "The exchange of ours": exchanges,
        "Details": details,
        "First step and memory": memory,
    }
    parts = [report.table(table(settings, overview)), *(str(rate) for rate in rates.values())]
    parts += [f"## {title}\n\n{report.table(t)}" for title, of in sections.items() if (t := table(settings, of))]
    bars = [row | {"label": f"{name}, {label(key)}"} for name, found in settings.items() for key, row in found.items()]
    chart = report.bars(bars, lambda row: row["label"], "backward s", "step s", unit="seconds")
    flat = [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]
    return report.write(name, "Optimizer step", flat, caption, *parts, NOTES, draw=chart)


def table(settings: dict[str, Found], rows_of: Any) -> list[Row]:
    """The rows of all settings, each named."""
    return [{"setting": name} | row for name, found in settings.items() for row in rows_of(found)]


def label(key: str) -> str:
    """A variant's, with its bucket."""
    variant, comma, bucket = key.partition(", ")
    return VARIANTS[variant].label + comma + bucket


def stock_muons(found: Found) -> list[str]:
    """Stock's Muons, the fastest first."""
    return sorted(
        (key for key in found if VARIANTS[key.split(",")[0]].is_stock_muon), key=lambda k: found[k]["seconds"]
    )


def bounds(found: Found, a: str, b: str) -> list[tuple[float, float]]:
    """Seconds of two variants: medians, the fastest of a and slowest of b, the slowest of a and fastest of b."""
    pairs = (("seconds", "seconds"), ("fastest s", "slowest s"), ("slowest s", "fastest s"))
    return [(found[a][x], found[b][y]) for x, y in pairs]


def overview(found: Found) -> Iterator[Row]:
    """Seconds and megabytes of each variant, and ours over stock's best."""
    own = {key: row for key, row in found.items() if not VARIANTS[key.split(",")[0]].again}
    row, stock = (
        {label(key): f"{row['seconds']:.2f} s, {row['MB']:.1f} MB" for key, row in own.items()},
        stock_muons(found),
    )
    has_both = "ours" in found and stock
    over = f"{found['ours']['seconds'] / found[stock[0]]['seconds']:.2f}" if has_both else "-"
    yield row | {"ours / stock's best": over}


def ratios(found: Found) -> Iterator[Row]:
    """Ours against each of stock's Muons, and whether the difference exceeds the spread of the rounds."""
    for other in stock_muons(found) if "ours" in found else ():
        median, low, high = (a / b for a, b in bounds(found, "ours", other))
        verdict = f"{'faster' if high < 1 else 'slower'}, beyond the spread" if high < 1 or low > 1 else "within it"
        row = {"against": label(other), "ratio of medians": median, "our slowest / its fastest": high}
        yield row | {"verdict": verdict if found[other]["rounds"] > 1 else "one round, spread unknown"}


def noise(found: Found) -> Iterator[Row]:
    """A repeated variant over the original: what a ratio of two equals looks like here."""
    for key, again in ((key, VARIANTS[key.split(",")[0]].again) for key in found):
        if again in found:
            a, b = found[key], found[again]
            spread = max(a["slowest s"], b["slowest s"]) / min(a["fastest s"], b["fastest s"])
            ratio = {"variant": label(again), "ratio of medians": a["seconds"] / b["seconds"]}
            yield ratio | {"slowest / fastest round of both": spread}


def additions(found: Found) -> Iterator[Row]:
    """Seconds that ours and each of stock's Muons add to AdamW's backward + step."""
    for other in stock_muons(found) if {"ours", "adamw"} <= found.keys() else ():
        ours, _, most = (a - b for a, b in bounds(found, "ours", "adamw"))
        theirs, least, _ = (a - b for a, b in bounds(found, other, "adamw"))
        row = {"AdamW s": found["adamw"]["seconds"], "ours adds s": ours, "against": label(other), "adds s": theirs}
        yield row | {"ours / its": ours / theirs, "at most": most / least if least > 0 else "-"}


def floors(found: Found, job: Job, rates: dict[int, Rates]) -> Iterator[Row]:
    """Seconds inside our optimizer's own step, the exchange included, over the least possible."""
    for key, row in found.items():
        if "kernels" in row and row["world"] in rates:
            sharding, symmetric = roofline.Sharding(CASES[row["case"]].stage, row["world"]), bool(row["symmetric"])
            floor = roofline.floor(job.matrices, sharding, rates[row["world"]], symmetric=symmetric)
            times = {"optimizer s": row["optimizer s"], "floor s": floor.total}
            named = {"variant": label(key), "kernels": row["kernels"]} | times
            yield named | {
                "of it Newton-Schulz": floor.newton_schulz,
                "optimizer / floor": row["optimizer s"] / floor.total,
            }


def exchanges(found: Found) -> Iterator[Row]:
    """Where a step of ours goes, and how much of the exchange it does not wait for."""
    for key, row in found.items():
        if row.get("exchange MB"):
            names = {"exchange": "waiting s", "newton_schulz": "Newton-Schulz s"}
            phases = {names.get(phase, f"{phase} s"): row[f"{phase} s"] for phase in OUR_PHASES}
            hidden = max(0.0, 1 - row["exchange s"] / row["alone s"])
            rounds = {"variant": label(key), "rounds": row["exchange rounds"], "MB sent": row["exchange MB"]}
            yield rounds | phases | {"exchange alone s": row["alone s"], "hidden": f"{hidden:.0%}"}


def details(found: Found) -> Iterator[Row]:
    """Phases, spread, traffic by phase, state and peak memory."""
    for key, row in found.items():
        shown = {"variant": label(key)} | {name: row[name] for name in ("backward s", "step s", "optimizer s")}
        shown["rounds min-max s"] = f"{row['fastest s']:.3f}-{row['slowest s']:.3f}"
        for phase in ("backward", "step"):
            shown[f"MB {phase}"] = f"{row[f'{phase} MB']:.1f} (max {row[f'{phase} MB, largest rank']:.1f})"
        if any(row[f"link {phase} MB"] for phase in ("backward", "step")):
            shown["MB of a host on the link"] = " + ".join(f"{row[f'link {p} MB']:.1f}" for p in ("backward", "step"))
        shown["state bytes/parameter"] = f"{row['state bytes/parameter']:.2f} ({row['state keys']})"
        yield shown | {name: f"{row[name]:.0f}" for name in row if name.startswith("peak MB")}


def memory(found: Found) -> Iterator[Row]:
    """The first step beyond AdamW's, in steady steps of its own; scratch; resident memory and its growth."""
    for key, row in found.items():
        resident, shown = row["resident MB"], {"variant": label(key), "first step s": row["first step s"]}
        if "adamw" in found and key != "adamw":
            shown["beyond AdamW's, in steady steps"] = (row["first step s"] - found["adamw"]["first step s"]) / row[
                "seconds"
            ]
        shown |= {"scratch MB": row["workspace MB"]} if "workspace MB" in row else {}
        half = resident[len(resident) // 2 :]
        shown["resident MB, second half"] = f"{min(half):.0f}-{max(half):.0f}"
        yield shown | {"MB per 100 steps, second half": slope(resident)}


def slope(values: list[float]) -> float:
    """Least-squares slope per 100 entries, of the second half of a series."""
    half = values[len(values) // 2 :]
    return 100 * statistics.linear_regression(range(len(half)), half).slope
