# SPDX-License-Identifier: Apache-2.0
"""Parts of gpu.py that need no engine: Newton-Schulz, the elementwise passes, and where symmetric products begin."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import gpu_timing as timing
from deepspeed.muon.kernels import quack, reference, triton_table
from deepspeed.muon.kernels.rounding import key_of
from deepspeed.muon.kernels.table import Operations, Scalars, Symmetric
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from rates import Rates
from roofline import least_flops

Row = dict[str, Any]
SIMPLE = schedule("simple", 5)
SHAPES = ((4, 2048, 8192), (4, 4096, 4096), (1, 4096, 4096))
QUICK_SHAPES = ((2, 48, 160), (2, 64, 64))
#: Where the error against fp64 is measured; of each shape's aspect ratio.
EXACT_ROWS = 256


def tables() -> dict[str, Operations]:
    """The tables that run here, the plain one first."""
    found = {"torch": reference.OPERATIONS}
    if triton_table.why_not() is None:
        found["triton"] = triton_table.operations(reference.OPERATIONS)
        if quack.why_not() is None:
            found["quack"] = quack.operations(found["triton"])
    return found


def exact(x: Tensor) -> Tensor:
    """The iteration in fp64."""
    wide = x.double() if x.size(-2) <= x.size(-1) else x.double().mT
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True)
    for a, b, c in SIMPLE:
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


def ours(method: str, table: Operations) -> Callable[[Tensor], Tensor]:
    """Our iteration in bf16, with a workspace that is kept from call to call."""
    work = Workspace()
    return lambda x: orthogonalize(x, SIMPLE, method, work=work, kernels=table)


def candidates(device: str) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Name -> (method whose floor counts, function of ``[batch, rows, cols]`` in bf16, which it may overwrite)."""
    from deepspeed.runtime.zero.muon import original_muon as stock
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    found = {}
    for name, table in tables().items():
        for method in ("gram", "standard"):
            found[f"ours, {method}, {name}"] = method, ours(method, table)
    for method, function in (
        ("gram", stock.zeropower_via_gram_newtonschulz),
        ("standard", stock.zeropower_via_newtonschulz5),
    ):
        call = function if device == "cuda" else getattr(function, "__wrapped__", function)
        found[f"stock, {method}"] = method, lambda x, call=call: call(x, 5)
    one_by_one = lambda x: torch.stack([of_torch(m, SIMPLE[0], 5, 1e-7) for m in x])  # noqa: E731
    found["torch.optim.Muon"] = "standard", one_by_one
    return found


def newton_schulz(device: str, quick: bool, rates: Rates, attempt: Callable) -> Iterator[Row]:
    """Milliseconds, TFLOP/s, ratio to the floor and to each rival, and the error on a smaller matrix."""
    for batch, rows, cols in QUICK_SHAPES if quick else SHAPES:
        source = torch.randn(batch, rows, cols, device=device, dtype=torch.bfloat16)
        small = torch.randn(1, min(rows, EXACT_ROWS), min(rows, EXACT_ROWS) * cols // rows, device=device).bfloat16()
        truth, errors, works, x = exact(small), {}, {}, torch.empty_like(source)
        methods = {name: method for name, (method, _) in candidates(device).items()}
        for name, (_, run) in candidates(device).items():
            with attempt(f"Newton-Schulz {batch}x{rows}x{cols}, {name}"):
                result = run(small.clone()).double()
                errors[name] = float((result - truth).norm() / truth.norm())
                x.copy_(source)
                run(x)
                works[name] = lambda run=run: run(x)
        times = timing.alternate(works, device, 3 if quick else 15, prepare=lambda: x.copy_(source))
        for name, spent in times.items():
            flops = batch * least_flops(rows, cols, methods[name], symmetric=True)
            row = {"part": "Newton-Schulz", "case": f"{batch}x{rows}x{cols}", "what": name} | timing.summary(spent)
            row |= {"TFLOP/s": flops / row["ms"] / 1e9, "of floor": row["ms"] * rates.bf16 / flops / 1e3}
            yield row | {"error": errors[name]}


def passes(table: Operations, numel: int, device: str) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (bytes of one call: every tensor touched once, call)."""
    buffer, grad, param = (torch.randn(numel, device=device) for _ in range(3))
    half, out, work = buffer.bfloat16(), torch.empty(numel, device=device, dtype=torch.bfloat16), Workspace()
    matrices = torch.randn(4, numel // 16, 4, device=device, dtype=torch.bfloat16)
    key = key_of("w", 1)
    return {
        "advance": (14 * numel, lambda: table.advance(buffer, grad, out, 0.95, True, work)),
        "advance_rounded": (10 * numel, lambda: table.advance_rounded(half, grad, out, 0.95, True, key, 0, work)),
        "apply_": (10 * numel, lambda: table.apply_(param, out, 1e-3, 1.0, 0.1, work)),
        "normalize_": (6 * matrices.numel(), lambda: table.normalize_(matrices)),
    }


def elementwise(device: str, quick: bool, rates: Rates, attempt: Callable) -> Iterator[Row]:
    """GB/s of each pass and its share of the copy's."""
    numel = 2**14 if quick else 2**28
    for name, table in tables().items():
        if name == "quack":
            continue  # has the passes of the table below it
        for what, (size, call) in passes(table, numel, device).items():
            with attempt(f"{what}, {name}"):
                spent = timing.alternate({name: call}, device, 3 if quick else 20)[name]
                row = {"part": "elementwise", "case": what, "what": name} | timing.summary(spent)
                yield row | {"GB/s": size / row["ms"] / 1e6, "of copy": size / row["ms"] * 1e3 / rates.copy}


def threshold(device: str, quick: bool, rates: Rates, attempt: Callable) -> Iterator[Row]:
    """Symmetric products over plain ones by size and batch: above one, the symmetric kernel is faster."""
    rivals = {name: table for name, table in tables().items() if name != "torch"}
    work = Workspace()
    kept = triton_table.SYMMETRIC_FROM, quack.SYMMETRIC_FROM
    triton_table.SYMMETRIC_FROM = quack.SYMMETRIC_FROM = 1
    try:
        for size in (64,) if quick else (256, 512, 1024, 1536, 2048, 3072, 4096):
            for batch in (2,) if quick else (1, 4, 16):
                x = torch.randn(batch, size, 2 * size, device=device, dtype=torch.bfloat16)
                r, out = (symmetric(batch, size, device) for _ in range(2))
                reference.square(x.div_(size), r, work)
                for name, table in ({"torch": reference.OPERATIONS} if quick else {} | rivals).items():
                    with attempt(f"symmetric products {batch}x{size}, {name}"):
                        yield _against_plain(name, table, x, r, out, plain_table())
    finally:
        triton_table.SYMMETRIC_FROM, quack.SYMMETRIC_FROM = kept


def symmetric(batch: int, size: int, device: str) -> Symmetric:
    """Room for matrices in bf16."""
    rest = torch.empty(batch, size, size, device=device, dtype=torch.bfloat16)
    return Symmetric(rest, torch.empty(batch, size, device=device))


def plain_table() -> Operations:
    """What runs below the threshold: a library's product, and where Triton is, one pass over it."""
    if triton_table.why_not() is not None:
        return reference.OPERATIONS
    from deepspeed.muon.kernels import triton_diagonals

    return dataclasses.replace(reference.OPERATIONS, product=triton_diagonals.product)


def _against_plain(name: str, table: Operations, x: Tensor, r: Symmetric, out: Symmetric, plain: Operations) -> Row:
    spent, work, device = {}, Workspace(), x.device.type
    for kind, call in (
        ("square", lambda chosen: chosen.square(x, out, work)),
        ("product", lambda chosen: chosen.product(r, r, out, work, Scalars(0.1, 0.5, 1.0))),
    ):
        works = {"plain": lambda call=call: call(plain), "symmetric": lambda call=call: call(table)}
        spent[kind] = {which: timing.summary(t)["ms"] for which, t in timing.alternate(works, device, 10).items()}
    row = {"part": "threshold", "case": f"{x.size(0)}x{x.size(1)}", "what": name, "ms": spent["square"]["symmetric"]}
    return row | {f"{kind} plain / symmetric": ms["plain"] / ms["symmetric"] for kind, ms in spent.items()}
