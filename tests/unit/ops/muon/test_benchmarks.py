# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: every command line parses, some run on tiny sizes; two claims about the package that they count."""

import csv
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS, ROOT

sys.path[1:1] = [str(ROOT), str(ROOT / "examples/pretrain_gpt")]

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import gpu, launches, ns, quality, report, step  # noqa: E402
from benchmarks.rates import Rates  # noqa: E402

#: Round numbers: one operation and one byte a unit.
RATES = Rates(bf16=1e9, fp32=1e8, fp16=1e7, copy=1e6, network=1e3)


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of result files; and rates that nobody has to measure."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for module in (gpu, ns, step):
        monkeypatch.setattr(module, "measure", lambda *_: RATES)
    return tmp_path


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_every_benchmark_has_a_command_line(name: str) -> None:
    """Its options are documented, and given their defaults as text they mean the defaults."""
    benchmark = getattr(importlib.import_module(f"benchmarks.{command.BENCHMARKS[name][0]}"), name)
    parser = command.parser_of(benchmark)
    defaults, words = vars(parser.parse_args([])), []
    for option, value in defaults.items():
        if not isinstance(value, bool) and value not in ("", ()):
            words += [f"--{option.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    found = vars(parser.parse_args(words))
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()} == defaults
    assert all(action.help for action in parser._actions)


LINES = [
    "ns --shapes 2x16x48 --limit 0.05",
    pytest.param("single --layers 1 --hidden 32 --rounds 1", marks=pytest.mark.full),
    pytest.param(
        "step --cases 3 --repeats 1 --steps 1 --warmup 1 --layers 1 --hidden 32",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_runs_on_tiny_sizes(line: str, capsys: pytest.CaptureFixture, results: Path) -> None:
    assert command.main(*line.split()) == 0
    out = capsys.readouterr().out
    assert out.count("\n|") >= 2 and "nan" not in out
    for file in results.glob("*.csv"):
        with file.open(newline="") as rows:
            assert all(row["torch"] and row["date"] for row in csv.DictReader(rows))


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("call", range(1, 7))
def test_every_part_of_gpu_runs_on_a_cpu(call: int, tmp_path: Path) -> None:
    """Tests are only found. Its exchange compares the bits of matrices that go to the rank itself or stay."""
    name = f"gpu-of-a-test-{call}"
    line = f"-m benchmarks gpu --device cpu --quick --call {call} --output {name} --keep {tmp_path}"
    try:
        done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, capture_output=True, text=True, timeout=880)
        assert done.returncode == 0, done.stdout + done.stderr
        with (tmp_path / f"{name}.csv").open() as lines:
            parts = {row["part"] for row in csv.DictReader(lines)}
        assert parts == {of for of, (number, *_) in gpu.PARTS.items() if number == call}
    finally:
        for suffix in (".csv", ".md"):
            (BENCHMARKS / "results" / f"{name}{suffix}").unlink(missing_ok=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_of_an_8b_model_has_fewer_than_700_launches(stage: int) -> None:
    """On 8 GPUs, with Triton's elementwise kernels and the vendor's products; it reads from the device once."""
    count, collectives, buckets = launches.counted(launches.llama(*launches.MODELS["8B"]), stage, triton=True)
    assert count.found.total() < 700
    assert collectives == {"all-to-all": 2 * buckets * (stage == 3), "all-reduce": 1, "reads": 1}


@pytest.mark.parametrize(
    "shape", [(256, 512), *(pytest.param(shape, marks=pytest.mark.full) for shape in ((256, 256), (512, 128)))]
)
def test_what_an_accelerator_takes_is_more_exact_than_torchs(shape: tuple[int, int]) -> None:
    found = quality.implementations()
    ratios = {kind: quality.errors(m.bfloat16(), found)["of torch's"] for kind, m in quality.spectra(*shape)}
    assert max(ratios.values()) < 0.6, ratios
