# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist and the wheel, and proves the wheel in a fresh virtual environment: ``make release-check``.

1. The archives hold what they should, and the wheel nothing else.
2. The wheel installs with the torch and DeepSpeed of ``requirements-dev.txt`` and trains with ``"type": "Muon"``.
3. DeepSpeed can be installed again beside it, and it still trains.
4. A wheel with compiled kernels, built in that environment, trains with them where there is no compiler.
5. Once it is uninstalled, DeepSpeed's files are as they were installed and ``"Muon"`` is stock's again.

pip takes torch from the indexes it is set up with; a CPU build is enough. ``train`` and ``intact`` run in the fresh
environment, by its own Python.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements" / "requirements-dev.txt"
#: The module of the optimizer that ``"type": "Muon"`` builds, with and without this package.
OURS, STOCK = "deepspeed.muon.optimizer", "deepspeed.runtime.zero.muon.muon_optimizer"
#: ATen's name for the vector instructions of a CPU -> the kernels that a compiled wheel has for them.
KERNELS = {"avx2": "C++ (AVX2)", "avx512": "C++ (AVX512)"}
STEPS = 10


def main() -> None:
    """All checks in order; the first that fails ends the program with a message."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="release-check-") as name:
        folder = Path(name)
        with step("build the sdist, and from it the wheel"):
            run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
            (sdist,), (wheel,) = folder.glob("dist/*.tar.gz"), folder.glob("dist/*.whl")
        with step("contents of both"):
            check_contents(sdist, wheel)
        with step("install the wheel, torch and DeepSpeed into a fresh environment"):
            run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
            python = python_of(folder)
            python("-m", "pip", "install", "-c", PINS, wheel)
        with step("train; DeepSpeed's files are untouched"):
            python(*TRAIN, OURS)
            python(__file__, "intact")
        with step("install DeepSpeed again"):
            python("-m", "pip", "install", "--force-reinstall", "--no-deps", "-c", PINS, "deepspeed")
        with step("train"):
            python(*TRAIN, OURS)
        with step("build a wheel with compiled kernels"):
            python("-m", "pip", "install", "-c", PINS, "setuptools")
            compiled = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder / "compiled", ROOT)
            python(*compiled, env={"DS_BUILD_MUON": "1"})
            (wheel,) = folder.glob("compiled/*.whl")
        with step(f"install {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB"):
            python("-m", "pip", "install", "--force-reinstall", "--no-deps", wheel)
        for capability, kernels in KERNELS.items():
            with step(f"train with {kernels}, without a compiler"):
                python(*TRAIN, OURS, kernels, env=without_a_compiler(folder) | {"ATEN_CPU_CAPABILITY": capability})
        with step("uninstall deepspeed-muon"):
            python("-m", "pip", "uninstall", "-y", "deepspeed-muon")
        with step("train with stock's Muon; DeepSpeed's files are untouched"):
            python(*TRAIN, STOCK)
            python(__file__, "intact", "alone")
    print(f"release check passed in {time.perf_counter() - start:.0f} s")


@contextmanager
def step(what: str) -> Iterator[None]:
    """Name a step, and say how long it took."""
    print(f"{what} ... ", end="", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """The standard output of a command; where it fails, all that it wrote ends this program."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"failed\n{done.stdout}{done.stderr}\nrelease check failed: {shlex.join(words)}")
    return done.stdout


def python_of(folder: Path) -> Callable[..., str]:
    """Runs the fresh environment's Python in ``folder``, out of reach of the checkout and of the caller's settings."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "AUTOLOAD" not in k}
    own = inherited | {
        "PATH": f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }

    def python(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
        return run(folder / "venv/bin/python", *arguments, cwd=folder, env=own | dict(env or {}))

    return python


def without_a_compiler(folder: Path) -> dict[str, str]:
    """Return the environment of a machine that has no compiler and has compiled nothing."""
    return {"PATH": str(folder / "venv/bin"), "CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(folder / "empty")}


# ---- the archives ---------------------------------------------------------------------------------------


def check_contents(sdist: Path, wheel: Path) -> None:
    """The sdist holds all that a build needs; the wheel holds the package and no other file."""
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    packaged = {name for name in tracked if name.startswith(("deepspeed/", "csrc/")) or name == "deepspeed_muon.py"}
    needed = {name for name in tracked if name.startswith("requirements/")} | packaged
    needed |= {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    compare("the sdist", in_sdist & needed, needed)

    expected = {name.replace("csrc/muon/", "deepspeed/muon/csrc/") for name in packaged}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    compare("the wheel", in_wheel, expected)

    version = wheel.name.split("-")[1]
    if f"version: {version}" not in (ROOT / "CITATION.cff").read_text().splitlines():
        sys.exit(f"CITATION.cff does not say version {version}")


def compare(what: str, found: set[str], expected: set[str]) -> None:
    """End the program where two sets of files differ."""
    if found != expected:
        sys.exit(f"{what} lacks {sorted(expected - found)}, and has {sorted(found - expected)} too many")


# ---- in the fresh environment ---------------------------------------------------------------------------

TRAIN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "train")


def train(module: str, kernels: str | None = None) -> None:
    """A few steps at ZeRO stage 2, on one of two ranks: the loss falls, and the optimizer is that of ``module``.

    ``kernels``: the name of the table of kernels that it must use, without a compiler.
    """
    import torch
    from torch import nn

    from deepspeed import initialize, ops

    if kernels:
        # Where there is no GPU, DeepSpeed compiles an extension for collectives; without it they are gloo's.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    inputs, targets = torch.randn(64, 32), torch.randn(64, 8)
    config = {
        "train_micro_batch_size_per_gpu": len(inputs),
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    optimizer = engine.basic_optimizer
    assert type(optimizer).__module__ == module, type(optimizer)
    assert any(group["use_muon"] for group in optimizer.param_groups)
    assert kernels is None or optimizer.context.kernels.name == kernels, optimizer.context.kernels.name
    assert losses[-1] < losses[0], losses
    torch.distributed.destroy_process_group()


def intact(alone: bool) -> None:
    """Every file that DeepSpeed installed has the hash of its RECORD; ``alone``: nothing of deepspeed-muon is left."""
    import deepspeed  # noqa: F401  it can be imported

    changed = []
    for file in metadata.distribution("deepspeed").files or ():
        if file.hash is not None:
            path = Path(str(file.locate()))
            contents = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.exists() else b""
            if base64.urlsafe_b64encode(contents).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    assert not changed, changed
    if alone:
        assert find_spec("deepspeed.muon") is None and find_spec("deepspeed_muon") is None


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["train", module, *kernels]:
            train(module, *kernels)
        case ["intact", *alone]:
            intact(bool(alone))
        case _:
            sys.exit(__doc__)
