# SPDX-License-Identifier: Apache-2.0
"""Implementations of Newton-Schulz under one signature, ours and others', for ns.py."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize
from deepspeed.muon.optimizer import MuonWithAuxAdam
from rates import DTYPES

STEPS = 5
SIMPLE = schedule("simple", STEPS)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation. ``run`` gets ``[batch, rows, cols]`` in ``dtype``, may overwrite it, returns the result.

    ``method`` and ``dtype`` say whose floor it is measured against; ``dtype`` is also that of its input.
    """

    name: str
    method: str
    dtype: str
    run: Callable[[Tensor], Tensor]


def kernels_in_use(device: str) -> Operations:
    """The table that the optimizer takes on a device: read off one that has made a step."""
    layer = nn.Linear(8, 8, bias=False, device=device)
    optimizer = MuonWithAuxAdam(layer.parameters(), model=nn.Sequential(layer), muon_include=["weight"])
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    return optimizer.kernels


def ours(table: Operations, label: str = "") -> list[Candidate]:
    """Both methods in both dtypes, with a workspace that is kept from call to call."""
    work = Workspace()

    def candidate(method: str, dtype: str) -> Candidate:
        def run(x: Tensor) -> Tensor:
            return orthogonalize(x, SIMPLE, method, work=work, kernels=table)

        return Candidate(f"ours{label}, {method}, {dtype}", method, dtype, run)

    return [candidate(method, dtype) for dtype in DTYPES for method in METHODS]


def of_torch() -> list[Candidate]:
    """torch.optim.Muon's iteration, which takes one matrix at a time."""
    from torch.optim._muon import _zeropower_via_newtonschulz as iterate

    def run(x: Tensor) -> Tensor:
        return torch.stack([iterate(matrix, SIMPLE[0], STEPS, 1e-7) for matrix in x])

    return [Candidate("torch.optim.Muon", "standard", "bf16", run)]


def of_stock(compiled: bool) -> list[Candidate]:
    """Stock DeepSpeed's iterations; it compiles them, the functions inside the wrapper run eagerly."""
    from deepspeed.runtime.zero.muon import original_muon as stock

    found = []
    functions = {"gram": stock.zeropower_via_gram_newtonschulz, "standard": stock.zeropower_via_newtonschulz5}
    for method, function in functions.items():
        dtype = str(stock.ns_compute_dtype(method)).removeprefix("torch.")
        eager = getattr(function, "__wrapped__", function)
        for name, call in {"eager": eager, "compiled": function}.items():
            if name == "compiled" and not compiled:
                continue
            label = f"stock, {method}, {dtype.replace('bfloat', 'bf').replace('float', 'fp')}, {name}"
            as_given = "fp32" if dtype == "float32" else "bf16"
            found.append(Candidate(label, method, as_given, lambda x, call=call: call(x, steps=STEPS)))
    return found


def of_gram_newton_schulz(device: str) -> list[Candidate]:
    """Dao-AILab's package, with its kernels on an accelerator and torch's products elsewhere.

    Raises:
        ImportError: it, or what it needs here, is not installed.
    """
    from gram_newton_schulz.gram_newton_schulz import GramNewtonSchulz

    options: dict = {"ns_coefficients": [list(triple) for triple in SIMPLE], "ns_use_kernels": device != "cpu"}
    if device == "cpu":
        options["compile_kwargs"] = None
    return [Candidate("gram-newton-schulz, fp16", "gram", "bf16", GramNewtonSchulz(**options))]


def candidates(device: str, plain: bool, compiled: bool) -> tuple[list[Candidate], list[str], Operations]:
    """All that run here, a line for each that does not, and the table that ours uses."""
    table = reference.OPERATIONS if plain else kernels_in_use(device)
    found = ours(table)
    if table is not reference.OPERATIONS:
        found += [c for c in ours(reference.OPERATIONS, " (plain)") if c.dtype == "bf16"]
    skipped = []
    others = {
        "torch.optim.Muon": of_torch,
        "stock": lambda: of_stock(compiled),
        "gram-newton-schulz": lambda: of_gram_newton_schulz(device),
    }
    for name, make in others.items():
        try:
            found += make()
        except ImportError as error:
            skipped.append(f"{name} is left out: {error}")
    return found, skipped, table
