# SPDX-License-Identifier: Apache-2.0
"""Build, test and train with the kernels of csrc/muon on 64-bit Arm, emulated by an x86-64 machine: ``make arm64``.

1. Unpack Debian's Python for arm64, from apt's configured sources, into a folder.
2. Install aarch64 wheels of the packages with compiled code; packages in plain Python are those of this environment.
3. Build the kernels under emulation; the cross compiler that the build starts runs at full speed.
4. Train ten steps on two ranks, with the kernels and without them.
5. Run the kernels' tests.

All of it is below build/arm64, and the next run uses it again. ``QEMU_CPU`` selects the emulated CPU, such as
``neoverse-n1``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "arm64"
#: The root folder of an Arm machine, its Python, and the folder of its compiled packages.
SYSTEM, SITE = FOLDER / "root", FOLDER / "site"
PYTHON = f"python3.{sys.version_info.minor}"
LAUNCHER = SYSTEM / "usr" / "bin" / "python"
#: Command that is needed -> Debian's package of it.
COMMANDS = {"qemu-aarch64-static": "qemu-user-static", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}
#: Debian's packages for arm64; without the last one DeepSpeed's setup asks for the types of files in vain.
DEBS = (PYTHON, f"lib{PYTHON}-dev", "libgomp1", "libstdc++6", "media-types")
#: The newest torch whose wheel for aarch64 on PyPI is for the CPU only; later ones have gigabytes of CUDA.
TORCH = "torch==2.10.0"
#: The other packages with compiled code that the tests import, in the versions of this environment.
COMPILED = ("hypothesis", "msgpack", "numpy", "psutil", "pydantic_core", "PyYAML")
TAGS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
TESTS = [f"tests/unit/ops/muon/kernels/test_{name}.py" for name in ("products", "elementwise", "codes", "rounding")]
TRAIN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "tools" / "release_check.py")


def main() -> None:
    """Run all steps in order, and end the program at the first that fails."""
    start = time.perf_counter()
    if missing := [package for command, package in COMMANDS.items() if shutil.which(command) is None]:
        sys.exit(f"please install {' '.join(missing)}: apt-get install {' '.join(missing)}")
    wheels = [TORCH, *(f"{name}=={metadata.version(name)}" for name in COMPILED)]
    make_once(SYSTEM, " ".join(DEBS), unpack_debs)
    make_once(SITE, " ".join(wheels), lambda: install(wheels))
    write_launcher()
    kernels = "from deepspeed.muon.kernels.builder import MuonBuilder as B; B().load(); print(B().path())"
    emulate("-c", kernels)
    train = (*TRAIN, "train", "deepspeed.muon.optimizer")
    emulate(*train, "C++ (DEFAULT)")
    emulate(*train, "torch", CXX="no-compiler", TORCH_EXTENSIONS_DIR=str(FOLDER / "empty"))
    report = FOLDER / "tests.xml"
    select = ("-m", "not full", "-k", "not triton")
    options = ("-q", "-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal", f"--junitxml={report}", *select)
    passed = emulate("-m", "pytest", *options, *TESTS, check=False, TEST_TIME_LIMIT="3600")
    suite = ElementTree.parse(report).getroot()[0]
    tests, skipped, failed = (int(suite.attrib[name]) for name in ("tests", "skipped", "failures"))
    failed += int(suite.attrib["errors"])
    print(
        f"64-bit Arm: two ranks trained with C++ (DEFAULT) and with torch; {tests - skipped - failed} tests passed, "
        f"{skipped} skipped, {failed} failed; {(time.perf_counter() - start) / 60:.0f} min"
    )
    sys.exit(not passed)


def make_once(folder: Path, what: str, make: Callable[[], None]) -> None:
    """Call ``make`` to fill a folder, unless an earlier run has filled it with the same."""
    stamp = folder / ".made-of"
    if not stamp.is_file() or stamp.read_text() != what:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make()
        stamp.write_text(what)


def unpack_debs() -> None:
    """Unpack Debian's packages into the root folder, by a state of apt of its own, which needs no rights."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        apt = Path(name)
        for part in ("lists", "archives"):
            (apt / part / "partial").mkdir(parents=True)
        (apt / "status").touch()
        options = {
            **{"APT::Architecture": "arm64", "APT::Architectures::": "arm64", "APT::Install-Recommends": "false"},
            **{"Dir::State": apt, "Dir::State::status": apt / "status", "Dir::Cache": apt},
            "APT::Sandbox::User": "",  # apt's own user may not read this folder
        }
        apt_get = ("apt-get", "-q", *(f"-o{key}={value}" for key, value in options.items()))
        run(*apt_get, "update")
        run(*apt_get, "install", "--download-only", "--yes", *DEBS, check=False)
        for deb in apt.glob("archives/*.deb"):
            run("dpkg", "-x", deb, SYSTEM)
    if not (SYSTEM / "usr" / "bin" / PYTHON).exists():
        sys.exit(f"apt has no {PYTHON} for arm64: this program needs an environment of the Python that Debian has")


def install(wheels: list[str]) -> None:
    """Install wheels for aarch64."""
    options = ("--target", SITE, "--only-binary=:all:", "--no-deps", *(f"--platform={tag}" for tag in TAGS))
    run(sys.executable, "-m", "pip", "install", "-q", *options, *wheels)


def write_launcher() -> None:
    """Write a script that is the emulated Python's ``sys.executable``, so that it can start itself."""
    qemu = f'exec qemu-aarch64-static ${{QEMU_CPU:+-cpu "$QEMU_CPU"}} -0 "$0" -L "{SYSTEM}"'
    LAUNCHER.write_text(f'#!/bin/sh\n{qemu} "{SYSTEM}/usr/bin/{PYTHON}" "$@"\n')
    LAUNCHER.chmod(0o755)
    # Triton of this environment is compiled for x86-64: tests skip what is not installed, but not what is broken.
    folders = "".join(f"site.addsitedir({str(folder)!r}); " for folder in (SITE, sysconfig.get_path("purelib")))
    packages = SYSTEM / "usr" / "lib" / "python3" / "dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "packages.pth").write_text(f"import site, sys; {folders}sys.modules['triton'] = None\n")
    # Python's pyconfig.h includes <aarch64-linux-gnu/python3.x/pyconfig.h>; other headers there are the compiler's own.
    link = SYSTEM / "include" / "aarch64-linux-gnu" / PYTHON
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(SYSTEM / "usr" / "include" / "aarch64-linux-gnu" / PYTHON)


def emulate(*arguments: str | Path, check: bool = True, **env: str) -> bool:
    """Run the emulated Python; see :func:`run`."""
    settings = {
        **{"CXX": "aarch64-linux-gnu-g++", "CPLUS_INCLUDE_PATH": str(SYSTEM / "include")},
        **{"TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    }
    return run(LAUNCHER, *arguments, check=check, env=os.environ | settings | env)


def run(*command: str | Path, check: bool = True, env: dict[str, str] | None = None) -> bool:
    """Run a command in the checkout and return whether it succeeded; if ``check``, failure ends the program."""
    words = [str(word) for word in command]
    print(f"$ {' '.join(words)}", flush=True)
    succeeded = subprocess.run(words, cwd=ROOT, env=env, check=False).returncode == 0
    if check and not succeeded:
        sys.exit(f"failed: {' '.join(words)}")
    return succeeded


if __name__ == "__main__":
    main()
