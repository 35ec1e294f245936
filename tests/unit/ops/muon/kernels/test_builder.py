# SPDX-License-Identifier: Apache-2.0
"""Building and choosing the C++ operations: DeepSpeed's conventions, and what happens where they cannot be built."""

import errno
import fcntl
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

import deepspeed.muon
from deepspeed.muon.kernels import build_lock, cpp_kernels
from deepspeed.muon.kernels.builder import MuonBuilder
from helpers import extensions
from helpers.distributed import Pool
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.paths import TESTS
from helpers.training import PARAMS, ds_config, make_engine

needs_compiler = pytest.mark.skipif(not MuonBuilder().is_compatible(), reason="no C++ compiler, or torch before 2.6")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has loaded nothing, and a folder in which nothing is built."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_the_module_of_a_wheel_is_the_one_for_this_cpu(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used with the torch that compiled it; with another one, or if it cannot be loaded, the log says so."""
    ours = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    name = f"deepspeed.muon.kernels.muon_{capability.lower()}"
    assert MuonBuilder()._installed() is None, "an installation from source has none"
    for version, is_used in ((ours, True), ("1.0", False)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.torch_version = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        with logged() as said:
            assert MuonBuilder()._installed() is (module if is_used else None)
        assert ["they are for torch 1.0" in line for line in said] == [True] * (not is_used)
    monkeypatch.setenv("RANK", "1")
    with logged() as said:
        assert MuonBuilder()._installed() is None and said == []


def test_a_module_of_a_wheel_that_cannot_be_loaded_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It needs functions that another torch lacks: Python raises ImportError."""
    (tmp_path / f"{MuonBuilder().module_name()}{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    monkeypatch.setattr(deepspeed.muon.kernels, "__path__", [str(tmp_path)])
    with logged() as said:
        assert MuonBuilder()._installed() is None
    (line,) = said
    assert "are not used, because " in line and str(tmp_path) in line


LACKS: list[tuple[Any, str, Any, str]] = [
    (os.environ, "CXX", "no-such-compiler", r"no C\+\+ compiler no-such-compiler.*; a C\+\+ compiler .*ninja"),
    (torch, "__version__", "2.5.1+cu124", r"torch 2\.6 or later is needed, this is 2\.5\.1\+cu124"),
    (MuonBuilder, "sources", lambda self: [], "the sources of csrc/muon are not installed"),
    (MuonBuilder, "sources", lambda self: [__file__], "Error building extension"),
]


@needs_compiler
@pytest.mark.parametrize(
    ("where", "name", "value", "reason"), LACKS, ids=["compiler", "products of torch", "sources", "C++ in the sources"]
)
def test_what_a_build_lacks_is_the_reason(
    where: Any, name: str, value: Any, reason: str, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch that lacks the products nothing is compiled, which would take a minute of every start."""
    patch = monkeypatch.setitem if where is os.environ else monkeypatch.setattr
    patch(where, name, value)
    with pytest.raises(cpp_kernels.KernelError, match=reason):
        cpp_kernels._load()


SMALL = """#include <Python.h>
#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small"};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&module); }
"""


def loaded(source: Path) -> list[str]:
    """What a process logs that loads the operations from this source."""
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        patch.setattr(OpBuilder, "_loaded_ops", {})
        patch.setattr(MuonBuilder, "_installed", lambda self: None)
        patch.setattr(MuonBuilder, "sources", lambda self: [str(source)])
        cpp_kernels._load()
    return said


@pytest.fixture
def small(fresh: None, tmp_path: Path) -> Path:
    """A source that takes a second to build, in a folder of its own."""
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "small.cpp"
    source.write_text(SMALL)
    return source


def modules(source: Path) -> list[Path]:
    return sorted(source.parents[1].glob("**/*.so"))


@needs_compiler
def test_what_is_built_is_known_by_the_content_of_its_sources(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reinstallation, whose files are new and the same, compiles nothing; an old header back again neither.

    Rank 0 says when it compiles, the others say nothing.
    """
    header = small.with_name("small.h")
    header.write_text("// one\n")
    begun, done = loaded(small)
    assert "compiling" in begun and "ready after" in done
    small.write_text(SMALL)
    os.utime(small, (2e9, 2e9))
    assert loaded(small) == [] and len(modules(small)) == 1
    header.write_text("// two\n")
    monkeypatch.setenv("RANK", "1")
    assert loaded(small) == [] and len(modules(small)) == 2
    header.write_text("// one\n")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PATH", "")  # a machine without a compiler takes what another has built
    assert loaded(small) == [] and len(modules(small)) == 2


@needs_compiler
def test_unlike_machines_share_a_cache(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has modules of its own, and flags that ATen's capability implies: nothing is made for one CPU alone."""
    names, flags = [], []
    for capability in ("AVX512", "AVX2", "DEFAULT", "SVE256"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        names.append(MuonBuilder().path().relative_to(small.parents[1]).parts)
        flags.append(MuonBuilder().cxx_args())
    assert [name[-1] for name in names] == ["muon_avx512.so", "muon_avx2.so", "muon_default.so", "muon_default.so"]
    assert len(set(names)) == 3
    assert not any("native" in flag or "-mtune" in flag for one in flags for flag in one)
    assert [any("-mavx" in flag for flag in one) for one in flags] == [True, True, False, False]
    monkeypatch.setattr(torch, "__version__", "2.6.1")
    assert MuonBuilder().path().relative_to(small.parents[1]).parts != names[-1]


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_a_module_has_instructions_of_its_capability_only(capability: str, tmp_path: Path) -> None:
    """Registers of 512 bits in AVX512's alone, of 256 bits from AVX2 on; no extension beyond those of ATen's flags."""
    load = "from deepspeed.muon.kernels.builder import MuonBuilder; print(MuonBuilder().load().cpu_capability)"
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-c", load], env=env, capture_output=True, text=True, check=True)
    (built,) = tmp_path.glob("**/*.so")
    if done.stdout.split()[-1].lower() != capability:
        pytest.skip(f"this CPU lacks {capability}")
    assert built.name == f"muon_{capability}.so"
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", built], capture_output=True, text=True, check=True)
    registers = {name: f"%{name}" in text.stdout for name in ("zmm", "ymm")}
    assert registers == {"zmm": capability == "avx512", "ymm": capability != "default"}
    beyond = (
        r"\b(vpermt2b|vpermi2b|vpermb|vpcompressb|vpshld\w*|vcvtne\w*bf16|vdpbf16ps|vmovw|v\w+ph|vpdpbusd|tile\w+)\b"
    )
    found = set(re.findall(beyond, text.stdout)) - {"vcvtps2ph"}  # of F16C and AVX-512 F
    assert found == set()


@needs_compiler
@pytest.mark.full
def test_builds_for_other_cpus_give_the_same_bits() -> None:
    """Compare AVX2 with AVX512. If oneDNN may use AVX2 only, products of bf16 are PyTorch's and may differ."""

    def hashes(**settings: str) -> dict[str, str]:
        command, env = [sys.executable, "-m", "helpers.bits"], {**os.environ, **settings}
        done = subprocess.run(command, env=env, cwd=TESTS, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    widest, avx2 = hashes(), hashes(ATEN_CPU_CAPABILITY="avx2")
    if widest.pop("table") != "C++ (AVX512)":
        pytest.skip("this CPU lacks AVX512")
    assert avx2.pop("table") == "C++ (AVX2)"
    assert avx2 == widest
    limited = hashes(ATEN_CPU_CAPABILITY="avx2", DNNL_MAX_CPU_ISA="AVX2")
    of_bf16 = {name for name in widest if "bfloat16" in name and not name.startswith("normalize")}
    assert {name for name in widest if limited[name] != widest[name]} <= of_bf16
    assert len(widest) - len(of_bf16) == 21


@needs_compiler
def test_a_module_that_cannot_be_loaded_is_built_anew(small: Path) -> None:
    loaded(small)
    (module,) = modules(small)
    module.unlink()  # the process has its pages mapped
    module.write_text("not a library")
    said = loaded(small)
    assert any(f"because {module} is damaged or from a machine with other libraries" in line for line in said)
    assert len(said) == 3
    assert loaded(small) == []


@needs_compiler
def test_who_waits_too_long_goes_on_with_plain_kernels(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of a machine says it, once on the way. A lock that is let go is free at once."""
    monkeypatch.setattr(build_lock, "TELL_AFTER", 0.1)
    monkeypatch.setattr(build_lock, "GIVE_UP_AFTER", 0.5)
    monkeypatch.setattr(MuonBuilder, "sources", lambda self: [str(small)])
    lock = MuonBuilder().path().with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with lock.open("a") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        for rank, count in (("0", 1), ("1", 0)):
            monkeypatch.setenv("LOCAL_RANK", rank)
            with logged() as said, pytest.raises(cpp_kernels.KernelError, match=re.escape(f"has held its lock {lock}")):
                cpp_kernels._load()
            assert sum("waiting for the process that holds its lock" in line for line in said) == count
    assert len(loaded(small)) == 2


@needs_compiler
def test_without_flock_a_file_of_this_machine_is_locked(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems. torch builds on this machine, too, because torch 2.15 locks the folder; a build
    that another machine has begun is left alone.
    """
    flock = fcntl.flock
    monkeypatch.setattr(tempfile, "tempdir", str(small.parent))

    def lacking(file: Any, operation: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(file.name)
        if small.parent not in path.parents:
            raise OSError(errno.ENOLCK, "No locks available")
        flock(file, operation)

    folders, load = [], cpp_extension.load

    def seen(*args: Any, **settings: Any) -> Any:
        folders.append(settings["build_directory"])
        return load(*args, **settings)

    monkeypatch.setattr(cpp_extension, "load", seen)
    monkeypatch.setattr(fcntl, "flock", lacking)
    monkeypatch.setattr(MuonBuilder, "sources", lambda self: [str(small)])
    others = MuonBuilder().path().parent / "build_other"
    others.mkdir(parents=True)
    assert any("has no file locks" in line for line in loaded(small))
    assert others.exists() and len(modules(small)) == 1
    assert [Path(folder).parent for folder in folders] == [small.parent] and not Path(folders[0]).exists()


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MuonBuilder, "sources", lambda self: [str(small)])
    folder = MuonBuilder().path().parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.touch()  # a file in its place
    with pytest.raises(cpp_kernels.KernelError, match=f"{folder} cannot be written"):
        cpp_kernels._load()


def build_slowly(source: Path, rank: int) -> None:
    """In a process of its own: load the operations, with a compiler that needs half a second more."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "CXX": str(source.with_name("slow"))}
    loaded(source)


@needs_compiler
@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize(("ranks", "victims"), [(1, 1), (2, 1), (2, 2)])
def test_a_build_that_is_killed_leaves_nothing_to_wait_for(ranks: int, victims: int, number: int, small: Path) -> None:
    """At any moment: before the lock, while a compiler runs, after the module is in its place."""
    slow = small.with_name("slow")
    slow.write_text('#!/bin/sh\ncase "$*" in *-c*) sleep 0.5;; esac\nexec c++ "$@"\n')
    slow.chmod(0o755)
    seconds = random.Random(f"{ranks} {victims} {number}").uniform(0.0, 2.5)
    context = multiprocessing.get_context("fork")

    def begin(rank: int) -> Any:
        process = context.Process(target=build_slowly, args=(small, rank), daemon=True)
        process.start()
        return process

    processes = [begin(rank) for rank in range(ranks)]
    time.sleep(seconds)
    for process in processes[:victims]:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    processes = [*processes[victims:], *(begin(rank) for rank in range(victims))]
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks, "none waits for ever"
    assert len(modules(small)) == 1 and not list(small.parents[1].glob("**/build_*")), "nothing half done is left"


def train_two_steps() -> str:
    """The kernels of a training of two steps."""
    engine = make_engine(MODELS["mlp"](), ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS}))
    train_engine(engine, 2)
    name = engine.basic_optimizer.context.kernels.name
    engine.destroy()
    return name


def cache_beside(folder: Path) -> None:
    """A cache of extensions with DeepSpeed's own, which are built under torch's lock, and without ours."""
    for built in extensions.FOLDER.glob("deepspeed_*"):
        shutil.copytree(built, folder / built.name)


@needs_compiler
@pytest.mark.full
@pytest.mark.time_limit(900)
def test_ranks_of_unlike_machines_train(tmp_path: Path) -> None:
    """They share a cache, and the kernels' names; each builds for its own CPU."""
    cache_beside(tmp_path)
    pool = Pool(2, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, restart=True)
    try:
        names = pool.run(train_as_capability, {}, 300)
    finally:
        pool.close()
    assert [built.name for built in sorted(tmp_path.glob("muon_*/*/*.so"))] == ["muon_avx2.so", "muon_default.so"]
    assert names == ["C++ (AVX2)", "C++ (DEFAULT)"]


def train_as_capability() -> str:
    rank = torch.distributed.get_rank()
    torch.backends.cpu.get_cpu_capability = lambda: ("AVX2", "DEFAULT")[rank]  # type: ignore[assignment]
    return train_two_steps()


@needs_compiler
@pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="this torch builds under locks that end with a process"
)
def test_who_waits_for_a_build_of_deepspeeds_says_for_which_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is torch's, which a killed build leaves; it is not ours to remove."""
    file_baton = importlib.import_module("torch.utils.file_baton")
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    monkeypatch.setattr(build_lock, "TELL_AFTER", 0.1)
    said = []
    for rank, built in (("0", "fused_adam"), ("0", "cpu_adam"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        compiler = SimpleNamespace(info={"name": "g++", "cmdline": ["g++", f"-DTORCH_EXTENSION_NAME={built}"]})
        gone = SimpleNamespace(info={"name": None, "cmdline": None})
        monkeypatch.setattr(psutil, "process_iter", lambda attributes, compiler=compiler: [compiler, gone])
        lock.touch()
        timer = threading.Timer(0.3, lock.unlink)
        timer.start()
        with logged() as lines:
            file_baton.FileBaton(str(lock)).wait()
        assert all(str(lock) in line for line in lines)
        said.append(["probably killed" in line for line in lines])
    assert said == [[False], [True], []], "who sees no compiler of it says so; one process of a machine speaks"
