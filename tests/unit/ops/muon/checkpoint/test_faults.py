# SPDX-License-Identifier: Apache-2.0
"""Killed and stalled ranks: a job that is started again goes on exactly, and nobody waits for ever."""

import re
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.errors import ExchangeError
from deepspeed.muon.exchange import watchdog
from helpers.faults import CELLS, WORLD, Tally, _judge, attempt, reference, torment
from helpers.logs import logged


def check(root: Path, case: dict[str, Any], phase: str, kills: int, seed: int) -> None:
    tally = torment(root, case, phase, kills, seed)
    print(phase, case, "seed", seed, tally)
    assert tally.problems == []
    assert tally.kills >= kills and tally.completed >= 1


# ---- killed ranks -------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "phase", "kills"), [(2, "save", 2), (3, "exchange", 2), (3, "training", 1)])
def test_a_killed_job_goes_on_exactly(tmp_path: Path, stage: int, phase: str, kills: int) -> None:
    check(tmp_path, {"stage": stage}, phase, kills, seed=0)


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(("case", "phase"), [(c, p) for c, phases in CELLS for p in phases], ids=str)
def test_many_kills(tmp_path: Path, case: dict[str, Any], phase: str) -> None:
    check(tmp_path, case, phase, kills=10, seed=1)


# ---- inside the exchange ------------------------------------------------------------------------------------

STALLED = 8.0
"""Seconds of the process group's timeout in the tests that wait for it."""
FAILED = "ExchangeError: communication between ranks failed in Muon's step, in "
NAMED = FAILED + r"bucket (1 of 1|2 of 2) of group muon \(layers.*\), [\d.]+ s"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stage", "stall"), [(0, False), (2, False), (3, False), (3, True), pytest.param(2, True, marks=pytest.mark.full)]
)
def test_who_waits_for_a_lost_rank_names_the_bucket(tmp_path: Path, stage: int, stall: bool) -> None:
    """At stage 0 the matrices must be large enough to be shared. Where they are sharded, the look for gradients is the
    first event.
    """
    case = {"stage": stage} | ({} if stage else {"model": "broad"})
    outcome = attempt(tmp_path, case, {1: ("exchange", 1)}, stall=stall, timeout=STALLED)
    assert outcome.codes == [1, None if stall else -9]
    assert re.search(NAMED, outcome.output[0]), outcome.output[0]
    if stall:
        assert outcome.seconds >= STALLED


class Work:
    """A collective that goes on after it has been waited for."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


class Stream(TorchDispatchMode):
    """A stream that reaches nothing before :meth:`run`: copies that do not block wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.queue.append(args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))

    def run(self, count: int) -> None:
        for target, source in self.queue[:count]:
            target.copy_(source)
        del self.queue[:count]


def test_a_collective_that_was_waited_for_keeps_nothing() -> None:
    """Its handle holds its tensors."""
    collectives, work = watchdog.PendingCollectives("group0-muon"), Work()
    kept = weakref.ref(work)
    pending = collectives.start("1 of 1", ("a",), lambda work=work: work)
    del work
    pending.since -= 1e9
    assert kept() is not None and not pending.is_slow(), "nobody waits for it yet"
    pending.wait()
    assert kept() is None and not pending.is_slow()


def test_the_thread_of_the_watchdog_calls_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of an event from it would invalidate the capture of a CUDA graph, at any time after a step."""

    def refuse(*_: Any) -> None:
        assert threading.current_thread() is threading.main_thread(), "a call from the watchdog's thread"

    class Asked(Work):
        def is_completed(self) -> bool:
            refuse()
            return False

    def device_module(device: torch.device) -> Any:
        refuse()
        return SimpleNamespace(Event=lambda: SimpleNamespace(record=refuse, query=lambda: refuse() or False))

    monkeypatch.setattr(torch, "get_device_module", device_module)
    collectives = watchdog.PendingCollectives("group0-muon")
    with Stream() as stream, ThreadPoolExecutor(1) as thread:
        pending = collectives.start("1 of 1", ("a",), Asked)
        pending.since -= 1e9
        before = thread.submit(collectives.is_waiting).result(10)
        pending.wait()
        under_way = thread.submit(collectives.is_waiting).result(10)
        stream.run(1)
        ended = thread.submit(collectives.is_waiting).result(10)
    assert (before, under_way, ended) == (False, True, False)


def test_marks_are_reused_once_their_collectives_have_ended() -> None:
    """To pin memory takes long. A mark that the device has yet to write would make another collective seem ended."""
    collectives, marks = watchdog.PendingCollectives("group0-muon"), []
    with Stream() as stream:
        for number in range(3 * watchdog.MAX_LATEST):
            pending = collectives.start(str(number), ("a",), Work)
            pending.wait()
            assert pending.mark.item() == 0
            marks.append(pending.mark)
            if number >= watchdog.MAX_LATEST:
                stream.run(1)
    counts = Counter(map(id, marks))
    assert watchdog.MAX_LATEST < len(counts) <= 2 * watchdog.MAX_LATEST + 1


def test_a_mark_belongs_to_one_collective_until_that_was_waited_for() -> None:
    """Where results are replicated, one broadcast per owner is under way."""
    collectives = watchdog.PendingCollectives("group0-muon")
    under_way = [collectives.start(str(number), ("a",), Work) for number in range(3 * watchdog.MAX_LATEST)]
    assert len({id(pending.mark) for pending in under_way}) == len(under_way)


def test_only_an_accelerators_marks_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin memory for ranks on CPUs would make a context on a GPU that they do not use."""
    asked: list[Tensor] = []
    monkeypatch.setattr(watchdog, "pinned", lambda tensor: asked.append(tensor) or tensor)
    counts = []
    for device in ("cpu", "cuda"):
        watchdog.PendingCollectives("group0-muon", torch.device(device)).start("1 of 1", ("a",), Work)
        counts.append(len(asked))
    assert counts == [0, 1]


def collective(launch: Any = None, wait: Any = None) -> watchdog.PendingCollective:
    """One whose launch or wait raises what is given."""

    def act(error: Exception | None) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(wait=lambda: act(wait))

    title, mark = "bucket 1 of 2 of group muon", torch.ones(1, dtype=torch.uint8)
    return watchdog.PendingCollective(title, ("up.weight",), lambda: act(launch), mark)


@pytest.mark.parametrize(
    "error", [torch.distributed.DistBackendError("NCCL"), RuntimeError("Connection closed by peer")], ids=repr
)
def test_an_error_of_the_backend_is_that_of_another_rank(error: Exception) -> None:
    """Gloo's errors are plain RuntimeErrors, and come when the collective is waited for."""
    pending = collective(wait=error)
    with pytest.raises(ExchangeError, match=r"bucket 1 of 2 of group muon \(up\.weight\).*another rank died"):
        pending.wait()
    pending.since -= 1e9
    assert not pending.is_slow(), "it has ended"
    if isinstance(error, torch.distributed.DistError):
        with pytest.raises(ExchangeError, match="another rank died"):
            collective(launch=error)


OTHER = [torch.OutOfMemoryError("CUDA out of memory"), NotImplementedError("sparse"), TypeError("int"), MemoryError()]


@pytest.mark.parametrize(
    ("error", "when"),
    [
        *((error, when) for error in OTHER for when in ("launch", "wait")),
        (RuntimeError("Tensors must be contiguous"), "launch"),
    ],
    ids=repr,
)
def test_any_other_error_passes_as_it_is(error: Exception, when: str) -> None:
    """The log names the bucket. An error of this rank, or a wrong call, must not send its user to the others' logs."""
    with logged() as said, pytest.raises(type(error)) as raised:
        collective(**{when: error}).wait()
    assert raised.value is error
    (line,) = said
    assert f"{type(error).__name__} in bucket 1 of 2 of group muon (up.weight)" in line


def test_a_collective_that_does_not_end_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL's watchdog leaves in the log, since it ends the process without Python: waiting for it returns."""
    monkeypatch.setattr(watchdog, "SLOW", 0.05)
    collectives = watchdog.PendingCollectives("group0-muon")
    with logged() as said:
        with Stream() as stream:
            for number in range(2):
                pending = collectives.start(f"{number + 1} of 2", ("a", "b", "c", "d", "e"), Work)
                pending.wait()
            stream.run(1)
        collectives.report_slow()
        assert said == []
        time.sleep(0.06)
        collectives.report_slow()
        collectives.report_slow()
    assert len(said) == 1
    assert "is waiting for other ranks in bucket 2 of 2 of group group0-muon (a, b, c, d and 1 more)" in said[0]
    monkeypatch.setattr(watchdog, "GRACE", 0.05)
    assert collectives.is_waiting(), "the process still ends if another rank fails later"
    assert "inf" not in pending.location()


def test_the_harness_notices_a_wrong_resume(tmp_path: Path) -> None:
    """A run whose checkpoint is ahead of its trace, or whose losses differ, is a problem."""
    expected = reference(tmp_path / "run", {"stage": 2})
    outcome = attempt(tmp_path / "run", {"stage": 2}, {})
    tally = Tally()
    _judge(tally, outcome, {}, tmp_path / "run", expected)
    assert tally.problems == [] and outcome.codes == [0] * WORLD
    expected.lines[1]["step 3"] = "0x1.0p+0"
    _judge(tally, outcome, {}, tmp_path / "run", expected)
    assert any("rank 1 has ['step', '3'" in text for text in tally.problems)


def test_a_rank_lost_before_the_first_bucket_is_named_too(tmp_path: Path) -> None:
    """Ranks that hold parts of a matrix look for its gradient together."""
    outcome = attempt(tmp_path, {"stage": 2}, {1: ("look", 0)}, timeout=STALLED)
    assert outcome.codes == [1, -9]
    named = FAILED + r"the check for missing gradients of group muon \(layers\.\d\.weight, .*\), [\d.]+"
    assert re.search(named, outcome.output[0]), outcome.output[0]
