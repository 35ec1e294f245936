# SPDX-License-Identifier: Apache-2.0
"""Building and choosing the C++ operations: DeepSpeed's conventions, and what happens where they cannot be built."""

import importlib
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension
from torch.utils._cpp_extension_versioner import ExtensionVersioner

import deepspeed.muon
from deepspeed.muon.kernels import builder, native, reference
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.zero.bind import _judge_kernels
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, make_engine

needs_compiler = pytest.mark.skipif(not MuonBuilder().is_compatible(), reason="no C++ compiler, or torch before 2.6")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has loaded nothing, and a folder in which nothing is built."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})


@needs_compiler
def test_it_builds_and_loads_once() -> None:
    assert native.unavailable() is None
    assert native.operations() is native.operations()
    assert native.operations().name.startswith("C++ (")
    assert MuonBuilder().load() is MuonBuilder().load()


def test_ds_report_lists_it_while_installed() -> None:
    assert isinstance(ALL_OPS["muon"], MuonBuilder)
    assert "muon" in installed_ops
    deepspeed.muon.uninstall()
    try:
        assert "muon" not in ALL_OPS and "muon" not in installed_ops
    finally:
        deepspeed.muon.install()
    assert "muon" in ALL_OPS


@pytest.mark.parametrize(
    ("built", "here", "version", "is_taken"),
    [
        ("AVX2", "AVX2", None, True),
        ("AVX2", "AVX512", None, True),
        ("AVX512", "AVX2", None, False),
        ("AVX2", "DEFAULT", None, False),
        ("AVX2", "AVX2", "1.0", False),
    ],
)
def test_a_module_built_ahead_is_taken_where_it_runs(
    built: str, here: str, version: str | None, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on a CPU that lacks its instructions, nor with another torch."""
    torch_version = version or ".".join(torch.__version__.split(".")[:2])
    module = SimpleNamespace(torch_version=torch_version, cpu_capability=built)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: here)
    assert MuonBuilder()._installed() is (module if is_taken else None)


def test_without_a_compiler(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not MuonBuilder().is_compatible()
    with pytest.raises(native.KernelError, match=r"no C\+\+ compiler no-such-compiler.*; a C\+\+ compiler .*ninja"):
        native._load()


def test_with_a_torch_that_lacks_the_products(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, which would take a minute of every start and fail."""
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(native.KernelError, match=r"torch 2\.6 or later is needed, this is 2\.5\.1\+cu124"):
        native._load()


def test_without_sources(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MuonBuilder, "sources", lambda self: [])
    with pytest.raises(native.KernelError, match="the sources of csrc/muon are not installed"):
        native._load()


@needs_compiler
def test_a_build_that_fails(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not C++\n")
    monkeypatch.setattr(MuonBuilder, "sources", lambda self: [str(broken)])
    with pytest.raises(native.KernelError, match="Error building extension"):
        native._load()


SMALL = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "muon"};
PyMODINIT_FUNC PyInit_muon(void) { return PyModule_Create(&module); }
"""


def loaded(source: Path) -> list[str]:
    """What a process logs that loads the operations from this source."""
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(OpBuilder, "_loaded_ops", {})
        patch.setattr(MuonBuilder, "_installed", lambda self: None)
        patch.setattr(MuonBuilder, "sources", lambda self: [str(source)])
        patch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", ExtensionVersioner())
        native._load()
    return said


@needs_compiler
def test_rank_0_says_that_it_compiles_and_says_nothing_of_what_is_built(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "small.cpp"
    source.write_text(SMALL)
    begun, done = loaded(source)
    assert begun == "deepspeed-muon: compiling the C++ operations, once per environment, about a minute"
    assert re.fullmatch(r"deepspeed-muon: compiled in \d+ s", done)
    assert loaded(source) == []
    source.write_text(SMALL + "\n")
    monkeypatch.setenv("RANK", "1")
    assert loaded(source) == []


@needs_compiler
def test_who_waits_for_another_process_says_for_which_file(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    say, source = builder._say_what_is_waited_for, tmp_path / "small.cpp"
    monkeypatch.setattr(builder, "PATIENCE", 0.005)
    monkeypatch.setattr(builder, "_say_what_is_waited_for", lambda lock: (say(lock), Path(lock).unlink()))
    source.write_text(SMALL)
    loaded(source)
    lock = Path(cpp_extension._get_build_directory("muon", False)) / "lock"
    lock.touch()
    (said,) = loaded(source)
    assert said.startswith("deepspeed-muon: another process has been compiling the C++ operations for 0 minutes; if it")
    assert said.endswith(f"it was killed, delete its lock, {lock}")


def test_one_process_of_a_machine_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "PATIENCE", 0.001)
    said = []
    for number in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", number)
        with logged() as lines:
            builder._wait(lambda lock: time.sleep(0.3), SimpleNamespace(lock_file_path="muon/lock"))
        said.append(len(lines))
    assert said == [1, 0]


def test_all_ranks_or_none() -> None:
    reasons = (None, None), (None, "there is no C++ compiler c++")
    verdicts = [_judge_kernels([{"cpu": own} for own in case]) for case in reasons]
    assert verdicts == [{"cpu": None}, {"cpu": "rank 1: there is no C++ compiler c++"}]


@needs_compiler
@pytest.mark.parametrize(("asked", "name"), [("auto", "C++"), ("torch", "torch")])
def test_the_choice_without_an_engine(asked: str, name: str) -> None:
    net: Any = MODELS["mlp"]()
    optimizer = deepspeed.muon.MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, kernels=asked)
    assert optimizer.kernels is reference.OPERATIONS, "nothing is built before the first step"
    net(*net.batch(0)).backward()
    optimizer.step()
    assert optimizer.kernels.name.startswith(name)


def chosen(missing_on: int | None = None) -> str:
    """The table of an engine's optimizer after a step; one rank may lack the compiler."""
    import torch.distributed

    kept = native.unavailable
    if torch.distributed.get_rank() == missing_on:
        native.unavailable = lambda: "no compiler"
    try:
        engine = make_engine(MODELS["mlp"](), ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS}))
        train_engine(engine, 1)
        name = engine.basic_optimizer.kernels.name
        engine.destroy()
        return name
    finally:
        native.unavailable = kept


@needs_compiler
def test_the_choice_of_all_ranks() -> None:
    assert all(name.startswith("C++") for name in run(chosen, 2))
    assert run(chosen, 2, missing_on=1) == ["torch", "torch"]
