# SPDX-License-Identifier: Apache-2.0
"""Times the products of Newton-Schulz in every dtype, with every table of operations, on a model's shapes.

Both methods are made of the same three kinds of products, so the time of a method follows from the times of these.
Large matrices are timed on smaller ones of the same aspect ratio, and the time is scaled by the operations.

A dtype that the hardware lacks would cost the race most of its time, so :func:`probe` tries each one first and
:func:`fast_enough` keeps those worth racing, by the probes of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from deepspeed.muon.kernels.rounding import key_of, noise
from deepspeed.muon.kernels.table import Operations, oriented, symmetric_of
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import TORCH, Shape, Times, shape_key
from deepspeed.muon.math.newton_schulz import DTYPES, NORM
from deepspeed.muon.numerics import fixed_numerics

#: Seconds of timed runs after which no further shape is begun, on a CPU and on an accelerator. The first run of a
#: product does not count: on an accelerator it compiles and tunes, which takes up to a minute.
CPU_SECONDS, SECONDS = 0.2, 0.04
#: The most operations of one timed run, of a CPU per thread: about half a millisecond.
CPU_OPERATIONS, OPERATIONS = 5e7, 2e11
#: Timed runs of each product after one that is not counted; the shortest counts.
RUNS = 3
#: Seconds after which the candidates of a product are not timed again: on a loaded machine each call may take 10 ms.
AGAIN_WITHIN = 0.05
#: Rows and columns of the probe's product on a CPU and on an accelerator, for models that have as large a matrix, and
#: how many times slower than the fastest dtype another may be and still enter the race. A CPU that only emulates a
#: dtype is up to 100 times slower.
PROBE, LARGE_PROBE, SLOW = 192, 2048, 2.0
#: A result is wrong if it is further than this from plain PyTorch's, relative to its norm, in units of the dtype's eps.
WRONG = 32.0
Clock = Callable[[], float]
#: A product of fixed matrices, with a table; its result.
Product = Callable[[Operations], Tensor]


@fixed_numerics()
def probe(
    dtypes: Collection[str],
    tables: Mapping[str, Operations],
    device: torch.device,
    clock: Clock = time.perf_counter,
    largest: int | None = None,
) -> dict[str, float]:
    """Seconds of one product by dtype, with plain PyTorch. What raises is missing, with a warning.

    A lone dtype is not timed: it takes 0 seconds.

    Args:
        dtypes: keys of ``DTYPES``, the most exact first.
        tables: by name, plain PyTorch's among them.
        largest: the smaller dimension of the model's largest matrix; the probe takes no larger one.
    """
    if len(dtypes) == 1:
        return dict.fromkeys(dtypes, 0.0)
    return _Timer(device, tables, clock).probe(dtypes, largest)


def fast_enough(probes: Sequence[Mapping[str, float]]) -> list[str]:
    """The dtypes worth racing: those that all ranks have and that are not hopelessly slow, by the slowest rank.

    Args:
        probes: of each rank, what :func:`probe` gave.
    """
    first, *others = probes
    slowest = {dtype: max(one[dtype] for one in probes) for dtype in first if all(dtype in one for one in others)}
    return [dtype for dtype, taken in slowest.items() if taken <= SLOW * min(slowest.values())]


@fixed_numerics()
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
        dtypes: those of :func:`fast_enough`, the same on all ranks.
        tables: by name, plain PyTorch's first.
        seconds: of timed runs, after which no shape is begun; one is always timed.
    """
    if seconds is None:
        seconds = CPU_SECONDS if device.type == "cpu" else SECONDS
    timer = _Timer(device, tables, clock)
    times: Times = {dtype: {} for dtype in dtypes}
    if not dtypes:
        return times
    cost = {shape: count * min(shape) * shape[0] * shape[1] for shape, count in shapes.items()}
    for shape in sorted(shapes, key=lambda shape: (-cost[shape], shape)):
        key = shape_key(*shape)
        if any(key in keys for keys in times.values()):
            continue  # its transpose was timed
        if any(times.values()) and timer.spent >= seconds:
            break
        for dtype, kinds in timer.products(shape, shapes[shape], dtypes).items():
            times[dtype][key] = kinds
    return times


#: The dtype and the table of a call.
Candidate = tuple[str, str]


@dataclass
class _Timer:
    """Times products on one device."""

    device: torch.device
    tables: Mapping[str, Operations]
    clock: Clock
    work: Workspace = field(default_factory=Workspace)
    #: Seconds of all timed runs.
    spent: float = 0.0
    #: By smaller dimension and batch: products of two symmetric matrices, which many shapes share.
    _symmetric: dict[tuple[int, int], dict[Candidate, float]] = field(default_factory=dict)

    def probe(self, dtypes: Collection[str], largest: int | None) -> dict[str, float]:
        """Seconds of one product with plain PyTorch."""
        size = PROBE if self.device.type == "cpu" else LARGE_PROBE
        size = min(size, largest or size)
        calls = {
            (dtype, TORCH): partial(self._multiply(self._matrices((size, size), 1, dtype)), self.tables[TORCH])
            for dtype in dtypes
        }
        return {dtype: seconds for (dtype, _), seconds in self._alternate(calls).items()}

    def products(self, shape: Shape, count: int, dtypes: Collection[str]) -> dict[str, dict[str, dict[str, float]]]:
        """Seconds per matrix of this shape, by dtype, kind of product and table."""
        small, numel = min(shape), shape[0] * shape[1]
        given = {dtype: self._matrices(shape, count, dtype) for dtype in dtypes}
        found: dict[str, dict[str, dict[str, float]]] = {dtype: {} for dtype in dtypes}
        for kind, make in (("square", self._square), ("multiply", self._multiply)):
            times = self._of_tables({dtype: make(x) for dtype, x in given.items()})
            for dtype, x in given.items():
                scale = small * numel / (min(x.shape[-2:]) * x.numel())
                found[dtype][kind] = _of(dtype, times, scale)
        given = {dtype: self._matrices((small, small), count, dtype) for dtype in dtypes}
        key = next((x.size(1), x.size(0)) for x in given.values())
        if key not in self._symmetric:
            self._symmetric[key] = self._of_tables({dtype: self._product(x) for dtype, x in given.items()})
        for dtype, x in given.items():
            scale = small**3 / (x.size(1) * x.numel())
            found[dtype]["product"] = _of(dtype, self._symmetric[key], scale)
        return found

    def _matrices(self, shape: Shape, count: int, dtype: str) -> Tensor:
        """Random ones, of the norm that Newton-Schulz begins with, for one short run.

        At most ``count``; where one alone would take long, its shape is divided by a power of two.
        """
        most = CPU_OPERATIONS * torch.get_num_threads() if self.device.type == "cpu" else OPERATIONS
        rows, cols = shape
        while 2 * min(rows, cols) * rows * cols > most and min(rows, cols) > 1:
            rows, cols = max(1, rows // 2), max(1, cols // 2)
        batch = max(1, min(count, int(most // (2 * min(rows, cols) * rows * cols))))
        bits, spare = (torch.empty(batch * rows * cols, dtype=torch.int32, device=self.device) for _ in range(2))
        # Uniform between -1 and 1, on every backend without a generator.
        x = noise(bits, spare, key_of("race", 0), 0).float().mul_(2.0**-15).sub_(1.0).view(batch, rows, cols)
        return x.mul_(NORM * (3 / (rows * cols)) ** 0.5).to(DTYPES[dtype])

    def _square(self, x: Tensor) -> Product:
        x = oriented(x)
        out = symmetric_of("out", x, Workspace())

        def run(table: Operations) -> Tensor:
            table.square(x, out, self.work)
            return out.rest

        return run

    def _product(self, x: Tensor) -> Product:
        gram, out = (symmetric_of("", x, Workspace()) for _ in range(2))
        self.tables[TORCH].square(x, gram, self.work)

        def run(table: Operations) -> Tensor:
            table.product(gram, gram, out, self.work)
            return out.rest

        return run

    def _multiply(self, x: Tensor) -> Product:
        x = oriented(x)
        gram, out = symmetric_of("gram", x, Workspace()), torch.empty_like(x)
        self.tables[TORCH].square(x, gram, self.work)
        return lambda table: table.multiply(gram, x, out, self.work)

    def _of_tables(self, products: Mapping[str, Product]) -> dict[Candidate, float]:
        """Of products by dtype, the seconds by dtype and table."""
        return self._alternate(
            {
                (dtype, name): partial(run, table)
                for dtype, run in products.items()
                for name, table in self.tables.items()
            }
        )

    def _alternate(self, calls: Mapping[Candidate, Callable[[], Tensor]]) -> dict[Candidate, float]:
        """The shortest of some runs of each call, in turn, so that whatever disturbs the machine meets all of them.

        Calls that raise, or whose result differs from that of plain PyTorch in their dtype, are missing.
        """
        times: dict[Candidate, float] = {}
        right: dict[str, Tensor] = {}
        for candidate, call in calls.items():
            if self._is_right(candidate, call, right):
                times[candidate] = float("inf")
        began = self.clock()
        for run in range(RUNS):
            if run and self.clock() - began > AGAIN_WITHIN:
                break
            for candidate in times:
                times[candidate] = min(times[candidate], self._once(calls[candidate]))
        return times

    def _is_right(self, candidate: Candidate, call: Callable[[], Tensor], right: dict[str, Tensor]) -> bool:
        """Whether the first run of a call gives what plain PyTorch's gave, which is kept in ``right``."""
        dtype, name = candidate
        try:
            out = call()
            if name == TORCH:
                right[dtype] = out.to(torch.float32, copy=True)
            elif dtype in right:
                error = torch.linalg.vector_norm(out.float() - right[dtype]) / torch.linalg.vector_norm(right[dtype])
                if not error <= WRONG * torch.finfo(out.dtype).eps:
                    raise ArithmeticError(f"wrong by {float(error):.1e}")
            return True
        except Exception as error:  # a kernel that does not compile or run must not end the training
            logger.warning("deepspeed-muon: the kernels of %s are not used in %s: %s", name, dtype, error)
            return False

    def _once(self, call: Callable[[], Tensor]) -> float:
        began = self.clock()
        call()[0, 0, 0].item()  # waits until the device has done what was launched
        taken = self.clock() - began
        self.spent += taken
        return taken


def _of(dtype: str, times: Mapping[Candidate, float], scale: float) -> dict[str, float]:
    """By table, the times of one dtype, scaled."""
    return {name: scale * seconds for (of, name), seconds in times.items() if of == dtype}
