# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: every command parses, and runs on tiny sizes; failures of ranks are told."""

import csv
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import BENCHMARKS, ROOT

sys.path[1:1] = [str(ROOT), str(ROOT / "examples/pretrain_gpt")]

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import gpu, launches, ns, quality, ranks, report, step  # noqa: E402
from benchmarks.rates import Rates  # noqa: E402
from benchmarks.training import Job, merge  # noqa: E402

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


def test_a_record_has_each_step_of_its_slowest_rank_and_the_optimizers_of_its_fastest() -> None:
    """Medians over the steps; which rank is slowest changes from step to step."""

    def of_rank(*optimizer: float) -> dict:
        times = [{"forward": 1.0, "backward": 2.0, "step": 1 + s, "optimizer": s} for s in optimizer]
        return {"times": times, "max": {}, "mean": {"backward MB": 1.0, "step MB": 2.0}, "first": {}}

    record = merge(Job("3", "ours"), [of_rank(1, 20, 300), of_rank(10, 2, 400)])
    assert (record["seconds"], record["optimizer s"], record["optimizer s, fastest rank"]) == (23, 20, 2)
    assert record["MB"] == 3


def test_without_a_name_all_are_listed_and_wrong_options_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert (command.main(), command.main("--help"), command.main("nothing")) == (0, 0, 2)
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.BENCHMARKS)
    for words in (["--cases", "4"], ["--worlds", "two"], ["--nothing"]):
        with pytest.raises(SystemExit):
            command.main("step", *words)


def test_the_repository_names_no_benchmark_that_is_gone() -> None:
    """In documentation, sources and the Makefile."""
    texts = [path for folder in ("docs", "deepspeed", "examples") for path in (ROOT / folder).rglob("*.[mp][dy]")]
    for path in (*texts, ROOT / "README.md", ROOT / "Makefile"):
        for words in path.read_text().split("-m benchmarks ")[1:]:
            name = words.split()[0].strip("`.,;:)")
            assert name in command.BENCHMARKS or not name.islower(), f"{path}: {name}"


LINES = [
    "ns --shapes 2x16x48 --limit 0.05",
]
LONGER_LINES = [
    "single --layers 1 --hidden 32 --rounds 1",
    "step --cases 3 --repeats 1 --steps 1 --warmup 1 --layers 1 --hidden 32",
]


@pytest.mark.parametrize("line", [*LINES, *(pytest.param(line, marks=pytest.mark.full) for line in LONGER_LINES)])
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


def test_a_part_of_gpu_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, setting: dict[str, Any], *rest: Any) -> list[Any]:
        if setting["name"] == "newton_schulz":
            raise ranks.RanksFailed("out of luck", [{"shape": "1 x 2 x 3"}])
        return [[{"way": "in place"}]]

    monkeypatch.setattr(ranks, "run", run)
    with pytest.raises(SystemExit, match=r"(?s)1 x 2 x 3.*in place.*FAILED: newton_schulz"):
        gpu.gpu(parts=("newton_schulz", "exchange"), device="cpu", output="test")


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run on this machine")
def test_tests_that_skip_fail_their_part_of_gpu_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match=r"tests were skipped: .*needs an NVIDIA GPU"):
        list(gpu.tests(gpu.PARTS["kernel_tests"][2], "cuda"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_an_8b_model_has_fewer_than_700_launches(stage: int) -> None:
    """On 8 GPUs, with Triton's elementwise kernels and the vendor's products; it reads from the device once."""
    count, collectives, buckets = launches.counted(launches.llama(*launches.MODELS["8B"]), stage, triton=True)
    assert count.found.total() < 700
    assert collectives == {"all-to-all": 2 * buckets * (stage == 3), "all-reduce": 1, "reads": 1}


@pytest.mark.parametrize("shape", [(256, 256), (256, 512), (512, 128)])
def test_what_an_accelerator_takes_is_more_exact_than_torchs(shape: tuple[int, int]) -> None:
    found = quality.implementations()
    ratios = {kind: quality.errors(m.bfloat16(), found)["of torch's"] for kind, m in quality.spectra(*shape)}
    assert max(ratios.values()) < 0.6, ratios


def fail(rows: int) -> Iterator[int]:
    """In a rank: rank 1 fails after some rows, rank 0 would sleep for long."""
    yield from range(rows)
    if os.environ["RANK"] == "1" or os.environ["WORLD_SIZE"] == "1":
        raise RuntimeError("no more rows")
    time.sleep(300)


@pytest.mark.full
def test_a_failing_rank_ends_all_but_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(ranks.RanksFailed, match=r"(?s)fail: ranks ended with \[None, 1\].*no more rows"):
        ranks.run(fail, {"rows": 1}, world=2, timeout=60)
    with pytest.raises(ranks.RanksFailed) as failure:
        ranks.run(fail, {"rows": 3})
    assert failure.value.results == [0, 1, 2]
