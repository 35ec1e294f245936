# SPDX-License-Identifier: Apache-2.0
"""Choose the dtype, method and kernels of Newton-Schulz.

At start :func:`measure_rates` times one iteration of the standard method in every dtype and with every table of kernels
(torch, C++, triton, quack). The fastest pair of dtype and table is used for the whole model. Which method ("standard"
or "gram") is faster for matrices of one shape follows from its number of operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.kernels.probe import POLYNOMIAL, iterate
from deepspeed.muon.kernels.rounding import key_of, noise
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import (
    TORCH,
    Choice,
    Rates,
    Shape,
    choice_from_json,
    fastest_choice,
    fewest_operations,
    predicted_seconds,
)
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, Products
from deepspeed.muon.numerics import fixed_numerics

#: How often each candidate is timed, after one run that is not timed, which compiles. The shortest time counts.
#: Candidates run in turn, so that other load on the machine affects all of them alike.
RUNS = 5
#: A candidate that has run for this many seconds is not timed again.
AGAIN_WITHIN = 0.01
#: Maximum number of operations in a timed run: for each thread of a CPU, and on an accelerator. It takes about 0.5 ms.
CPU_OPERATIONS, OPERATIONS = 3e7, 6e11
#: Maximum number of operations in a trial run on a CPU, where some dtypes are emulated, up to 100 times slower.
TRIAL_OPERATIONS = 1e6
#: A candidate that is more than this many times slower than the fastest in the trial is not timed.
MAX_SLOWDOWN = 3.0
#: A result is wrong if its relative error against plain PyTorch in fp32 is more than this many eps of its dtype.
MAX_ERROR = 32.0
#: Warn if another choice would run Newton-Schulz this many times faster than the choice in the checkpoint.
WARN_IF_SPEEDUP_EXCEEDS = 1.5
#: (dtype, name of a table of kernels).
Candidate = tuple[str, str]


@dataclass(frozen=True)
class Tuning:
    """The result of :meth:`Candidates.choose`: the chosen dtype, methods and kernels of Newton-Schulz.

    ``rates``: {dtype: {kernels: operations per second on the slowest rank}}; empty if nothing was timed.
    """

    choice: Choice
    rates: Rates = field(default_factory=dict)

    def speedup_over(self, other: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
        """Return how many times faster than ``other`` this choice is for a model's matrices.

        Return ``None`` if one of the two was not timed. ``shapes``: (rows, columns) -> number of matrices.
        """
        ours, theirs = (predicted_seconds(self.rates, choice, shapes, schedule) for choice in (self.choice, other))
        return theirs / ours if ours and theirs else None

    def log_saved_choice(
        self, saved: Choice, shapes: Mapping[Shape, int], schedule: Schedule, tables: Collection[str]
    ) -> None:
        """Log that ``saved``, the choice in a loaded checkpoint, replaces this run's choice, if the two differ.

        Warn instead if kernels in ``saved`` are unavailable, or if this run's choice is much faster.
        ``shapes``: (rows, columns) -> number of matrices. ``tables``: names of the kernels that are available.
        """
        speedup = self.speedup_over(saved, shapes, schedule)
        if absent := sorted(saved.tables - set(tables)):
            logger.warning(
                "deepspeed-muon: the checkpoint was saved by a run with the kernels of %s, which are unavailable on "
                "this machine; plain PyTorch's are used instead, so results may differ in their last bits",
                ", ".join(absent),
            )
        elif speedup is not None and speedup > WARN_IF_SPEEDUP_EXCEEDS:
            other = self.choice.dtype
            logger.warning(
                "deepspeed-muon: Newton-Schulz continues in %s, with the checkpoint's methods and kernels, so that "
                "results stay reproducible; on this machine %s would be %.1f times faster%s",
                saved.dtype,
                "other methods or kernels" if other == saved.dtype else other,
                speedup,
                "" if other == saved.dtype else f'; to use it, set "ns_dtype": "{other}" in optimizer.params',
            )
        elif saved != self.choice:
            logger.info("deepspeed-muon: after the load, Newton-Schulz continues in %s", self.log_text(saved))

    def log_text(self, choice: Choice) -> str:
        """Return a text for the log: the dtype, methods and kernels in ``choice``, and why they were chosen."""
        recipes = [str(recipe) for recipe in choice.recipes.values()]
        how = ", ".join(f"{recipes.count(one)} of {len(recipes)} shapes by {one}" for one in dict.fromkeys(recipes))
        if choice != self.choice:
            reason = "with the checkpoint's methods and kernels"
        elif self.rates:
            reason = f"the fastest of those timed at start; {keep_dtype_hint(choice.dtype)}"
        else:
            reason = "chosen by the number of operations, without timing"
        return f"{choice.dtype}, {how} ({reason})"


@dataclass(frozen=True)
class Candidates:
    """Dtypes (most exact first), methods (default first) and kernels (PyTorch's first) that Newton-Schulz may use."""

    dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    tables: Mapping[str, Operations]
    schedule: Schedule
    device: torch.device

    @classmethod
    def from_config(
        cls,
        config: MuonConfig,
        tables: Mapping[str, Operations],
        ns_methods: set[str],
        device: torch.device,
        has_bf16: bool,
    ) -> Candidates:
        """Return the candidates that the config allows.

        ``tables``: name -> kernels that can multiply matrices on ``device``, plain PyTorch's first. ``ns_methods``: the
        values of ``ns_method`` in the Muon groups. ``has_bf16``: whether ``device`` has bf16 instructions; see
        :func:`has_bf16`.
        """
        dtypes = tuple(name for name in DTYPES if has_bf16 or name != "bf16")
        methods = METHODS if "auto" in ns_methods or len(ns_methods) != 1 else tuple(ns_methods)
        chosen = dtypes if config.ns_dtype == "auto" else (config.ns_dtype,)
        return cls(chosen, methods, tables, config.schedule, device)

    @property
    def default_dtype(self) -> str:
        """Return the dtype to use if nothing is timed: fp32 on a CPU; elsewhere bf16, or fp16 if bf16 is emulated."""
        return self.dtypes[0] if self.device.type == "cpu" else self.dtypes[-1]

    def choose_untimed(self, shapes: Mapping[Shape, int]) -> Tuning:
        """Return, without timing, the default dtype, and for each shape the method with fewer operations.

        The kernels are the last in ``self.tables`` on a CPU, and plain PyTorch's on other devices.
        """
        table = list(self.tables)[-1] if self.device.type == "cpu" else TORCH
        return Tuning(fewest_operations(shapes, self.schedule, self.default_dtype, self.methods, table))

    def choose(
        self,
        shapes: Mapping[Shape, int],
        world_size: int,
        may_time: bool,
        is_logging_rank: bool = True,
        slowest: Callable[[Callable[[], Rates]], Rates] = lambda measure: measure(),
    ) -> Tuning:
        """Time the candidates and return the fastest.

        If only one dtype and one set of kernels can be chosen, or ``may_time`` is false, return :meth:`choose_untimed`.

        Args:
            shapes: (rows, columns) -> number of matrices in the model.
            world_size: number of ranks that share the matrices; it decides how many matrices are timed as one batch.
            may_time: whether timing is allowed, see :func:`may_time`.
            is_logging_rank: whether this process logs that compiling may take long.
            slowest: takes a function that measures this process's rates, and returns the slowest rank's rates.
        """
        # Each rank chooses for itself, and all must choose the same, so use only what is equal on all ranks.
        if not (may_time and shapes and (len(self.dtypes) > 1 or len(self.tables) > 1)):
            return self.choose_untimed(shapes)
        compiled = [name for name in self.tables if name != TORCH and self.device.type != "cpu"]
        if compiled and is_logging_rank:
            logger.info(
                "deepspeed-muon: compiling and timing the Newton-Schulz kernels of %s in %s for the matrices of "
                "this model; this takes about a minute per dtype at the first start on a machine; later starts reuse "
                "the kernels",
                " and ".join(compiled),
                ", ".join(self.dtypes),
            )
        rates = slowest(lambda: measure_rates(shapes, world_size, self.dtypes, self.tables, self.device))
        choice = fastest_choice(rates, shapes, self.schedule, self.methods)
        return Tuning(choice, rates) if choice else self.choose_untimed(shapes)


@fixed_numerics()
def measure_rates(
    shapes: Mapping[Shape, int],
    world_size: int,
    dtypes: Collection[str],
    tables: Mapping[str, Operations],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Time one iteration of Newton-Schulz; return {dtype: {name of kernels: operations per second}}.

    The timed matrices have the shape that takes most time in a step. Kernels that fail or compute wrong results are
    left out with a warning. Candidates that are far slower in a short trial are left out without a warning.

    Args:
        shapes: (rows, columns) -> number of matrices in the model; at least one shape.
        world_size: number of ranks that share the matrices; it decides how many matrices are timed as one batch.
        dtypes: keys of :data:`DTYPES`, the most exact first.
        tables: name -> kernels, plain PyTorch's first.
    """
    # Timed, because no rule holds for all machines: some CPUs' bf16 instructions are slower than fp32, and torch
    # reports support for bf16 and fp16 if oneDNN only emulates them, up to 50 times slower.
    shape = max(shapes, key=lambda shape: (shapes[shape] * min(shape) * shape[0] * shape[1], shape))
    count = -(-shapes[shape] // world_size)
    is_cpu = device.type == "cpu"
    most = CPU_OPERATIONS * torch.get_num_threads() if is_cpu else OPERATIONS
    trial_tables = tables if is_cpu else {TORCH: tables[TORCH]}  # the other tables would have to be compiled
    trial = _shortest_runs(
        _matrices(shape, count, TRIAL_OPERATIONS if is_cpu else most, device),
        [(dtype, name) for dtype in dtypes for name in trial_tables],
        tables,
        clock,
    )
    slowest = MAX_SLOWDOWN * min(trial.values(), default=0.0)
    entrants = [candidate for candidate, spent in trial.items() if spent <= slowest]
    entrants += [(dtype, name) for dtype, _ in entrants for name in tables if name not in trial_tables]

    x = _matrices(shape, count, most, device)
    operations = x.size(0) * _operations(x.size(1), x.size(2))
    rates: Rates = {dtype: {} for dtype in dtypes}
    for (dtype, name), spent in _shortest_runs(x, entrants, tables, clock).items():
        rates[dtype][name] = operations / spent
    return rates


def _operations(rows: int, cols: int) -> int:
    """Return the number of floating-point operations of one iteration on one matrix with rows <= cols."""
    return 2 * rows * rows * (2 * cols + rows)


def _matrices(shape: Shape, count: int, limit: float, device: torch.device) -> Tensor:
    """Return random fp32 matrices ``[batch, rows, cols]`` to time: rows <= cols, batch <= ``count``, row norms about 1.

    ``shape`` is halved until one iteration has at most ``limit`` operations.
    """
    rows, cols = sorted(shape)
    while _operations(rows, cols) > limit and rows > 1:
        rows, cols = rows // 2, cols // 2
    batch = max(1, min(count, int(limit // _operations(rows, cols))))
    bits, spare = (torch.empty(batch * rows * cols, dtype=torch.int32, device=device) for _ in range(2))
    # Uniform between -1 and 1, by our own noise, because not every backend has a random generator.
    x = noise(bits, spare, key_of("race", 0), 0).float().mul_(2.0**-15).sub_(1.0).view(batch, rows, cols)
    return x.mul_((3 / cols) ** 0.5)


def _shortest_runs(
    x: Tensor, candidates: Collection[Candidate], tables: Mapping[str, Operations], clock: Callable[[], float]
) -> dict[Candidate, float]:
    """Return {(dtype, kernels): seconds of the shortest run on ``x``}; leave out, and warn of, those that fail."""
    work, in_dtype = Workspace(), {dtype: x.to(DTYPES[dtype]) for dtype, _ in candidates}
    shortest: dict[Candidate, float] = {}
    for dtype, name in candidates:
        try:
            _check(tables[name], in_dtype[dtype], work)
            shortest[dtype, name] = float("inf")
        except Exception as error:  # a kernel that does not compile or run must not end the training
            logger.warning(
                "deepspeed-muon: the Newton-Schulz kernels of %s fail in dtype %s and are not used: %s",
                name,
                dtype,
                error,
            )
    spent = dict.fromkeys(shortest, 0.0)
    for _ in range(RUNS):
        for dtype, name in shortest:
            if spent[dtype, name] < AGAIN_WITHIN:
                start = clock()
                iterate(tables[name], in_dtype[dtype], work)[0, 0, 0].item()  # item() waits for the device
                taken = clock() - start
                spent[dtype, name] += taken
                shortest[dtype, name] = min(shortest[dtype, name], taken)
    return shortest


def _check(table: Operations, x: Tensor, work: Workspace) -> None:
    """Raise ArithmeticError if a Newton-Schulz iteration on ``x`` by ``table`` is far from plain PyTorch's in fp32."""
    eps, out, x = torch.finfo(x.dtype).eps, iterate(table, x, work).float(), x.float()
    c, b, a = POLYNOMIAL
    gram = x @ x.mT
    exact = a * x + (b * gram + c * (gram @ gram)) @ x
    error = torch.linalg.vector_norm(out - exact) / torch.linalg.vector_norm(exact)
    if not error <= MAX_ERROR * eps:
        raise ArithmeticError(
            f"an iteration's result differs from plain PyTorch's by {float(error):.1e} (relative), more than the "
            f"{MAX_ERROR * eps:.1e} allowed"
        )


def may_time() -> bool:
    """Return whether kernels may be chosen by timing: not under ``torch.use_deterministic_algorithms``."""
    # Another run may find other kernels fastest.
    return not torch.are_deterministic_algorithms_enabled()


def has_bf16(device_type: str, supported: bool | None = None) -> bool:
    """Return whether a device has bf16 instructions. NVIDIA GPUs before Ampere (V100, T4) only emulate bf16.

    For a CPU return True, because :func:`measure_rates` finds out whether bf16 is slow there. ``supported``: what
    DeepSpeed says about an accelerator other than CUDA; ``None``: ask torch.
    """
    if device_type == "cpu":
        return True
    if device_type == "cuda":  # DeepSpeed's accelerator also says yes to emulated bf16
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if supported is None:
        ask = getattr(torch.get_device_module(device_type), "is_bf16_supported", None)
        return bool(ask and ask())
    return supported


def keep_dtype_hint(dtype: str) -> str:
    """Return a text for the log: the setting that keeps ``dtype`` in later runs, where timing might choose another."""
    return f'"ns_dtype": "{dtype}" in optimizer.params keeps this dtype in new runs'


def resume_choice(group: dict[str, Any], default: Choice, ns_dtype: str) -> Choice:
    """Return the Newton-Schulz dtype, methods and kernels for a parameter group; store them in ``group["ns_choice"]``.

    Return the choice that a load has stored there, so that a resumed run is bitwise the same; otherwise ``default``.
    Matrix shapes that the loaded choice lacks get the methods and kernels of ``default``. The config's ``ns_dtype``
    replaces the loaded dtype unless it is ``auto``.
    """
    choice = default
    if "ns_choice" in group:
        saved = choice_from_json(group["ns_choice"])
        choice = Choice(saved.dtype if ns_dtype == "auto" else ns_dtype, {**default.recipes, **saved.recipes})
    choice = choice.with_methods(group.pop("ns_methods", {}))  # a checkpoint of 0.1.0 has methods only
    group["ns_choice"] = choice.as_json()
    return choice


def method_of(choice: Choice, ns_method: str, rows: int, cols: int) -> str:
    """Return the method for rows x cols matrices: ``ns_method`` or, if that is ``auto``, the method in ``choice``."""
    return choice.recipe(rows, cols).method if ns_method == "auto" else ns_method


def with_products(
    kernels: Operations, tables: Mapping[str, Operations], choice: Choice, rows: int, cols: int
) -> Operations:
    """Return a copy of ``kernels`` with other matrix products: those that ``choice`` names for rows x cols matrices.

    ``tables``: name -> available kernels. Plain PyTorch computes the products of kernels that are unavailable.
    """
    recipe = choice.recipe(rows, cols)
    found = {kind: tables.get(getattr(recipe, kind), tables[TORCH]) for kind in Products._fields}
    return replace(kernels, **{kind: getattr(table, kind) for kind, table in found.items()})
