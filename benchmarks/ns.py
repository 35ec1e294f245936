# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz alone: methods x dtypes x shapes against torch.optim.Muon's iteration and stock's; time and accuracy.

    python benchmarks/ns.py [--shapes 8x512x2048 1x1024x4096] [--full] [--compiled] [--kernels torch] [--threads 2]

Every implementation makes five steps with the same coefficients, from an input of its own dtype, and they take turns
(A B C A B C ...) until --limit seconds are over, after one call of each that is not counted. What needs a quarter of
the limit for a call is called once; what must need longer than the limit, by its floor, is left out. A row's floor is
the least work of its method in its dtype (roofline.py). Errors are relative to the same polynomial of the singular
values in float64: of a Gaussian matrix, and of one with singular values from 1 to 1e-5. Shapes that are not measured
keep their rows of an earlier run.
"""

import argparse
import csv
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import launcher
import output
import roofline
from candidates import SIMPLE, Candidate, candidates
from rates import DTYPES, Rates, product_rate
from timing import seconds, summary

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests/unit/ops/muon"))

from helpers.singular_values import quick_reference, relative_error

#: Elements of a batch: what a bucket of the exchange holds in bf16.
BUCKET = 2**22
#: Errors are computed up to this smaller dimension: the reference takes an eigendecomposition in float64.
EXACT_UP_TO = 1024
MOST_CALLS = 12
Shape = tuple[int, int, int]


def default_shapes() -> list[Shape]:
    """What takes minutes on two cores."""
    sizes = {128: (1, 4), 256: (1, 4), 512: (1, 2, 4, 8), 1024: (1, 4)}
    return [(batch(m, a * m), m, a * m) for m, aspects in sizes.items() for a in aspects] + [(1, 512, 2048)]


def full_shapes() -> list[Shape]:
    """Smaller dimension 128 to 8192, aspect 1 to 8, one matrix and a bucket of them, wide and tall."""
    shapes = []
    for m in (128, 256, 512, 1024, 2048, 4096, 8192):
        for aspect in (1, 2, 4, 8):
            shapes += [(b, m, aspect * m) for b in sorted({1, batch(m, aspect * m)})]
        shapes.append((1, 4 * m, m))
    return shapes


def batch(rows: int, cols: int) -> int:
    """How many matrices share a bucket."""
    return max(1, BUCKET // (rows * cols))


def inputs(shape: Shape, device: str) -> dict[str, Tensor]:
    """Two matrices in fp32 to judge by: Gaussian, and with singular values from 1 to 1e-5."""
    generator = torch.Generator().manual_seed(0)
    _, rows, cols = shape
    gaussian = torch.randn(rows, cols, generator=generator)
    left, right = (torch.linalg.qr(torch.randn(n, min(rows, cols), generator=generator))[0] for n in (rows, cols))
    spectrum = torch.logspace(0, -5, min(rows, cols))
    return {"error, Gaussian": gaussian.to(device), "error, 1 to 1e-5": ((left * spectrum) @ right.mT).to(device)}


def errors(shape: Shape, found: list[Candidate], device: str) -> dict[str, dict[str, float]]:
    """Relative errors by candidate and input; none for matrices too large for the reference."""
    if min(shape[1:]) > EXACT_UP_TO:
        return {candidate.name: {} for candidate in found}
    result: dict[str, dict[str, float]] = {candidate.name: {} for candidate in found}
    for name, matrix in inputs(shape, device).items():
        exact = quick_reference(matrix, SIMPLE)
        for candidate in found:
            given = matrix.to(DTYPES[candidate.dtype])[None].clone()
            result[candidate.name][name] = relative_error(candidate.run(given)[0], exact)
    return result


def times(shape: Shape, found: list[Candidate], limit: float, device: str) -> dict[str, list[float]]:
    """Seconds of calls in turn; before them, as the first entry, of the call that compiles and fills caches."""
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    sources = {name: source.to(dtype) for name, dtype in DTYPES.items()}

    def call(candidate: Candidate) -> float:
        x = sources[candidate.dtype].clone()
        return seconds(lambda: candidate.run(x), device)

    taken = {candidate.name: [call(candidate), call(candidate)] for candidate in found}
    quick = [candidate for candidate in found if taken[candidate.name][1] < limit / 4]
    begin, rounds = time.perf_counter(), 1
    while quick and rounds < MOST_CALLS and time.perf_counter() - begin < limit:
        for candidate in quick:
            taken[candidate.name].append(call(candidate))
        rounds += 1
    return taken


def floors(shape: Shape, found: list[Candidate], rates: Rates, symmetric: bool) -> dict[str, float]:
    """Least seconds of each candidate's method in its dtype."""
    batches, rows, cols = shape
    work = {c.name: batches * roofline.least_flops(rows, cols, c.method, symmetric=symmetric) for c in found}
    return {c.name: work[c.name] / getattr(rates, c.dtype) for c in found}


def rows_of(shape: Shape, args: argparse.Namespace, rates: Rates) -> tuple[list[dict], list[str]]:
    """One row per candidate, and what is left out."""
    known, notes, table = candidates(args.device, args.kernels == "torch", args.compiled)
    least = floors(shape, known, rates, roofline.has_symmetric(table))
    found = [candidate for candidate in known if least[candidate.name] < args.limit]
    if not found:
        return [], [*notes, f"{shape} is left out: one call takes more than --limit"]
    accuracy, taken = errors(shape, found, args.device), times(shape, found, args.limit, args.device)
    again = {name: max(getattr(rates, name), product_rate(dtype, args.device)) for name, dtype in DTYPES.items()}
    least = floors(shape, found, dataclasses.replace(rates, **again), roofline.has_symmetric(table))
    medians = {name: statistics.median(calls[1:]) for name, calls in taken.items()}
    result = []
    for name in taken:
        row = {"batch": shape[0], "rows": shape[1], "cols": shape[2], "implementation": name}
        row |= {"first call ms": 1e3 * taken[name][0]} | summary(taken[name][1:])
        row |= {"floor ms": 1e3 * least[name], "time / floor": medians[name] / least[name]}
        if "torch.optim.Muon" in medians:
            row["speed / torch"] = medians["torch.optim.Muon"] / medians[name]
        result.append(row | accuracy[name] | {"kernels": table.name, "threads": args.threads})
    return result, notes


def kept(path: Path, shapes: list[Shape]) -> list[dict]:
    """Rows of an earlier run whose shapes are not measured now."""
    file = path.with_name(f"{path.name}.csv")
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        rows = [{name: number(text) for name, text in row.items() if text} for row in csv.DictReader(lines)]
    return [row for row in rows if (row["batch"], row["rows"], row["cols"]) not in shapes]


def number(text: str) -> float | int | str:
    """A cell of a CSV as it was."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


COLUMNS = ("implementation", "median ms", "fastest ms", "slowest ms", "calls", "time / floor", "speed / torch")
COLUMNS = (*COLUMNS, "error, Gaussian", "error, 1 to 1e-5")


def report(rows: list[dict], notes: list[str], threads: int) -> str:
    """A table per shape."""
    shapes = dict.fromkeys((row["batch"], row["rows"], row["cols"]) for row in rows)
    parts = [f"# Newton-Schulz, {threads} threads", *notes]
    for shape in shapes:
        own = [row for row in rows if (row["batch"], row["rows"], row["cols"]) == shape]
        parts += [f"## {shape[0]} x {shape[1]} x {shape[2]}", output.table(own, COLUMNS)]
    return "\n\n".join(parts)


def draw(rows: list[dict]):
    """Speed relative to torch's iteration, a line per implementation over the shapes."""

    def on(axes) -> None:
        shapes = list(dict.fromkeys(f"{row['batch']}x{row['rows']}x{row['cols']}" for row in rows))
        for name in dict.fromkeys(row["implementation"] for row in rows):
            own = {
                f"{row['batch']}x{row['rows']}x{row['cols']}": row.get("speed / torch")
                for row in rows
                if row["implementation"] == name
            }
            axes.plot([own.get(shape) for shape in shapes], "o-", label=name, markersize=4)
        axes.set_xticks(range(len(shapes)), shapes, rotation=45, ha="right")
        axes.set_ylabel("speed relative to torch.optim.Muon's iteration")
        axes.set_yscale("log")
        axes.legend(fontsize=7)

    return on


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="BATCHxROWSxCOLS")
    parser.add_argument("--full", action="store_true", help="all shapes, up to 8192 x 65536")
    parser.add_argument("--limit", type=float, default=4.0, help="seconds of timed calls per shape, about")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=("in-use", "torch"), default="in-use", help="of ours")
    parser.add_argument("--compiled", action="store_true", help="stock's through torch.compile too, as it runs them")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """What to measure."""
    if args.shapes:
        return [tuple(map(int, text.split("x"))) for text in args.shapes]
    return full_shapes() if args.full else default_shapes()


def work(args: argparse.Namespace) -> None:
    """The worker: one shape after another, each printed when it is done."""
    setting, result = json.loads(args.worker[0]), Path(args.worker[1])
    args = argparse.Namespace(**setting["args"])
    torch.set_num_threads(args.threads)
    rows, skipped = [], []
    for shape in map(tuple, setting["shapes"]):
        more, skipped = rows_of(shape, args, Rates(**setting["rates"]))
        rows += more
    result.write_text(json.dumps({"rows": rows, "skipped": skipped}))


def main() -> None:
    """Measure the rates and every shape in a process of its own, and report after each."""
    args = arguments()
    if args.worker:
        work(args)
        return
    rates = roofline.measure(1, args.threads, args.device)
    shapes, deviations = shapes_of(args), [f"{args.threads}-threads"] * (args.threads != 2)
    path = output.path_of("ns", *deviations, *(["plain"] if args.kernels == "torch" else []))
    rows = kept(path, shapes)
    for shape in shapes:
        setting = {"args": vars(args), "shapes": [shape], "rates": vars(rates)}
        command = [__file__, "--worker", json.dumps(setting)]
        try:
            (found,) = launcher.run_ranks(
                command, 1, 120 + 40 * args.limit, args.threads, {"DS_MUON_AUTOLOAD": "0"}, args.device
            )
        except launcher.LaunchFailed as error:
            print(f"{shape}: {error}", file=sys.stderr)
            continue
        if not found["rows"]:
            print(*found["skipped"], sep="\n")
            continue
        rows += found["rows"]
        rows.sort(key=lambda row: (min(row["rows"], row["cols"]), row["cols"], row["batch"]))
        notes = [f"Rates, measured again after every shape: {roofline.describe(rates)}", *found["skipped"]]
        output.write(path, rows, report(rows, notes, args.threads), draw(rows))
        print(shape, output.table(found["rows"], COLUMNS), sep="\n", flush=True)


if __name__ == "__main__":
    main()
