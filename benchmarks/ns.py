# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz alone: ours, torch.optim.Muon's, stock's and Dao-AILab's, by method, dtype and shape."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.rates import DTYPES, Rates, alternate, measure, summary
from benchmarks.roofline import has_symmetric, least_flops
from deepspeed.muon.kernels import quack, reference, selection, triton_table
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize

SIMPLE = schedule("simple", 5)
#: Elements of a batch: a bucket of the exchange in bf16.
BUCKET = 2**22
#: Errors are measured up to this smaller dimension on a CPU.
EXACT_UP_TO = 1024
COLUMNS = ("implementation", "first call ms", "median ms", "fastest ms", "slowest ms", "calls", "TFLOP/s")
COLUMNS = (*COLUMNS, "time / floor", "speed / torch", "error, Gaussian", "error, 1 to 1e-5")
Shape = tuple[int, int, int]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
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


def candidates(device: str, compiled: bool = False) -> tuple[dict[str, Candidate], list[str]]:
    """All that run here by name, and a line for each that does not."""
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
        dtype = str(stock.ns_compute_dtype(method)).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        eager = getattr(function, "__wrapped__", function)
        for how, call in {"eager": eager, "compiled": function}.items():
            if how == "eager" or compiled:
                given, run = "fp32" if dtype == "fp32" else "bf16", lambda x, call=call: call(x, steps=5)
                found[f"stock, {method}, {dtype}, {how}"] = Candidate(method, given, run)
    try:
        from gram_newton_schulz.gram_newton_schulz import GramNewtonSchulz

        settings: dict[str, Any] = {} if device != "cpu" else {"compile_kwargs": None}
        dao = GramNewtonSchulz(ns_coefficients=list(map(list, SIMPLE)), ns_use_kernels=device != "cpu", **settings)
        return found | {"gram-newton-schulz, fp16": Candidate("gram", "bf16", dao)}, []
    except ImportError as error:
        return found, [f"gram-newton-schulz is left out: {error}"]


def exact(x: Tensor) -> Tensor:
    """The iteration in float64."""
    wide = x.double() if x.size(-2) <= x.size(-1) else x.double().mT
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True)
    for a, b, c in SIMPLE:
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


def inputs(rows: int, cols: int, device: str) -> dict[str, Tensor]:
    """Two matrices in fp32 to judge errors by: Gaussian, and with singular values from 1 to 1e-5."""
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
    floors = {name: flops[name] / getattr(rates, c.dtype) for name, c in found.items()}
    sources = {name: torch.randn(shape, device=device).to(dtype) for name, dtype in DTYPES.items()}
    given = {name: source.clone() for name, source in sources.items()}

    def refresh() -> None:
        for name, source in sources.items():
            given[name].copy_(source)

    calls = {n: lambda c=candidate: c.run(given[c.dtype]) for n, candidate in found.items() if floors[n] < limit}
    times = alternate(calls, device, 12, limit, refresh)
    judged = {} if device == "cpu" and min(rows, cols) > EXACT_UP_TO else inputs(rows, cols, device)
    truths = {kind: exact(matrix) for kind, matrix in judged.items()}
    torch_median = statistics.median(times["torch.optim.Muon"][1:]) if "torch.optim.Muon" in times else float("nan")
    for name, (first, *rest) in times.items():
        row = {"batch": batch, "rows": rows, "cols": cols, "implementation": name, "first call ms": 1e3 * first}
        row |= summary(rest)
        row["TFLOP/s"] = flops[name] / row["median ms"] / 1e9
        row["time / floor"] = row["median ms"] / 1e3 / floors[name]
        row["speed / torch"] = 1e3 * torch_median / row["median ms"]
        for kind, matrix in judged.items():
            result = found[name].run(matrix.to(DTYPES[found[name].dtype])[None].clone())[0].double()
            row[kind] = float((result - truths[kind]).norm() / truths[kind].norm())
        yield row


def default_shapes() -> list[Shape]:
    """What takes minutes on two cores."""
    sizes = {128: (1, 4), 256: (1, 4), 512: (1, 2, 4, 8), 1024: (1, 4)}
    return [(fill(m, a * m), m, a * m) for m, aspects in sizes.items() for a in aspects] + [(1, 512, 2048)]


def full_shapes() -> list[Shape]:
    """Smaller dimension 128 to 8192, aspect 1 to 8, one matrix and a bucket of them, wide and tall."""
    sizes = [2**k for k in range(7, 14)]
    wide = [(b, m, a * m) for m in sizes for a in (1, 2, 4, 8) for b in sorted({1, fill(m, a * m)})]
    return wide + [(1, 4 * m, m) for m in sizes]


def fill(rows: int, cols: int) -> int:
    """How many matrices fill a bucket."""
    return max(1, BUCKET // (rows * cols))


def ns(
    shapes: tuple[str, ...] = (),
    full: bool = False,
    limit: float = 4.0,
    threads: int = 2,
    compiled: bool = False,
    plain: bool = False,
    device: str = "cpu",
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
        compiled: stock's through torch.compile too, as it runs them
        plain: of ours, the PyTorch twins of the kernels only
        device: cpu or cuda
    """
    chosen = [tuple(map(int, text.split("x"))) for text in shapes] or (full_shapes() if full else default_shapes())
    rates, rows, text = measure(1, threads, device), [], ""
    torch.set_num_threads(threads)
    found, notes = candidates(device, compiled)
    if plain:
        found = {name: c for name, c in found.items() if not name.startswith("ours") or name.endswith("torch")}
    setting = "shapes" * bool(shapes), "full" * full, f"{threads}-threads" * (threads != 2), "plain" * plain
    name = report.name_of("ns", *setting, device * (device != "cpu"))
    for shape in chosen:
        rows += rows_of(shape, found, rates, device, limit)
        parts = [str(rates), *notes]
        for of in dict.fromkeys((row["batch"], row["rows"], row["cols"]) for row in rows):
            own = [row for row in rows if (row["batch"], row["rows"], row["cols"]) == of]
            parts.append("## {} x {} x {}\n\n".format(*of) + report.table(own, COLUMNS))
        print(parts[-1], flush=True)
        drawn = [row | {"shape": "{batch}x{rows}x{cols}".format(**row)} for row in rows]
        chart = report.lines(drawn, lambda row: row["implementation"], "shape", "speed / torch", yscale="log")
        text = report.write(name, f"Newton-Schulz, {threads} threads", rows, *parts, draw=chart)
    return text
