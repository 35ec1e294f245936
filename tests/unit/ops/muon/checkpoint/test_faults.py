# SPDX-License-Identifier: Apache-2.0
"""Killed and stalled ranks: a job that is started again goes on exactly, and nobody waits for ever."""

import re
import threading
import time
import weakref
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
from helpers.faults import CELLS, attempt, torment
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
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize(("case", "phase"), [(c, p) for c, phases in CELLS for p in phases], ids=str)
def test_many_kills(tmp_path: Path, case: dict[str, Any], phase: str) -> None:
    check(tmp_path, case, phase, kills=50 if phase == "save" and "model" not in case else 10, seed=1)


# ---- inside the exchange ------------------------------------------------------------------------------------

STALLED = 8.0
"""Seconds of the process group's timeout in the tests that wait for it."""
#: Where matrices are sharded, the look for gradients is the first event; at stage 0 they must be large to be shared.
PLACES = {"exchange": r"bucket (1 of 1|2 of 2)", "look": "the check for missing gradients"}
LOST = [(0, "exchange", False), (2, "look", False)]
LOST_TOO = [(2, "exchange", False), (3, "exchange", False), (3, "exchange", True), (2, "exchange", True)]


@pytest.mark.parametrize(
    ("stage", "phase", "stall"), [*LOST, *(pytest.param(*case, marks=pytest.mark.full) for case in LOST_TOO)]
)
def test_who_waits_for_a_lost_rank_names_the_bucket(tmp_path: Path, stage: int, phase: str, stall: bool) -> None:
    case = {"stage": stage} | ({} if stage else {"model": "broad"})
    outcome = attempt(tmp_path, case, {1: (phase, int(phase == "exchange"))}, stall=stall, timeout=STALLED)
    assert outcome.codes == [1, None if stall else -9]
    named = "ExchangeError: communication between ranks failed in Muon's step, in "
    named += PLACES[phase] + r" of group muon \(layers.*\), [\d.]+ s"
    assert re.search(named, outcome.output[0]), outcome.output[0]
    assert outcome.seconds >= STALLED * stall


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
    """To pin memory takes long. A mark that the device has yet to write would make another collective seem ended.

    Where results are replicated, one broadcast per owner is under way: each has a mark of its own.
    """
    collectives, marks = watchdog.PendingCollectives("group0-muon"), []
    with Stream() as stream:
        for number in range(3 * watchdog.MAX_LATEST):
            pending = collectives.start(str(number), ("a",), Work)
            pending.wait()
            assert pending.mark.item() == 0
            marks.append(pending.mark)
            if number >= watchdog.MAX_LATEST:
                stream.run(1)
    assert watchdog.MAX_LATEST < len({id(mark) for mark in marks}) <= 2 * watchdog.MAX_LATEST + 1
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


class Failing:
    """A collective that raises an error when it is launched, or when it is waited for."""

    def __init__(self, error: Exception, when: str) -> None:
        self.error = error
        if when == "launch":
            raise error

    def wait(self) -> None:
        raise self.error


BACKENDS = [torch.distributed.DistBackendError("NCCL"), RuntimeError("Connection closed by peer")]
OTHER = [torch.OutOfMemoryError("CUDA out of memory"), NotImplementedError("sparse"), TypeError("int"), MemoryError()]
#: Gloo's errors are plain RuntimeErrors, and come when the collective is waited for.
RAISED = [(BACKENDS[0], "launch", True), *((error, "wait", True) for error in BACKENDS)]
RAISED += [(error, when, False) for error in OTHER for when in ("launch", "wait")]
RAISED += [(RuntimeError("Tensors must be contiguous"), "launch", False)]


@pytest.mark.parametrize(("error", "when", "is_another_ranks"), RAISED, ids=repr)
def test_only_an_error_of_the_backend_is_that_of_another_rank(
    error: Exception, when: str, is_another_ranks: bool
) -> None:
    """An error of this rank, or a wrong call, must not send its user to the others' logs: it passes as it is."""
    collectives = watchdog.PendingCollectives("muon")
    with logged() as said, pytest.raises(Exception) as raised:
        collectives.start("1 of 2", ("up.weight",), lambda: Failing(error, when)).wait()
    text = str(raised.value) if is_another_ranks else said.pop()
    assert "bucket 1 of 2 of group muon (up.weight)" in text and said == []
    if is_another_ranks:
        assert raised.type is ExchangeError and "another rank died" in text
    else:
        assert raised.value is error and type(error).__name__ in text
    assert not any(pending.is_slow(-1.0) for pending in collectives._latest), "it has ended"


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
