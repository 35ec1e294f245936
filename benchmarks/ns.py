# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz alone by method, dtype and shape: against others' (`ns`), and the faster method (`choose`)."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.rates import DTYPES, Rates, alternate, measure, summary
from benchmarks.roofline import has_symmetric, least_flops
from deepspeed.muon.kernels import quack, reference, selection, triton_table
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import choice
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.measure import race
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize

SIMPLE = schedule("simple", 5)
#: Elements of a batch, a bucket of the exchange in bf16; smaller dimension up to which errors are measured on a CPU.
BUCKET, EXACT_UP_TO = 2**22, 1024
#: Of `choose`: smaller dimensions and aspect ratios.
SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
ASPECTS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
#: Rows x rows x columns of the largest matrix that is timed: on one core about half a second of either method.
LONGEST = {"cpu": 3.7e9, "cuda": 6e12}
#: What a band of its own has to save, as a sum over its shapes of how much slower they are than the better method.
WORTH = 0.03
#: Mean spread of the runs of a shape beyond which the machine was busy, and no rule is written.
BUSY = 0.25
Shape = tuple[int, int, int]
Row = dict[str, Any]
Bands = list[list[float | None]]


class Candidate(NamedTuple):
    """One implementation: `run` gets [batch, rows, cols] in `dtype`, may overwrite it, and returns the result."""

    method: str
    dtype: str
    run: Callable[[Tensor], Tensor]


def tables(device: str) -> dict[str, Operations]:
    """Our tables of operations that run here by name, the fastest last."""
    found = {"torch": reference.OPERATIONS}
    if device == "cpu":
        table = selection.choose(selection.missing("auto", ["cpu"]))
        return found if table is reference.OPERATIONS else found | {"C++": table}
    if triton_table.why_not() is None:
        found["triton"] = triton_table.operations(reference.OPERATIONS)
        if quack.why_not() is None:
            found["quack"] = quack.operations(found["triton"])
    return found


def ours(table: Operations, method: str) -> Callable[[Tensor], Tensor]:
    """Our iteration, with a workspace that is kept from call to call."""
    work = Workspace()
    return lambda x: orthogonalize(x, SIMPLE, method, work=work, kernels=table)


def candidates(device: str, compiled: bool = False) -> tuple[dict[str, Candidate], str]:
    """All that run here by name; why Dao-AILab's does not. `compiled`: stock's as it runs them, by torch.compile."""
    from deepspeed.runtime.zero.muon import original_muon as stock
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    found = {
        f"ours, {method}, {dtype}, {name}": Candidate(method, dtype, ours(table, method))
        for name, table in reversed(tables(device).items())
        for dtype in DTYPES
        for method in METHODS
    }
    one_by_one = lambda x: torch.stack([of_torch(matrix, SIMPLE[0], 5, 1e-7) for matrix in x])  # noqa: E731
    found["torch.optim.Muon"] = Candidate("standard", "bf16", one_by_one)
    functions = {"gram": stock.zeropower_via_gram_newtonschulz, "standard": stock.zeropower_via_newtonschulz5}
    for method, function in functions.items():
        dtype = stock.ns_compute_dtype(method)
        call = function if compiled else getattr(function, "__wrapped__", function)
        given = "fp32" if dtype == torch.float32 else "bf16"
        name = f"stock, {method}, {str(dtype)[6:]}, {'compiled' if compiled else 'eager'}"
        found[name] = Candidate(method, given, lambda x, call=call: call(x, steps=5))
    try:
        from gram_newton_schulz.gram_newton_schulz import GramNewtonSchulz

        settings: dict[str, Any] = {} if device != "cpu" else {"compile_kwargs": None}
        dao = GramNewtonSchulz(ns_coefficients=list(map(list, SIMPLE)), ns_use_kernels=device != "cpu", **settings)
        return found | {"gram-newton-schulz, fp16": Candidate("gram", "bf16", dao)}, ""
    except ImportError as error:
        return found, f"gram-newton-schulz is left out: {error}"


def exact(x: Tensor) -> Tensor:
    """The iteration in float64."""
    if x.size(-2) > x.size(-1):
        return exact(x.mT).mT
    x = x.double() / x.double().norm(dim=(-2, -1), keepdim=True)
    for a, b, c in SIMPLE:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def judged(rows: int, cols: int, device: str) -> dict[str, Tensor]:
    """Two matrices in fp32 to judge errors by."""
    torch.manual_seed(0)
    small = min(rows, cols)
    left, right = (torch.linalg.qr(torch.randn(size, small, device=device))[0] for size in (rows, cols))
    spectrum = (left * torch.logspace(0, -5, small, device=device)) @ right.mT
    return {"error, Gaussian": torch.randn(rows, cols, device=device), "error, 1 to 1e-5": spectrum}


def rows_of(shape: Shape, found: dict[str, Candidate], rates: Rates, device: str, limit: float) -> Iterator[Row]:
    """A row per candidate whose floor lets it make a call within the limit."""
    batch, rows, cols = shape
    symmetric = has_symmetric(list(tables(device).values())[-1])
    flops = {name: batch * least_flops(rows, cols, c.method, symmetric=symmetric) for name, c in found.items()}
    floors = {name: 1e3 * flops[name] / getattr(rates, c.dtype) for name, c in found.items()}
    sources = {name: torch.randn(shape, device=device).to(dtype) for name, dtype in DTYPES.items()}
    given = {name: source.clone() for name, source in sources.items()}
    refresh = lambda: [given[name].copy_(source) for name, source in sources.items()]  # noqa: E731
    calls = {n: lambda c=candidate: c.run(given[c.dtype]) for n, candidate in found.items() if floors[n] < 1e3 * limit}
    times = alternate(calls, device, 12, limit, refresh)
    matrices = {} if device == "cpu" and min(rows, cols) > EXACT_UP_TO else judged(rows, cols, device)
    truths = {kind: exact(matrix) for kind, matrix in matrices.items()}
    torch_ms = summary(times["torch.optim.Muon"][1:])["median ms"] if "torch.optim.Muon" in times else float("nan")
    for name, (first, *rest) in times.items():
        row = {"shape": f"{batch} x {rows} x {cols}", "implementation": name, "first call ms": 1e3 * first}
        row |= summary(rest)
        row |= {"TFLOP/s": flops[name] / row["median ms"] / 1e9, "time / floor": row["median ms"] / floors[name]}
        row["speed / torch"] = torch_ms / row["median ms"]
        for kind, matrix in matrices.items():
            result = found[name].run(matrix.to(DTYPES[found[name].dtype])[None].clone())[0].double()
            row[kind] = float((result - truths[kind]).norm() / truths[kind].norm())
        yield row


def shapes_of(full: bool) -> list[Shape]:
    """By smaller dimension and aspect ratio: batches that fill a bucket; with `full` single matrices too, and tall."""
    usual = {128: (1, 4), 256: (1, 4), 512: (1, 2, 4, 8), 1024: (1, 4)}
    aspects = {2**k: (1, 2, 4, 8) for k in range(7, 14)} if full else usual
    batches = [(max(1, BUCKET // (m * a * m)), m, a * m) for m, factors in aspects.items() for a in factors]
    single = [(1, rows, cols) for _, rows, cols in batches] + [(1, 4 * m, m) for m in aspects]
    return list(dict.fromkeys(batches + (single if full else [(1, 512, 2048)])))


def ns(
    shapes: tuple[str, ...] = (),
    full: bool = False,
    limit: float = 4.0,
    threads: int = 2,
    compiled: bool = False,
    device: Annotated[str, ("cpu", "cuda")] = "cpu",
) -> str:
    """Newton-Schulz: methods x dtypes x shapes, ours against torch.optim.Muon's, stock's and Dao-AILab's.

    All make five steps with the same coefficients and take turns. Errors are relative to the same iteration in float64,
    of a Gaussian matrix and of one with singular values from 1 to 1e-5. The floor is the least work of a row's method
    over the rate of products in its dtype. The report is written anew after every shape.

    Args:
        shapes: BATCHxROWSxCOLS instead of the usual ones
        full: shapes up to 8192 x 65536
        limit: seconds of timed calls per shape, about; what must need longer for a call is left out
        threads: of the process
        compiled: stock's through torch.compile, as it runs them
        device: where
    """
    chosen = [tuple(map(int, text.split("x"))) for text in shapes] or shapes_of(full)
    rates, rows, text = measure(1, threads, device), [], ""
    torch.set_num_threads(threads)
    found, note = candidates(device, compiled)
    setting = "shapes" * bool(shapes), "full" * full, f"{threads}-threads" * (threads != 2)
    name = report.name_of("ns", *setting, device * (device != "cpu"))
    for shape in chosen:
        new = list(rows_of(shape, found, rates, device, limit))
        print(report.table(new), flush=True)
        rows += new
        of_shape = [[row for row in rows if row["shape"] == of] for of in dict.fromkeys(row["shape"] for row in rows)]
        parts = [f"## {own[0]['shape']}\n\n{report.table(own, list(own[0])[1:])}" for own in of_shape]
        chart = report.lines(rows, lambda row: row["implementation"], "shape", "speed / torch", yscale="log")
        text = report.write(name, f"Newton-Schulz, {threads} threads", rows, str(rates), note, *parts, draw=chart)
    return text


def compare(device: str, dtype: torch.dtype, seconds: float) -> list[Row]:
    """Every shape whose call is short enough; more seconds buy more runs of each."""
    shapes = [(size, aspect) for size in SIZES for aspect in ASPECTS if size**3 * aspect <= LONGEST[device]]
    kernels, rows = selection.choose(selection.missing("auto", [device])), []
    for size, aspect in shapes:
        shape, where = (size, round(size * aspect)), torch.device(device)
        times = race(shape, 8, SIMPLE, dtype, where, kernels, seconds / len(shapes))
        row = {"rows": shape[0], "cols": shape[1], "size": size, "aspect": aspect}
        row |= {f"{method} ms": 1e3 * statistics.median(runs) for method, runs in times.items()}
        spread = max((max(runs) - min(runs)) / statistics.median(runs) for runs in times.values())
        rows.append(row | {"standard / gram": row["standard ms"] / row["gram ms"], "spread": spread})
    return rows


def loss(row: Row, method: str) -> float:
    """How much slower a method is than the better one, 0 for that."""
    return row[f"{method} ms"] / min(row[f"{other} ms"] for other in METHODS) - 1


def fit(rows: Sequence[Row]) -> Bands:
    """The bands that lose least: for each size the least aspect ratio from which `gram` is taken, where it wins at all.

    A further band has to save :data:`WORTH`, else the rule would follow noise. The last one goes on. A size of which
    only one shape was measured says nothing of where `gram` begins to win.
    """
    ways: dict[float | None, tuple[float, Bands]] = {None: (0.0, [[1, None]])}
    for size in dict.fromkeys(row["size"] for row in rows):
        mine = [row for row in rows if row["size"] == size]
        further: dict[float | None, tuple[float, Bands]] = {}
        for aspect in (*(row["aspect"] for row in mine), None) if len(mine) > 1 else ():
            takes_gram = [aspect is not None and row["aspect"] >= aspect for row in mine]
            lost = sum(loss(row, "gram" if takes else "standard") for row, takes in zip(mine, takes_gram, strict=True))
            found = [
                (before + lost + WORTH * (last != aspect), bands + [[size, aspect]] * (last != aspect))
                for last, (before, bands) in ways.items()
            ]
            further[aspect] = min(found, key=lambda way: way[0])
        ways = further or ways
    return min(ways.values(), key=lambda way: way[0])[1]


def verdict(rows: Sequence[Row], rule: choice.Rule) -> str:
    """The rule against the better method of each shape, and against either method for all."""
    losses = {"the rule": [loss(row, rule.method(row["rows"], row["cols"])) for row in rows]}
    losses |= {f"always {method}": [loss(row, method) for row in rows] for method in METHODS}
    parts = [f"{of} {statistics.mean(lost):.1%} on average, {max(lost):.0%} at worst" for of, lost in losses.items()]
    return f"Slower than the better method of each shape: {'; '.join(parts)}."


def choose(
    device: Annotated[str, LONGEST] = "cuda" if torch.cuda.is_available() else "cpu",
    dtype: Annotated[tuple[str, ...], DTYPES] = ("bf16",),
    seconds: float = 40.0,
    write: bool = False,
) -> str:
    """Both methods of Newton-Schulz by shape, and the rule by which `ns_method: auto` chooses between them.

    Times batches of matrices with a smaller dimension of 64 to 4096 and an aspect ratio of 1 to 8, as far as one call
    stays short, in turn, with the operations of a step. Without --write the table judges the shipped rule.

    Args:
        device: where
        dtype: of Newton-Schulz
        seconds: for the shapes of one dtype; each is run thrice
        write: put the rule that follows into the package, deepspeed/muon/math/choice.json
    """
    facts, kernels = report.describe(), selection.choose(selection.missing("auto", [device])).name
    where = torch.cuda.get_device_name() if device == "cuda" else f"{facts['cpu']}, threads: {torch.get_num_threads()}"
    basis, texts = f"{where}, torch {facts['torch']}, kernels {kernels}, {facts['date']}", []
    for name in dtype:
        kind, rows = choice.kind_of(device, DTYPES[name].itemsize), compare(device, DTYPES[name], seconds)
        bands, spread = fit(rows), statistics.mean(row["spread"] for row in rows)
        rules, writes = json.loads(choice.FILE.read_text()), write and spread <= BUSY
        rules |= {kind: {"basis": basis, "bands": bands}} if writes else {}
        rule = choice.parse(rules)[kind]
        if writes:
            lines = ",\n".join(f"  {json.dumps(of)}: {json.dumps(entry)}" for of, entry in rules.items())
            choice.FILE.write_text(f"{{\n{lines}\n}}\n")
        elif write:
            print(f"NOT WRITTEN: the runs of one shape lie {spread:.0%} apart, so the machine is busy; try again")
        for row in rows:
            row["rule"] = rule.method(row["rows"], row["cols"])
            row["slower than the better"] = f"{loss(row, row['rule']):.0%}"
        fitted = f"The bands that fit: {json.dumps(bands)}; the rule: {json.dumps(rule.bands)}, {rule.basis}"
        chart = report.lines(rows, lambda row: str(row["size"]), "aspect", "standard / gram")
        parts = basis, report.table(rows), verdict(rows, rule), fitted
        file, title = report.name_of(f"choose-{device}-{name}"), f"Methods of Newton-Schulz by shape: {kind}"
        texts.append(report.write(file, title, rows, *parts, draw=chart))
    return "\n".join(texts)
