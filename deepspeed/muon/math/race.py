# SPDX-License-Identifier: Apache-2.0
"""Times the products of Newton-Schulz in every dtype, with every table of operations, on a model's shapes.

Both methods are made of the same three kinds of products, so the time of a method follows from the times of these.
Large matrices are timed on smaller ones of the same aspect ratio, and the time is scaled by the operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Operations, Symmetric
from deepspeed.muon.kernels.workspace import Workspace, matrices_together
from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import PLAIN, Shape, Times, shape_key
from deepspeed.muon.math.newton_schulz import DTYPES, NORM

#: Seconds after which no further shape is begun, on a CPU and on an accelerator.
CPU_SECONDS, SECONDS = 0.2, 0.04
#: The most operations of one timed run, of a CPU per thread: about half a millisecond.
CPU_OPERATIONS, OPERATIONS = 5e7, 2e11
#: Timed runs of each product after one that is not counted; the shortest counts.
RUNS = 3
#: Rows and columns of the product by which dtypes are judged first, and how many times slower than the fastest one a
#: dtype may be there and still enter the race. A CPU that only emulates a dtype is up to 100 times slower.
PROBE, SLOW = 128, 2.0
#: A result is wrong if it is further than this from plain PyTorch's, relative to its norm, in units of the dtype's eps.
WRONG = 32.0
Clock = Callable[[], float]


def race(
    shapes: Mapping[Shape, int],
    dtypes: Collection[str],
    tables: Mapping[str, Operations],
    device: torch.device,
    seconds: float | None = None,
    clock: Clock = time.perf_counter,
) -> Times:
    """Seconds per matrix of every product. What raises, or differs from plain PyTorch, is missing, with a warning.

    Args:
        shapes: rows, columns -> matrices that one rank has at once. Those with most operations come first.
        dtypes: keys of ``DTYPES``, the most exact first.
        tables: by name, plain PyTorch's first.
        seconds: no shape is begun after this time; one is always timed.
    """
    if seconds is None:
        seconds = CPU_SECONDS if device.type == "cpu" else SECONDS
    timer, end = _Timer(device, tables, clock), clock() + seconds
    left = timer.fast_enough(dtypes)
    times: Times = {dtype: {} for dtype in left}
    cost = {shape: count * min(shape) * shape[0] * shape[1] for shape, count in shapes.items()}
    for shape in sorted(shapes, key=lambda shape: (-cost[shape], shape)):
        if any(times.values()) and clock() >= end:
            break
        for dtype in left:
            times[dtype].setdefault(shape_key(*shape), timer.products(shape, shapes[shape], dtype))
    return times


@dataclass
class _Timer:
    """Times products on one device."""

    device: torch.device
    tables: Mapping[str, Operations]
    clock: Clock
    work: Workspace = field(default_factory=Workspace)
    #: By dtype, smaller dimension and batch: products of two symmetric matrices, which many shapes share.
    _symmetric: dict[tuple[str, int, int], dict[str, float]] = field(default_factory=dict)

    def fast_enough(self, dtypes: Collection[str]) -> list[str]:
        """The dtypes that are not hopelessly slower than the fastest."""
        if len(dtypes) == 1:
            return list(dtypes)
        found = {
            dtype: self._seconds(self._square(self._matrices((PROBE, PROBE), 1, dtype)), PLAIN) for dtype in dtypes
        }
        fastest = min((seconds for seconds in found.values() if seconds is not None), default=0.0)
        return [dtype for dtype, seconds in found.items() if seconds is not None and seconds <= SLOW * fastest]

    def products(self, shape: Shape, count: int, dtype: str) -> dict[str, dict[str, float]]:
        """Seconds per matrix of this shape, by kind of product and table."""
        rows, cols = shape
        small, numel = min(shape), rows * cols
        x = self._matrices(shape, count, dtype)
        scale = small * numel / (min(x.shape[-2:]) * x.numel())
        wide = {
            kind: {name: scale * seconds for name, seconds in self._all(make(x)).items()}
            for kind, make in (("square", self._square), ("multiply", self._multiply))
        }
        x = self._matrices((small, small), count, dtype)
        key = (dtype, x.size(1), x.size(0))
        if key not in self._symmetric:
            self._symmetric[key] = self._all(self._product(x))
        scale = small**3 / (x.size(1) * x.numel())
        return wide | {"product": {name: scale * seconds for name, seconds in self._symmetric[key].items()}}

    def _matrices(self, shape: Shape, count: int, dtype: str) -> Tensor:
        """Random ones, of the norm that Newton-Schulz begins with, for one short run.

        At most ``count``; where one alone would take long, its shape is divided by a power of two.
        """
        most = CPU_OPERATIONS * torch.get_num_threads() if self.device.type == "cpu" else OPERATIONS
        rows, cols = shape
        while 2 * min(rows, cols) * rows * cols > most and min(rows, cols) > 1:
            rows, cols = max(1, rows // 2), max(1, cols // 2)
        batch = max(1, min(count, int(most // (2 * min(rows, cols) * rows * cols))))
        generator = torch.Generator(self.device).manual_seed(0)  # leaves torch's own generators alone
        x = torch.randn(batch, rows, cols, generator=generator, device=self.device)
        x = x.mul_(NORM / (rows * cols) ** 0.5).to(DTYPES[dtype])
        return x[: matrices_together(x, x.dtype)]

    def _square(self, x: Tensor) -> Callable[[Operations], Tensor]:
        out = self._symmetric_of(x)

        def run(table: Operations) -> Tensor:
            table.square(x, out, self.work)
            return out.rest

        return run

    def _product(self, x: Tensor) -> Callable[[Operations], Tensor]:
        gram, out = self._symmetric_of(x), self._symmetric_of(x)
        self.tables[PLAIN].square(x, gram, self.work)

        def run(table: Operations) -> Tensor:
            table.product(gram, gram, out, self.work)
            return out.rest

        return run

    def _multiply(self, x: Tensor) -> Callable[[Operations], Tensor]:
        gram, out = self._symmetric_of(x), torch.empty_like(x)
        self.tables[PLAIN].square(x, gram, self.work)
        return lambda table: table.multiply(gram, x, out, self.work)

    def _symmetric_of(self, x: Tensor) -> Symmetric:
        size = min(x.shape[-2:])
        return Symmetric(
            torch.empty(x.size(0), size, size, dtype=x.dtype, device=x.device),
            torch.empty(x.size(0), size, device=x.device),
        )

    def _all(self, run: Callable[[Operations], Tensor]) -> dict[str, float]:
        """Seconds of a product with each table whose result is right."""
        times = {}
        right = run(self.tables[PLAIN]).to(torch.float32, copy=True)
        for name in self.tables:
            if (seconds := self._seconds(run, name, right)) is not None:
                times[name] = seconds
        return times

    def _seconds(self, run: Callable[[Operations], Tensor], name: str, right: Tensor | None = None) -> float | None:
        """The shortest of some runs; ``None`` if it raises or its result is wrong."""
        try:
            call = partial(run, self.tables[name])
            out = call()
            if right is not None and name != PLAIN:
                error = torch.linalg.vector_norm(out.float() - right) / torch.linalg.vector_norm(right)
                if not error <= WRONG * torch.finfo(out.dtype).eps:
                    raise ArithmeticError(f"wrong by {float(error):.1e}")
            return min(self._once(call, out) for _ in range(RUNS))
        except Exception as error:  # a kernel that does not compile or run must not end the training
            logger.warning("deepspeed-muon: the kernels of %s are not used: %s", name, error)
            return None

    def _once(self, call: Callable[[], Tensor], out: Tensor) -> float:
        wait = out.view(-1)[0].item  # until the device has done what was launched
        wait()
        began = self.clock()
        call()
        wait()
        return self.clock() - began
