# SPDX-License-Identifier: Apache-2.0
"""Runs a part of the suite on other versions and writes docs/evidence/versions.md: ``make versions``, or some rows
of it with ``make versions ROWS="torch-2.5 numpy-1.26"``.

The rows are in versions.txt. Each installs the pinned development set, with its own pins, and this checkout into a
virtual environment below build/versions, which is removed after its last row. The page keeps the lines of the other
rows. pip takes torch from the indexes it is set up with; a CPU build is enough.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence" / "versions.md"
PINS = ROOT / "requirements" / "requirements-dev.txt"
FOLDER = ROOT / "build" / "versions"
#: Of the development set, what no test of a row needs.
NOT_NEEDED = ("ruff", "mypy", "mkdocs-material", "build")
SMOKE = (
    *("contracts/test_oracle.py", "exchange/test_exchange.py", "math/test_adamw.py", "math/test_newton_schulz.py"),
    *(f"zero/test_{name}.py" for name in ("patches", "grad_norm", "momentum_dtype", "state_access", "nvme")),
    *(f"checkpoint/test_{name}.py" for name in ("load_options", "converter", "save_load")),
    *(f"kernels/test_{name}.py" for name in ("builder", "elementwise", "products", "codes")),
)
MODELS = (
    *(f"model/test_{name}.py" for name in ("routing", "routing_overrides", "splitting", "fused_layouts")),
    *("cli/test_cli.py", "test_attention_watch.py", "examples/test_frameworks.py"),
    *(f"zero/test_{name}.py" for name in ("tensor_parallel", "experts", "qk_clip", "lr_schedule_values")),
)
STOCK = "test_oracles.py::test_adam_matches_deepspeed"
#: What a row can run: stock's AdamW and a training tool in all cases; others without those that `make test` leaves out.
TESTS = {
    "smoke": ("not full", STOCK, *SMOKE),
    "models": ("not full", *MODELS),
    "stock": ("", STOCK),
    "integrators": ("", "examples/test_integrators.py"),
}
#: Of the development set, what rows of training tools take; the tools say which versions of the rest they need.
BESIDE_TOOLS = ("torch", "deepspeed", "ninja", "pytest", "pytest-xdist")
#: Seconds that the tests of a row may take.
TIMEOUT = 3600
PACKAGES = ("python", "torch", "deepspeed", "numpy", "transformers")
HEAD = ("row", *PACKAGES, "tests", "passed", "failed", "skipped", "remarks")
TEXT = """# Versions

`make versions` writes this table. Each row of `tools/versions.txt` installs the pinned development set, with other
versions of some packages, into an environment of its own and runs a part of the suite on CPU with gloo:

- `smoke`: DeepSpeed's AdamW and this Muon against their references at stages 0 to 3, bad steps, resume, universal
  checkpoints, offload to the CPU and NVMe, activation, the exchange, the kernels;
- `models`: what is tested with models of transformers: routing, fused projections, heads, tensor parallelism, AutoEP,
  ALST, QK-clip, schedules, `ds_muon plan`, Trainer, accelerate and Lightning;
- `stock`: DeepSpeed's AdamW alone, at stages 0 to 3 on 2 ranks;
- `integrators`: the [training tool](../frameworks.md#training-tools) that the row is named after, with the versions of
  other packages that it asks for; of the development set only torch, DeepSpeed, ninja and pytest.

`make versions ROWS="torch-2.5 numpy-1.26"` runs rows by name and leaves the others as they are. Why DeepSpeed's range
is what it is: [decision 1](../decisions/0001-an-add-on-and-its-activation.md).
"""


class Row(NamedTuple):
    """A line of versions.txt."""

    name: str
    python: str
    tests: str
    pins: tuple[str, ...]

    def environment(self) -> str:
        """The folder of its environment."""
        if self.tests == "integrators":
            return self.name
        torch = [pin for pin in self.pins if Requirement(pin).name == "torch"]
        return "-".join([f"python{self.python}", *torch])

    def not_run(self, reason: str) -> list[str]:
        """Its cells without results."""
        named = {requirement.name: str(requirement.specifier).strip("=") for requirement in map(Requirement, self.pins)}
        packages = {"python": self.python} | named
        found = (packages.get(name, "") for name in PACKAGES)
        return [self.name, *found, self.tests, "", "", "", f"not run: {reason}"]

    def log(self) -> Path:
        """The file for what its commands write."""
        return FOLDER / f"{self.name}.log"


class Refused(Exception):
    """Why a row cannot be run."""


def rows() -> list[Row]:
    """All of versions.txt."""
    lines = (Path(__file__).with_suffix(".txt")).read_text().splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [Row(name, python, tests, tuple(pins)) for name, python, tests, *pins in words]


def main(names: list[str]) -> None:
    """Run the rows, by default all, and write the page after each."""
    known = {row.name: row for row in rows()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = [known[name] for name in names] or list(known.values())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for environment, group in groupby(wanted, Row.environment):
        folder = FOLDER / environment
        for row in group:
            print(f"{row.name} ... ", end="", flush=True)
            try:
                cells = run_row(row, folder)
            except Refused as reason:
                cells = row.not_run(str(reason))
            print(" | ".join(cells[1:]), flush=True)
            PAGE.write_text(page(kept() | {row.name: line(cells)}))
        shutil.rmtree(folder, ignore_errors=True)


def page(lines: dict[str, str]) -> str:
    """The text of docs/evidence/versions.md, from the lines of rows."""
    found = (lines.get(row.name) or line(row.not_run("not yet")) for row in rows())
    table = [line(HEAD), line(["---"] * len(HEAD)), *found]
    return TEXT + "\n" + "\n".join(table) + "\n"


def kept() -> dict[str, str]:
    """The page's lines by row, in the order of the rows."""
    text = PAGE.read_text() if PAGE.exists() else ""
    lines = {found[1]: found[0] for found in re.finditer(r"^\| ([\w.-]+) \|.*$", text, re.MULTILINE)}
    return {row.name: lines[row.name] for row in rows() if row.name in lines}


def line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- one row --------------------------------------------------------------------------------------------


def run_row(row: Row, folder: Path) -> list[str]:
    """Its cells. What its commands write goes to a log beside the environment.

    Raises:
        Refused: the Python is not here, or what it asks for cannot be installed.
    """
    install(row, folder)
    for lock in folder.glob("extensions/*/lock"):  # of a build that was killed
        lock.unlink()
    report = json.loads(
        python(row, folder, "-m", "deepspeed.muon.cli", "report", "--json", stdout=subprocess.PIPE).stdout
    )
    missing = [name for name, state in report["seams"].items() if state == "missing"]
    if missing and row.tests != "stock":
        raise Refused(f"DeepSpeed has no {', '.join(missing)}")
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    marks, *names = TESTS[row.tests]
    workers = ["-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal"]
    tests = [f"tests/unit/ops/muon/{name}" for name in names]
    if row.tests == "integrators":
        tests += ["-k", row.name]
    python(row, folder, "-m", "pytest", "-m", marks, *workers, f"--junitxml={results}", *tests)
    counts, remarks = judge(results)
    versions = [str(report["versions"][name] or "none") for name in PACKAGES]
    tools = [f"`{pin}`" for pin in row.pins if row.tests == "integrators"]
    remarks = [*tools, *(f"lacks `{name}`" for name in missing), *remarks]
    return [row.name, *versions, row.tests, *(str(counts[key]) for key in HEAD[-4:-1]), "<br>".join(remarks)]


def install(row: Row, folder: Path) -> None:
    """The row's packages into its environment, which may have been another row's before."""
    row.log().unlink(missing_ok=True)
    if not folder.exists():
        subprocess.run([python_of(row.python), "-m", "venv", folder], check=True)
    own = {Requirement(pin).name for pin in row.pins}
    lines = [line.partition("#")[0].strip() for line in PINS.read_text().splitlines()]
    named = {line: Requirement(line).name for line in lines if line}
    pins = [line for line, name in named.items() if name not in {*own, *NOT_NEEDED}]
    if row.tests == "integrators":
        pins = [line for line in pins if named[line] in BESIDE_TOOLS]
    for packages in ([*pins, *row.pins], ["--no-deps", "-e", str(ROOT)]):
        if python(row, folder, "-m", "pip", "install", "-q", *packages).returncode:
            raise Refused(f"cannot be installed: {row.log().read_text().strip().splitlines()[-1]}")


def python_of(version: str) -> str:
    """A Python of this version: this one, pyenv's, whose shims on the PATH need not work, or one on the PATH."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = next(map(str, pyenv.glob(f"versions/{version}.*/bin/python")), None) or shutil.which(f"python{version}")
    if found is None:
        raise Refused(f"there is no Python {version} here")
    return found


def python(row: Row, folder: Path, *arguments: str, stdout: int | None = None) -> subprocess.CompletedProcess:
    """Run an environment's Python, out of reach of the caller's settings."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and "AUTOLOAD" not in name}
    env = inherited | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }
    command = [str(folder / "bin" / "python"), *arguments]
    with row.log().open("a") as log:
        return subprocess.run(command, cwd=ROOT, env=env, stdout=stdout or log, stderr=log, text=True, timeout=TIMEOUT)


def judge(results: Path) -> tuple[Counter[str], list[str]]:
    """How many tests passed, failed and were skipped; the names of the failed, the reasons of the skipped."""
    if not results.exists():
        raise Refused("pytest ended without results")
    counts, failed, skipped = Counter[str](), Counter[str](), Counter[str]()
    for case in ElementTree.parse(results).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            counts["passed"] += 1
        elif outcome.tag == "skipped":
            counts["skipped"] += 1
            skipped[outcome.get("message", "")] += 1
        else:
            counts["failed"] += 1
            failed[f"`{test_of(case)}`"] += 1
    return counts, [*told("failed", failed), *told("skipped", skipped)]


def test_of(case: ElementTree.Element) -> str:
    """``test_file.py::test_name`` without parameters, or the file where it could not be collected."""
    file, name = (case.get(key, "").partition("[")[0] for key in ("classname", "name"))
    return f"{file.rpartition('.')[2]}.py::{name}" if file else f"{name.rpartition('.')[2]}.py"


def told(what: str, found: Counter[str]) -> Iterator[str]:
    """A remark each."""
    for name, count in sorted(found.items()):
        yield f"{what}: {name}" + f" ({count})" * (count > 1)


if __name__ == "__main__":
    main(sys.argv[1:])
