# SPDX-License-Identifier: Apache-2.0
"""Times an iteration of Newton-Schulz in every dtype, with every table of products.

An iteration of the standard method has one product of each kind. The dtype and table that are fastest for it are the
fastest for a model; the methods differ in their operations, which are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from deepspeed.muon.kernels.probe import POLYNOMIAL, iterate
from deepspeed.muon.kernels.rounding import key_of, noise
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import TORCH, Rates, Shape
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.numerics import fixed_numerics

#: Timed runs of each candidate after one that is not counted, which on an accelerator compiles and tunes for up to a
#: minute. The shortest counts. Candidates run in turn, so that whatever disturbs the machine meets all of them.
RUNS = 5
#: Seconds of timed runs after which a candidate does not run again: on a loaded machine each run may take 10 ms.
AGAIN_WITHIN = 0.01
#: The most operations of one run, of a CPU per thread: about half a millisecond.
CPU_OPERATIONS, OPERATIONS = 3e7, 6e11
#: The most operations of a trial run on a CPU, which emulates some dtypes up to 100 times slower than others.
TRIAL_OPERATIONS = 1e6
#: How many times slower than the fastest one a candidate may be in the trial.
MAX_SLOWDOWN = 3.0
#: A result is wrong if its relative distance from plain PyTorch's in fp32 is more than this many eps of its dtype.
MAX_ERROR = 32.0
#: A dtype and the name of a table.
Candidate = tuple[str, str]


@fixed_numerics()
def race(
    shapes: Mapping[Shape, int],
    world_size: int,
    dtypes: Collection[str],
    tables: Mapping[str, Operations],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Return the rate of every dtype and table in one iteration of Newton-Schulz, in operations per second.

    It is timed on the shape that costs a step most. What raises, or differs from plain PyTorch, is left out, with a
    warning. What a trial finds far slower is left out, too: a dtype that the hardware only emulates would take longer
    than all others, or be compiled for nothing.

    Args:
        shapes: rows, columns -> how many matrices the model has; at least one.
        world_size: ranks that share the matrices, so that a batch has its size.
        dtypes: keys of :data:`DTYPES`, the most exact first.
        tables: by name, plain PyTorch's first.
    """
    shape = max(shapes, key=lambda shape: (shapes[shape] * min(shape) * shape[0] * shape[1], shape))
    count = -(-shapes[shape] // world_size)
    is_cpu = device.type == "cpu"
    most = CPU_OPERATIONS * torch.get_num_threads() if is_cpu else OPERATIONS
    trial_tables = tables if is_cpu else {TORCH: tables[TORCH]}  # the others compile first
    trial = _times(
        _matrices(shape, count, TRIAL_OPERATIONS if is_cpu else most, device),
        [(dtype, name) for dtype in dtypes for name in trial_tables],
        tables,
        clock,
    )
    slowest = MAX_SLOWDOWN * min(trial.values(), default=0.0)
    entrants = [candidate for candidate, seconds in trial.items() if seconds <= slowest]
    entrants += [(dtype, name) for dtype, _ in entrants for name in tables if name not in trial_tables]

    x = _matrices(shape, count, most, device)
    operations = x.size(0) * _operations(x.size(1), x.size(2))
    rates: Rates = {dtype: {} for dtype in dtypes}
    for (dtype, name), seconds in _times(x, entrants, tables, clock).items():
        rates[dtype][name] = operations / seconds
    return rates


def _operations(rows: int, cols: int) -> int:
    """Return the operations of one iteration on one matrix, rows <= cols."""
    return 2 * rows * rows * (2 * cols + rows)


def _matrices(shape: Shape, count: int, limit: float, device: torch.device) -> Tensor:
    """Return random matrices ``[batch, rows, cols]`` in fp32, with rows <= cols, and rows of norm about one.

    Their iteration takes at most ``limit`` operations: a large shape is divided by a power of two, and the batch is
    at most ``count``.
    """
    rows, cols = sorted(shape)
    while _operations(rows, cols) > limit and rows > 1:
        rows, cols = rows // 2, cols // 2
    batch = max(1, min(count, int(limit // _operations(rows, cols))))
    bits, spare = (torch.empty(batch * rows * cols, dtype=torch.int32, device=device) for _ in range(2))
    # Uniform between -1 and 1, on every backend without a generator.
    x = noise(bits, spare, key_of("race", 0), 0).float().mul_(2.0**-15).sub_(1.0).view(batch, rows, cols)
    return x.mul_((3 / cols) ** 0.5)


def _times(
    x: Tensor, candidates: Collection[Candidate], tables: Mapping[str, Operations], clock: Callable[[], float]
) -> dict[Candidate, float]:
    """Return the seconds of the shortest of some runs; candidates that raise or err are left out, with a warning."""
    work, in_dtype = Workspace(), {dtype: x.to(DTYPES[dtype]) for dtype, _ in candidates}
    seconds: dict[Candidate, float] = {}
    for dtype, name in candidates:
        try:
            _check(tables[name], in_dtype[dtype], work)
            seconds[dtype, name] = float("inf")
        except Exception as error:  # a kernel that does not compile or run must not end the training
            logger.warning("deepspeed-muon: the kernels of %s are not used in %s: %s", name, dtype, error)
    spent = dict.fromkeys(seconds, 0.0)
    for _ in range(RUNS):
        for dtype, name in seconds:
            if spent[dtype, name] < AGAIN_WITHIN:
                start = clock()
                iterate(tables[name], in_dtype[dtype], work)[0, 0, 0].item()  # waits until the device has done it
                taken = clock() - start
                spent[dtype, name] += taken
                seconds[dtype, name] = min(seconds[dtype, name], taken)
    return seconds


def _check(table: Operations, x: Tensor, work: Workspace) -> None:
    """Raise ArithmeticError if an iteration differs from the same in fp32."""
    eps, out, x = torch.finfo(x.dtype).eps, iterate(table, x, work).float(), x.float()
    c, b, a = POLYNOMIAL
    gram = x @ x.mT
    exact = a * x + (b * gram + c * (gram @ gram)) @ x
    error = torch.linalg.vector_norm(out - exact) / torch.linalg.vector_norm(exact)
    if not error <= MAX_ERROR * eps:
        raise ArithmeticError(f"wrong by {float(error):.1e}")
