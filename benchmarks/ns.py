# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz alone by method, dtype and shape, against others'."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.rates import DTYPES, Rates, alternate, measure, summary
from benchmarks.roofline import has_symmetric, least_flops
from deepspeed.muon.kernels import kernel_set, selection, triton_kernels
from deepspeed.muon.kernels.kernel_set import KernelSet, Workspace
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize, schedule

SIMPLE = schedule("simple", 5)
#: Elements of a batch, a bucket of the exchange in bf16; smaller dimension up to which errors are measured on a CPU.
BUCKET, EXACT_UP_TO = 2**22, 1024
Shape = tuple[int, int, int]
Row = dict[str, Any]


class Candidate(NamedTuple):
    """One implementation: `run` gets [batch, rows, cols] in `dtype`, may overwrite it, and returns the result."""

    method: str
    dtype: str
    run: Callable[[Tensor], Tensor]


def tables(device: str) -> dict[str, KernelSet]:
    """Our tables of operations that run here by name, the fastest last."""
    found = {"torch": kernel_set.TORCH}
    if device == "cpu":
        table = selection.choose(selection.unavailable_kernels("auto", ["cpu"]))
        return found if table is kernel_set.TORCH else found | {"C++": table}
    if triton_kernels.unavailable() is None:
        found["triton"] = triton_kernels.operations(kernel_set.TORCH)
    return found


def ours(table: KernelSet, method: str, dtype: str) -> Callable[[Tensor], Tensor]:
    """Our iteration, with a workspace that is kept from call to call."""
    work = Workspace()
    return lambda x: orthogonalize(x, SIMPLE, method, DTYPES[dtype], work, table)


def candidates(device: str, compiled: bool = False) -> tuple[dict[str, Candidate], str]:
    """All that run here by name; why Dao-AILab's does not. `compiled`: stock's as it runs them, by torch.compile."""
    from deepspeed.runtime.zero.muon import original_muon as stock
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    found = {
        f"ours, {method}, {dtype}, {name}": Candidate(method, dtype, ours(table, method, dtype))
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
    flops = {name: batch * least_flops(rows, cols, c.method, c.dtype, symmetric) for name, c in found.items()}
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
