# SPDX-License-Identifier: Apache-2.0
"""The dtypes, methods and kernels that a run may choose for its Newton-Schulz, and how it chooses.

A race times one iteration of the standard method, which has one product of each kind, in every dtype with every table
of products. The dtype and table that are fastest for it are the fastest for a model; the methods differ in their
operations, which are counted.
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
from deepspeed.muon.math.choice import TORCH, Choice, Rates, Shape, by_count, fastest, from_pinned, seconds
from deepspeed.muon.math.coefficients import Schedule
from deepspeed.muon.math.newton_schulz import DTYPES, METHODS, Products
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


@dataclass(frozen=True)
class Tuning:
    """The choice, and the rates from which it follows: of the slowest rank, empty where nothing was timed."""

    choice: Choice
    rates: Rates = field(default_factory=dict)

    def speedup_over(self, other: Choice, shapes: Mapping[Shape, int], schedule: Schedule) -> float | None:
        """Return how many times faster this choice is than another; ``None`` if the rates do not tell."""
        ours, theirs = (seconds(self.rates, choice, shapes, schedule) for choice in (self.choice, other))
        return theirs / ours if ours and theirs else None

    def described(self, choice: Choice) -> str:
        """Return a choice in one line, for people, with where it comes from."""
        recipes = [str(recipe) for recipe in choice.recipes.values()]
        how = ", ".join(f"{recipes.count(one)} of {len(recipes)} shapes by {one}" for one in dict.fromkeys(recipes))
        reason = f"the fastest in a race at start; {pin(choice.dtype)}" if self.rates else "by the count of operations"
        return f"{choice.dtype}, {how} ({reason})"


@dataclass(frozen=True)
class Candidates:
    """The dtypes, methods and tables of operations among which to choose, the default ones first."""

    dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    tables: Mapping[str, Operations]
    schedule: Schedule
    device: torch.device

    @classmethod
    def of(
        cls,
        config: MuonConfig,
        tables: Mapping[str, Operations],
        ns_methods: set[str],
        device: torch.device,
        has_bf16: bool,
    ) -> Candidates:
        """Return those that the config leaves open.

        Args:
            tables: that compute products on ``device``, by name, plain PyTorch's first.
            ns_methods: ``ns_method`` of all Muon groups.
            has_bf16: whether the device has instructions for bf16; see :func:`has_bf16`.
        """
        left_out = {"bf16": not has_bf16, "fp16": config.ns_normalization == "aol"}
        dtypes = tuple(name for name in DTYPES if not left_out.get(name))
        methods = METHODS if "auto" in ns_methods or len(ns_methods) != 1 else tuple(ns_methods)
        chosen = dtypes if config.ns_dtype == "auto" else (config.ns_dtype,)
        return cls(chosen, methods, tables, config.schedule, device)

    @property
    def default_dtype(self) -> str:
        """Return the dtype where nothing is timed: fp32 on a CPU, elsewhere bf16, or fp16 where that is emulated."""
        return self.dtypes[0] if self.device.type == "cpu" else self.dtypes[-1]

    def without_race(self, shapes: Mapping[Shape, int]) -> Tuning:
        """Choose by the count of operations: on a CPU with its fastest kernels, elsewhere with PyTorch's."""
        table = list(self.tables)[-1] if self.device.type == "cpu" else TORCH
        return Tuning(by_count(shapes, self.schedule, self.default_dtype, self.methods, table))

    def choose(
        self,
        shapes: Mapping[Shape, int],
        world_size: int,
        races: bool,
        is_logging_rank: bool = True,
        slowest: Callable[[Callable[[], Rates]], Rates] = lambda measure: measure(),
    ) -> Tuning:
        """Choose by a race where one is allowed and decides anything, otherwise by the count of operations.

        Args:
            shapes: rows, columns -> how many matrices the model has.
            world_size: ranks that share the matrices, so that a batch has its size.
            races: whether a race is allowed, see :func:`may_race`.
            is_logging_rank: whether this process logs that a start may take long.
            slowest: return the rates of the slowest rank, from a function that measures those of this process.
        """
        # Each rank of an engine chooses for itself, so everything below follows from facts on which they have agreed.
        if not (races and shapes and (len(self.dtypes) > 1 or len(self.tables) > 1)):
            return self.without_race(shapes)
        compiled = [name for name in self.tables if name != TORCH and self.device.type != "cpu"]
        if compiled and is_logging_rank:
            logger.info(
                "deepspeed-muon: compiling and timing the kernels of %s in %s for the matrices of this model; the "
                "first start on a machine takes about a minute per dtype, later ones find them compiled",
                " and ".join(compiled),
                ", ".join(self.dtypes),
            )
        rates = slowest(lambda: race(shapes, world_size, self.dtypes, self.tables, self.device))
        choice = fastest(rates, shapes, self.schedule, self.methods)
        return Tuning(choice, rates) if choice else self.without_race(shapes)


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
    entrants = [candidate for candidate, spent in trial.items() if spent <= slowest]
    entrants += [(dtype, name) for dtype, _ in entrants for name in tables if name not in trial_tables]

    x = _matrices(shape, count, most, device)
    operations = x.size(0) * _operations(x.size(1), x.size(2))
    rates: Rates = {dtype: {} for dtype in dtypes}
    for (dtype, name), spent in _times(x, entrants, tables, clock).items():
        rates[dtype][name] = operations / spent
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
    shortest: dict[Candidate, float] = {}
    for dtype, name in candidates:
        try:
            _check(tables[name], in_dtype[dtype], work)
            shortest[dtype, name] = float("inf")
        except Exception as error:  # a kernel that does not compile or run must not end the training
            logger.warning("deepspeed-muon: the kernels of %s are not used in %s: %s", name, dtype, error)
    spent = dict.fromkeys(shortest, 0.0)
    for _ in range(RUNS):
        for dtype, name in shortest:
            if spent[dtype, name] < AGAIN_WITHIN:
                start = clock()
                iterate(tables[name], in_dtype[dtype], work)[0, 0, 0].item()  # waits until the device has done it
                taken = clock() - start
                spent[dtype, name] += taken
                shortest[dtype, name] = min(shortest[dtype, name], taken)
    return shortest


def _check(table: Operations, x: Tensor, work: Workspace) -> None:
    """Raise ArithmeticError if an iteration differs from the same in fp32."""
    eps, out, x = torch.finfo(x.dtype).eps, iterate(table, x, work).float(), x.float()
    c, b, a = POLYNOMIAL
    gram = x @ x.mT
    exact = a * x + (b * gram + c * (gram @ gram)) @ x
    error = torch.linalg.vector_norm(out - exact) / torch.linalg.vector_norm(exact)
    if not error <= MAX_ERROR * eps:
        raise ArithmeticError(f"wrong by {float(error):.1e}")


def may_race() -> bool:
    """Return whether this process allows what may end differently in the next run."""
    return not torch.are_deterministic_algorithms_enabled()


def has_bf16(device_type: str, supported: bool | None = None) -> bool:
    """Return whether a device computes with bf16. NVIDIA's before Ampere (V100, T4) only emulate it.

    A CPU may emulate it, too, which the race finds out.

    Args:
        supported: what DeepSpeed's accelerator says; by default what the device's module in torch says.
    """
    if device_type == "cpu":
        return True
    if device_type == "cuda":  # DeepSpeed's accelerator counts emulation
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if supported is None:
        ask = getattr(torch.get_device_module(device_type), "is_bf16_supported", None)
        return bool(ask and ask())
    return supported


def pin(dtype: str) -> str:
    """Return how a user makes every further run take a dtype: two races may end differently."""
    return f'"ns_dtype": "{dtype}" in optimizer.params keeps this dtype in new runs'


def pinned_in(group: dict[str, Any], default: Choice, ns_dtype: str) -> Choice:
    """Return the choice of a group, a checkpoint's for the shapes that it knows, and store it in the group.

    Args:
        ns_dtype: of the config, which wins over the checkpoint unless it is ``auto``.
    """
    choice = default
    if "ns_choice" in group:
        saved = from_pinned(group["ns_choice"])
        choice = Choice(saved.dtype if ns_dtype == "auto" else ns_dtype, {**default.recipes, **saved.recipes})
    choice = choice.with_methods(group.pop("ns_methods", {}))  # of a checkpoint that pinned nothing else
    group["ns_choice"] = choice.pinned()
    return choice


def method_of(choice: Choice, ns_method: str, rows: int, cols: int) -> str:
    """Return the method for one shape: the group's own, or under ``auto`` the chosen one."""
    return choice.recipe(rows, cols).method if ns_method == "auto" else ns_method


def with_products(
    kernels: Operations, tables: Mapping[str, Operations], choice: Choice, rows: int, cols: int
) -> Operations:
    """Return ``kernels`` with the products chosen for a shape; plain PyTorch's where this process lacks a table."""
    recipe = choice.recipe(rows, cols)
    found = {kind: tables.get(getattr(recipe, kind), tables[TORCH]) for kind in Products._fields}
    return replace(kernels, **{kind: getattr(table, kind) for kind, table in found.items()})
