# SPDX-License-Identifier: Apache-2.0
"""Run kernels outside of training: to check their results, and to compile them before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.codes import block_count
from deepspeed.muon.kernels.table import Operations, Scalars, base_of, symmetric_of
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.numerics import fixed_numerics

#: Device of the check: this process's GPU, NVIDIA's or AMD's.
DEVICE = "cuda"
#: The smaller dimension of the random matrices: a multiple of 16, so that the kernels of real models run, and large
#: enough for the symmetric products of Triton's and quack's tables.
SIZE = 512
#: A relative difference from plain PyTorch above this is an error; rounding twice to bf16 stays below it.
TOLERANCE = 0.02
#: C, B and A of the polynomial ``A I + B G + C G^2`` in :func:`iterate`. Its terms are of similar size, so that an
#: error in any product shows.
POLYNOMIAL = Scalars(1.0, -0.5, 2.0)
#: The dtype of the matrices in the check.
DTYPE = torch.bfloat16


@fixed_numerics()
def why_wrong(build: Callable[[], Operations]) -> str | None:
    """Check the kernels that ``build()`` returns on this process's GPU. Return why they fail; ``None`` if they work.

    The reason is one line: an error of any type that ``build`` or a kernel raised, or the name of a kernel whose result
    differs from plain PyTorch's.
    """
    try:
        found, expected = _results(build()), _results(reference.OPERATIONS)
        for name, result in found.items():
            difference = float((result - expected[name]).norm() / expected[name].norm())
            if not difference <= TOLERANCE:
                return f"the result of {name} is wrong, by {difference:.2g} of its norm"
    except Exception as error:  # one that leaves the GPU unusable still ends the process, at a later call
        line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {line}" if line else type(error).__name__
    return None


def iterate(table: Operations, x: Tensor, work: Workspace) -> Tensor:
    """Run one iteration of Newton-Schulz with the kernels of ``table``, to test or time them.

    Return ``(2 I - G / 2 + G^2) X`` with ``G = X X^T``, in a tensor that ``work`` owns and reuses. ``x``: ``[batch,
    rows, cols]``, contiguous or a transposed view of a contiguous tensor.
    """
    gram, factor = (symmetric_of(name, x, work) for name in ("gram", "factor"))
    base, is_transposed = base_of(x)
    out = work.get("out", tuple(base.shape), x.dtype, x.device)
    table.square(x, gram, work)
    table.product(gram, gram, factor, work, POLYNOMIAL)
    return table.multiply(factor, x, out.mT if is_transposed else out, work)


@fixed_numerics()
def warm(table: Operations, shapes: Iterable[tuple[int, int, int, int, torch.dtype]], device: torch.device) -> None:
    """Compile and autotune the kernels of ``table`` for Newton-Schulz before the first step.

    This takes as much memory as the largest batch of a step, and draws no random numbers. ``shapes``: (number of
    matrices, rows, columns, axis, dtype) of each batch; the Gram matrix is ``X X^T`` for axis 0, ``X^T X`` for axis 1.
    """
    work = Workspace()
    for batch, rows, cols, gram_axis, dtype in sorted(set(shapes), key=str):
        x = work.get("x", (batch, rows, cols), dtype, device)
        table.normalize(x.fill_(1.0), x)
        iterate(table, x.mT if gram_axis else x, work)


def _results(table: Operations) -> dict[str, Tensor]:
    """Run every kernel of ``table`` on random input, and return {name: result in fp32}."""
    work, results = Workspace(), {}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, SIZE, 2 * SIZE, generator=generator, dtype=torch.float32, device="cpu").to(DEVICE)
    param, grad, out = x.flatten().clone(), x.flatten().flip(0), torch.empty(x.numel(), dtype=DTYPE, device=DEVICE)

    table.advance(param, grad, out, 0.9, True, work)
    results["advance"] = torch.cat([param, out.float()])
    kept = param.bfloat16()
    table.advance_rounded(kept, grad, out, 0.9, True, (1, 2), 0, work)
    results["advance_rounded"] = torch.cat([kept.float(), out.float()])
    table.copy_rounded(kept, param, (1, 2), 0, work)
    results["copy_rounded"] = kept.float()
    codes = torch.zeros(param.numel(), dtype=torch.int8, device=DEVICE)
    absmax = torch.zeros(block_count(param.numel()), dtype=torch.float32, device=DEVICE)
    table.advance_codes(codes, absmax, grad, out, 0.9, True, (1, 2), 0, work)
    results["advance_codes"] = torch.cat([codes.float(), absmax, out.float()])
    for name, cautious in (("apply_", False), ("cautious apply_", True)):
        table.apply_(param, out, 0.1, 0.7, 5.0, cautious, work)
        results[name] = param.clone()
    runs, half = table.runs or reference.RUNS, param.numel() // 2
    tiles = runs.tiles([(0, half, half), (half, 0, half)], param.device)
    runs.advance(param, grad, out, tiles, 0.9, True)
    results["advance of runs"] = torch.cat([param, out.float()])
    for name, cautious in (("apply_ of runs", False), ("cautious apply_ of runs", True)):
        runs.apply_(param, out, tiles, 0.1, 0.7, 5.0, cautious)
        results[name] = param.clone()

    x = (x / (2 * SIZE) ** 0.5).to(DTYPE)
    gram, factor = (symmetric_of(name, x, work) for name in ("gram", "factor"))
    table.square(x, gram, work)
    table.product(gram, gram, factor, work, POLYNOMIAL)
    for name, matrix in (("square", gram), ("product", factor)):
        # Two entries, so that an error in the smaller one shows.
        results[name], results[f"{name}, on the diagonal,"] = matrix.rest.float(), matrix.diagonal
    results["multiply"] = table.multiply(factor, x, torch.empty_like(x), work).float()
    results["normalize"] = table.normalize(x, x).float()
    return results
