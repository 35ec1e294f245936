# SPDX-License-Identifier: Apache-2.0
"""CPU offload with an accelerator, without one: doubles of its streams record what waits for what.

Two uses of the same memory, one of them a write, must be ordered by the waits and by nothing else, however long each
of them takes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.exchange import host_staging
from deepspeed.muon.exchange.buffers import BucketBuffers
from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.plan.plan import Plan
from helpers.loop import run_loop
from helpers.plans import COST, make_plan, specs

CPU = torch.device("cpu")
BUCKETS = 7


class Use(NamedTuple):
    """An operation: what it does, the storages it touches, and the numbers of the operations that end before it."""

    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    before: frozenset[int]


@dataclass(eq=False)
class Lane:
    """The host, a stream or the network: does one operation after the other. ``known``: what has ended by then."""

    record: "Record"
    name: str
    known: frozenset[int] = frozenset()

    def wait_stream(self, other: "Lane") -> None:
        self.record.wait(self, other.known, other.name)


class Record:
    """The accelerator that an exchange sees, its network and the host; all that they do.

    ``without``: a wait that is left out, as (who waits, for whom).
    """

    def __init__(self, without: tuple[str, str] | None) -> None:
        self.without, self.uses, names = without, list[Use](), iter(("up", "down"))
        self.host, self.network, self.computing = (Lane(self, name) for name in ("host", "network", "computing"))
        self._current = self.computing
        self.Stream = lambda: Lane(self, next(names))
        self.Event = lambda: End(self)
        self.waits: set[tuple[str, str]] = set()

    def pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor

    def current_stream(self) -> Lane:
        return self._current

    @contextmanager
    def stream(self, lane: Lane) -> Iterator[None]:
        self._current, outer = lane, self._current
        yield
        self._current = outer

    def wait(self, lane: Lane, known: frozenset[int], name: str) -> None:
        self.waits.add((lane.name, name))
        if (lane.name, name) != self.without:
            lane.known |= known

    def use(self, lane: Lane, text: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """The host gives a stream its work, so that comes after all that the host has waited for."""
        touched = (frozenset(t.untyped_storage().data_ptr() for t in tensors) for tensors in (reads, writes))
        before = lane.known | self.host.known
        lane.known = before | {len(self.uses)}
        self.uses.append(Use(f"{text} ({lane.name})", *touched, before))

    def races(self) -> list[tuple[str, str]]:
        """Pairs of uses of one storage, one of which writes, in no order."""
        found = []
        for number, later in enumerate(self.uses):
            for index, earlier in enumerate(self.uses[:number]):
                shared = later.writes & (earlier.reads | earlier.writes) | later.reads & earlier.writes
                if shared and index not in later.before:
                    found.append((earlier.text, later.text))
        return found

    def all_to_all_single(self, received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> "End":
        """Like NCCL's: after what the current stream has to do, on a stream of its own."""
        self.network.known |= self._current.known
        self.use(self.network, "all-to-all", [sent], [received])
        return End(self, self.network)


class End:
    """An event, or the handle of a collective."""

    def __init__(self, record: Record, lane: Lane | None = None) -> None:
        self._record = record
        if lane is not None:
            self.record(lane)

    def record(self, lane: Lane | None = None) -> None:
        lane = lane or self._record.current_stream()
        self._known, self._name = lane.known, lane.name

    def wait(self) -> None:
        self._record.wait(self._record.current_stream(), self._known, self._name)

    def synchronize(self) -> None:
        self._record.wait(self._record.host, self._known, self._name)


class Copies(TorchDispatchMode):
    """Records every copy on the current stream."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._record.use(self._record.current_stream(), "copy", [args[1]], [args[0]])
        return func(*args, **(kwargs or {}))


class UsedBefore(Workspace):
    """Its memory on the accelerator is still in use by computation that was queued before. Nothing is pinned."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def get(self, name: str, shape: tuple, dtype: torch.dtype, device: torch.device, pin: Any = None) -> Tensor:
        held = set(map(id, self._storage.values()))
        found = super().get(name, shape, dtype, device, pin)
        if pin is None and set(map(id, self._storage.values())) != held:
            self._record.use(self._record.computing, f"earlier use of {name}", writes=[found])
        return found


def exchange(monkeypatch: pytest.MonkeyPatch, world: int, without: tuple[str, str] | None) -> Record:
    """Rank 0's exchange of two steps of a model with as many buckets as there are matrices."""
    from deepspeed import comm

    record = Record(without)
    monkeypatch.setattr(host_staging, "get_accelerator", lambda: record)
    monkeypatch.setattr(comm, "all_to_all_single", record.all_to_all_single)
    items = specs([(8, 12)] * BUCKETS * world)
    shards = [Shard(spec, 0, Placement(0, 96 // world, index * 96 // world)) for index, spec in enumerate(items)]
    plan: Plan = make_plan(shards, 0, world, COST, bucket_bytes=200)
    assert len(plan.buckets) == BUCKETS and plan.buckets[0].travels == (world > 1)

    def prepare(now: Any, buffers: BucketBuffers) -> None:
        record.use(record.host, f"prepare {buffers.index}", writes=[buffers.host])

    def orthogonalize(now: Any, buffers: BucketBuffers) -> None:
        record.use(record.current_stream(), f"compute {buffers.index}", [buffers.matrices], [buffers.matrices])

    def apply(now: Any, buffers: BucketBuffers) -> None:
        record.use(record.host, f"apply {buffers.index}", reads=[buffers.host])

    group = object() if world > 1 else None
    ours = Exchange(group, torch.float32, CPU, UsedBefore(record), host_staging.Staging())
    with Copies(record):
        for _ in range(2):
            run_loop(plan, ours, prepare=prepare, orthogonalize=orthogonalize, apply=apply)
    return record


LOCAL = {("up", "computing"), ("computing", "up"), ("down", "computing"), ("host", "down")}
NETWORK = {("computing", "network"), ("down", "network")}


@pytest.mark.parametrize(("world", "waits"), [(1, LOCAL), (2, LOCAL | NETWORK)], ids=["1", "2"])
def test_every_use_of_a_buffer_waits_for_those_before(
    world: int, waits: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for nothing else, as each wait may cost time."""
    record = exchange(monkeypatch, world, None)
    assert record.races() == [] and record.waits == waits


@pytest.mark.parametrize(
    ("world", "without"),
    [*((1, wait) for wait in sorted(LOCAL)), *((2, wait) for wait in sorted(NETWORK)), (2, ("up", "computing"))],
    ids=str,
)
def test_no_wait_is_superfluous(world: int, without: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchange(monkeypatch, world, without).races()


@pytest.mark.parametrize("world", [1, 2])
def test_a_bucket_travels_beside_the_computation_of_another(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation of 2 waits for no copy of 3 or 1 that was queued before it, and the copies of 4 not for it."""
    uses = exchange(monkeypatch, world, None).uses
    texts = [use.text for use in uses]
    computed = texts.index("compute 2 (computing)")
    sent = texts.index("copy (up)", texts.index("prepare 3 (host)"))
    returned = texts.index("copy (down)", texts.index("compute 1 (computing)"))
    assert sent < computed and returned < computed, "queued before"
    assert sent not in uses[computed].before and returned not in uses[computed].before
    after = texts.index("copy (up)", texts.index("prepare 4 (host)"))
    assert computed < after and computed not in uses[after].before
