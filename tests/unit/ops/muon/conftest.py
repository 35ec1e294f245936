# SPDX-License-Identifier: Apache-2.0
"""What is compiled before the tests, marks, a time limit for every test and the end of the process pools."""

import gc
import itertools
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

pytest.register_assert_rewrite("helpers")
from helpers import extensions  # noqa: E402

TIME_LIMIT = float(os.environ.get("TEST_TIME_LIMIT", "300"))
"""Seconds a test may take unless it is marked with time_limit(seconds)."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configs; nothing is fetched
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of the workers: threads that spin take the cores of other tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"time_limit(seconds): bound of a test, {TIME_LIMIT:g} s by default")
    config.addinivalue_line("markers", "sample(count): so many of its cases run by default, the others in full runs")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove what killed runs left and compile what the tests need, in the process that starts the others."""
    if not hasattr(session.config, "workerinput") and not session.config.option.collectonly:
        extensions.remove_locks()
        extensions.remove_shared_memory()
        extensions.build()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs in full runs only; leave out what this DeepSpeed gets wrong."""
    _mark_all_but_a_sample(items)
    _leave_out_stocks_faults(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: collections of garbage need not walk through it during the tests."""
    gc.collect()
    gc.freeze()


def _mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    """Of each test marked ``sample(count)``, the cases beyond the sample are ``full``."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for found in cases.values():
        kept = sample([case.callspec.params for case in found], found[0].get_closest_marker("sample").args[0])
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.full)


def sample(cases: list[dict[str, Any]], count: int) -> set[int]:
    """Indices of ``count`` cases that cover as many values, and then pairs of values, of the parameters as they can."""
    facts = [[{fact} for fact in _values(case)] for case in cases]
    pairs = [[a | b for a, b in itertools.combinations(one, 2)] for one in facts]
    kept: list[int] = []
    seen: set[frozenset] = set()
    while len(kept) < min(count, len(cases)):
        left = [index for index in range(len(cases)) if index not in kept]

        def gain(index: int) -> tuple[int, int]:
            new = [sum(frozenset(fact) not in seen for fact in of[index]) for of in (facts, pairs)]
            return new[0], new[1]

        kept.append(max(left, key=gain))
        seen |= {frozenset(fact) for of in (facts, pairs) for fact in of[kept[-1]]}
    return set(kept)


def _values(case: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each parameter; a parameter that is a dict counts as its entries."""
    found = []
    for name, value in case.items():
        found += [(key, str(one)) for key, one in value.items()] if isinstance(value, dict) else [(name, str(value))]
    return found


def _leave_out_stocks_faults(items: list[pytest.Item]) -> None:
    """What stock DeepSpeed gets wrong on CPU and gloo, whatever the optimizer: most of it before 0.19.8."""
    if Version(version("transformers")) >= Version("5.24"):
        opt = pytest.mark.skip(
            reason="from transformers 5.24 on DeepSpeed's hybrid engine does not build OPT's containers"
        )
        for item in items:
            if re.search(r"\[hybrid engine: .*model opt", item.name):
                item.add_marker(opt)
    if Version(version("deepspeed")) >= Version("0.19.8"):
        return
    races = pytest.mark.skip(reason="before 0.19.8 overlapped buckets of separate gradients race on CPU and gloo")
    stops = pytest.mark.skip(reason="before 0.19.8 BF16_Optimizer stops the run at a non-finite norm")
    streams = pytest.mark.skip(reason="before 0.19.8 DeepSpeed's activation checkpointing needs CUDA streams")
    swapping = pytest.mark.skip(reason="offload to NVMe is refused before 0.19.8")
    for item in items:
        if item.path.name.startswith("test_nvme"):
            item.add_marker(swapping)
        elif "'contiguous_gradients': False" in str(getattr(item, "callspec", None)):
            item.add_marker(races)
        elif re.search(r"\[.*checkpoint(_interval|ing(?!.*how (torch|compile)))", item.name):
            item.add_marker(streams)
        elif re.search("test_a_bad_.*(grad_accum_dtype|BF16_Optimizer)|step_is_reported_once", item.name):
            item.add_marker(stops)


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that runs too long; the distributed `run` then ends its processes."""
    marker = request.node.get_closest_marker("time_limit")
    seconds = marker.args[0] if marker else TIME_LIMIT

    def expire(*_: object) -> None:
        pytest.fail(f"the test ran longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def worn_pools() -> Iterator[None]:
    """Close the process pools that the test has worn out."""
    yield
    from helpers.distributed import end_worn_pools, used

    end_worn_pools(used)
    used.clear()


@pytest.fixture(autouse=True, scope="session")
def pools() -> Iterator[None]:
    """End the process pools with the session."""
    yield
    from helpers.distributed import shutdown

    shutdown()


@pytest.fixture(scope="session")
def interpret() -> Iterator[Callable[..., Any]]:
    """Runs a function where Triton interprets: in one process that knew so before it imported Triton."""
    from helpers.distributed import Pool

    held: list[Pool] = []

    def run(fn: Callable[..., Any], **kwargs: Any) -> Any:
        if not held or held[-1].closed:  # by a failure
            held.append(Pool(1, {"TRITON_INTERPRET": "1"}, restart=True))
        return held[-1].run(fn, kwargs, 120)[0]

    yield run
    for pool in held:
        pool.close()


@pytest.fixture(scope="session")
def late() -> Iterator[Callable[..., list[Any]]]:
    """Runs a function on ranks whose accelerator is that of `helpers/late_device.py`; returns the results by rank."""
    from helpers.distributed import Pool

    pools: dict[int, Pool] = {}

    def run(fn: Callable[..., Any], world_size: int, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        if world_size not in pools or pools[world_size].closed:  # by a failure
            pools[world_size] = Pool(world_size, {"TEST_DEVICE": "late"})
        try:
            return pools[world_size].run(fn, kwargs, timeout)
        except BrokenPipeError:  # a rank ended while no job ran on it
            warnings.warn(f"ranks ended with {[rank.code for rank in pools[world_size].ranks]}", stacklevel=2)
            return run(fn, world_size, timeout, **kwargs)

    yield run
    for pool in pools.values():
        pool.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests record under the name `summary`."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "summary":
                terminalreporter.write_line(str(value))
