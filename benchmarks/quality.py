# SPDX-License-Identifier: Apache-2.0
"""What each schedule makes of singular values, and what each dtype and method adds to it by rounding."""

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import exactness as tables
from benchmarks import report
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, NAMED, method_of, orthogonalize, schedule
from helpers.oracles import newton_schulz_fp64

ROWS, COLS = 192, 768
#: Singular values below this part of the largest are left out of the measures: bf16 turns exact zeros into them.
NOISE = 0.01
SETTINGS: dict[str, dict[str, Any]] = {name: {"ns_coefficients": name} for name in NAMED} | {
    "simple, 4 steps": {"ns_coefficients": "simple", "ns_steps": 4},
}
#: Shapes of weights: square, wide and tall, among them those of keys and values and of a fused projection.
SHAPES = ((512, 512), (1024, 1024), (512, 2048), (768, 3072), (1024, 4096), (2048, 512), (2304, 768), (1024, 128))
SIMPLE = schedule("simple")


def localized() -> Tensor:
    """Singular values from 1 to 1e-3 whose vectors have few entries, so that no rounding is averaged out."""
    torch.manual_seed(0)
    blocks = [torch.linalg.qr(torch.randn(2, 2))[0] * 10 ** (-3 * i / (ROWS / 2)) for i in range(ROWS // 2)]
    return torch.nn.functional.pad(torch.block_diag(*blocks), (0, COLS - ROWS))


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Of each kind of spectrum one matrix, in bf16 as it arrives at its owner."""
    for kind, matrix in tables.matrices():
        if matrix.shape == (ROWS, COLS) or kind.startswith("gradient"):
            yield kind, matrix.bfloat16()
    yield "localized", localized().bfloat16()


def largest_of(result: Tensor) -> float:
    """The largest singular value."""
    return math.sqrt(
        float(torch.linalg.eigvalsh(result @ result.T if result.size(0) < result.size(1) else result.T @ result)[-1])
    )


def measures(matrix: Tensor, result: Tensor) -> dict[str, float]:
    """Of an orthogonalized matrix, in the directions in which the given one has more than noise."""
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = int((values > NOISE * values[0]).sum())
    inside = u[:, :rank].T @ result @ vh[:rank].T
    rms = (torch.linalg.svdvals(result)[:rank] - 1).square().mean().sqrt()
    return {
        "rms of s - 1": float(rms),
        "distance to U V'": float((inside - torch.eye(rank, dtype=inside.dtype)).norm()) / math.sqrt(rank),
        "largest s": largest_of(result),
    }


def rows() -> Iterator[dict[str, Any]]:
    """One row for each spectrum and schedule."""
    kernels = choose(unavailable_kernels("auto", ["cpu"]))
    for kind, matrix in inputs():
        for name, keys in SETTINGS.items():
            triples = schedule(keys["ns_coefficients"], keys.get("ns_steps"))
            exact = newton_schulz_fp64(matrix, triples)
            row: dict[str, Any] = {"input": kind, "schedule": name, **measures(matrix, exact)}
            largest = row["largest s"]
            for method in METHODS:
                for dtype in DTYPES:
                    batch = matrix.float()[None]
                    found = orthogonalize(batch, triples, method, DTYPES[dtype], None, kernels)[0].double()
                    row[f"{method} {dtype}"] = float((found - exact).norm() / exact.norm())
                    largest = max(largest, largest_of(found))
            yield row | {"largest s, rounded": largest}


# ---- by dtype, shape and spectrum, as an accelerator rounds -------------------------------------------------------


class OneRounding(TorchDispatchMode):
    """Computes products of 16-bit matrices as accelerators do: with sums in fp32, and one rounding of each result."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        if name not in self.PRODUCTS or args[0].dtype not in (torch.float16, torch.bfloat16):
            return func(*args, **options)
        out = options.pop("out", None)
        wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        result = getattr(torch.ops.aten, name).default(*wide, **options).to(args[0].dtype)
        return result if out is None else out.copy_(result)


def spectra(rows: int, cols: int) -> Iterator[tuple[str, Tensor]]:
    """Five matrices of one shape whose singular values lie differently."""
    torch.manual_seed(0)
    small = min(rows, cols)
    left, right = (torch.linalg.qr(torch.randn(size, small))[0] for size in (rows, cols))
    yield "Gaussian", torch.randn(rows, cols)
    yield "singular values 1 to 1e-2", (left * torch.logspace(0, -2, small)) @ right.T
    yield "singular values 1 to 1e-5", (left * torch.logspace(0, -5, small)) @ right.T
    yield "rank 8", torch.randn(rows, 8) @ torch.randn(8, cols)
    yield "orthogonal", left @ right.T


def implementations() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ours by dtype and method, torch.optim.Muon's and stock DeepSpeed's: of a matrix in bf16, by name."""
    from deepspeed.runtime.zero.muon import original_muon as stock
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    def ours(dtype: str, method: str) -> Callable[[Tensor], Tensor]:
        # A result in bf16 would show the rounding of what is sent back, which is a column of its own.
        return lambda x: orthogonalize(x.float()[None], SIMPLE, method, DTYPES[dtype])[0]

    def stocks(function: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with mock.patch.object(stock, "ns_compute_dtype", lambda *_: dtype):  # that of GPUs
                return getattr(function, "__wrapped__", function)(x, steps=len(SIMPLE))

        return call

    found = {f"{dtype}, {method}": ours(dtype, method) for dtype in ("fp16", "bf16", "fp32") for method in METHODS}
    found["torch, bf16"] = lambda x: of_torch(x.clone(), SIMPLE[0], len(SIMPLE), 1e-7)
    found["stock, bf16, standard"] = stocks(stock.zeropower_via_newtonschulz5, torch.bfloat16)
    found["stock, fp16, gram"] = stocks(stock.zeropower_via_gram_newtonschulz, torch.float16)
    return found


def errors(matrix: Tensor, found: dict[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """The error of each implementation relative to fp64, and of what `auto` takes on an accelerator."""
    exact = newton_schulz_fp64(matrix, SIMPLE)

    def error(result: Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    with OneRounding():
        results = {name: run(matrix) for name, run in found.items()}
    auto = f"fp16, {method_of(*matrix.shape, 'auto', SIMPLE, 'fp16')}"
    sent = error(results[auto].bfloat16())
    row: dict[str, Any] = {name: error(result) for name, result in results.items()}
    return row | {"auto": auto.split(", ")[1], "auto, sent in bf16": sent, "of torch's": sent / row["torch, bf16"]}


def by_shape() -> Iterator[dict[str, Any]]:
    """One row for each spectrum and shape."""
    found = implementations()
    for shape in SHAPES:
        for kind, matrix in spectra(*shape):
            yield {"input": kind, "shape": "{} x {}".format(*shape)} | errors(matrix.bfloat16(), found)


def verdict(found: list[dict[str, Any]]) -> str:
    """A sentence for each spectrum: how the error of `auto` compares with torch's in all shapes."""
    lines = []
    for kind in dict.fromkeys(row["input"] for row in found):
        ratios = [row["of torch's"] for row in found if row["input"] == kind]
        lines.append(f"- {kind}: {min(ratios):.2f} to {max(ratios):.2f}")
    worst = max(row["of torch's"] for row in found)
    judged = "nothing is worse than torch's" if worst <= 1 else "SOMETHING IS WORSE THAN TORCH'S"
    return "\n".join([*lines, f"- all: at most {worst:.2f}: {judged}."])


def quality() -> str:
    """Orthogonality, residual and rounding by schedule, dtype, method and spectrum; writes docs/evidence/quality.md."""
    found, shapes = list(rows()), sorted(by_shape(), key=lambda row: row["input"])
    text = f"""# Quality of the orthogonalization

What `ns_coefficients` makes of a matrix, and what rounding adds. `python -m benchmarks quality` writes this page.
{report.one_line()}.

Matrices of {ROWS} x {COLS}, in bf16 as they arrive at their owner, and gradients of `examples/pretrain_gpt` at its
third step. *Localized* ones have singular vectors with two entries, so that no error is averaged out. Of the r
directions U, V in which the matrix has more than 1 % of its largest singular value:

- **rms of s - 1**: of the r largest singular values s of the result O, exact in fp64: 0 is an orthogonal matrix;
- **distance to U V'**: |U' O V - I| / sqrt(r);
- **largest s**: exact, and the largest of all dtypes and methods. A schedule that leaves its range would show here;
- **standard, gram**: the error of the result in each dtype, relative to the exact one. The steep start of a schedule
  enlarges the rounding of small singular values.

{report.table(found)}

## By dtype, shape and spectrum

Errors of five steps of `simple`, relative to the same steps in fp64, of matrices in bf16 as they arrive at their owner.
The products are rounded as on an accelerator, emulated on a CPU: sums in fp32, one rounding of each result. Without a
name before the dtype: ours. *stock*: DeepSpeed's own Muon. **auto**: the method that `ns_method: auto` takes in fp16,
the dtype of accelerators. **auto, sent in bf16**: its error once the result is rounded to bf16, as ranks send it. **of
torch's**: that error as a part of the error of `torch.optim.Muon`. By spectrum:

{verdict(shapes)}

{report.table(shapes)}
"""
    (report.ROOT / "docs" / "evidence" / "quality.md").write_text(text)
    return text
